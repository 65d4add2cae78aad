// Operations on parts of vectors and on pairs, for AVX2 and NEON, which have no instructions for them.
#pragma once

// Lanes of a vector that lie within the first `count` numbers.
struct Lanes {
    long count;  // from 0 to 16
    bool full() const { return count == 16; }
};
inline Lanes lanes(long count) { return {count >= 16 ? 16 : count <= 0 ? 0 : count}; }

template <class Number>
inline Floats load(const Number* from, Lanes part) {
    if (part.full()) return load(from);
    Number some[16] = {};
    std::memcpy(some, from, part.count * sizeof(Number));
    return load(some);
}
template <class Number>
inline void store(Number* to, Floats numbers, Lanes part) {
    if (part.full()) return store(to, numbers);
    Number some[16];
    store(some, numbers);
    std::memcpy(to, some, part.count * sizeof(Number));
}
inline void store_halves(uint16_t* to, Floats numbers, Lanes part) {
    if (part.full()) return store_halves(to, numbers);
    uint16_t some[16];
    store_halves(some, numbers);
    std::memcpy(to, some, part.count * sizeof(uint16_t));
}
inline Floats keep(Lanes part, Floats numbers, Floats otherwise) {
    return part.full() ? numbers : first_lanes(part.count, numbers, otherwise);
}

// Add the products of two numbers with those of each pair to `sum`.
inline Floats add_pair_products(Floats sum, const bf16* two, const Pairs& pairs) {
    const Line both = repeat(two);
    return add_product(add_product(sum, first_of(both), pairs.first), second_of(both), pairs.second);
}

// Pair the first `count` of 32 numbers of two rows; the others are 0.
inline void pair_rows(const bf16* first, const bf16* second, long count, Pairs to[2]) {
    for (int half = 0; half < 2; half++) {
        const Lanes part = lanes(count - 16 * half);
        to[half] = {load(first + 16 * half, part), load(second + 16 * half, part)};
    }
}

// Replace 16 numbers, each less than 128, by the entries of a table.
inline void look_up(const uint8_t* table, int8_t* numbers) {
    for (int i = 0; i < 16; i++) numbers[i] = (int8_t)table[numbers[i]];
}

inline Floats distance_from_whole(Floats x) { return x - nearest_whole(x); }
