// Inputs of products, in every form that the units read.
#pragma once

#include <vector>

#include "product.h"

static int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// Matrix of rows in float32, padded with zeros.
struct FloatRows {
    std::vector<float> numbers;
    int64_t stride = 0;

    void reserve(int64_t num_rows, int64_t width) {
        stride = round_up(width, 64);
        numbers.assign(num_rows * stride, 0);
    }
    float* row(int64_t index) { return numbers.data() + index * stride; }
};

// Inputs of products, padded with zeros to whole tiles: in float32 or, for weights in bfloat16 and units that are not WIDE,
// in bfloat16. For quantised weights they are also in 8 bits (`GroupValues`).
struct Rows {
    std::vector<bf16> numbers;
    std::vector<float> wide;
    std::vector<int8_t> small;
    std::vector<ValueGroup> groups;
    int64_t stride = 0;

    void reserve(int64_t num_rows, int64_t width) {
        // Reused buffers keep old numbers. Rows beyond the last do not affect results. Columns
        // beyond the last are multiplied by zero weights and must not be NaN.
        numbers.clear(), wide.clear();
        resize(num_rows, width);
    }

    // Set the size; rows that the caller does not write keep old numbers.
    void resize(int64_t num_rows, int64_t width) {
        const int64_t rows = round_up(num_rows, 2 * TILE);
        stride = round_up(width, 64);
        if (!VectorUnit::WIDE) numbers.resize(rows * stride);
        wide.resize(rows * stride);
        small.resize(rows * stride);
        groups.resize(rows * (stride / GROUP));
    }

    // Call `write` with the address of a column of a row, in the type that products by `weight` are formed from.
    template <class Function>
    void at(int64_t row, int64_t column, const Weight& weight, Function write) {
        if (VectorUnit::WIDE || weight.has_groups())
            write(wide.data() + row * stride + column);
        else
            write(numbers.data() + row * stride + column);
    }

    // Return whether rows must be formed before products by `weight`.
    static bool needs_form(const Weight& weight) { return weight.has_groups(); }
    void form(int64_t index, const Weight& weight) {
        if (needs_form(weight)) form_groups(index * (stride / GROUP), (index + 1) * (stride / GROUP), weight);
    }

    // Form a thread's share of the groups of all rows.
    void form_share(int64_t num_rows, const Weight& weight, int thread, int num_threads) {
        const int64_t num_groups = num_rows * (stride / GROUP);
        form_groups(thread * num_groups / num_threads, (thread + 1) * num_groups / num_threads, weight);
    }

    Values values(int64_t num_rows, int64_t first = 0) const {
        const int64_t start = first * stride;
        const GroupValues all = {small.data(), groups.data(), stride, stride / GROUP};
        return {numbers.data() + start, wide.data() + start, all.from_row(first), stride, num_rows};
    }

  private:
    // Form groups; `first` and `last` count those of all rows.
    void form_groups(int64_t first, int64_t last, const Weight& weight) {
        for (int64_t group = first; group < last; group++)
            groups[group] = quantise(wide.data() + group * GROUP, zero_of(weight.encoding), small.data() + group * GROUP);
    }
};
