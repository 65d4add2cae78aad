// Attention of a few queries over a cache of keys and values `[position][size]`, and what comes before it.
#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

struct Norm {
    const float* weight;  // null where there is no such norm
    float eps;
    int32_t rounds_first;  // whether numbers are rounded to bfloat16 before they meet the weight (Llama), or after (Gemma)
};

// Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467) of one row; `to` may be `from`.
inline void normalise(const bf16* from, int64_t size, const Norm& norm, bf16* to) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 x = load(from + i, lanes(size - i));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + norm.eps));
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(size - i);
        __m512 x = _mm512_mul_ps(load(from + i, mask), factor);
        if (norm.rounds_first) x = rounded(x);
        store(to + i, _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, norm.weight + i)), mask);
    }
}

constexpr int64_t LARGEST_HEAD = 512;

// Rotary embedding of one head, rounded where the modules round. `turns` holds the cosines, then the sines, those of the
// first half negated.
inline void rotate(const bf16* from, int64_t size, const bf16* turns, bf16* to) {
    bf16 other[LARGEST_HEAD], turned[LARGEST_HEAD];  // the other half's numbers; `to` may be `from`
    const int64_t half = size / 2;
    std::memcpy(other, from + half, half * sizeof(bf16));
    std::memcpy(other + half, from, half * sizeof(bf16));
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(size - i);
        const __m512 straight = rounded(_mm512_mul_ps(load(from + i, mask), load(turns + i, mask)));
        const __m512 crossed = rounded(_mm512_mul_ps(load(other + i, mask), load(turns + size + i, mask)));
        store(turned + i, _mm512_add_ps(straight, crossed), mask);
    }
    std::memcpy(to, turned, size * sizeof(bf16));
}

// The dot product of a query and a key, still in 16 parts. With `SIZE` known nothing is masked.
template <int SIZE>
inline __m512 dot(const bf16* query, const bf16* key, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    if constexpr (SIZE > 0) {
        for (int j = 0; j < SIZE; j += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(query + j), (__m512bh)_mm512_loadu_si512(key + j));
    } else {
        for (int64_t j = 0; j < size; j += 32) {
            const __mmask32 mask = pairs(size - j);
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(mask, query + j),
                                   (__m512bh)_mm512_maskz_loadu_epi16(mask, key + j));
        }
    }
    return sum;
}

// 64 numbers (or what is `left` of a head) of the values' sum by their shares. Two sums in turn, so that neither waits for itself.
template <int SIZE>
inline void mix(const bf16* values, int64_t size, int64_t left, const int32_t* positions, int64_t count, const float* shares, __m512 factor,
                bf16* to) {
    __mmask16 masks[4];
    __m512 sums[2][4];
    for (int part = 0; part < 4; part++) {
        masks[part] = SIZE > 0 ? 0xFFFF : lanes(left - part * 16);
        sums[0][part] = sums[1][part] = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < count; i += 2) {
        for (int turn = 0; turn < 2 && i + turn < count; turn++) {
            const bf16* value = values + positions[i + turn] * (SIZE > 0 ? SIZE : size);
            const __m512 share = _mm512_set1_ps(shares[i + turn]);
            for (int part = 0; part < 4; part++) {
                const __m512 numbers = SIZE > 0 ? load(value + part * 16) : load(value + part * 16, masks[part]);
                sums[turn][part] = _mm512_fmadd_ps(share, numbers, sums[turn][part]);
            }
        }
    }
    for (int part = 0; part < 4; part++)
        store(to + part * 16, _mm512_mul_ps(_mm512_add_ps(sums[0][part], sums[1][part]), factor), masks[part]);
}

template <int SIZE>
inline void attend_sized(const bf16* query, const bf16* keys, const bf16* values, int64_t any_size, const int32_t* positions,
                         int64_t count, float scaling, float* scores, bf16* to) {
    const int64_t size = SIZE > 0 ? SIZE : any_size;
    const int64_t padded = (count + 15) / 16 * 16;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t start = 0; start < padded; start += 16) {
        __m512 parts[16];
        for (int i = 0; i < 16; i++)
            parts[i] = dot<SIZE>(query, keys + positions[std::min(start + i, count - 1)] * size, size);
        const __m512 found = _mm512_mul_ps(sum_each(parts), _mm512_set1_ps(scaling));
        const __m512 seen = _mm512_mask_blend_ps(lanes(count - start), _mm512_set1_ps(-INFINITY), found);
        _mm512_storeu_ps(scores + start, seen);
        most = _mm512_max_ps(most, seen);
    }
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 total = _mm512_setzero_ps();
    for (int64_t start = 0; start < padded; start += 16) {
        const __m512 power = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + start), most));
        const __m512 seen = _mm512_maskz_mov_ps(lanes(count - start), power);
        _mm512_storeu_ps(scores + start, seen);
        total = _mm512_add_ps(total, seen);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
    for (int64_t j = 0; j < size; j += 64)
        mix<SIZE>(values + j, size, size - j, positions, count, scores, factor, to + j);
}

// One query over the keys and values at `positions`: softmax(q k * scaling) v, in float32 until the end. Everything is
// summed in the order of the list, so a result does not depend on what else the cache holds.
inline void attend(const bf16* query, const bf16* keys, const bf16* values, int64_t size, const int32_t* positions,
                   int64_t count, float scaling, float* scores, bf16* to) {
    if (size == 64) return attend_sized<64>(query, keys, values, size, positions, count, scaling, scores, to);
    if (size == 128) return attend_sized<128>(query, keys, values, size, positions, count, scaling, scores, to);
    attend_sized<0>(query, keys, values, size, positions, count, scaling, scores, to);
}
