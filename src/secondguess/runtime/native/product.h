// values @ weight.T, each row summed in an order of its own: its bits do not depend on how many rows there are.
//
// A weight lies in blocks of 32 outputs. Within a block, 64 bytes of every output's inputs (32 in bfloat16, 64 in 8 bits)
// make two tiles of 16 outputs, and within a tile 4 bytes of each of the 16 outputs stand side by side: the form that AMX
// tiles and the vector dot products both read, once, from front to back.
#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

constexpr int BLOCK = 32;          // outputs
constexpr int TILE = 16;           // rows, or outputs
constexpr int TILE_BYTES = 1024;   // 16 rows of 64 bytes
constexpr long AHEAD = 4096;       // bytes to ask for in advance

struct Weight {
    const char* data;       // blocks
    const float* scale;     // per output, for 8 bits; null for bfloat16
    const int32_t* sum;     // per output, sum of the 8-bit numbers
    const float* bias;      // per output, or null
    int64_t num_outputs;
    int64_t num_inputs;     // multiple of 64, padded with zeros

    int64_t num_blocks() const { return (num_outputs + BLOCK - 1) / BLOCK; }
    int64_t num_steps() const { return scale ? num_inputs / 64 : num_inputs / 32; }
};

// What a product reads: rows in bfloat16, and for 8-bit weights the same in 8 bits with a scale per row. There is room
// for a multiple of 32 rows.
struct Values {
    const bf16* numbers;
    const int8_t* small;
    const float* scale;
    int64_t stride;  // numbers per row
    int64_t num_rows;
};

struct Tiles {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
};

// Tiles 0 to 3 hold sums (rows by outputs), 4 and 5 rows, 6 and 7 weights.
inline void set_tiles(int num_rows) {
    Tiles tiles;
    for (int i = 0; i < 8; i++) {
        tiles.row_bytes[i] = 64;
        tiles.num_rows[i] = i < 6 ? num_rows : TILE;
    }
    // GCC does not know that tiles are loaded from memory: what was written before must be there.
    asm volatile("" : : "r"(&tiles) : "memory");
    _tile_loadconfig(&tiles);
}

// Sums of up to 32 rows with one block of bfloat16 weights, into `sums[row][output]`.
inline void block_sums_amx(const bf16* rows, int64_t stride, bool two, const char* block, int64_t num_steps, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = block + step * 2 * TILE_BYTES;
        for (int line = 0; line < 2 * TILE_BYTES; line += 64) _mm_prefetch(tile + AHEAD + line, _MM_HINT_T0);
        _tile_loadd(4, rows + step * 32, stride * 2);
        _tile_loadd(6, tile, 64);
        _tile_loadd(7, tile + TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, rows + TILE * stride + step * 32, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, BLOCK * 4);
    _tile_stored(1, sums + TILE, BLOCK * 4);
    if (two) {
        _tile_stored(2, sums + TILE * BLOCK, BLOCK * 4);
        _tile_stored(3, sums + TILE * BLOCK + TILE, BLOCK * 4);
    }
}

// The same in 8 bits; the sums are whole numbers.
inline void block_sums_amx(const int8_t* rows, int64_t stride, bool two, const char* block, int64_t num_steps, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = block + step * 2 * TILE_BYTES;
        for (int line = 0; line < 2 * TILE_BYTES; line += 64) _mm_prefetch(tile + AHEAD + line, _MM_HINT_T0);
        _tile_loadd(4, rows + step * 64, stride);
        _tile_loadd(6, tile, 64);
        _tile_loadd(7, tile + TILE_BYTES, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (two) {
            _tile_loadd(5, rows + TILE * stride + step * 64, stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, BLOCK * 4);
    _tile_stored(1, sums + TILE, BLOCK * 4);
    if (two) {
        _tile_stored(2, sums + TILE * BLOCK, BLOCK * 4);
        _tile_stored(3, sums + TILE * BLOCK + TILE, BLOCK * 4);
    }
}

constexpr int FEW = 8;  // rows that the vector units take at once

// Without AMX: sums of up to 8 rows with one block.
template <int ROWS>
inline void block_sums_vector(const bf16* rows, int64_t stride, const char* block, int64_t num_steps, float* sums) {
    __m512 low[ROWS], high[ROWS];
    for (int row = 0; row < ROWS; row++) low[row] = high[row] = _mm512_setzero_ps();
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = block + step * 2 * TILE_BYTES;
        for (int line = 0; line < 2 * TILE_BYTES; line += 64) _mm_prefetch(tile + AHEAD + line, _MM_HINT_T0);
        for (int pair = 0; pair < 16; pair++) {
            const __m512bh first = (__m512bh)_mm512_loadu_si512(tile + pair * 64);
            const __m512bh second = (__m512bh)_mm512_loadu_si512(tile + TILE_BYTES + pair * 64);
            for (int row = 0; row < ROWS; row++) {
                int both;
                std::memcpy(&both, rows + row * stride + step * 32 + pair * 2, sizeof both);
                low[row] = _mm512_dpbf16_ps(low[row], (__m512bh)_mm512_set1_epi32(both), first);
                high[row] = _mm512_dpbf16_ps(high[row], (__m512bh)_mm512_set1_epi32(both), second);
            }
        }
    }
    for (int row = 0; row < ROWS; row++) {
        _mm512_storeu_ps(sums + row * BLOCK, low[row]);
        _mm512_storeu_ps(sums + row * BLOCK + TILE, high[row]);
    }
}

// In 8 bits the vector units multiply unsigned by signed: values are shifted by 128, the caller takes that out again.
template <int ROWS>
inline void block_sums_vector(const int8_t* rows, int64_t stride, const char* block, int64_t num_steps, float* sums) {
    __m512i low[ROWS], high[ROWS];
    for (int row = 0; row < ROWS; row++) low[row] = high[row] = _mm512_setzero_si512();
    const __m512i shift = _mm512_set1_epi32((int)0x80808080);
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = block + step * 2 * TILE_BYTES;
        for (int line = 0; line < 2 * TILE_BYTES; line += 64) _mm_prefetch(tile + AHEAD + line, _MM_HINT_T0);
        for (int four = 0; four < 16; four++) {
            const __m512i first = _mm512_loadu_si512(tile + four * 64);
            const __m512i second = _mm512_loadu_si512(tile + TILE_BYTES + four * 64);
            for (int row = 0; row < ROWS; row++) {
                int all;
                std::memcpy(&all, rows + row * stride + step * 64 + four * 4, sizeof all);
                const __m512i shifted = _mm512_xor_si512(_mm512_set1_epi32(all), shift);
                low[row] = _mm512_dpbusd_epi32(low[row], shifted, first);
                high[row] = _mm512_dpbusd_epi32(high[row], shifted, second);
            }
        }
    }
    for (int row = 0; row < ROWS; row++) {
        _mm512_storeu_si512(sums + row * BLOCK, low[row]);
        _mm512_storeu_si512(sums + row * BLOCK + TILE, high[row]);
    }
}

