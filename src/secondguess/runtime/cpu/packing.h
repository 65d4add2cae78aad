// Packing of weights into blocks, rounded to their encoding.
#pragma once

#include <cfloat>

#include "stored.h"
#include "team.h"

// Row of a block in bfloat16.
struct BlockRow {
    const char* block;
    int64_t output;

    bool read_codes(int64_t, GroupCodes&) const { return false; }
    void read_levels(int64_t, GroupCodes&) const {}
    void read(int64_t group, float* to) const {
        const char* from = block + group * STEP_BYTES + output * 4;
        bf16 numbers[GROUP];
        for (int slice = 0; slice < 16; slice++) std::memcpy(numbers + 2 * slice, from + slice * SLICE_BYTES, 4);
        for (int i = 0; i < GROUP; i += 16) store(to + i, load(numbers + i));
    }
};

// One output of a block. All encodings have slices in common: 4 bytes of each output.
template <class Row>
struct RowPacker {
    const Weight& weight;
    const Row row;
    char* block;
    int64_t output;

    void write(int64_t step, const void* bytes, int64_t size) const {
        char* to = block + step * weight.step_bytes() + output * 4;
        for (int64_t i = 0; i < size; i += 4) std::memcpy(to + i * BLOCK, (const char*)bytes + i, 4);
    }

    // Write the parameters of a group, in float16 or, for levels, in bfloat16.
    void write_parameters(int64_t group, float scale, float minimum) const {
        uint16_t* to = (uint16_t*)(block + group * weight.step_bytes() + code_bytes(weight.encoding)) + output;
        if (has_levels(weight.encoding)) {
            bf16 scales[16];
            store(scales, all(scale));
            *to = scales[0];
        } else {
            *to = to_half(scale);
        }
        if (has_minima(weight.encoding)) to[BLOCK] = to_half(minimum);
    }

    void pack_bfloat16(int64_t step) const {
        float numbers[GROUP];
        bf16 halves[GROUP];
        row.read(step, numbers);
        for (int i = 0; i < GROUP; i += 16) store(halves + i, load(numbers + i));
        write(step, halves, sizeof halves);
    }

    // Write codes of 8 bits as they are, if the encoding has what they need, or round the group to 8 bits.
    void pack_8_bits(int64_t group) const {
        GroupCodes codes;
        if (!row.read_codes(group, codes) || (codes.lowest == 0 && !has_minima(weight.encoding))) round(group, codes);
        write(group, codes.codes, GROUP);
        write_parameters(group, codes.scale, codes.minimum);
    }

    // Round a group to 8 bits with the largest magnitude at 127; the scale is NaN if a number is.
    void round(int64_t group, GroupCodes& to) const {
        float numbers[GROUP];
        row.read(group, numbers);
        const Floats low = load(numbers), high = load(numbers + 16);
        const float largest_magnitude = largest_of(largest(absolute(low), absolute(high)));
        const bool is_defined = !has_nan(low) && !has_nan(high);
        to.scale = is_defined ? half_above(std::max(largest_magnitude / 127, 0x1p-24f)) : NAN;
        to.minimum = 0;
        const Floats limit = all(127);
        for (int half = 0; half < 2; half++) {
            const Floats code = nearest_whole((half ? high : low) / all(to.scale));
            store_small(to.codes + 16 * half, largest(smallest(code, limit), zeros() - limit));
        }
    }

    // The number itself in float16, or the next larger one: a code beyond 127 would be cut off.
    static float half_above(float number) {
        const uint16_t nearest = to_half(number);
        return from_half((uint16_t)(nearest + (from_half(nearest) < number)));
    }

    // Write codes of 4 bits, which the rows have: evenly spaced levels, or those of MXFP4.
    void pack_4_bits(int64_t group) const {
        GroupCodes codes = {};
        if (has_levels(weight.encoding))
            row.read_levels(group, codes);
        else if (row.read_codes(group, codes))
            shift_to_zero(codes);
        char* to = block + group * weight.step_bytes() + output * 4;
        for (int slice = 0; slice < GROUP / 8; slice++) {
            uint32_t pair[2];  // codes whose inputs are 4 apart
            std::memcpy(pair, codes.codes + slice * 8, sizeof pair);
            const uint32_t word = pair[0] | pair[1] << 4;
            std::memcpy(to + slice * SLICE_BYTES, &word, sizeof word);
        }
        write_parameters(group, codes.scale, codes.minimum);
    }

    void pack(int64_t step) const {
        if (weight.encoding == BFLOAT16)
            pack_bfloat16(step);
        else if (has_half_bytes(weight.encoding))
            pack_4_bits(step);
        else
            pack_8_bits(step);
    }

