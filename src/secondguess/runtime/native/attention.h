// Root-mean-square norm, rotary embedding, and attention of a few queries over cached keys and
// values `[position][size]`.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "vectors.h"

struct Norm {
    const float* weight;  // null if the layer has no such norm
    const float* bias;    // of a layer norm, which also subtracts the mean; null for a root-mean-square norm
    float eps;
    int32_t rounds_first;  // round before applying the weight (Llama), or after (Gemma)
};

// Layer norm (Ba, Kiros and Hinton, arXiv 1607.06450) of one row; `to` may be `from`.
inline void normalise_around_mean(const bf16* from, int64_t size, const Norm& norm, bf16* to) {
    Floats sum = zeros(), squares = zeros();
    for (int64_t i = 0; i < size; i += 16) sum = sum + load(from + i, lanes(size - i));
    const Floats mean = all(sum_of(sum) / size);
    for (int64_t i = 0; i < size; i += 16) {
        const Lanes part = lanes(size - i);
        const Floats x = keep(part, load(from + i, part) - mean, zeros());
        squares = add_product(squares, x, x);
    }
    const Floats factor = all(1.0f / std::sqrt(sum_of(squares) / size + norm.eps));
    for (int64_t i = 0; i < size; i += 16) {
        const Lanes part = lanes(size - i);
        const Floats x = (load(from + i, part) - mean) * factor;
        store(to + i, add_product(load(norm.bias + i, part), x, load(norm.weight + i, part)), part);
    }
}

// Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467) of one row; `to` may be `from`.
inline void normalise(const bf16* from, int64_t size, const Norm& norm, bf16* to) {
    if (norm.bias) return normalise_around_mean(from, size, norm, to);
    Floats squares = zeros();
    for (int64_t i = 0; i < size; i += 16) {
        const Floats x = load(from + i, lanes(size - i));
        squares = add_product(squares, x, x);
    }
    const Floats factor = all(1.0f / std::sqrt(sum_of(squares) / size + norm.eps));
    for (int64_t i = 0; i < size; i += 16) {
        const Lanes part = lanes(size - i);
        Floats x = load(from + i, part) * factor;
        if (norm.rounds_first) x = rounded(x);
        store(to + i, x * load(norm.weight + i, part), part);
    }
}

// Normalise one row, or copy it if there is no norm; `to` may be `from`.
inline void normalise_if(const Norm& norm, const bf16* from, int64_t size, bf16* to) {
    if (norm.weight)
        normalise(from, size, norm, to);
    else if (to != from)
        std::memcpy(to, from, size * sizeof(bf16));
}

constexpr int64_t LARGEST_HEAD = 512;

// Rotary embedding of the first `size` numbers of a head, rounded where the Transformers modules
// round: after each operation, or once if the table is float32. `cos_sin` holds the cosines, then
// the sines, negated for the first number of each pair. A pair is one number of each half or, with
// `pairs`, two neighbours.
template <class Number>
inline void rotate(const bf16* from, int64_t size, bool pairs, const Number* cos_sin, bf16* to) {
    bf16 other[LARGEST_HEAD], turned[LARGEST_HEAD];  // `other`: the other number of each pair; `to` may be `from`
    const int64_t half = size / 2;
    if (pairs) {
        for (int64_t i = 0; i < size; i++) other[i] = from[i ^ 1];
    } else {
        std::memcpy(other, from + half, half * sizeof(bf16));
        std::memcpy(other + half, from, half * sizeof(bf16));
    }
    constexpr bool is_exact = std::is_same_v<Number, float>;
    for (int64_t i = 0; i < size; i += 16) {
        const Lanes part = lanes(size - i);
        const Floats straight = load(from + i, part) * load(cos_sin + i, part);
        const Floats crossed = load(other + i, part) * load(cos_sin + size + i, part);
        store(turned + i, is_exact ? straight + crossed : rounded(straight) + rounded(crossed), part);
    }
    std::memcpy(to, turned, size * sizeof(bf16));
}

