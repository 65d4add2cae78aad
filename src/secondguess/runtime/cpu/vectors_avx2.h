// Vector operations for AVX2: a vector of 16 is two registers of 8.
#pragma once

struct Floats {
    __m256 low, high;
};
struct Halves {
    __m256i both;  // 16 numbers in bfloat16
};

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

inline Floats all(float number) { return {_mm256_set1_ps(number), _mm256_set1_ps(number)}; }

inline __m256 widen(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
inline Floats widen(Halves halves) {
    return {widen(_mm256_castsi256_si128(halves.both)), widen(_mm256_extracti128_si256(halves.both, 1))};
}

// Round to the nearest bfloat16, ties to even; NaN stays NaN. Results are in the low half of each
// lane.
inline __m256i narrow(__m256 numbers) {
    const __m256i bits = _mm256_castps_si256(numbers);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, none), 16);
}
inline Halves narrow(Floats numbers) {
    // packing works within each half of a register; the permutation restores the order
    return {_mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(numbers.low), narrow(numbers.high)), 0xD8)};
}

inline Floats load(const bf16* from) { return widen(Halves{_mm256_loadu_si256((const __m256i*)from)}); }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(bf16* to, Floats numbers) { _mm256_storeu_si256((__m256i*)to, narrow(numbers).both); }
inline void store(float* to, Floats numbers) {
    _mm256_storeu_ps(to, numbers.low);
    _mm256_storeu_ps(to + 8, numbers.high);
}

// sum + a * b, and sum - a * b, rounded once.
inline Floats add_product(Floats sum, Floats a, Floats b) {
    return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
inline Floats subtract_product(Floats sum, Floats a, Floats b) {
    return {_mm256_fnmadd_ps(a.low, b.low, sum.low), _mm256_fnmadd_ps(a.high, b.high, sum.high)};
}

inline Floats largest(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats smallest(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats absolute(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Floats nearest_whole(Floats x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, mode), _mm256_round_ps(x.high, mode)};
}
// 2^whole, for exponents of normal float32 numbers.
inline __m256 power_of_two(__m256 whole) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Floats times_power_of_two(Floats x, Floats whole) {
    return x * Floats{power_of_two(whole.low), power_of_two(whole.high)};
}

// The first `count` lanes of `numbers`, and the others of `otherwise`.
inline Floats first_lanes(long count, Floats numbers, Floats otherwise) {
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), places);
    const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count - 8), places);
    return {_mm256_blendv_ps(otherwise.low, numbers.low, _mm256_castsi256_ps(low)),
            _mm256_blendv_ps(otherwise.high, numbers.high, _mm256_castsi256_ps(high))};
}

// `numbers`, and 0 in the lanes in which `x` is less than `limit`.
inline Floats zero_where_less(Floats numbers, Floats x, float limit) {
    const auto eight = [&](__m256 some, __m256 compared) {
        return _mm256_andnot_ps(_mm256_cmp_ps(compared, _mm256_set1_ps(limit), _CMP_LT_OQ), some);
    };
    return {eight(numbers.low, x.low), eight(numbers.high, x.high)};
}

// `if_less` in the lanes in which a < b, and `otherwise` in the others.
inline Floats where_less(Floats a, Floats b, Floats if_less, Floats otherwise) {
    return {_mm256_blendv_ps(otherwise.low, if_less.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.high, if_less.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
inline bool has_nan(Floats x) {
    const __m256 low = _mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), high = _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0;
}
inline float sum_of(Floats x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest_of(Floats x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// Store the sum of each of four vectors.
inline void store_four_sums(float* to, const Floats four[4]) {
    const auto eight = [&](int i) { return _mm256_add_ps(four[i].low, four[i].high); };
    const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(eight(0), eight(1)), _mm256_hadd_ps(eight(2), eight(3)));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

// Store the nearest integers as 8-bit numbers.
inline void store_small(int8_t* to, Floats numbers) {
    const __m256i halves = _mm256_packs_epi32(_mm256_cvtps_epi32(numbers.low), _mm256_cvtps_epi32(numbers.high));
    const __m256i sorted = _mm256_permute4x64_epi64(halves, 0xD8);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1)));
}

inline Floats load_small(const int8_t* from) {
    const __m128i all_numbers = _mm_loadu_si128((const __m128i*)from);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all_numbers)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all_numbers, 8)))};
}

