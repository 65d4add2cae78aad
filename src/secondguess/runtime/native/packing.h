// Packing of weights into blocks, rounded to their encoding.
#pragma once

#include <cfloat>

#include "product.h"
#include "team.h"

// Rows of a weight, [row][width]. With `second`, these are gates and the values that they multiply, of which
// each block has 16 in turn.
struct Source {
    const void *first, *second;
    int64_t num_rows, width;  // rows of each
    int64_t is_float32;       // or bfloat16
};

// Row of a weight; null for zeros.
template <class Number>
struct PlainRow {
    const Number* row;
    int64_t width;

    Floats numbers(int64_t start) const { return row ? load(row + start, lanes(width - start)) : zeros(); }
};

// Row of a block in bfloat16.
struct BlockRow {
    const char* block;
    int64_t output;

    Floats numbers(int64_t start) const {
        const char* from = block + start / 2 * SLICE_BYTES + output * 4;
        bf16 pairs[16];
        for (int slice = 0; slice < 8; slice++) std::memcpy(pairs + 2 * slice, from + slice * SLICE_BYTES, 4);
        return load(pairs);
    }
};

// One output of a block. All encodings have slices in common: 4 bytes of each output.
template <class Row>
struct RowPacker {
    const Weight& weight;
    const Row row;
    char* block;
    int64_t output;

    Floats numbers(int64_t start) const { return row.numbers(start); }

    void write(int64_t step, const void* bytes, int64_t size) const {
        char* to = block + step * weight.step_bytes() + output * 4;
        for (int64_t i = 0; i < size; i += 4) std::memcpy(to + i * BLOCK, (const char*)bytes + i, 4);
    }

    void pack_bfloat16() const {
        for (int64_t step = 0; step < weight.num_steps(); step++) {
            bf16 pair[BLOCK];
            store(pair, numbers(step * BLOCK)), store(pair + 16, numbers(step * BLOCK + 16));
            write(step, pair, sizeof pair);
        }
    }

    // Round to 8 bits with the largest magnitude at 127; returns the scale, and the sum of the numbers.
    float pack_int8(int32_t& sum) const {
        Floats maxima = zeros();
        bool is_defined = true;
        for (int64_t start = 0; start < weight.num_inputs; start += 16) {
            maxima = largest(maxima, absolute(numbers(start)));
            is_defined &= !has_nan(numbers(start));
        }
        const float scale = is_defined ? std::max(largest_of(maxima), FLT_MIN) / 127 : NAN;
        sum = 0;
        for (int64_t step = 0; step < weight.num_steps(); step++) {
            int8_t small[64];
            for (int i = 0; i < 64; i += 16) store_small(small + i, nearest_whole(numbers(step * 64 + i) / all(scale)));
            for (const int8_t each : small) sum += each;
            write(step, small, sizeof small);
        }
        return scale;
    }

    // Round each group to evenly spaced levels of 8 bits between its limits, as `GroupedWeight.rounded` does; a group
    // with NaN has the scale NaN.
    void pack_groups() const {
        const float last_code = 255, shift = 128;
        for (int64_t group = 0; group < weight.num_steps(); group++) {
            const Floats low = numbers(group * GROUP), high = numbers(group * GROUP + 16);
            const uint16_t least = to_half(0.0f - largest_of(zeros() - smallest(low, high)));
            const Floats minimum = all(from_half(least));
            const Floats above[2] = {low - minimum, high - minimum};
            const bool is_defined = !has_nan(low) && !has_nan(high);
            const uint16_t scale = to_half(!is_defined ? NAN : std::max(largest_of(largest(above[0], above[1])) / last_code, 0x1p-24f));
            const float step = from_half(scale);
            int8_t codes[GROUP];
            for (int half = 0; half < 2; half++) {
                const Floats level = smallest(largest(nearest_whole(above[half] / all(step)), zeros()), all(last_code));
                store_small(codes + half * 16, level - all(shift));
            }
            uint16_t* parameters = (uint16_t*)(block + (group + 1) * weight.step_bytes()) - 2 * BLOCK;
            parameters[output] = scale;
            parameters[BLOCK + output] = to_half(from_half(least) + shift * step);
            write(group, codes, GROUP);
        }
    }
};

// Codes and levels of INT4 nearest to the whole numbers from the first level to the last.
struct NearestLevels {
    static constexpr int LAST = INT4_LEVELS[15];
    alignas(64) uint8_t code[128] = {}, level[128] = {};

    constexpr NearestLevels() {
        for (int number = 0, next = 0; number <= LAST; number++) {
            while (next < 15 && 2 * number > INT4_LEVELS[next] + INT4_LEVELS[next + 1]) next++;
            code[number] = next, level[number] = INT4_LEVELS[next];
        }
    }
};
constexpr NearestLevels NEAREST;

// A group of 16 outputs rounded to the levels of INT4, each with the scale of the least squared error: of four scales,
// and of those refined by least squares. The weight of largest magnitude then is close to the last level or, negated, to
// the first one. A group with a weight that is not finite has the scale NaN.
struct LevelGroups {
    Floats numbers[GROUP], scale;  // [input][output]

    // Find `scale`.
    void round() {
        Floats maxima = zeros(), minima = zeros(), finite = zeros();
        for (const Floats each : numbers) {
            maxima = largest(maxima, each), minima = smallest(minima, each);
            finite = add_product(finite, each, zeros());
        }
        const Floats limit = where_less(maxima, zeros() - minima, minima, maxima) + finite;
        Floats least_error = all(INFINITY);
        scale = rounded(limit * all(1.0f / (NearestLevels::LAST - zero_of(INT4))));
        for (const float last : {0.95f, 1.0f, 1.05f, -1.1f}) {
            const Floats refined = try_scale(limit * all(last / (NearestLevels::LAST - zero_of(INT4))), least_error);
            try_scale(refined, least_error);
        }
    }

