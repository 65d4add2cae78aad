// Vectors of 16 numbers: bfloat16 in memory, float32 in registers.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

using bf16 = uint16_t;

// What part of a vector lies within the first `count` numbers.
inline __mmask16 lanes(long count) { return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
inline __mmask32 pairs(long count) { return count >= 32 ? 0xFFFFFFFFu : count <= 0 ? 0 : (1u << count) - 1; }

inline __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline __m512 load(const bf16* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }
inline __m512 load(const bf16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }
inline __m256i narrow(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }
inline void store(bf16* to, __m512 numbers) { _mm256_storeu_si256((__m256i*)to, narrow(numbers)); }
inline void store(bf16* to, __m512 numbers, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, narrow(numbers)); }

// To bfloat16 and back: modules round after each of their operations, and so do we.
inline __m512 rounded(__m512 numbers) { return widen(narrow(numbers)); }

// e to the x to float32's precision: 2 to the whole part, times a polynomial in the rest.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(sum, whole);
}

inline __m512 hyperbolic_tangent(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 power = exponential(_mm512_add_ps(x, x));
    return _mm512_div_ps(_mm512_sub_ps(power, one), _mm512_add_ps(power, one));
}

// Lane i is the sum of the 16 lanes of `parts[i]`, always added in the same order; `parts` is used up.
inline __m512 sum_each(__m512 parts[16]) {
    for (int i = 0; i < 8; i++)
        parts[i] = _mm512_add_ps(_mm512_shuffle_f32x4(parts[i], parts[i + 8], 0x44),
                                 _mm512_shuffle_f32x4(parts[i], parts[i + 8], 0xEE));
    for (int i = 0; i < 4; i++)
        parts[i] = _mm512_add_ps(_mm512_shuffle_f32x4(parts[i], parts[i + 4], 0x88),
                                 _mm512_shuffle_f32x4(parts[i], parts[i + 4], 0xDD));
    for (int i = 0; i < 2; i++)
        parts[i] = _mm512_add_ps(_mm512_shuffle_ps(parts[i], parts[i + 2], 0x44),
                                 _mm512_shuffle_ps(parts[i], parts[i + 2], 0xEE));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(parts[0], parts[1], 0x88),
                                      _mm512_shuffle_ps(parts[0], parts[1], 0xDD));
    // The shuffles leave the sums in this order.
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(order, sums);
}
