// Products by the vector units of AVX2 and NEON. Their registers hold the sums of up to two rows with both
// tiles of a block, or of up to six rows with one tile.
#pragma once

constexpr int MAX_ROWS = 6;
constexpr int STEPS_AT_ONCE = 2;  // steps of one tile before the other: as far ahead as lines are prefetched

#ifdef __aarch64__
#include "product_neon.h"
#else
#include "product_avx2.h"
#endif

// Prefetch the next TILES lines. Lines are requested between products and in the order of their
// addresses: a step's lines all at once, or a tile's without its neighbour's, hold up the products.
template <int TILES>
inline void prefetch_lines(const char*& ahead) {
    UNROLLED for (int line = 0; line < TILES; line++) __builtin_prefetch(ahead + line * LINE_BYTES);
    ahead += TILES * LINE_BYTES;
}

// Add the products of a pair of numbers of each row with a line of each tile to `found`, first those of the
// first numbers. Values are in float32.
template <int COUNT, int TILES>
[[gnu::always_inline]] inline void add_line(Floats (&found)[COUNT][TILES], const float* rows, int64_t stride, const char* line) {
    UNROLLED for (int place = 0; place < 2; place++) {
        Floats weights[TILES];
        UNROLLED for (int tile = 0; tile < TILES; tile++) {
            const Line pairs = load_line(line + tile * LINE_BYTES);
            weights[tile] = place ? second_of(pairs) : first_of(pairs);
        }
        UNROLLED for (int row = 0; row < COUNT; row++) {
            const Floats value = all(rows[row * stride + place]);
            UNROLLED for (int tile = 0; tile < TILES; tile++) found[row][tile] = add_product(found[row][tile], value, weights[tile]);
        }
    }
}

// Add the products of COUNT rows with some steps of TILES tiles to `sums`, and prefetch as many
// bytes from `ahead` on. (Inlined, GCC spills the sums of six rows.)
template <int COUNT, int TILES>
[[gnu::noinline]] inline void vector_sums(const float* rows, int64_t stride, const char* first_tile, const char* ahead, int64_t num_steps, float* sums) {
    Floats found[COUNT][TILES];
    UNROLLED for (int row = 0; row < COUNT; row++)
        UNROLLED for (int tile = 0; tile < TILES; tile++) found[row][tile] = load(sums + row * BLOCK + tile * TILE);
    for (int64_t step = 0; step < num_steps; step++)
        for (int slice = 0; slice < 16; slice++) {
            prefetch_lines<TILES>(ahead);
            add_line(found, rows + (step * 16 + slice) * 2, stride, first_tile + step * STEP_BYTES + slice * SLICE_BYTES);
        }
    UNROLLED for (int row = 0; row < COUNT; row++)
        UNROLLED for (int tile = 0; tile < TILES; tile++) store(sums + row * BLOCK + tile * TILE, found[row][tile]);
}

// Add the products of COUNT rows with a block to `sums`.
template <int COUNT>
inline void block_sums(const float* rows, int64_t stride, const char* block, int64_t num_steps, float* sums) {
    if constexpr (COUNT <= 2) return vector_sums<COUNT, 2>(rows, stride, block, block + PREFETCH_BYTES, num_steps, sums);
    for (int64_t step = 0; step < num_steps; step += STEPS_AT_ONCE) {
        const int64_t count = std::min<int64_t>(STEPS_AT_ONCE, num_steps - step);
        const char* tiles = block + step * STEP_BYTES;
        for (int tile = 0; tile < 2; tile++) {
            const char* ahead = tiles + tile * count * STEP_BYTES / 2 + PREFETCH_BYTES;
            vector_sums<COUNT, 1>(rows + step * 32, stride, tiles + tile * LINE_BYTES, ahead, count, sums + tile * TILE);
        }
    }
}

// Products of some rows with a block in groups. Lines of the group that is read some groups later are prefetched. It
// is not inlined, as GCC spills the sums in the products of a decoder.
template <Encoding ENCODING, class Count>
[[gnu::noinline]] inline void sum_products_of_groups(const GroupValues& values, Count count, const char* block, int64_t num_groups, float* sums) {
    constexpr int64_t BYTES = group_bytes(ENCODING);
    std::fill_n(sums, count * BLOCK, 0.0f);
    for (int64_t group = 0; group < num_groups; group++) {
        const char* data = block + group * BYTES;
        const GroupValues group_values = values.at_group(group);
        for (int64_t line = 0; line < BYTES; line += LINE_BYTES) __builtin_prefetch(data + PREFETCH_BYTES + line);
        UNROLLED for (int tile = 0; tile < BLOCK / TILE; tile++) {
            const Parameters<ENCODING> parameters((const uint16_t*)(data + code_bytes(ENCODING)) + tile * TILE);
            sum_group<ENCODING>(data + tile * LINE_BYTES, group_values, count, [&](int row, Wholes whole) {
                float* to = sums + row * BLOCK + tile * TILE;
                store(to, parameters.add_to(load(to), to_floats(whole), group_values.of_row(row)));
            });
        }
    }
}

template <Encoding ENCODING>
inline void add_groups(const GroupValues& values, int count, const char* block, int64_t num_groups, float* sums) {
    if (count == 1)  // a constant, with which the compiler keeps the sums of the row in registers
        sum_products_of_groups<ENCODING>(values, std::integral_constant<int, 1>(), block, num_groups, sums);
    else
        sum_products_of_groups<ENCODING>(values, count, block, num_groups, sums);
}

struct VectorUnit {
    static constexpr int ROWS = MAX_ROWS, ROWS_IN_GROUPS = MAX_ROWS;
    static int next(int64_t left) { return even_share(left, ROWS); }
    static constexpr bool WIDE = true;

    const Values& values;

    explicit VectorUnit(const Values& values) : values(values) {}

    void add_up(int64_t start, int count, const char* block, int64_t num_steps, float* sums) const {
        std::fill_n(sums, count * BLOCK, 0.0f);
        with_count<ROWS>(count, [&](auto rows_at_once) {
            block_sums<decltype(rows_at_once)::value>(values.wide + start * values.stride, values.stride, block, num_steps, sums);
        });
    }
};