template <class Number>
inline void block_sums_vector(int num_rows, const Number* rows, int64_t stride, const char* block, int64_t num_steps, float* sums) {
    switch (num_rows) {
        case 1: return block_sums_vector<1>(rows, stride, block, num_steps, sums);
        case 2: return block_sums_vector<2>(rows, stride, block, num_steps, sums);
        case 3: return block_sums_vector<3>(rows, stride, block, num_steps, sums);
        case 4: return block_sums_vector<4>(rows, stride, block, num_steps, sums);
        case 5: return block_sums_vector<5>(rows, stride, block, num_steps, sums);
        case 6: return block_sums_vector<6>(rows, stride, block, num_steps, sums);
        case 7: return block_sums_vector<7>(rows, stride, block, num_steps, sums);
        default: return block_sums_vector<8>(rows, stride, block, num_steps, sums);
    }
}

// One thread's share of a product. `finish(row, block, low, high)` gets the 16 + 16 sums of each row and block, with
// scales and bias applied.
template <class Finish>
inline void multiply(const Values& values, const Weight& weight, bool amx, int thread, int num_threads, Finish finish) {
    const int64_t num_blocks = weight.num_blocks(), num_steps = weight.num_steps();
    const int64_t first = thread * num_blocks / num_threads, last = (thread + 1) * num_blocks / num_threads;
    alignas(64) float sums[2 * TILE * BLOCK];
    if (amx) set_tiles(std::min<int64_t>(values.num_rows, TILE));
    const int chunk = amx ? 2 * TILE : FEW;
    for (int64_t block = first; block < last; block++) {
        const char* data = weight.data + block * num_steps * 2 * TILE_BYTES;
        for (int64_t start = 0; start < values.num_rows; start += chunk) {
            const int count = std::min<int64_t>(chunk, values.num_rows - start);
            const int64_t offset = start * values.stride;
            if (amx) {
                if (weight.scale)
                    block_sums_amx(values.small + offset, values.stride, count > TILE, data, num_steps, sums);
                else
                    block_sums_amx(values.numbers + offset, values.stride, count > TILE, data, num_steps, sums);
            } else {
                if (weight.scale)
                    block_sums_vector(count, values.small + offset, values.stride, data, num_steps, sums);
                else
                    block_sums_vector(count, values.numbers + offset, values.stride, data, num_steps, sums);
            }
            for (int i = 0; i < count; i++) {
                __m512 found[2];
                for (int half = 0; half < 2; half++) {
                    const float* at = sums + i * BLOCK + half * TILE;
                    const int64_t output = block * BLOCK + half * TILE;
                    if (weight.scale) {
                        __m512i whole = _mm512_load_si512(at);
                        if (!amx) {
                            const __m512i sum = _mm512_loadu_si512(weight.sum + output);
                            whole = _mm512_sub_epi32(whole, _mm512_slli_epi32(sum, 7));
                        }
                        const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(weight.scale + output),
                                                           _mm512_set1_ps(values.scale[start + i]));
                        found[half] = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), scale);
                    } else {
                        found[half] = _mm512_load_ps(at);
                    }
                    if (weight.bias) found[half] = _mm512_add_ps(found[half], _mm512_loadu_ps(weight.bias + output));
                }
                finish(start + i, block, found[0], found[1]);
            }
        }
    }
}

// One row in 8 bits: the largest number becomes 127. Returns the scale.
inline float shrink(const bf16* row, int64_t count, int8_t* to) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(load(row + i)));
    const float scale = std::max(_mm512_reduce_max_ps(most), 1e-30f) / 127;
    const __m512 factor = _mm512_set1_ps(1 / scale);
    for (int64_t i = 0; i < count; i += 16) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(row + i), factor));
        _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtsepi32_epi8(whole));
    }
    return scale;
}
