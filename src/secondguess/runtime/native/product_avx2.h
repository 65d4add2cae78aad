// Products by the vector units of AVX2. Sixteen registers hold the sums of up to two rows with both
// tiles of a block, or of up to six rows with one tile.
#pragma once

constexpr int MOST_ROWS = 6;
constexpr int STEPS_AT_ONCE = 2;  // steps of one tile before the other: as far ahead as lines are prefetched

inline __m256i load_pairs(const char* pairs, int part) {
    return _mm256_loadu_si256((const __m256i*)(pairs + part / 2 * TILE_BYTES + part % 2 * 32));
}

// Add the products of one value of each row with the weights of PARTS vectors of 8 outputs. The
// fewer of the two stay in registers.
template <int COUNT, int PARTS, class Weights>
[[gnu::always_inline]] inline void add_half(__m256 (&found)[COUNT][PARTS], const float* values, int64_t stride, Weights weights) {
    if constexpr (COUNT < PARTS) {
        __m256 of_rows[COUNT];
        UNROLLED for (int row = 0; row < COUNT; row++) of_rows[row] = _mm256_broadcast_ss(values + row * stride);
        UNROLLED for (int part = 0; part < PARTS; part++) {
            const __m256 of_part = weights(part);
            UNROLLED for (int row = 0; row < COUNT; row++)
                found[row][part] = _mm256_fmadd_ps(of_rows[row], of_part, found[row][part]);
        }
    } else {
        __m256 of_parts[PARTS];
        UNROLLED for (int part = 0; part < PARTS; part++) of_parts[part] = weights(part);
        UNROLLED for (int row = 0; row < COUNT; row++) {
            const __m256 value = _mm256_broadcast_ss(values + row * stride);
            UNROLLED for (int part = 0; part < PARTS; part++)
                found[row][part] = _mm256_fmadd_ps(value, of_parts[part], found[row][part]);
        }
    }
}

// Prefetch the next TILES lines. Lines are requested between products and in the order of their
// addresses: a step's lines all at once, or a tile's without its neighbour's, hold up the products
// (five rows took 1.4 times as long as one).
template <int TILES>
inline void prefetch_lines(const char*& ahead) {
    UNROLLED for (int line = 0; line < TILES; line++) _mm_prefetch(ahead + line * 64, _MM_HINT_T0);
    ahead += TILES * 64;
}

// Add the products of COUNT rows with some steps of TILES tiles to `sums`, and prefetch as many
// bytes from `ahead` on. Products of the first and of the second number of a pair are added to the
// same sum, in that order. Values are in float32. (Inlined, GCC spills the sums of six rows.)
template <int COUNT, int TILES>
[[gnu::noinline]] inline void vector_sums(const float* rows, int64_t stride, const char* first_tile, const char* ahead, int64_t num_steps, float* sums) {
    constexpr int PARTS = 2 * TILES;
    __m256 found[COUNT][PARTS];
    UNROLLED for (int row = 0; row < COUNT; row++)
        UNROLLED for (int part = 0; part < PARTS; part++)
            found[row][part] = _mm256_loadu_ps(sums + row * BLOCK + part * 8);
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = first_tile + step * 2 * TILE_BYTES;
        for (int pair = 0; pair < 16; pair++) {
            prefetch_lines<TILES>(ahead);
            const char* pairs = tile + pair * 64;
            const float* values = rows + step * 32 + pair * 2;
            add_half<COUNT, PARTS>(found, values, stride, [pairs](int part) { return first_of(load_pairs(pairs, part)); });
            add_half<COUNT, PARTS>(found, values + 1, stride, [pairs](int part) { return second_of(load_pairs(pairs, part)); });
        }
    }
    UNROLLED for (int row = 0; row < COUNT; row++)
        UNROLLED for (int part = 0; part < PARTS; part++)
            _mm256_storeu_ps(sums + row * BLOCK + part * 8, found[row][part]);
}

