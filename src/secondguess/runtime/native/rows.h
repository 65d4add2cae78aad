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
    std::vector<float> scales, sums;  // of groups
    std::vector<int32_t> offsets;
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
        const int64_t num_groups = rows * (stride / GROUP);
        scales.resize(num_groups), sums.resize(num_groups), offsets.resize(num_groups);
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
        if (!needs_form(weight)) return;
        const int64_t num_groups = stride / GROUP, first = index * num_groups, start = index * stride;
        quantise(wide.data() + start, num_groups, zero_of(weight.encoding), small.data() + start, scales.data() + first, sums.data() + first,
                 offsets.data() + first);
    }
    Values values(int64_t num_rows, int64_t first = 0) const {
        const int64_t start = first * stride, num_groups = stride / GROUP;
        const GroupValues groups = {small.data(), scales.data(), sums.data(), offsets.data(), stride, num_groups};
        return {numbers.data() + start, wide.data() + start, groups.from_row(first), stride, num_rows};
    }
};
