// Products by the vector units of AVX2: one row with both tiles of a block at once, or up to four
// rows with one tile after the other, which is what sixteen registers can hold.
#pragma once

// Products of the first and of the second number of a pair are added to the same sum, in that
// order. Values are in float32.
template <int COUNT, int TILES>
inline void vector_sums(const float* rows, int64_t stride, const char* first_tile, int64_t num_steps, float* sums) {
    __m256 found[COUNT][2 * TILES];
    for (int row = 0; row < COUNT; row++)
        for (int part = 0; part < 2 * TILES; part++) found[row][part] = _mm256_setzero_ps();
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = first_tile + step * 2 * TILE_BYTES;
        prefetch(tile + PREFETCH_BYTES);
        for (int pair = 0; pair < 16; pair++) {
            __m256i pairs[2 * TILES];
            for (int part = 0; part < 2 * TILES; part++)
                pairs[part] = _mm256_loadu_si256((const __m256i*)(tile + part / 2 * TILE_BYTES + pair * 64 + part % 2 * 32));
            const float* values = rows + step * 32 + pair * 2;
            for (int row = 0; row < COUNT; row++) {
                const __m256 value = _mm256_broadcast_ss(values + row * stride);
                for (int part = 0; part < 2 * TILES; part++)
                    found[row][part] = _mm256_fmadd_ps(value, first_of(pairs[part]), found[row][part]);
            }
            for (int row = 0; row < COUNT; row++) {
                const __m256 value = _mm256_broadcast_ss(values + row * stride + 1);
                for (int part = 0; part < 2 * TILES; part++)
                    found[row][part] = _mm256_fmadd_ps(value, second_of(pairs[part]), found[row][part]);
            }
        }
    }
    for (int row = 0; row < COUNT; row++)
        for (int part = 0; part < 2 * TILES; part++) _mm256_storeu_ps(sums + row * BLOCK + part * 8, found[row][part]);
}

// The instruction multiplies unsigned by signed bytes and adds two products in 16 bits: magnitudes
// of weights are multiplied by values with the weights' signs. No weight or value is -128, so that
// two products fit.
template <int COUNT, int TILES>
inline void vector_sums(const int8_t* rows, int64_t stride, const char* first_tile, int64_t num_steps, int32_t* sums) {
    __m256i found[COUNT][2 * TILES];
    for (int row = 0; row < COUNT; row++)
        for (int part = 0; part < 2 * TILES; part++) found[row][part] = _mm256_setzero_si256();
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = first_tile + step * 2 * TILE_BYTES;
        prefetch(tile + PREFETCH_BYTES);
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
    static constexpr int ROWS = 4;
    static constexpr int32_t SHIFT = 0;
    static constexpr bool WIDE = true;

    const Values& values;

    explicit VectorUnit(const Values& values) : values(values) {}

    void add_up(int64_t start, int count, const char* block, int64_t num_steps, float* sums) const {
        add_up(values.wide + start * values.stride, values.stride, count, block, num_steps, sums);
    }
    void add_up(int64_t start, int count, const char* block, int64_t num_steps, int32_t* sums) const {
        add_up(values.small + start * values.stride, values.stride, count, block, num_steps, sums);
    }

    template <class Number, class Sum>
    static void add_up(const Number* rows, int64_t stride, int count, const char* block, int64_t num_steps, Sum* sums) {
        if (count == 1) return vector_sums<1, 2>(rows, stride, block, num_steps, sums);
        for (int tile = 0; tile < 2; tile++) {
            const char* data = block + tile * TILE_BYTES;
            Sum* to = sums + tile * TILE;
            switch (count) {
                case 2: vector_sums<2, 1>(rows, stride, data, num_steps, to); break;
                case 3: vector_sums<3, 1>(rows, stride, data, num_steps, to); break;
                default: vector_sums<4, 1>(rows, stride, data, num_steps, to);
            }
        }
    }
};