// The instruction multiplies unsigned by signed bytes and adds two products in 16 bits: magnitudes
// of weights are multiplied by values with the weights' signs. No weight or value is -128, so that
// two products fit.
template <int COUNT, int TILES>
[[gnu::noinline]] inline void vector_sums(const int8_t* rows, int64_t stride, const char* first_tile, const char* ahead, int64_t num_steps, int32_t* sums) {
    constexpr int PARTS = 2 * TILES;
    __m256i found[COUNT][PARTS];
    UNROLLED for (int row = 0; row < COUNT; row++)
        UNROLLED for (int part = 0; part < PARTS; part++)
            found[row][part] = _mm256_loadu_si256((const __m256i*)(sums + row * BLOCK + part * 8));
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = first_tile + step * 2 * TILE_BYTES;
        for (int four = 0; four < 16; four++) {
            prefetch_lines<TILES>(ahead);
            UNROLLED for (int part = 0; part < PARTS; part++) {
                const char* at = tile + part / 2 * TILE_BYTES + four * 64 + part % 2 * 32;
                const __m256i weights = _mm256_loadu_si256((const __m256i*)at);
                const __m256i sizes = _mm256_abs_epi8(weights);
                UNROLLED for (int row = 0; row < COUNT; row++) {
                    const __m256i values = _mm256_set1_epi32(four_bytes(rows + row * stride + step * 64 + four * 4));
                    const __m256i twos = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(values, weights));
                    found[row][part] = _mm256_add_epi32(found[row][part], _mm256_madd_epi16(twos, ones));
                }
            }
        }
    }
    UNROLLED for (int row = 0; row < COUNT; row++)
        UNROLLED for (int part = 0; part < PARTS; part++)
            _mm256_storeu_si256((__m256i*)(sums + row * BLOCK + part * 8), found[row][part]);
}

// Add the products of COUNT rows with a block to `sums`. One step reads NUMBERS values of a row.
template <int COUNT, int NUMBERS, class Number, class Sum>
inline void block_sums(const Number* rows, int64_t stride, const char* block, int64_t num_steps, Sum* sums) {
    if constexpr (COUNT <= 2) return vector_sums<COUNT, 2>(rows, stride, block, block + PREFETCH_BYTES, num_steps, sums);
    for (int64_t step = 0; step < num_steps; step += STEPS_AT_ONCE) {
        const int64_t count = std::min<int64_t>(STEPS_AT_ONCE, num_steps - step);
        const char* tiles = block + 2 * step * TILE_BYTES;
        for (int tile = 0; tile < 2; tile++) {
            const char* ahead = tiles + tile * count * TILE_BYTES + PREFETCH_BYTES;
            vector_sums<COUNT, 1>(rows + step * NUMBERS, stride, tiles + tile * TILE_BYTES, ahead, count, sums + tile * TILE);
        }
    }
}

// Add the products of at most MOST_ROWS rows with a group of one tile in 4 bits to `sums`. Sums of 16
// products fit into 16 bits: 16 * 15 * 127 < 2^15. They are kept for a row while the codes of half of
// the inputs are in registers.
inline void add_tile_of_group(const char* data, int tile, const GroupValues& values, int count, float* sums) {
    const __m256i half_byte = _mm256_set1_epi8(15);
    __m256i twos[MOST_ROWS][2];
    const uint16_t* parameters = (const uint16_t*)(data + CODE_BYTES) + tile * TILE;
    __m256 scales[2], minima[2];
    UNROLLED for (int part = 0; part < 2; part++) {
        scales[part] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(parameters + part * 8)));
        minima[part] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(parameters + BLOCK + part * 8)));
    }
    UNROLLED for (int half = 0; half < 2; half++) {
        const char* lines = data + tile * (CODE_BYTES / 2) + half * 128;
        __m256i fours[2][4];  // 4 inputs of 8 outputs
        UNROLLED for (int part = 0; part < 2; part++)
            UNROLLED for (int line = 0; line < 2; line++) {
                const __m256i both = _mm256_loadu_si256((const __m256i*)(lines + line * 64 + part * 32));
                fours[part][2 * line] = _mm256_and_si256(both, half_byte);
                fours[part][2 * line + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), half_byte);
            }
        for (int row = 0; row < count; row++) {
            const int8_t* from = values.numbers + row * values.stride + half * 16;
            __m256i found[2];
            UNROLLED for (int four = 0; four < 4; four++) {
                const __m256i each = _mm256_set1_epi32(four_bytes(from + four * 4));
                UNROLLED for (int part = 0; part < 2; part++) {
                    const __m256i added = _mm256_maddubs_epi16(fours[part][four], each);
                    found[part] = four ? _mm256_add_epi16(found[part], added) : half ? _mm256_add_epi16(twos[row][part], added) : added;
                }
            }
            UNROLLED for (int part = 0; part < 2; part++) {
                if (half == 0) {
                    twos[row][part] = found[part];
                    continue;
                }
                float* to = sums + row * BLOCK + tile * TILE + part * 8;
                const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(found[part], _mm256_set1_epi16(1)));
                const __m256 scaled = _mm256_fmadd_ps(whole, scales[part], _mm256_loadu_ps(to));
                _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_broadcast_ss(values.sums + row * values.num_groups), minima[part], scaled));
            }
        }
    }
}