// Soft cap, which keeps numbers between -cap and cap; `round` rounds the result of each operation.
template <class Round>
inline Floats capped(Floats x, float cap, Round round) {
    return round(round(hyperbolic_tangent(round(x / all(cap)))) * all(cap));
}

// Dot product of a query and a key as 16 partial sums. With a fixed `SIZE` no lanes are masked.
template <int SIZE>
inline Floats dot(const bf16* query, const bf16* key, int64_t size) {
    Floats sum = zeros();
    if constexpr (SIZE > 0) {
        for (int j = 0; j < SIZE; j += 32) sum = add_products(sum, query + j, key + j);
    } else {
        for (int64_t j = 0; j < size; j += 32) sum = add_products(sum, query + j, key + j, size - j);
    }
    return sum;
}

// Weighted sum of the values for 64 numbers of a head, or the `left` last ones; `shares` are the
// unnormalised attention weights. Two alternating sums hide the latency of the addition.
template <int SIZE>
inline void add_weighted(const bf16* values, int64_t size, int64_t left, const int32_t* positions, int64_t count, const float* shares,
                Floats factor, bf16* to) {
    Lanes within[4];
    Floats sums[2][4];
    for (int part = 0; part < 4; part++) {
        within[part] = lanes(SIZE > 0 ? 16 : left - part * 16);
        sums[0][part] = sums[1][part] = zeros();
    }
    for (int64_t i = 0; i < count; i += 2) {
        for (int half = 0; half < 2 && i + half < count; half++) {
            const bf16* value = values + positions[i + half] * (SIZE > 0 ? SIZE : size);
            const Floats share = all(shares[i + half]);
            for (int part = 0; part < 4; part++) {
                const Floats numbers = SIZE > 0 ? load(value + part * 16) : load(value + part * 16, within[part]);
                sums[half][part] = add_product(sums[half][part], share, numbers);
            }
        }
    }
    for (int part = 0; part < 4; part++)
        store(to + part * 16, (sums[0][part] + sums[1][part]) * factor, within[part]);
}

template <int SIZE>
inline void attend_sized(const bf16* query, const bf16* keys, const bf16* values, int64_t any_size, const int32_t* positions,
                         int64_t count, float scaling, float cap, float* scores, bf16* to) {
    const int64_t size = SIZE > 0 ? SIZE : any_size;
    const int64_t padded = (count + 15) / 16 * 16;
    Floats most = all(-INFINITY);
    for (int64_t start = 0; start < padded; start += 16) {
        Floats parts[16];
        for (int i = 0; i < 16; i++)
            parts[i] = dot<SIZE>(query, keys + positions[std::min(start + i, count - 1)] * size, size);
        Floats found = sum_each(parts) * all(scaling);
        if (cap) found = capped(found, cap, [](Floats x) { return x; });
        const Floats seen = keep(lanes(count - start), found, all(-INFINITY));
        store(scores + start, seen);
        most = largest(most, seen);
    }
    most = all(largest_of(most));
    Floats total = zeros();
    for (int64_t start = 0; start < padded; start += 16) {
        const Floats power = exponential(load(scores + start) - most);
        const Floats seen = keep(lanes(count - start), power, zeros());
        store(scores + start, seen);
        total = total + seen;
    }
    const Floats factor = all(1.0f / sum_of(total));
    for (int64_t j = 0; j < size; j += 64)
        add_weighted<SIZE>(values + j, size, size - j, positions, count, scores, factor, to + j);
}

// Attention of one query over the keys and values at `positions`: softmax(q k * scaling) v, with a
// soft cap on the scores unless `cap` is 0, in float32 until the result is stored. All sums follow
// the order of the list, so that the result does not depend on what else the cache holds.
inline void attend(const bf16* query, const bf16* keys, const bf16* values, int64_t size, const int32_t* positions,
                   int64_t count, float scaling, float cap, float* scores, bf16* to) {
    if (size == 64) return attend_sized<64>(query, keys, values, size, positions, count, scaling, cap, scores, to);
    if (size == 128) return attend_sized<128>(query, keys, values, size, positions, count, scaling, cap, scores, to);
    attend_sized<0>(query, keys, values, size, positions, count, scaling, cap, scores, to);
}
