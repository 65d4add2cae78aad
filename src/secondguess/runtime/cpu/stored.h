// Rows of weights as files store them: numbers, or blocks of quantised ones in the types of ggml.
#pragma once

#include "product.h"

// Types, as ggml numbers them. A name with K has blocks of 256 numbers, the other quantised ones of 32.
enum StoredType : uint8_t {
    STORED_F32 = 0,
    STORED_F16 = 1,
    STORED_Q4_0 = 2,
    STORED_Q4_1 = 3,
    STORED_Q5_0 = 6,
    STORED_Q5_1 = 7,
    STORED_Q8_0 = 8,
    STORED_Q2_K = 10,
    STORED_Q3_K = 11,
    STORED_Q4_K = 12,
    STORED_Q5_K = 13,
    STORED_Q6_K = 14,
    STORED_BF16 = 30,
    STORED_MXFP4 = 39,
    // Not of ggml: a byte per code, then the scale and the minimum of the group in float16, or its scale in bfloat16.
    STORED_CODES_4 = 200,
    STORED_CODES_8 = 201,  // signed
    STORED_LEVELS = 202,   // of MXFP4
};

// Codes of a group: a number is `scale * code + minimum`. `lowest`: the least code of the type; 0 for types with a minimum.
struct GroupCodes {
    int8_t codes[GROUP];
    float scale, minimum;
    int lowest;
};

inline uint16_t read_bits(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}
inline float read_half(const uint8_t* from) { return from_half(read_bits(from)); }

// Bytes of a group of 32 numbers, for types without larger blocks.
constexpr int64_t stored_group_bytes(uint8_t type) {
    switch (type) {
        case STORED_F32: return 4 * GROUP;
        case STORED_F16: case STORED_BF16: return 2 * GROUP;
        case STORED_Q4_0: return 18;
        case STORED_Q4_1: return 20;
        case STORED_Q5_0: return 22;
        case STORED_Q5_1: return 24;
        case STORED_Q8_0: return 34;
        case STORED_MXFP4: return 17;
        case STORED_CODES_4: case STORED_CODES_8: return GROUP + 4;
        case STORED_LEVELS: return GROUP + 2;
        default: return 0;
    }
}

// A row of a weight; without data, zeros. `width` numbers, a multiple of 32 for quantised types.
struct StoredRow {
    const uint8_t* data;
    uint8_t type;
    int64_t width;

    const uint8_t* group_at(int64_t group) const { return data + group * stored_group_bytes(type); }

    // Read the codes of a group in evenly spaced levels; returns false for types without, and for zeros.
    bool read_codes(int64_t group, GroupCodes& to) const {
        if (!data || group * GROUP >= width) return false;
        switch (type) {
            case STORED_Q4_0: case STORED_Q4_1: case STORED_Q5_0: case STORED_Q5_1: read_halves_of_bytes(group_at(group), to); return true;
            case STORED_Q4_K: case STORED_Q5_K: read_k_codes(group, to); return true;
            case STORED_Q8_0:
                to.scale = read_half(group_at(group)), to.minimum = 0, to.lowest = -128;
                std::memcpy(to.codes, group_at(group) + 2, GROUP);
                return true;
            case STORED_CODES_4: case STORED_CODES_8:
                std::memcpy(to.codes, group_at(group), GROUP);
                to.scale = read_half(group_at(group) + GROUP), to.minimum = read_half(group_at(group) + GROUP + 2), to.lowest = 0;
                return true;
            default: return false;
        }
    }

    // Read the codes of a group of MXFP4, whose levels are not evenly spaced, and its scale; zeros for zeros.
    void read_levels(int64_t group, GroupCodes& to) const {
        to = {};
        if (!data || group * GROUP >= width) return;
        const uint8_t* from = group_at(group);
        if (type == STORED_LEVELS) {
            const uint32_t bits = (uint32_t)read_bits(from + GROUP) << 16;
            std::memcpy(&to.scale, &bits, sizeof bits), std::memcpy(to.codes, from, GROUP);
            return;
        }
        to.scale = std::ldexp(1.0f, (int)from[0] - 128);
        for (int i = 0; i < 16; i++) to.codes[i] = from[1 + i] & 15, to.codes[i + 16] = from[1 + i] >> 4;
    }

    // Codes of 4 or 5 bits: the first half of a group in the low halves of 16 bytes, the other in the high halves.
    void read_halves_of_bytes(const uint8_t* from, GroupCodes& to) const {
        const bool has_minimum = type == STORED_Q4_1 || type == STORED_Q5_1, has_fifth = type == STORED_Q5_0 || type == STORED_Q5_1;
        to.scale = read_half(from), to.minimum = has_minimum ? read_half(from + 2) : 0;
        to.lowest = has_minimum ? 0 : has_fifth ? -16 : -8;
        from += has_minimum ? 4 : 2;
        uint32_t fifth = 0;
        if (has_fifth) std::memcpy(&fifth, from, sizeof fifth), from += sizeof fifth;
        for (int i = 0; i < GROUP / 2; i++) {
            to.codes[i] = (int8_t)((from[i] & 15) + (fifth >> i & 1) * 16 + to.lowest);
            to.codes[i + 16] = (int8_t)((from[i] >> 4) + (fifth >> (i + 16) & 1) * 16 + to.lowest);
        }
    }

    // Scale and minimum, of 6 bits each, of one of the 8 groups of a block of Q4_K or Q5_K.
    static void read_k_parameters(const uint8_t* bits, int group, int& scale, int& minimum) {
        if (group < 4) {
            scale = bits[group] & 63, minimum = bits[group + 4] & 63;
        } else {
            scale = (bits[group + 4] & 15) | (bits[group - 4] >> 6) << 4;
            minimum = bits[group + 4] >> 4 | (bits[group] >> 6) << 4;
        }
    }

