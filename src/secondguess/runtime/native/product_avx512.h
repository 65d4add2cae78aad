// Products by the vector units of AVX-512: up to 8 rows with one block at once.
#pragma once

// Prefetch, for each line that is read of both tiles, two lines of the step `PREFETCH_BYTES` ahead.
// Lines are requested between products and in the order of their addresses, into the second cache: a
// step's lines all at once hold up the products, and so do requests for more lines than the first cache
// can wait for (five rows took 1.4 times as long as one).
inline void prefetch_ahead(const char* tile, int line) {
    _mm_prefetch(tile + PREFETCH_BYTES + line * 128, _MM_HINT_T1);
    _mm_prefetch(tile + PREFETCH_BYTES + line * 128 + 64, _MM_HINT_T1);
}

template <int COUNT>
inline void vector_sums(const bf16* rows, int64_t stride, const char* block, int64_t num_steps, float* sums) {
    __m512 low[COUNT], high[COUNT];
    UNROLLED for (int row = 0; row < COUNT; row++) low[row] = high[row] = _mm512_setzero_ps();
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = block + step * 2 * TILE_BYTES;
        for (int pair = 0; pair < 16; pair++) {
            prefetch_ahead(tile, pair);
            const __m512bh first = (__m512bh)_mm512_loadu_si512(tile + pair * 64);
            const __m512bh second = (__m512bh)_mm512_loadu_si512(tile + TILE_BYTES + pair * 64);
            UNROLLED for (int row = 0; row < COUNT; row++) {
                const __m512bh both = (__m512bh)_mm512_set1_epi32(four_bytes(rows + row * stride + step * 32 + pair * 2));
                low[row] = _mm512_dpbf16_ps(low[row], both, first);
                high[row] = _mm512_dpbf16_ps(high[row], both, second);
            }
        }
    }
    UNROLLED for (int row = 0; row < COUNT; row++) {
        _mm512_storeu_ps(sums + row * BLOCK, low[row]);
        _mm512_storeu_ps(sums + row * BLOCK + TILE, high[row]);
    }
}

// The instruction multiplies unsigned by signed bytes: values are shifted by 128 (SHIFT), which
// the caller corrects.
template <int COUNT>
inline void vector_sums(const int8_t* rows, int64_t stride, const char* block, int64_t num_steps, int32_t* sums) {
    __m512i low[COUNT], high[COUNT];
    UNROLLED for (int row = 0; row < COUNT; row++) low[row] = high[row] = _mm512_setzero_si512();
    const __m512i shift = _mm512_set1_epi32((int)0x80808080);
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = block + step * 2 * TILE_BYTES;
        for (int four = 0; four < 16; four++) {
            prefetch_ahead(tile, four);
            const __m512i first = _mm512_loadu_si512(tile + four * 64);
            const __m512i second = _mm512_loadu_si512(tile + TILE_BYTES + four * 64);
            UNROLLED for (int row = 0; row < COUNT; row++) {
                const int all_four = four_bytes(rows + row * stride + step * 64 + four * 4);
                const __m512i shifted = _mm512_xor_si512(_mm512_set1_epi32(all_four), shift);
                low[row] = _mm512_dpbusd_epi32(low[row], shifted, first);
                high[row] = _mm512_dpbusd_epi32(high[row], shifted, second);
            }
        }
    }
    UNROLLED for (int row = 0; row < COUNT; row++) {
        _mm512_storeu_si512(sums + row * BLOCK, low[row]);
        _mm512_storeu_si512(sums + row * BLOCK + TILE, high[row]);
    }
}

