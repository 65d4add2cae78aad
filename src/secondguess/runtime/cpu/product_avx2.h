// Sums of products in groups by AVX2.
#pragma once

// Sums of some rows with codes of 8 bits.
template <int COUNT, class Finish>
[[gnu::always_inline]] inline void sum_rows(const char* codes, const GroupValues& values, int first, Finish finish) {
    Wholes whole[COUNT] = {};
    const int8_t* numbers = values.numbers + first * values.stride;
    UNROLLED for (int four = 0; four < 8; four++)
        UNROLLED for (int row = 0; row < COUNT; row++)
            whole[row] = add_dots(whole[row], load_line(codes + four * SLICE_BYTES), repeat(numbers + row * values.stride + four * 4));
    UNROLLED for (int row = 0; row < COUNT; row++) finish(first + row, whole[row]);
}

// Call `finish(row, sums)` with the sums of the products of some rows, at most MAX_ROWS, with a group of one tile.
template <Encoding ENCODING, class Finish>
[[gnu::always_inline]] inline void sum_group(const char* codes, const GroupValues& values, int count, Finish finish) {
    if constexpr (!has_half_bytes(ENCODING)) {
        int row = 0;
        for (; row + 2 <= count; row += 2) sum_rows<2>(codes, values, row, finish);
        if (row < count) sum_rows<1>(codes, values, row, finish);
        return;
    }
    const __m256i half_byte = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    // Sums of products that fit into 16 bits are added before they are widened: of 16 with codes of 4 bits, 8 with levels of
    // MXFP4 and 4 with those of INT4, as 16 * 15 * 127, 8 * 24 * 127 and 4 * 64 * 127 are less than 2^15. They are kept
    // for a row while the codes of half of the inputs are in registers.
    constexpr int NUM_FOURS = ENCODING == INT4_GROUPS ? 8 : ENCODING == MXFP4 ? 4 : 2;  // whose products are added before
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)LEVELS<ENCODING>));
    const auto decoded = [&](__m256i found) {
        const __m256i codes_of_half = _mm256_and_si256(found, half_byte);
        return has_levels(ENCODING) ? _mm256_shuffle_epi8(levels, codes_of_half) : codes_of_half;
    };
    __m256i before[MAX_ROWS][2];  // sums of the first half
    UNROLLED for (int half = 0; half < 2; half++) {
        __m256i fours[2][4];  // 4 inputs of 8 outputs
        UNROLLED for (int part = 0; part < 2; part++)
            UNROLLED for (int line = 0; line < 2; line++) {
                const __m256i both = _mm256_loadu_si256((const __m256i*)(codes + (half * 2 + line) * SLICE_BYTES + part * 32));
                fours[part][2 * line] = decoded(both);
                fours[part][2 * line + 1] = decoded(_mm256_srli_epi16(both, 4));
            }
        for (int row = 0; row < count; row++) {
            const int8_t* from = values.numbers + row * values.stride + half * 16;
            __m256i narrow[2], wide[2];  // sums in 16 and in 32 bits
            UNROLLED for (int part = 0; part < 2; part++)
                narrow[part] = wide[part] = half ? before[row][part] : _mm256_set1_epi32(values.of_row(row).offset);
            UNROLLED for (int four = 0; four < 4; four++) {
                const __m256i each = _mm256_set1_epi32(four_bytes(from + four * 4));
                const bool begins = NUM_FOURS < 8 && four % NUM_FOURS == 0, ends = (half * 4 + four + 1) % NUM_FOURS == 0;
                UNROLLED for (int part = 0; part < 2; part++) {
                    const __m256i added = _mm256_maddubs_epi16(fours[part][four], each);
                    narrow[part] = begins ? added : _mm256_add_epi16(narrow[part], added);
                    if (!ends) continue;
                    const __m256i widened = _mm256_madd_epi16(narrow[part], ones);
                    wide[part] = NUM_FOURS < 8 ? _mm256_add_epi32(wide[part], widened) : widened;
                }
            }
            UNROLLED for (int part = 0; part < 2; part++) before[row][part] = NUM_FOURS < 8 || half ? wide[part] : narrow[part];
            if (half) finish(row, Wholes{wide[0], wide[1]});
        }
    }
}