    static void shift_to_zero(GroupCodes& codes) {
        if (!codes.lowest) return;
        for (int8_t& code : codes.codes) code = (int8_t)(code - codes.lowest);
        codes.minimum += codes.scale * (float)codes.lowest;
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
            row.read(group, row_numbers);
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
    constexpr int64_t STEPS_AT_ONCE = 8;  // whose part of a block stays in the first cache
    for (int64_t first = 0; first < weight.num_steps(); first += STEPS_AT_ONCE)
        for (int64_t output = 0; output < BLOCK; output++) {
            const RowPacker<decltype(row_of(output))> packer{weight, row_of(output), data, output};
            for (int64_t step = first; step < std::min(first + STEPS_AT_ONCE, weight.num_steps()); step++) packer.pack(step);
        }
}

// Read the numbers of a group of an output from the blocks of a weight.
inline void unpack_group(const Weight& weight, const char* block, int64_t group, int64_t output, float* to) {
    if (weight.encoding == BFLOAT16) return BlockRow{block, output}.read(group, to);
    const char* data = block + group * weight.step_bytes();
    const uint16_t* parameters = (const uint16_t*)(data + code_bytes(weight.encoding)) + output;
    float scale = from_half(*parameters);
    if (has_levels(weight.encoding)) {
        const uint32_t bits = (uint32_t)*parameters << 16;
        std::memcpy(&scale, &bits, sizeof bits);
    }
    const float minimum = has_minima(weight.encoding) ? from_half(parameters[BLOCK]) : 0;
    int8_t codes[GROUP];
    if (has_half_bytes(weight.encoding)) {
        for (int slice = 0; slice < GROUP / 8; slice++)
            for (int i = 0; i < 4; i++) {
                const uint8_t byte = data[slice * SLICE_BYTES + output * 4 + i];
                codes[slice * 8 + i] = byte & 15, codes[slice * 8 + 4 + i] = byte >> 4;
            }
    } else {
        for (int slice = 0; slice < GROUP / 4; slice++) std::memcpy(codes + slice * 4, data + slice * SLICE_BYTES + output * 4, 4);
    }
    if (has_levels(weight.encoding)) {
        const uint8_t* levels = weight.encoding == MXFP4 ? FP4_LEVELS : INT4_LEVELS;
        for (int8_t& code : codes) code = (int8_t)(levels[code] - zero_of(weight.encoding));
    }
    for (int half = 0; half < 2; half++)
        store(to + half * 16, load_small(codes + half * 16) * all(scale) + all(minimum));
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
// Write rows to the blocks of a weight.
void secondguess_pack(const Weight* weight, const Source* source, int64_t num_threads) {
    for_each_block(*weight, num_threads, [&](int64_t block) {
        pack_block(*weight, block, [&](int64_t output) { return source->row(block * BLOCK + output); });
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

// Read the numbers of a weight from its blocks. `rows`: where the first `width` numbers of each output of the blocks go, or
// null for one that is not read.
void secondguess_unpack(const Weight* weight, float* const* rows, int64_t width, int64_t num_threads) {
    for_each_block(*weight, num_threads, [&](int64_t block) {
        const char* data = weight->data + block * weight->num_steps() * weight->step_bytes();
        for (int64_t start = 0; start < width; start += GROUP)
            for (int64_t output = 0; output < BLOCK; output++) {
                float numbers[GROUP], *const row = rows[block * BLOCK + output];
                if (!row) continue;
                unpack_group(*weight, data, start / GROUP, output, numbers);
                std::copy_n(numbers, std::min<int64_t>(GROUP, width - start), row + start);
            }
    });
}

// Read the numbers of rows, to [row][width] in float32 or bfloat16.
void secondguess_decode(const Source* source, int64_t num_rows, void* to, int64_t is_float32, int64_t num_threads) {
    Team::get().run(std::min(num_threads, num_rows), [&](int thread, int count) {
        for (int64_t row = thread * num_rows / count; row < (thread + 1) * num_rows / count; row++)
            for (int64_t start = 0; start < source->width; start += GROUP) {
                float numbers[GROUP];
                source->row(row).read(start / GROUP, numbers);
                for (int half = 0; half < 2; half++) {
                    const int64_t at = row * source->width + start + 16 * half;
                    const Lanes part = lanes(source->width - start - 16 * half);
                    is_float32 ? store((float*)to + at, load(numbers + 16 * half), part) : store((bf16*)to + at, load(numbers + 16 * half), part);
                }
            }
    });
}
}
#pragma GCC visibility pop
