// Sums of products in groups by NEON.
#pragma once

// Codes, or levels, of 4 inputs of each output of a tile.
template <Encoding ENCODING>
inline Line codes_of(const char* codes, int four) {
    if (!has_half_bytes(ENCODING)) return load_line(codes + four * SLICE_BYTES);
    Line both = load_line(codes + four / 2 * SLICE_BYTES);
    for (auto& part : both.part) {
        const uint8x16_t bytes = vreinterpretq_u8_u32(part);
        const uint8x16_t half = four % 2 ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
        part = vreinterpretq_u32_u8(has_levels(ENCODING) ? vqtbl1q_u8(vld1q_u8(LEVELS<ENCODING>), half) : half);
    }
    return both;
}

template <Encoding ENCODING, int COUNT, class Finish>
inline void sum_group_of_rows(const char* codes, const GroupValues& values, Finish finish) {
    Wholes whole[COUNT];
    UNROLLED for (int row = 0; row < COUNT; row++)
        for (auto& part : whole[row].part) part = vdupq_n_s32(has_levels(ENCODING) ? values.of_row(row).offset : 0);
    UNROLLED for (int four = 0; four < 8; four++) {
        const Line weights = codes_of<ENCODING>(codes, four);
        UNROLLED for (int row = 0; row < COUNT; row++)
            whole[row] = add_dots(whole[row], weights, repeat(values.numbers + row * values.stride + four * 4));
    }
    UNROLLED for (int row = 0; row < COUNT; row++) finish(row, whole[row]);
}

// Call `finish(row, sums)` with the sums of the products of some rows, at most MAX_ROWS, with a group of one tile.
template <Encoding ENCODING, class Finish>
inline void sum_group(const char* codes, const GroupValues& values, int count, Finish finish) {
    with_count<MAX_ROWS>(count, [&](auto rows_at_once) {
        sum_group_of_rows<ENCODING, decltype(rows_at_once)::value>(codes, values, finish);
    });
}