    // The nearest whole numbers of an input's weights, from 0 for the first level on.
    void places(int input, Floats inverse, int8_t* to) const {
        const Floats place = nearest_whole(numbers[input] * inverse) + all(zero_of(INT4));
        store_small(to, smallest(largest(place, zeros()), all(NearestLevels::LAST)));
    }

private:
    // Keep scales whose squared errors are the least so far; return those of least squares for the same levels.
    Floats try_scale(Floats exact, Floats& least_error) {
        const Floats tried = rounded(exact), inverse = all(1) / tried;
        Floats error = zeros(), products = zeros(), squares = zeros();
        for (int input = 0; input < GROUP; input++) {
            int8_t place[TILE];
            places(input, inverse, place);
            look_up(NEAREST.level, place);
            const Floats level = load_small(place) - all(zero_of(INT4)), difference = subtract_product(numbers[input], level, tried);
            error = add_product(error, difference, difference);
            products = add_product(products, numbers[input], level);
            squares = add_product(squares, level, level);
        }
        scale = where_less(error, least_error, tried, scale);
        least_error = where_less(error, least_error, error, least_error);
        return products / squares;
    }
};

// Pack a tile of a block in INT4; `row_of(output)` returns the row of an output of the block.
template <class Function>
inline void pack_levels(const Weight& weight, char* block, int tile, Function row_of) {
    for (int64_t group = 0; group < weight.num_steps(); group++, block += weight.step_bytes()) {
        alignas(64) float numbers[GROUP][TILE];
        for (int output = 0; output < TILE; output++) {
            const auto row = row_of(tile * TILE + output);
            float row_numbers[GROUP];
            for (int start = 0; start < GROUP; start += 16) store(row_numbers + start, row.numbers(group * GROUP + start));
            for (int input = 0; input < GROUP; input++) numbers[input][output] = row_numbers[input];
        }
        LevelGroups groups;
        for (int input = 0; input < GROUP; input++) groups.numbers[input] = load(numbers[input]);
        groups.round();
        store((bf16*)(block + CODE_BYTES) + tile * TILE, groups.scale);
        const Floats inverse = all(1) / groups.scale;
        for (int input = 0; input < GROUP; input++) {
            int8_t codes[TILE];
            groups.places(input, inverse, codes);
            look_up(NEAREST.code, codes);
            char* to = block + input / 8 * SLICE_BYTES + tile * LINE_BYTES + input % 4;
            for (int output = 0; output < TILE; output++)
                to[output * 4] = (char)(input % 8 < 4 ? codes[output] : to[output * 4] | codes[output] << 4);
        }
    }
}

// Pack all outputs of a block; `row_of(output)` returns the row of one.
template <class Function>
inline void pack_block(const Weight& weight, int64_t block, Function row_of) {
    char* data = (char*)weight.data + block * weight.num_steps() * weight.step_bytes();
    if (weight.encoding == INT4) {
        for (int tile = 0; tile < BLOCK / TILE; tile++) pack_levels(weight, data, tile, row_of);
        return;
    }
    for (int64_t output = 0; output < BLOCK; output++) {
        const RowPacker<decltype(row_of(output))> packer{weight, row_of(output), data, output};
        const int64_t line = block * BLOCK + output;
        if (weight.encoding == BFLOAT16)
            packer.pack_bfloat16();
        else if (weight.encoding == INT8)
            ((float*)weight.scale)[line] = packer.pack_int8(((int32_t*)weight.sum)[line]);
        else
            packer.pack_groups();
    }
}

template <class Number>
inline void pack_plain_block(const Weight& weight, const Source& source, int64_t block) {
    pack_block(weight, block, [&](int64_t output) {
        const int64_t row = source.second ? block * TILE + output % TILE : block * BLOCK + output;
        const auto from = (const Number*)(source.second && output >= TILE ? source.second : source.first);
        return PlainRow<Number>{row < source.num_rows ? from + row * source.width : nullptr, source.width};
    });
}

template <class Function>
inline void for_each_block(const Weight& weight, int64_t num_threads, Function function) {
    const int64_t num_blocks = weight.num_blocks();
    if (!num_blocks) return;
    Team::get().run(std::min(num_threads, num_blocks), [&](int thread, int count) {
        for (int64_t block = thread * num_blocks / count; block < (thread + 1) * num_blocks / count; block++) function(block);
    });
}

#pragma GCC visibility push(default)
extern "C" {
// Write rows to the blocks of a weight, and their scales and sums.
void secondguess_pack(const Weight* weight, const Source* source, int64_t num_threads) {
    for_each_block(*weight, num_threads, [&](int64_t block) {
        source->is_float32 ? pack_plain_block<float>(*weight, *source, block) : pack_plain_block<bf16>(*weight, *source, block);
    });
}

// The same for a weight whose blocks are in bfloat16.
void secondguess_repack(const Weight* weight, const Weight* from, int64_t num_threads) {
    for_each_block(*weight, num_threads, [&](int64_t block) {
        pack_block(*weight, block, [&](int64_t output) {
            const char* data = from->data + block * from->num_steps() * from->step_bytes();
            return BlockRow{data, output};
        });
    });
}
}
#pragma GCC visibility pop
