// Products by the vector units of AVX-512: up to 10 rows with one block at once.
#pragma once

// Prefetch a later slice. Products of up to four rows only wait for memory, whose lines the processor requests in
// order by itself; requests of ours would take the places in which the first cache waits for lines. With more rows the
// arithmetic delays the processor's requests. Ours are into the second cache, which has more places.
template <int COUNT>
inline void prefetch_ahead(const char* slice) {
    if (COUNT <= 4) return;
    _mm_prefetch(slice + 2 * PREFETCH_BYTES, _MM_HINT_T1);
    _mm_prefetch(slice + 2 * PREFETCH_BYTES + LINE_BYTES, _MM_HINT_T1);
}

template <int COUNT>
inline void vector_sums(const bf16* rows, int64_t stride, const char* block, int64_t num_steps, float* sums) {
    __m512 low[COUNT], high[COUNT];
    UNROLLED for (int row = 0; row < COUNT; row++) low[row] = high[row] = _mm512_setzero_ps();
    for (int64_t step = 0; step < num_steps; step++) {
        for (int pair = 0; pair < 16; pair++) {
            const char* slice = block + step * STEP_BYTES + pair * SLICE_BYTES;
            prefetch_ahead<COUNT>(slice);
            const __m512bh first = (__m512bh)_mm512_loadu_si512(slice);
            const __m512bh second = (__m512bh)_mm512_loadu_si512(slice + LINE_BYTES);
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

// Codes, or levels, of 4 inputs of each output of a tile, without sign: those in 8 bits are 128 larger than stored.
template <Encoding ENCODING>
inline __m512i unsigned_codes(const char* tile, int four) {
    if (!has_half_bytes(ENCODING)) return _mm512_xor_si512(_mm512_loadu_si512(tile + four * SLICE_BYTES), _mm512_set1_epi8((char)0x80));
    const __m512i both = _mm512_loadu_si512(tile + four / 2 * SLICE_BYTES);
    const __m512i codes = four % 2 ? _mm512_srli_epi16(both, 4) : both;
    if (!has_levels(ENCODING)) return _mm512_and_si512(codes, _mm512_set1_epi8(15));
    // The place is the low 6 bits of a byte: the table is there four times, so that 2 of them have no effect.
    return _mm512_permutexvar_epi8(codes, _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)LEVELS<ENCODING>)));
}

// Products of `COUNT` rows with a block in groups. The sums of both tiles stay in registers, as do the whole sums
// of a group: numbers of a row are read once for both tiles. Lines are requested into the second cache, as requests into
// the first hold up the products.
template <Encoding ENCODING, int COUNT>
inline void sum_products_of_groups(const GroupValues& values, const char* block, int64_t num_groups, float* sums) {
    constexpr int64_t BYTES = group_bytes(ENCODING), CODES = code_bytes(ENCODING);
    Floats totals[2][COUNT];
    UNROLLED for (int row = 0; row < COUNT; row++) totals[0][row] = totals[1][row] = zeros();
    for (int64_t group = 0; group < num_groups; group++) {
        const char* data = block + group * BYTES;
        const GroupValues group_values = values.at_group(group);
        const auto request = [data](int64_t place) {
            _mm_prefetch(data + PREFETCH_BYTES + place, _MM_HINT_T1);
        };
        __m512i whole[2][COUNT];
        UNROLLED for (int row = 0; row < COUNT; row++)
            whole[0][row] = whole[1][row] = _mm512_set1_epi32(group_values.of_row(row).offset);
        UNROLLED for (int four = 0; four < 8; four++) {
            UNROLLED for (int64_t line = four * CODES / 8; line < (four + 1) * CODES / 8; line += LINE_BYTES) request(line);
            const __m512i first = unsigned_codes<ENCODING>(data, four), second = unsigned_codes<ENCODING>(data + LINE_BYTES, four);
            UNROLLED for (int row = 0; row < COUNT; row++) {
                const __m512i all_four = _mm512_set1_epi32(four_bytes(group_values.numbers + row * values.stride + four * 4));
                whole[0][row] = _mm512_dpbusd_epi32(whole[0][row], first, all_four);
                whole[1][row] = _mm512_dpbusd_epi32(whole[1][row], second, all_four);
            }
        }
        const uint16_t* parameters = (const uint16_t*)(data + CODES);
        UNROLLED for (int tile = 0; tile < 2; tile++) {
            if (CODES + tile * LINE_BYTES < BYTES) request(CODES + tile * LINE_BYTES);
            const Parameters<ENCODING> tile_parameters(parameters + tile * TILE);
            UNROLLED for (int row = 0; row < COUNT; row++)
                totals[tile][row] = tile_parameters.add_to(totals[tile][row], _mm512_cvtepi32_ps(whole[tile][row]), group_values.of_row(row));
        }
    }
    UNROLLED for (int row = 0; row < COUNT; row++) {
        store(sums + row * BLOCK, totals[0][row]);
        store(sums + row * BLOCK + TILE, totals[1][row]);
    }
}

// The products of some rows with a block in groups, at most 6 rows at once, whose sums fit into the registers.
template <Encoding ENCODING>
inline void add_groups(const GroupValues& values, int count, const char* block, int64_t num_groups, float* sums) {
    for (int start = 0, part; start < count; start += part) {
        part = even_share(count - start, 6);
        const GroupValues rows = values.from_row(start);
        float* to = sums + start * BLOCK;
        with_count<6>(part, [&](auto rows_at_once) {
            sum_products_of_groups<ENCODING, decltype(rows_at_once)::value>(rows, block, num_groups, to);
        });
    }
}

struct VectorUnit {
    static constexpr int ROWS = 10, ROWS_IN_GROUPS = 24;
    // More than 10 rows read a block again from the second cache, and are fastest in parts of up to 8.
    static int next(int64_t left) { return left <= ROWS ? left : even_share(left, 8); }
    static constexpr bool WIDE = false;

    const Values& values;

    explicit VectorUnit(const Values& values) : values(values) {}

    void add_up(int64_t start, int count, const char* block, int64_t num_steps, float* sums) const {
        with_count<ROWS>(count, [&](auto rows_at_once) {
            vector_sums<decltype(rows_at_once)::value>(values.numbers + start * values.stride, values.stride, block, num_steps, sums);
        });
    }
};
