// values @ weight.T with a fixed order of summation per row: a row's bits do not depend on the
// number of rows.
//
// A weight is stored in blocks of 32 outputs. Within a block, 4 bytes of each output's inputs (2 in
// bfloat16, 4 in 8 bits) are adjacent: a slice of 128 bytes, a cache line for each of the two tiles of
// 16 outputs. A step is 32 inputs of each output: 16 slices in bfloat16, 8 in 8 bits and 4 in 4 bits. AVX-512,
// and the other vector units with up to two rows, read a block in the order of its addresses, which processors
// prefetch at the rate of the memory. AMX reads the 16 lines of a tile in a step.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "vectors.h"

// Sums are kept in registers only if GCC unrolls the loops over them early; the number is at least that of a unit's rows.
#define UNROLLED _Pragma("GCC unroll 16")

constexpr int BLOCK = 32;          // outputs
constexpr int TILE = 16;           // rows, or outputs
constexpr int SLICE_BYTES = 4 * BLOCK;
constexpr int LINE_BYTES = 4 * TILE;
constexpr int STEP_BYTES = 16 * SLICE_BYTES;
constexpr long PREFETCH_BYTES = 4096;  // prefetch distance in bytes

inline int four_bytes(const void* from) {
    int bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

// A quantised weight is in groups: 32 inputs of an output share parameters, which follow the codes of the group of a
// block. With levels (INT4, MXFP4) a weight is `scale * (level - zero)`, its code is the place of the level in a table,
// and the parameters are 32 scales in bfloat16. In INT8 it is `scale * code`, and the parameters are 32 scales in
// float16. With minima (INT8_GROUPS, INT4_GROUPS) it is `scale * code + minimum`, and 32 minima follow the scales. Codes
// of 8 bits are signed; a slice holds 4 inputs of each output. Codes of 4 bits are not; a byte holds two whose inputs
// are 4 apart, the first in its low half, and a slice holds 8 inputs of each output.
constexpr int GROUP = 32;              // inputs
constexpr int CODE_BYTES = 512;        // in 4 bits, of a group of a block

enum Encoding { BFLOAT16, INT8, INT4, INT8_GROUPS, MXFP4, INT4_GROUPS };

constexpr bool has_levels(int64_t encoding) { return encoding == INT4 || encoding == MXFP4; }
constexpr bool has_half_bytes(int64_t encoding) { return has_levels(encoding) || encoding == INT4_GROUPS; }
constexpr bool has_minima(int64_t encoding) { return encoding == INT8_GROUPS || encoding == INT4_GROUPS; }

// Levels of INT4, plus 30: whole numbers, with 0 among them, that minimise the squared error of normal weights
// rounded as by `LevelGroups`. Found by a search that starts from the levels of Lloyd's algorithm (1982) for weights
// divided by the one of largest magnitude.
alignas(16) constexpr uint8_t INT4_LEVELS[16] = {0, 6, 11, 16, 21, 24, 27, 30, 33, 36, 39, 42, 47, 52, 57, 64};
// Levels of MXFP4 (OCP Microscaling Formats 1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, doubled, plus 12.
alignas(16) constexpr uint8_t FP4_LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <Encoding ENCODING>
constexpr const uint8_t* LEVELS = ENCODING == MXFP4 ? FP4_LEVELS : INT4_LEVELS;

// Unsigned level or code of 0: codes of 8 bits become unsigned by adding 128.
constexpr int zero_of(int64_t encoding) {
    return encoding == INT4 ? 30 : encoding == MXFP4 ? 12 : has_half_bytes(encoding) ? 0 : 128;
}

// Sizes of a group of a block: of its codes, and with its parameters.
constexpr int64_t code_bytes(int64_t encoding) { return has_half_bytes(encoding) ? CODE_BYTES : 2 * CODE_BYTES; }
constexpr int64_t group_bytes(int64_t encoding) {
    return code_bytes(encoding) + (has_minima(encoding) ? 2 : 1) * BLOCK * sizeof(uint16_t);
}

struct Weight {
    const char* data;       // blocks
    const float* bias;      // per output, or null
    int64_t num_outputs;
    int64_t num_inputs;     // multiple of 64, padded with zeros
    int64_t encoding;

    int64_t num_blocks() const { return (num_outputs + BLOCK - 1) / BLOCK; }
    bool has_groups() const { return encoding != BFLOAT16; }
    // Number of steps of a block, and their size.
    int64_t num_steps() const { return num_inputs / GROUP; }
    int64_t step_bytes() const { return has_groups() ? group_bytes(encoding) : STEP_BYTES; }
};

// Parameters of a group of values in 8 bits.
struct alignas(16) ValueGroup {
    float scale;
    float sum;       // of the values
    int32_t offset;  // the sum of the numbers, negated, times `zero_of`
};

// Inputs of some rows in 8 bits, from a group on.
struct GroupValues {
    const int8_t* numbers;
    const ValueGroup* groups;
    int64_t stride, num_groups;  // numbers, and groups, per row

    GroupValues at_group(int64_t group) const { return {numbers + group * GROUP, groups + group, stride, num_groups}; }
    GroupValues from_row(int64_t row) const { return {numbers + row * stride, groups + row * num_groups, stride, num_groups}; }
    const ValueGroup& of_row(int64_t row) const { return groups[row * num_groups]; }
};

// Inputs of a product: rows in bfloat16, or in float32 for units with WIDE, and for quantised weights what `GroupValues` has. Memory is allocated for a multiple of 32 rows.
struct Values {
    const bf16* numbers;
    const float* wide;
    GroupValues groups;
    int64_t stride;  // numbers per row
    int64_t num_rows;
};

// Call a function with `count`, which is from 1 to MOST, as a constant.
template <int MOST, class Function>
inline void with_count(int count, Function function) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, function);
    function(std::integral_constant<int, MOST>());
}