// Add the products of `COUNT` rows with a group in 4 bits to `sums`. Both tiles use the same four inputs of
// a row, and the whole sums of all rows stay in registers. One or two rows only wait for memory, so lines are
// requested into the first cache; with more rows such requests hold up the products.
template <int COUNT>
inline void add_group_to(const char* data, const GroupValues& values, float* sums) {
    constexpr _mm_hint CACHE = COUNT < 3 ? _MM_HINT_T0 : _MM_HINT_T1;
    const __m512i half_byte = _mm512_set1_epi8(15);
    __m512i low[COUNT], high[COUNT];
    UNROLLED for (int row = 0; row < COUNT; row++) low[row] = high[row] = _mm512_setzero_si512();
    UNROLLED for (int line = 0; line < 4; line++) {
        const char* lines = data + line * 64;
        _mm_prefetch(lines + PREFETCH_BYTES, CACHE);
        _mm_prefetch(lines + PREFETCH_BYTES + CODE_BYTES / 2, CACHE);
        __m512i first = _mm512_loadu_si512(lines), second = _mm512_loadu_si512(lines + CODE_BYTES / 2);
        UNROLLED for (int half = 0; half < 2; half++) {  // 4 inputs of each output
            const __m512i codes = _mm512_and_si512(first, half_byte), others = _mm512_and_si512(second, half_byte);
            UNROLLED for (int row = 0; row < COUNT; row++) {
                const __m512i four = _mm512_set1_epi32(four_bytes(values.numbers + row * values.stride + (2 * line + half) * 4));
                low[row] = _mm512_dpbusd_epi32(low[row], codes, four);
                high[row] = _mm512_dpbusd_epi32(high[row], others, four);
            }
            first = _mm512_srli_epi16(first, 4);
            second = _mm512_srli_epi16(second, 4);
        }
    }
    const __m256i* parameters = (const __m256i*)(data + CODE_BYTES);
    _mm_prefetch(data + PREFETCH_BYTES + CODE_BYTES, CACHE);
    _mm_prefetch(data + PREFETCH_BYTES + CODE_BYTES + 64, CACHE);
    UNROLLED for (int tile = 0; tile < BLOCK / TILE; tile++) {
        const Floats scales = _mm512_cvtph_ps(_mm256_loadu_si256(parameters + tile));
        const Floats minima = _mm512_cvtph_ps(_mm256_loadu_si256(parameters + BLOCK / TILE + tile));
        UNROLLED for (int row = 0; row < COUNT; row++) {
            float* to = sums + row * BLOCK + tile * TILE;
            const Floats scaled = add_product(load(to), _mm512_cvtepi32_ps(tile ? high[row] : low[row]), scales);
            store(to, add_product(scaled, all(values.sums[row * values.num_groups]), minima));
        }
    }
}

// Add the products of some rows with a group in 4 bits to `sums`.
inline void add_group(const char* data, const GroupValues& values, int count, float* sums) {
    for (int start = 0, part; start < count; start += part) {
        part = even_share(count - start, 8);
        const GroupValues rows{values.numbers + start * values.stride, values.sums + start * values.num_groups, values.stride,
                               values.num_groups};
        float* to = sums + start * BLOCK;
        switch (part) {
            case 1: add_group_to<1>(data, rows, to); break;
            case 2: add_group_to<2>(data, rows, to); break;
            case 3: add_group_to<3>(data, rows, to); break;
            case 4: add_group_to<4>(data, rows, to); break;
            case 5: add_group_to<5>(data, rows, to); break;
            case 6: add_group_to<6>(data, rows, to); break;
            case 7: add_group_to<7>(data, rows, to); break;
            default: add_group_to<8>(data, rows, to);
        }
    }
}

struct VectorUnit {
    static constexpr int ROWS = 8;
    static int next(int64_t left) { return even_share(left, ROWS); }
    static constexpr int32_t SHIFT = 128;
    static constexpr bool WIDE = false;

    const Values& values;

    explicit VectorUnit(const Values& values) : values(values) {}

    void add_up(int64_t start, int count, const char* block, int64_t num_steps, float* sums) const {
        add_up(values.numbers + start * values.stride, values.stride, count, block, num_steps, sums);
    }
    void add_up(int64_t start, int count, const char* block, int64_t num_steps, int32_t* sums) const {
        add_up(values.small + start * values.stride, values.stride, count, block, num_steps, sums);
    }

    template <class Number, class Sum>
    static void add_up(const Number* rows, int64_t stride, int count, const char* block, int64_t num_steps, Sum* sums) {
        switch (count) {
            case 1: return vector_sums<1>(rows, stride, block, num_steps, sums);
            case 2: return vector_sums<2>(rows, stride, block, num_steps, sums);
            case 3: return vector_sums<3>(rows, stride, block, num_steps, sums);
            case 4: return vector_sums<4>(rows, stride, block, num_steps, sums);
            case 5: return vector_sums<5>(rows, stride, block, num_steps, sums);
            case 6: return vector_sums<6>(rows, stride, block, num_steps, sums);
            case 7: return vector_sums<7>(rows, stride, block, num_steps, sums);
            default: return vector_sums<8>(rows, stride, block, num_steps, sums);
        }
    }
};