    void read_k_codes(int64_t group, GroupCodes& to) const {
        const bool has_fifth = type == STORED_Q5_K;
        const uint8_t* block = data + group / 8 * (has_fifth ? 176 : 144);
        const int within = (int)(group % 8);
        int scale, minimum;
        read_k_parameters(block + 4, within, scale, minimum);
        to.scale = read_half(block) * (float)scale, to.minimum = 0.0f - read_half(block + 2) * (float)minimum, to.lowest = 0;
        const uint8_t *fifths = block + 16, *codes = fifths + (has_fifth ? 32 : 0) + within / 2 * GROUP;
        const int shift = within % 2 * 4;
        for (int i = 0; i < GROUP; i++) to.codes[i] = (int8_t)(codes[i] >> shift & 15);
        if (has_fifth)
            for (int i = 0; i < GROUP; i++) to.codes[i] = (int8_t)(to.codes[i] + (fifths[i] >> within & 1) * 16);
    }

    // Read the numbers of a group; zeros beyond the row.
    void read(int64_t group, float* to) const {
        if (!data || (group + 1) * GROUP > width) std::fill_n(to, GROUP, 0.0f);
        if (!data || group * GROUP >= width) return;
        const int count = (int)std::min<int64_t>(GROUP, width - group * GROUP);
        GroupCodes codes;
        if (read_codes(group, codes)) {
            for (int half = 0; half < 2; half++)
                store(to + half * 16, load_small(codes.codes + half * 16) * all(codes.scale) + all(codes.minimum));
            return;
        }
        switch (type) {
            case STORED_F32: std::memcpy(to, group_at(group), count * sizeof(float)); return;
            case STORED_F16:
                for (int i = 0; i < count; i++) to[i] = read_half(group_at(group) + 2 * i);
                return;
            case STORED_BF16:
                if (count == GROUP) {
                    for (int i = 0; i < GROUP; i += 16) store(to + i, load((const bf16*)group_at(group) + i));
                    return;
                }
                for (int i = 0; i < count; i++) {
                    const uint32_t bits = (uint32_t)read_bits(group_at(group) + 2 * i) << 16;
                    std::memcpy(to + i, &bits, sizeof bits);
                }
                return;
            case STORED_MXFP4: case STORED_LEVELS:
                read_levels(group, codes);
                for (int i = 0; i < GROUP; i++) to[i] = codes.scale * (float)(FP4_LEVELS[codes.codes[i]] - zero_of(MXFP4));
                return;
            case STORED_Q2_K: read_q2_k(group, to); return;
            case STORED_Q3_K: read_q3_k(group, to); return;
            case STORED_Q6_K: read_q6_k(group, to); return;
        }
    }

    // A block has 16 scales and minima of 4 bits, and codes of 2 bits: 4 groups in turn in each of two runs of 32 bytes.
    void read_q2_k(int64_t group, float* to) const {
        const uint8_t* block = data + group / 8 * 84;
        const int within = (int)(group % 8);
        const uint8_t* codes = block + 16 + within / 4 * 32;
        const float scale = read_half(block + 80), minimum = read_half(block + 82);
        for (int i = 0; i < GROUP; i++) {
            const int parameters = block[2 * within + i / 16];
            to[i] = scale * (float)(parameters & 15) * (float)(codes[i] >> 2 * (within % 4) & 3) - minimum * (float)(parameters >> 4);
        }
    }

    // A block has codes of 3 bits, of which the highest, inverted, lie apart, and 16 scales of 6 bits.
    void read_q3_k(int64_t group, float* to) const {
        const uint8_t *block = data + group / 8 * 110, *packed = block + 96;
        const int within = (int)(group % 8);
        const uint8_t* codes = block + 32 + within / 4 * 32;
        const float scale = read_half(block + 108);
        for (int i = 0; i < GROUP; i++) {
            const int place = 2 * within + i / 16;
            const int low = place < 8 ? packed[place] & 15 : packed[place - 8] >> 4, high = packed[8 + place % 4] >> 2 * (place / 4) & 3;
            const int code = (codes[i] >> 2 * (within % 4) & 3) - (block[i] >> within & 1 ? 0 : 4);
            to[i] = scale * (float)((low | high << 4) - 32) * (float)code;
        }
    }

    // A block has 128 bytes with the low 4 bits of codes, 64 with the high 2 bits, and 16 scales of 8 bits.
    void read_q6_k(int64_t group, float* to) const {
        const uint8_t* block = data + group / 8 * 210;
        const int half = (int)(group % 8) / 4, within = (int)(group % 4);
        const uint8_t *low = block + half * 64 + within % 2 * 32, *high = block + 128 + half * 32;
        const int8_t* scales = (const int8_t*)block + 192 + half * 8 + within * 2;
        const float scale = read_half(block + 208);
        const int shift = within < 2 ? 0 : 4, shift_of_high = 2 * within;
        int8_t codes[GROUP];
        for (int i = 0; i < GROUP; i++) codes[i] = (int8_t)(((low[i] >> shift & 15) | (high[i] >> shift_of_high & 3) << 4) - 32);
        for (int half = 0; half < 2; half++) store(to + half * 16, load_small(codes + half * 16) * all(scale * (float)scales[half]));
    }
};

// Rows of a weight in the order of the outputs of its blocks.
struct Source {
    const uint8_t* const* rows;  // null for zeros
    const uint8_t* types;        // of each row
    int64_t width;               // numbers per row

    StoredRow row(int64_t index) const { return {rows[index], types[index], width}; }
};
