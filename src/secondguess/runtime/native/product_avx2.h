// Sums of products by the vector units of AVX2: one row with both tiles of a block at once, or two rows with one. That is what
// sixteen registers hold, and enough sums in flight that none waits for itself.
#pragma once

// bfloat16 is the upper half of float32. First and second numbers of the pairs are added up apart and put together at the end.
template <int COUNT, int TILES>
inline void vector_sums(const bf16* rows, int64_t stride, const char* first_tile, int64_t num_steps, float* sums) {
    __m256 first[COUNT][2 * TILES], second[COUNT][2 * TILES];
    for (int row = 0; row < COUNT; row++)
        for (int part = 0; part < 2 * TILES; part++) first[row][part] = second[row][part] = _mm256_setzero_ps();
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = first_tile + step * 2 * TILE_BYTES;
        ask_for(tile + AHEAD);
        for (int pair = 0; pair < 16; pair++) {
            __m256 weights[2][2 * TILES];
            for (int part = 0; part < 2 * TILES; part++) {
                const char* at = tile + part / 2 * TILE_BYTES + pair * 64 + part % 2 * 32;
                const __m256i pairs = _mm256_loadu_si256((const __m256i*)at);
                weights[0][part] = first_of(pairs), weights[1][part] = second_of(pairs);
            }
            for (int row = 0; row < COUNT; row++) {
                const __m256i both = _mm256_set1_epi32(four_bytes(rows + row * stride + step * 32 + pair * 2));
                const __m256 values[2] = {first_of(both), second_of(both)};
                for (int part = 0; part < 2 * TILES; part++) {
                    first[row][part] = _mm256_fmadd_ps(values[0], weights[0][part], first[row][part]);
                    second[row][part] = _mm256_fmadd_ps(values[1], weights[1][part], second[row][part]);
                }
            }
        }
    }
    for (int row = 0; row < COUNT; row++)
        for (int part = 0; part < 2 * TILES; part++)
            _mm256_storeu_ps(sums + row * BLOCK + part * 8, _mm256_add_ps(first[row][part], second[row][part]));
}

// The units multiply unsigned by signed, two at a time into 16 bits: sizes of weights by values with the weights' signs. Neither
// is ever -128, so that two products fit.
template <int COUNT, int TILES>
inline void vector_sums(const int8_t* rows, int64_t stride, const char* first_tile, int64_t num_steps, int32_t* sums) {
    __m256i found[COUNT][2 * TILES];
    for (int row = 0; row < COUNT; row++)
        for (int part = 0; part < 2 * TILES; part++) found[row][part] = _mm256_setzero_si256();
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = first_tile + step * 2 * TILE_BYTES;
        ask_for(tile + AHEAD);
        for (int four = 0; four < 16; four++) {
            for (int part = 0; part < 2 * TILES; part++) {
                const char* at = tile + part / 2 * TILE_BYTES + four * 64 + part % 2 * 32;
                const __m256i weights = _mm256_loadu_si256((const __m256i*)at);
                const __m256i sizes = _mm256_abs_epi8(weights);
                for (int row = 0; row < COUNT; row++) {
                    const __m256i values = _mm256_set1_epi32(four_bytes(rows + row * stride + step * 64 + four * 4));
                    const __m256i twos = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(values, weights));
                    found[row][part] = _mm256_add_epi32(found[row][part], _mm256_madd_epi16(twos, ones));
                }
            }
        }
    }
    for (int row = 0; row < COUNT; row++)
        for (int part = 0; part < 2 * TILES; part++)
            _mm256_storeu_si256((__m256i*)(sums + row * BLOCK + part * 8), found[row][part]);
}

struct VectorUnit {
    static constexpr int ROWS = 2;
    static constexpr int32_t SHIFT = 0;

    explicit VectorUnit(int64_t) {}

    template <class Number, class Sum>
    static void add_up(int count, const Number* rows, int64_t stride, const char* block, int64_t num_steps, Sum* sums) {
        if (count == 1) return vector_sums<1, 2>(rows, stride, block, num_steps, sums);
        vector_sums<2, 1>(rows, stride, block, num_steps, sums);
        vector_sums<2, 1>(rows, stride, block + TILE_BYTES, num_steps, sums + TILE);
    }
};