// Prefetch the lines of the group that is read some groups after this one.
template <Encoding ENCODING>
inline void prefetch_group(const char* data) {
    for (int64_t line = 0; line < group_bytes(ENCODING); line += 64) _mm_prefetch(data + PREFETCH_BYTES + line, _MM_HINT_T0);
}

// Add the products of some rows with a group of one tile in 8 bits to `sums`. The instruction
// multiplies unsigned by signed bytes, as for 8 bits without groups; a weight may be -128.
inline void add_group_of_bytes(const char* data, int tile, const GroupValues& values, int count, float* sums) {
    const uint16_t* parameters = (const uint16_t*)(data + 2 * CODE_BYTES) + tile * TILE;
    const __m256i ones = _mm256_set1_epi16(1);
    UNROLLED for (int part = 0; part < 2; part++) {
        const __m256 scales = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(parameters + part * 8)));
        const __m256 minima = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(parameters + BLOCK + part * 8)));
        __m256i fours[8];  // 4 inputs of 8 outputs
        UNROLLED for (int four = 0; four < 8; four++)
            fours[four] = _mm256_loadu_si256((const __m256i*)(data + tile * CODE_BYTES + four * 64 + part * 32));
        for (int row = 0; row < count; row++) {
            const int8_t* from = values.numbers + row * values.stride;
            __m256i whole = _mm256_setzero_si256();
            UNROLLED for (int four = 0; four < 8; four++) {
                const __m256i each = _mm256_sign_epi8(_mm256_set1_epi32(four_bytes(from + four * 4)), fours[four]);
                const __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(fours[four]), each);
                whole = _mm256_add_epi32(whole, _mm256_madd_epi16(twos, ones));
            }
            float* to = sums + row * BLOCK + tile * TILE + part * 8;
            const __m256 scaled = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), scales, _mm256_loadu_ps(to));
            _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_broadcast_ss(values.sums + row * values.num_groups), minima, scaled));
        }
    }
}

template <Encoding ENCODING>
inline void add_groups(const GroupValues& values, int count, const char* block, int64_t num_groups, float* sums) {
    std::fill_n(sums, count * BLOCK, 0.0f);
    for (int64_t group = 0; group < num_groups; group++) {
        const char* data = block + group * group_bytes(ENCODING);
        prefetch_group<ENCODING>(data);
        for (int tile = 0; tile < BLOCK / TILE; tile++)
            ENCODING == INT4 ? add_tile_of_group(data, tile, values.of_group(group), count, sums)
                             : add_group_of_bytes(data, tile, values.of_group(group), count, sums);
    }
}

struct VectorUnit {
    static constexpr int ROWS = MOST_ROWS;
    static int next(int64_t left) { return even_share(left, ROWS); }
    static constexpr int32_t SHIFT = 0;
    static constexpr bool WIDE = true;

    const Values& values;

    explicit VectorUnit(const Values& values) : values(values) {}

    void add_up(int64_t start, int count, const char* block, int64_t num_steps, float* sums) const {
        add_rows<32>(values.wide + start * values.stride, count, block, num_steps, sums);
    }

    void add_up(int64_t start, int count, const char* block, int64_t num_steps, int32_t* sums) const {
        add_rows<64>(values.small + start * values.stride, count, block, num_steps, sums);
    }

    template <int NUMBERS, class Number, class Sum>
    void add_rows(const Number* rows, int count, const char* block, int64_t num_steps, Sum* sums) const {
        std::fill_n(sums, count * BLOCK, Sum(0));
        switch (count) {
            case 1: return block_sums<1, NUMBERS>(rows, values.stride, block, num_steps, sums);
            case 2: return block_sums<2, NUMBERS>(rows, values.stride, block, num_steps, sums);
            case 3: return block_sums<3, NUMBERS>(rows, values.stride, block, num_steps, sums);
            case 4: return block_sums<4, NUMBERS>(rows, values.stride, block, num_steps, sums);
            case 5: return block_sums<5, NUMBERS>(rows, values.stride, block, num_steps, sums);
            default: return block_sums<6, NUMBERS>(rows, values.stride, block, num_steps, sums);
        }
    }
};