// Split rows evenly: 6 rows, at most 5 at once, are 3 and 3, which is faster than 5 and 1.
inline int even_share(int64_t left, int limit) {
    const int64_t parts = (left + limit - 1) / limit;
    return (int)((left + parts - 1) / parts);
}

// Parameters of a group of a tile.
template <Encoding ENCODING>
struct Parameters {
    Floats scales, minima;

    explicit Parameters(const uint16_t* tile) {
        if constexpr (has_levels(ENCODING))
            scales = load((const bf16*)tile);
        else
            scales = load_halves(tile);
        if constexpr (has_minima(ENCODING)) minima = load_halves(tile + BLOCK);
    }

    // Add the products of a row's values with the group's weights. `whole`: sums of the products of the values' numbers
    // with the codes, or with the levels less that of 0.
    Floats add_to(Floats total, Floats whole, const ValueGroup& values) const {
        const Floats added = add_product(total, whole * all(values.scale), scales);
        if constexpr (has_minima(ENCODING)) return add_product(added, all(values.sum), minima);
        return added;
    }
};

// A unit multiplies at most ROWS rows of its values with one block of bfloat16 weights into `sums[row][output]`.
// WIDE: the unit reads float32 values instead of bfloat16. `next(left)`: how many of the rows that are left it
// multiplies at once.
//
// `add_groups` multiplies at most ROWS_IN_GROUPS rows with a block in groups. Sums within a group are exact integers,
// and each group is added in one order on every processor.
#ifdef __AVX512BF16__
#include "product_avx512.h"
#else
#include "product_vectors.h"
#endif
#ifdef __AMX_TILE__
#include "product_amx.h"
#endif

