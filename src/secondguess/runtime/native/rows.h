// Inputs of products, in every form that the units read.
#pragma once

#include <vector>

#include "product.h"

static int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// Matrix of rows, padded with zeros to whole tiles.
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
        numbers.clear();
        resize(num_rows, width);
    }

    // Set the size; rows that the caller does not write keep old numbers.
    void resize(int64_t num_rows, int64_t width) {
        const int64_t rows = round_up(num_rows, 2 * TILE);
        stride = round_up(width, 64);
        numbers.resize(rows * stride);
        if (VectorUnit::WIDE) wide.resize(rows * stride);
        small.resize(rows * stride);
        const int64_t num_groups = rows * (stride / GROUP);
        scales.resize(num_groups), sums.resize(num_groups), offsets.resize(num_groups);
    }
    bf16* row(int64_t index) { return numbers.data() + index * stride; }

    // Return whether rows must be converted before products by `weight`.
    static bool needs_form(const Weight& weight) { return weight.has_groups() || VectorUnit::WIDE; }
    void form(int64_t index, const Weight& weight) {
        if (weight.has_groups()) {
            const int64_t num_groups = stride / GROUP, first = index * num_groups;
            quantise(row(index), num_groups, zero_of(weight.encoding), small.data() + index * stride, scales.data() + first,
                     sums.data() + first, offsets.data() + first);
        } else if (VectorUnit::WIDE) {
            for (int64_t i = index * stride; i < (index + 1) * stride; i += 16) store(wide.data() + i, load(numbers.data() + i));
        }
    }
    Values values(int64_t num_rows, int64_t first = 0) const {
        const int64_t start = first * stride, num_groups = stride / GROUP;
        const GroupValues groups = {small.data(), scales.data(), sums.data(), offsets.data(), stride, num_groups};
        return {numbers.data() + start, wide.data() + start, groups.from_row(first), stride, num_rows};
    }
};
