// Products by AMX tiles: up to 32 rows with one block at once.
#pragma once

// Prefetch a step.
inline void prefetch(const char* step) {
    for (int line = 0; line < STEP_BYTES; line += LINE_BYTES) _mm_prefetch(step + line, _MM_HINT_T0);
}

struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
};

// Multiply rows with a block in bfloat16: each step 32 values of each row by 64 bytes of each output's inputs.
inline void tile_sums(const bf16* rows, int64_t stride, bool two, const char* block, int64_t num_steps, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < num_steps; step++) {
        const char* tile = block + step * STEP_BYTES;
        prefetch(tile + PREFETCH_BYTES);
        _tile_loadd(4, rows + step * 32, stride * sizeof(bf16));
        _tile_loadd(6, tile, SLICE_BYTES);
        _tile_loadd(7, tile + LINE_BYTES, SLICE_BYTES);
        if (two) _tile_loadd(5, rows + TILE * stride + step * 32, stride * sizeof(bf16));
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    char* to = (char*)sums;
    _tile_stored(0, to, BLOCK * 4);
    _tile_stored(1, to + TILE * 4, BLOCK * 4);
    if (two) {
        _tile_stored(2, to + TILE * BLOCK * 4, BLOCK * 4);
        _tile_stored(3, to + (TILE * BLOCK + TILE) * 4, BLOCK * 4);
    }
}

struct MatrixUnit {
    static constexpr int ROWS = 2 * TILE, ROWS_IN_GROUPS = ROWS;
    static int next(int64_t left) { return (int)std::min<int64_t>(left, ROWS); }

    const Values& values;

    // Tiles 0 to 3 hold sums (rows by outputs), 4 and 5 values, 6 and 7 weights.
    explicit MatrixUnit(const Values& values) : values(values) {
        TileShapes shapes;
        for (int i = 0; i < 8; i++) {
            shapes.row_bytes[i] = 64;
            shapes.num_rows[i] = i < 6 ? std::min<int64_t>(values.num_rows, TILE) : TILE;
        }
        // GCC does not treat tile loads as memory reads; the barrier makes earlier writes visible.
        asm volatile("" : : "r"(&shapes) : "memory");
        _tile_loadconfig(&shapes);
    }

    void add_up(int64_t start, int count, const char* block, int64_t num_steps, float* sums) const {
        tile_sums(values.numbers + start * values.stride, values.stride, count > TILE, block, num_steps, sums);
    }
};
