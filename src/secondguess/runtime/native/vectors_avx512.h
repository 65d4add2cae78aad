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
inline bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

// whole - times * other, computed in integers, as float32.
inline Floats load_difference(const int32_t* whole, const int32_t* other, int32_t times) {
    const __m512i less = _mm512_mullo_epi32(_mm512_loadu_si512(other), _mm512_set1_epi32(times));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(whole), less));
}

// Store the nearest integers as 8-bit numbers.
inline void store_small(int8_t* to, Floats numbers) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(numbers)));
}

// Add the products of 32 numbers to `sum`, two per lane; with `count`, of the first `count`
// numbers.
inline Floats add_products(Floats sum, const bf16* a, const bf16* b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}
inline Floats add_products(Floats sum, const bf16* a, const bf16* b, long count) {
    const __mmask32 mask = count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1;
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(mask, a), (__m512bh)_mm512_maskz_loadu_epi16(mask, b));
}

// Lane i is the sum of the 16 lanes of `parts[i]`, in a fixed order; `parts` is overwritten.
inline Floats sum_each(Floats parts[16]) {
    for (int i = 0; i < 8; i++)
        parts[i] = _mm512_shuffle_f32x4(parts[i], parts[i + 8], 0x44) + _mm512_shuffle_f32x4(parts[i], parts[i + 8], 0xEE);
    for (int i = 0; i < 4; i++)
        parts[i] = _mm512_shuffle_f32x4(parts[i], parts[i + 4], 0x88) + _mm512_shuffle_f32x4(parts[i], parts[i + 4], 0xDD);
    for (int i = 0; i < 2; i++)
        parts[i] = _mm512_shuffle_ps(parts[i], parts[i + 2], 0x44) + _mm512_shuffle_ps(parts[i], parts[i + 2], 0xEE);
    const Floats sums = _mm512_shuffle_ps(parts[0], parts[1], 0x88) + _mm512_shuffle_ps(parts[0], parts[1], 0xDD);
    // undo the order in which the shuffles leave the sums
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(order, sums);
}