// Numbers in float16.
inline void store_halves(uint16_t* to, Floats numbers) {
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(numbers.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(to + 8), _mm256_cvtps_ph(numbers.high, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats load_halves(const uint16_t* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)))};
}

// 64 bytes: a pair of bfloat16, or 4 numbers of 8 bits, per lane.
struct Line {
    __m256i low, high;
};
inline Line load_line(const void* from) {
    return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
}
inline Line repeat(const void* four_bytes) {
    int32_t bits;
    std::memcpy(&bits, four_bytes, sizeof bits);
    return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}

// The first, and the second, number of each pair.
inline __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 second_of(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000)));
}
inline Floats first_of(Line pairs) { return {first_of(pairs.low), first_of(pairs.high)}; }
inline Floats second_of(Line pairs) { return {second_of(pairs.low), second_of(pairs.high)}; }

// 16 integers.
struct Wholes {
    __m256i low, high;
};
inline Floats to_floats(Wholes numbers) { return {_mm256_cvtepi32_ps(numbers.low), _mm256_cvtepi32_ps(numbers.high)}; }

// Add the products of the numbers of 8 bits of each lane. The instruction multiplies unsigned by signed
// bytes and adds two products in 16 bits: magnitudes of weights are multiplied by values with the weights'
// signs. Two products fit: no value is -128.
inline __m256i add_dots(__m256i sum, __m256i weights, __m256i values) {
    const __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(values, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
inline Wholes add_dots(Wholes sum, Line weights, Line values) {
    return {add_dots(sum.low, weights.low, values.low), add_dots(sum.high, weights.high, values.high)};
}

// 16 pairs of numbers, in float32.
struct Pairs {
    Floats first, second;
};

// Columns of 8 rows of 8 lanes of 32 bits.
inline void transpose(__m256 rows[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; half++) {
            b[i + 2 * half] = _mm256_shuffle_ps(a[i + half], a[i + half + 2], 0x44);
            b[i + 2 * half + 1] = _mm256_shuffle_ps(a[i + half], a[i + half + 2], 0xEE);
        }
    for (int j = 0; j < 4; j++) {
        rows[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
        rows[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
    }
}

// The low halves of 8 lanes, in float16.
inline __m256 from_halves(__m256i lanes) {
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(lanes, _mm256_set1_epi32(0xFFFF)), _mm256_setzero_si256());
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xD8)));
}

// Transpose the first `count` of 32 numbers in float16 of 16 rows: the i-th number of each row is at `to + i * stride`.
inline void transpose_halves(const uint16_t* const rows[16], long count, float* to, long stride) {
    for (int start = 0; start < 32; start += 16)
        for (int half = 0; half < 2; half++) {
            __m256 eight[8];
            for (int i = 0; i < 8; i++) {
                uint16_t some[16] = {};
                const long left = count - start;
                if (left < 16 && left > 0) std::memcpy(some, rows[8 * half + i] + start, left * sizeof(uint16_t));
                const uint16_t* from = left < 16 ? some : rows[8 * half + i] + start;
                eight[i] = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)from));
            }
            transpose(eight);
            for (int i = 0; i < 8; i++) {
                const __m256i pairs = _mm256_castps_si256(eight[i]);
                float* const at = to + (start + 2 * i) * stride + 8 * half;
                _mm256_storeu_ps(at, from_halves(pairs));
                _mm256_storeu_ps(at + stride, from_halves(_mm256_srli_epi32(pairs, 16)));
            }
        }
}
constexpr int NUM_SUMS = 4;  // vectors of sums that the registers hold
