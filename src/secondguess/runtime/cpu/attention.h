// Root-mean-square norm, rotary embedding, and attention of a few queries over cached keys in float16 and values in
// bfloat16 `[position][size]`. Some models have keys of several hundred, whose errors in bfloat16 change the output.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

struct Norm {
    const float* weight;  // null if the layer has no such norm
    const float* bias;    // of a layer norm, which also subtracts the mean; null for a root-mean-square norm
    float eps;
};

// Layer norm (Ba, Kiros and Hinton, arXiv 1607.06450) of one row; `to` may be `from`.
template <class From, class To>
inline void normalise_around_mean(const From* from, int64_t size, const Norm& norm, To* to) {
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
template <class From, class To>
inline void normalise(const From* from, int64_t size, const Norm& norm, To* to) {
    if (norm.bias) return normalise_around_mean(from, size, norm, to);
    Floats squares = zeros();
    for (int64_t i = 0; i < size; i += 16) {
        const Floats x = load(from + i, lanes(size - i));
        squares = add_product(squares, x, x);
    }
    const Floats factor = all(1.0f / std::sqrt(sum_of(squares) / size + norm.eps));
    for (int64_t i = 0; i < size; i += 16) {
        const Lanes part = lanes(size - i);
        store(to + i, load(from + i, part) * factor * load(norm.weight + i, part), part);
    }
}

// Convert one row.
template <class From, class To>
inline void convert(const From* from, int64_t size, To* to) {
    for (int64_t i = 0; i < size; i += 16) store(to + i, load(from + i, lanes(size - i)), lanes(size - i));
}

// Normalise one row, or convert it if there is no norm; `to` may be `from`.
template <class From, class To>
inline void normalise_if(const Norm& norm, const From* from, int64_t size, To* to) {
    if (norm.weight)
        normalise(from, size, norm, to);
    else
        convert(from, size, to);
}

constexpr int64_t LARGEST_HEAD = 512;

// Rotary embedding of the first `size` numbers of a head. `cos_sin` holds the cosines, then the sines, negated for the
// first number of each pair. A pair is one number of each half or, with `is_interleaved`, two neighbours.
inline void rotate(const float* from, int64_t size, bool is_interleaved, const float* cos_sin, float* to) {
    float other[LARGEST_HEAD];  // number of each pair; `to` may be `from`
    const int64_t half = size / 2;
    if (is_interleaved) {
        for (int64_t i = 0; i < size; i++) other[i] = from[i ^ 1];
    } else {
        std::memcpy(other, from + half, half * sizeof(float));
        std::memcpy(other + half, from, half * sizeof(float));
    }
    for (int64_t i = 0; i < size; i += 16) {
        const Lanes part = lanes(size - i);
        const Floats straight = load(from + i, part) * load(cos_sin + i, part);
        store(to + i, add_product(straight, load(other + i, part), load(cos_sin + size + i, part)), part);
    }
}

// Soft cap, which keeps numbers between -cap and cap.
inline Floats capped(Floats x, float cap) { return hyperbolic_tangent(x / all(cap)) * all(cap); }

// Write numbers in float16. Those beyond its range become the largest ones; NaN stays NaN.
inline void store_cached(uint16_t* to, Floats numbers, Lanes part) {
    const Floats limit = all(65504);
    store_halves(to, largest(zeros() - limit, smallest(limit, numbers)), part);
}

constexpr int QUERIES_AT_ONCE = NUM_SUMS >= 16 ? 4 : 2;
constexpr int64_t NUM_PARTS = NUM_SUMS / QUERIES_AT_ONCE;  // vectors of sums of each of these queries
constexpr int64_t BLOCK_KEYS = 16 * NUM_PARTS;             // keys of a block: with their values they fit into the first cache
constexpr int64_t MAX_QUERIES = 64;                        // queries that read a block together

// Attention of some queries of one key head, block by block of their keys, with a running softmax (Milakov
// and Gimelshein, arXiv 1805.02867; Dao and others, arXiv 2205.14135). Blocks are counted from the first key
// of a query's own list, and all sums follow the order of the list: the result for a query does not depend
// on the others, nor on what else the cache holds, if all numbers are finite: values of a block that a query
// does not attend to have weight 0.
class Attention {
    int64_t size = 0, padded = 0;  // of a head; `padded` to 64
    float scaling, cap;            // on scores; a soft cap unless 0
    std::vector<float> packed_keys;    // [number][key]
    std::vector<Pairs> packed_values;  // [pair of keys][16 numbers]
    std::vector<float> queries;        // [query][padded]
    std::vector<float> sums;           // [query][padded], weighted values
    alignas(64) float totals[MAX_QUERIES][16], scores[MAX_QUERIES][BLOCK_KEYS];
    bf16 shares[MAX_QUERIES][BLOCK_KEYS];
    float maxima[MAX_QUERIES], factors[MAX_QUERIES];

    void pack(const uint16_t* keys, const bf16* values, const int32_t* positions, int64_t count) {
        const auto place = [&](int64_t i) { return positions[std::min(i, count - 1)] * size; };
        for (int64_t group = 0; group * 16 < count; group++)
            for (int64_t n = 0; n < size; n += 32) {
                const uint16_t* rows[16];
                for (int64_t i = 0; i < 16; i++) rows[i] = keys + place(group * 16 + i) + n;
                transpose_halves(rows, size - n, &packed_keys[n * BLOCK_KEYS + group * 16], BLOCK_KEYS);
            }
        for (int64_t i = 0; i < count; i += 2)
            for (int64_t n = 0; n < size; n += 32)
                pair_rows(values + place(i) + n, values + place(i + 1) + n, size - n, &packed_values[i / 2 * padded / 16 + n / 16]);
    }

    // Request some lines of memory, so that reading the next block overlaps with the arithmetic on this one.
    static void prefetch(const uint16_t* from) {
        for (int line = 0; line < NUM_PARTS; line++) __builtin_prefetch(from + 32 * line, 0, 2);
    }

    template <int COUNT>
    void score(int64_t first, const uint16_t* next) {
        Floats found[COUNT][NUM_PARTS];
        for (auto& query_values : found)
            for (Floats& each : query_values) each = zeros();
        const float* keys = packed_keys.data();
        const float* numbers = &queries[first * padded];
        for (int64_t n = 0; n < size; n++, keys += BLOCK_KEYS) {
            if (next && n % 2 == 0) prefetch(next + n * BLOCK_KEYS);
            for (int i = 0; i < COUNT; i++) {
                const Floats number = all(numbers[i * padded + n]);
                for (int64_t group = 0; group < NUM_PARTS; group++) found[i][group] = add_product(found[i][group], number, load(keys + group * 16));
            }
        }
        for (int i = 0; i < COUNT; i++)
            for (int64_t group = 0; group < NUM_PARTS; group++) store(scores[first + i] + group * 16, found[i][group] * all(scaling));
    }

    // Turn the scores of the first `count` keys into weights, relative to the largest score so far.
    void weigh(int64_t query, int64_t count) {
        Floats seen[NUM_PARTS], highest = all(maxima[query]);
        for (int64_t group = 0; group < NUM_PARTS; group++) {
            Floats found = load(scores[query] + group * 16);
            if (cap) found = capped(found, cap);
            seen[group] = keep(lanes(count - group * 16), found, all(-INFINITY));
            highest = largest(highest, seen[group]);
        }
        const float before = maxima[query];
        highest = all(maxima[query] = largest_of(highest));
        float each[16];
        store(each, exponential(all(before) - highest));
        factors[query] = before == -INFINITY ? 0 : each[0];
        Floats total = load(totals[query]) * all(factors[query]);
        for (int64_t group = 0; group < NUM_PARTS; group++) {
            const Floats power = keep(lanes(count - group * 16), exponential(seen[group] - highest), zeros());
            store(shares[query] + group * 16, power);
            total = total + power;
        }
        store(totals[query], total);
    }

    // Add the weighted values of a block of `count` keys to the sums of queries, for `BLOCK_KEYS` numbers of the head.
    template <int COUNT>
    void add_values(int64_t first, int64_t n, int64_t count, const bf16* next) {
        Floats found[COUNT][NUM_PARTS];
        for (int i = 0; i < COUNT; i++)
            for (int part = 0; part < NUM_PARTS; part++)
                found[i][part] = load(&sums[(first + i) * padded + n + part * 16]) * all(factors[first + i]);
        const Pairs* values = &packed_values[n / 16];
        for (int64_t key = 0; key < count; key += 2, values += padded / 16) {
            if (next) prefetch(next + (n + key) * BLOCK_KEYS);
            for (int part = 0; part < NUM_PARTS; part++)
                for (int i = 0; i < COUNT; i++)
                    found[i][part] = add_pair_products(found[i][part], shares[first + i] + key, values[part]);
        }
        for (int i = 0; i < COUNT; i++)
            for (int part = 0; part < NUM_PARTS; part++) store(&sums[(first + i) * padded + n + part * 16], found[i][part]);
    }

  public:
    // Set the size of heads, the factor on scores and their soft cap.
    void set(int64_t head_size, float scaling, float cap) {
        this->scaling = scaling, this->cap = cap;
        if (size == head_size) return;
        size = 0, padded = (head_size + 63) / 64 * 64;
        packed_keys.resize(padded * BLOCK_KEYS), packed_values.resize(BLOCK_KEYS / 2 * padded / 16);
        queries.assign(MAX_QUERIES * padded, 0), sums.resize(MAX_QUERIES * padded);
        size = head_size;
    }

    // Begin a query; returns where to write it. `sink` is the score of a key without a value, -infinity for none.
    float* begin(int64_t query, float sink) {
        maxima[query] = sink;
        store(totals[query], zeros());
        if (sink != -INFINITY) totals[query][0] = 1;
        std::fill_n(&sums[query * padded], padded, 0.0f);
        return &queries[query * padded];
    }

    // Attend to the keys `start` to `end - 1` of a list of cache positions; `start` is the first of a block.
    // Of the queries `first` to `last - 1`, each attends to the first `counts[query]` keys of the list.
    void attend(const uint16_t* keys, const bf16* values, const int32_t* positions, int64_t start, int64_t end, int64_t first,
                int64_t last, const int64_t* counts) {
        for (; start < end; start += BLOCK_KEYS) {
            const int64_t count = std::min(BLOCK_KEYS, end - start);
            pack(keys, values, positions + start, count);
            const int64_t next = (positions[start] + BLOCK_KEYS) * size;  // of most blocks
            const auto ahead = [&](const uint16_t* from, int64_t query) { return query == first ? from + next : nullptr; };
            for_each_few(first, last, [&](auto few, int64_t query) { score<decltype(few)::value>(query, ahead(keys, query)); });
            for (int64_t query = first; query < last; query++) weigh(query, std::max<int64_t>(0, std::min(count, counts[query] - start)));
            for (int64_t n = 0; n < size; n += BLOCK_KEYS)
                for_each_few(first, last, [&](auto few, int64_t query) {
                    add_values<decltype(few)::value>(query, n, count, ahead(values, query));
                });
        }
    }

    // Write the result of a query.
    template <class To>
    void end(int64_t query, To* to) const {
        const Floats factor = all(1.0f / sum_of(load(totals[query])));
        for (int64_t n = 0; n < size; n += 16) store(to + n, load(&sums[query * padded + n]) * factor, lanes(size - n));
    }

  private:
    // Apply a function to queries in groups of `COUNT`, and to the rest in smaller groups.
    template <int COUNT = QUERIES_AT_ONCE, class Function>
    static void for_each_few(int64_t first, int64_t last, Function function) {
        for (; first + COUNT <= last; first += COUNT) function(std::integral_constant<int, COUNT>(), first);
        if constexpr (COUNT > 1) for_each_few<COUNT - 1>(first, last, function);
    }
};