// One thread's share of a product with the blocks from `first_block` on. `finish(row, block, low, high)`
// is called with the 16 + 16 sums of each row and block, with scales and bias applied.
template <class Unit, class Finish>
inline void multiply(const Values& values, const Weight& weight, int64_t first_block, int thread, int num_threads, Finish finish) {
    const int64_t num_blocks = weight.num_blocks() - first_block, num_steps = weight.num_steps();
    const int64_t first = first_block + thread * num_blocks / num_threads;
    const int64_t last = first_block + (thread + 1) * num_blocks / num_threads;
    alignas(64) float sums[std::max(Unit::ROWS, Unit::ROWS_IN_GROUPS) * BLOCK];
    const Unit unit(values);
    for (int64_t block = first; block < last; block++) {
        const char* data = weight.data + block * num_steps * weight.step_bytes();
        for (int64_t start = 0, count; start < values.num_rows; start += count) {
            count = weight.has_groups() ? even_share(values.num_rows - start, Unit::ROWS_IN_GROUPS) : Unit::next(values.num_rows - start);
            if (weight.encoding == BFLOAT16)
                unit.add_up(start, count, data, num_steps, sums);
            else if (weight.encoding == INT8)
                add_groups<INT8>(values.groups.from_row(start), count, data, num_steps, sums);
            else if (weight.encoding == INT4)
                add_groups<INT4>(values.groups.from_row(start), count, data, num_steps, sums);
            else if (weight.encoding == MXFP4)
                add_groups<MXFP4>(values.groups.from_row(start), count, data, num_steps, sums);
            else if (weight.encoding == INT4_GROUPS)
                add_groups<INT4_GROUPS>(values.groups.from_row(start), count, data, num_steps, sums);
            else
                add_groups<INT8_GROUPS>(values.groups.from_row(start), count, data, num_steps, sums);
            for (int i = 0; i < count; i++) {
                Floats found[2];
                for (int half = 0; half < 2; half++) {
                    found[half] = load(sums + i * BLOCK + half * TILE);
                    if (weight.bias) found[half] = found[half] + load(weight.bias + block * BLOCK + half * TILE);
                }
                finish(start + i, block, found[0], found[1]);
            }
        }
    }
}

// Largest magnitudes of quantised values that `quantise` tries.
constexpr int NUM_LIMITS = 4;
constexpr float LIMITS[NUM_LIMITS] = {127, 126, 125, 124};

// Quantise a group of values to 8 bits, for weights whose code or level of 0 is `zero`. The scale is NaN if a value is:
// of those that put the largest magnitude at one of `LIMITS`, the one of the least squared error, which is a sixth less
// than with 127 alone. Errors are compared without branches, which would be mispredicted: as whole numbers whose lowest
// bits are the place of the limit.
inline ValueGroup quantise(const float* values, int zero, int8_t* to) {
    const Floats low = load(values), high = load(values + 16);
    const bool is_defined = !has_nan(low) && !has_nan(high);
    const float magnitude = is_defined ? std::max(largest_of(largest(absolute(low), absolute(high))), 1e-30f) : NAN;
    const float inverse = 1 / magnitude;
    Floats squares[NUM_LIMITS];
    for (int i = 0; i < NUM_LIMITS; i++) {
        const Floats factor = all(LIMITS[i] * inverse), first = distance_from_whole(low * factor), second = distance_from_whole(high * factor);
        squares[i] = add_product(first * first, second, second);
    }
    float errors[NUM_LIMITS];
    store_four_sums(errors, squares);
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < NUM_LIMITS; i++) {
        const float error = errors[i] * (1 / (LIMITS[i] * LIMITS[i]));
        uint32_t bits;
        std::memcpy(&bits, &error, sizeof bits);
        least = std::min(least, (bits & ~3u) | i);
    }
    const float limit = LIMITS[least & 3];
    const Floats factor = all(limit * inverse), first = nearest_whole(low * factor), second = nearest_whole(high * factor);
    store_small(to, first), store_small(to + 16, second);
    const float scale = magnitude * (1 / limit);
    const int sum = is_defined ? (int)sum_of(first + second) : 0;
    return {scale, scale * (float)sum, -zero * sum};
}
