// Vector operations for AVX-512.
#pragma once

using Floats = __m512;
using Halves = __m256i;  // 16 numbers in bfloat16

// Lanes of a vector that lie within the first `count` numbers.
struct Lanes {
    __mmask16 mask;
};
inline Lanes lanes(long count) {
    return {(__mmask16)(count >= 16 ? 0xFFFF : count <= 0 ? 0 : (1u << count) - 1)};
}

inline Floats all(float number) { return _mm512_set1_ps(number); }

inline Floats widen(Halves halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }
inline Halves narrow(Floats numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

inline Floats load(const bf16* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }
inline Floats load(const bf16* from, Lanes part) { return widen(_mm256_maskz_loadu_epi16(part.mask, from)); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Lanes part) { return _mm512_maskz_loadu_ps(part.mask, from); }
inline void store(bf16* to, Floats numbers) { _mm256_storeu_si256((__m256i*)to, narrow(numbers)); }
inline void store(bf16* to, Floats numbers, Lanes part) { _mm256_mask_storeu_epi16(to, part.mask, narrow(numbers)); }
inline void store(float* to, Floats numbers) { _mm512_storeu_ps(to, numbers); }
inline void store(float* to, Floats numbers, Lanes part) { _mm512_mask_storeu_ps(to, part.mask, numbers); }

// sum + a * b, and sum - a * b, rounded once.
inline Floats add_product(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats subtract_product(Floats sum, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, sum); }

inline Floats largest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smallest(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats nearest_whole(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline Floats times_power_of_two(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }
inline Floats keep(Lanes part, Floats numbers, Floats otherwise) { return _mm512_mask_blend_ps(part.mask, otherwise, numbers); }

// `numbers`, and 0 in the lanes in which `x` is less than `limit`.
inline Floats zero_where_less(Floats numbers, Floats x, float limit) {
    return _mm512_mask_mov_ps(numbers, _mm512_cmp_ps_mask(x, all(limit), _CMP_LT_OQ), all(0.0f));
}

// `if_less` in the lanes in which a < b, and `otherwise` in the others.
inline Floats where_less(Floats a, Floats b, Floats if_less, Floats otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, if_less);
}
inline bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline Floats distance_from_whole(Floats x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT); }

// Store the sum of each of four vectors.
inline void store_four_sums(float* to, const Floats four[4]) {
    const auto in_pairs = [](Floats a, Floats b) { return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b); };
    const __m512d first = (__m512d)in_pairs(four[0], four[1]), second = (__m512d)in_pairs(four[2], four[3]);
    const Floats quarters = (__m512)_mm512_unpacklo_pd(first, second) + (__m512)_mm512_unpackhi_pd(first, second);
    const __m256 halves = _mm512_castps512_ps256(quarters) + _mm512_extractf32x8_ps(quarters, 1);
    _mm_storeu_ps(to, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
}

// Store the nearest integers as 8-bit numbers.
inline void store_small(int8_t* to, Floats numbers) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(numbers)));
}

inline Floats load_small(const int8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from))); }

// Replace 16 numbers, each less than 128, by the entries of a table.
inline void look_up(const uint8_t* table, int8_t* numbers) {
    const __m512i places = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)numbers));
    const __m512i found = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), places, _mm512_loadu_si512(table + 64));
    _mm_storeu_si128((__m128i*)numbers, _mm512_castsi512_si128(found));
}

// Numbers in float16.
inline void store_halves(uint16_t* to, Floats numbers, Lanes part) {
    _mm256_mask_storeu_epi16(to, part.mask, _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats load_halves(const uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

// 16 pairs of numbers.
struct Pairs {
    __m512i both;
};

// Add the products of two numbers with those of each pair to `sum`.
inline Floats add_pair_products(Floats sum, const bf16* two, Pairs pairs) {
    int32_t bits;
    std::memcpy(&bits, two, sizeof bits);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)pairs.both);
}

inline __m512i load_part(const bf16* from, long count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1, from);
}

// Pair the first `count` of 32 numbers of two rows; the others are 0.
inline void pair_rows(const bf16* first, const bf16* second, long count, Pairs to[2]) {
    const __m512i a = load_part(first, count), b = load_part(second, count);
    const __m512i places = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                            35, 3, 34, 2, 33, 1, 32, 0);
    to[0] = {_mm512_permutex2var_epi16(a, places, b)};
    to[1] = {_mm512_permutex2var_epi16(a, _mm512_add_epi16(places, _mm512_set1_epi16(16)), b)};
}

// Transpose the first `count` of 32 numbers in float16 of 16 rows: the i-th number of each row is at `to + i * stride`.
inline void transpose_halves(const uint16_t* const rows[16], long count, float* to, long stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        const __m512i first = load_part(rows[i], count), second = load_part(rows[i + 1], count);
        a[i] = _mm512_unpacklo_epi32(first, second), a[i + 1] = _mm512_unpackhi_epi32(first, second);
    }
    for (int i = 0; i < 16; i += 4)
        for (int half = 0; half < 2; half++) {
            b[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + half + 2]);
            b[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + half + 2]);
        }
    const __m512i places = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12,
                                            10, 8, 6, 4, 2, 0);
    const auto write = [&](int pair, __m512i numbers) {
        const __m512i apart = _mm512_permutexvar_epi16(places, numbers);  // the first numbers of all pairs, then the second
        store(to + 2 * pair * stride, _mm512_cvtph_ps(_mm512_castsi512_si256(apart)));
        store(to + (2 * pair + 1) * stride, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(apart, 1)));
    };
    // each quarter of b[i + j] has pair 4 * quarter + j of rows i to i + 3
    for (int j = 0; j < 4; j++) {
        const __m512i even[] = {_mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88)};
        const __m512i odd[] = {_mm512_shuffle_i32x4(b[j], b[4 + j], 0xDD), _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xDD)};
        write(j, _mm512_shuffle_i32x4(even[0], even[1], 0x88)), write(4 + j, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
        write(8 + j, _mm512_shuffle_i32x4(even[0], even[1], 0xDD)), write(12 + j, _mm512_shuffle_i32x4(odd[0], odd[1], 0xDD));
    }
}
constexpr int NUM_SUMS = 16;  // vectors of sums that the registers hold
