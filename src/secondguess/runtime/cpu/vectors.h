// Vectors of 16 numbers: bfloat16 in memory, float32 in registers. One header per kind of
// processor defines loads, stores and arithmetic; all other functions are written once on top of
// them.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

// Conversion of float16, to nearest, ties to even.
#ifdef __aarch64__
inline float from_half(uint16_t bits) {
    __fp16 number;
    std::memcpy(&number, &bits, sizeof bits);
    return number;
}
inline uint16_t to_half(float number) {
    const __fp16 half = (__fp16)number;
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}
#else
inline float from_half(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t to_half(float number) { return _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT); }
#endif

#ifdef __AVX512BF16__
#include "vectors_avx512.h"
#else
#ifdef __aarch64__
#include "vectors_neon.h"
#else
#include "vectors_avx2.h"
#endif
#include "vectors_unmasked.h"
#endif

inline Floats zeros() { return all(0.0f); }

// Round to bfloat16 precision, as the Transformers modules do after each operation.
inline Floats rounded(Floats numbers) { return widen(narrow(numbers)); }

// e^x to float32 precision: 2 to the integer part, times a polynomial in the remainder. NaN stays NaN, because
// `smallest` and `largest` return the second operand if one is NaN.
inline Floats exponential(Floats x) {
    x = largest(all(-87.0f), smallest(all(88.0f), x));
    const Floats whole = nearest_whole(x * all(1.44269504f));
    Floats rest = subtract_product(x, whole, all(0.693359375f));
    rest = subtract_product(rest, whole, all(-2.12194440e-4f));
    Floats sum = all(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = add_product(all(factor), sum, rest);
    return times_power_of_two(sum, whole);
}

inline Floats hyperbolic_tangent(Floats x) {
    const Floats one = all(1.0f);
    const Floats power = exponential(x + x);
    return (power - one) / (power + one);
}
