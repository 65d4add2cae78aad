// Parts of Transformers' modules: linear layers, and recurrences over the few tokens of a draft. A
// token's bits do not depend on the other tokens of a call, nor on the number of threads.
#pragma once

#include <new>
#include <type_traits>
#include <vector>

#include "rows.h"
#include "team.h"

// Rows of a linear layer's inputs in the form that the unit reads. Valid until the next call of this
// thread, whose memory is reused.
inline Values linear_inputs(const bf16* from, int64_t num_rows, int64_t width, const Weight& weight) {
    static thread_local Rows rows;
    rows.resize(num_rows, weight.num_inputs);
    for (int64_t row = 0; row < num_rows; row++) {
        rows.at(row, 0, weight, [&](auto* to) {
            for (int64_t i = 0; i < rows.stride; i += 16) store(to + i, load(from + row * width + i, lanes(width - i)));
        });
        rows.form(row, weight);
    }
    return rows.values(num_rows);
}

// Gated delta rule (Yang et al., arXiv 2412.06464) over some tokens of one row. Per head the state is
// first multiplied by the decays of its rows, and then learns the value v at the key k:
//
//     state += k (rate (v - k state)),   output = q state
struct DeltaRule {
    int64_t num_tokens, num_heads, num_key_heads, key_size, value_size;
    int64_t num_decays;             // per head: 1, or one for each number of a key
    int64_t normalises;             // queries and keys are divided by their norms
    const float *queries, *keys;    // [token][key head][key_size]
    const float* values;            // [token][head][value_size]
    const float* decays;            // [token][head][num_decays], logarithms
    const float* rates;             // [token][head]
    const float* before;            // state [head][key_size][value_size] before the first token
    float* after;                   // state after the last one; may be `before`
    float* outputs;                 // [token][head][value_size]

    static constexpr int64_t COLUMNS = 32;  // of a state at once, which then stay in the first cache

    int64_t scratch_size() const { return (3 * num_tokens + COLUMNS) * key_size; }

    void scale(const float* from, float factor, float* to) const {
        Floats squares = zeros();
        for (int64_t i = 0; i < key_size; i += 16) {
            const Floats x = load(from + i, lanes(key_size - i));
            squares = add_product(squares, x, x);
        }
        if (normalises) factor /= std::sqrt(sum_of(squares) + 1e-6f);
        for (int64_t i = 0; i < key_size; i++) to[i] = from[i] * factor;
    }

    void run(int64_t head, float* scratch) const {
        float *all_keys = scratch, *all_queries = all_keys + num_tokens * key_size;
        float *all_decays = all_queries + num_tokens * key_size, *columns = all_decays + num_tokens * key_size;
        const int64_t key_head = head / (num_heads / num_key_heads);
        for (int64_t token = 0; token < num_tokens; token++) {
            const int64_t from = (token * num_key_heads + key_head) * key_size, to = token * key_size;
            scale(keys + from, 1, all_keys + to);
            scale(queries + from, 1 / std::sqrt((float)key_size), all_queries + to);
            const float* logarithms = decays + (token * num_heads + head) * num_decays;
            for (int64_t i = 0; i < num_decays; i++) all_decays[to + i] = std::exp(logarithms[i]);
            for (int64_t i = num_decays; i < key_size; i++) all_decays[to + i] = all_decays[to];
        }
        const int64_t whole = head * key_size * value_size;
        for (int64_t column = 0; column < value_size; column += COLUMNS) {
            const Lanes parts[2] = {lanes(value_size - column), lanes(value_size - column - 16)};
            for (int64_t i = 0; i < key_size; i++)
                for (int half = 0; half < 2; half++)
                    store(columns + i * COLUMNS + half * 16, load(before + whole + i * value_size + column + half * 16, parts[half]));
            for (int64_t token = 0; token < num_tokens; token++) {
                const int64_t line = token * num_heads + head, at = line * value_size + column;
                run_token(all_keys + token * key_size, all_queries + token * key_size, all_decays + token * key_size,
                          rates[line], at, parts, columns);
            }
            for (int64_t i = 0; i < key_size; i++)
                for (int half = 0; half < 2; half++)
                    store(after + whole + i * value_size + column + half * 16, load(columns + i * COLUMNS + half * 16), parts[half]);
        }
    }

    // Run one token on some columns of the state; `at` is their place in `values` and `outputs`.
    void run_token(const float* key, const float* query, const float* factors, float rate, int64_t at, const Lanes* parts,
                   float* columns) const {
        Floats known[2] = {zeros(), zeros()}, added[2], found[2] = {zeros(), zeros()};
        for (int64_t i = 0; i < key_size; i++)
            for (int half = 0; half < 2; half++) {
                float* place = columns + i * COLUMNS + half * 16;
                const Floats x = load(place) * all(factors[i]);
                store(place, x);
                known[half] = add_product(known[half], x, all(key[i]));
            }
        for (int half = 0; half < 2; half++) added[half] = (load(values + at + half * 16, parts[half]) - known[half]) * all(rate);
        for (int64_t i = 0; i < key_size; i++)
            for (int half = 0; half < 2; half++) {
                float* place = columns + i * COLUMNS + half * 16;
                const Floats x = add_product(load(place), added[half], all(key[i]));
                store(place, x);
                found[half] = add_product(found[half], x, all(query[i]));
            }
        for (int half = 0; half < 2; half++) store(outputs + at + half * 16, found[half], parts[half]);
    }
};

// State-space model of Mamba-2 (Dao and Gu, arXiv 2405.21060) over some tokens of one row. Per number x
// of a head, with a time step s, the softplus of its input:
//
//     state = exp(s rate) state + s x write,   output = state read + skip x
//
// torch rounds a softplus by the place of a number in its vectors.
struct StateSpace {
    int64_t num_tokens, num_heads, num_groups, head_size, state_size;
    const float* inputs;           // [token][head][head_size]
    const float* steps;            // [token][head], before the softplus
    const float *writes, *reads;   // [token][group][state_size]
    const float *rates, *skips;    // [head]
    const float* before;           // state [head][head_size][state_size] before the first token
    float* after;                  // state after the last one; may be `before`
    float* outputs;                // [token][head][head_size]

    int64_t scratch_size() const { return 2 * num_tokens; }

    void run(int64_t head, float* scratch) const {
        float *own_steps = scratch, *decays = scratch + num_tokens;
        const int64_t group = head / (num_heads / num_groups);
        for (int64_t token = 0; token < num_tokens; token++) {
            const float x = steps[token * num_heads + head];
            own_steps[token] = x > 20 ? x : std::log1p(std::exp(x));
            decays[token] = std::exp(own_steps[token] * rates[head]);
        }
        for (int64_t number = 0; number < head_size; number++) {
            const int64_t first = (head * head_size + number) * state_size;
            float* line = after + first;
            if (after != before) std::memcpy(line, before + first, state_size * sizeof(float));
            for (int64_t token = 0; token < num_tokens; token++) {
                const int64_t place = token * num_heads + head, group_offset = (token * num_groups + group) * state_size;
                const float x = inputs[place * head_size + number];
                const Floats decay = all(decays[token]), added = all(x * own_steps[token]);
                Floats found = zeros();
                for (int64_t i = 0; i < state_size; i += 16) {
                    const Lanes part = lanes(state_size - i);
                    const Floats next = add_product(load(line + i, part) * decay, added, load(writes + group_offset + i, part));
                    store(line + i, next, part);
                    found = add_product(found, next, load(reads + group_offset + i, part));
                }
                outputs[place * head_size + number] = sum_of(found) + skips[head] * x;
            }
        }
    }
};

// Run all heads of a recurrence. Returns 0 on success, 1 if memory could not be allocated.
template <class Recurrence>
inline int run_heads(const Recurrence& recurrence, int64_t num_threads) {
    num_threads = std::min(num_threads, recurrence.num_heads);
    const int64_t size = recurrence.scratch_size();
    try {
        std::vector<float> scratch(num_threads * size);
        Team::get().run(num_threads, [&](int thread, int count) {
            const int64_t last = (thread + 1) * recurrence.num_heads / count;
            for (int64_t head = thread * recurrence.num_heads / count; head < last; head++)
                recurrence.run(head, scratch.data() + thread * size);
        });
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

#pragma GCC visibility push(default)
extern "C" {

// Linear layer over rows [row][width] of bfloat16 numbers, to [row][output] in bfloat16 or float32. Returns 0 on
// success, 1 if memory could not be allocated.
int secondguess_linear(const Weight* weight, const bf16* from, int64_t num_rows, int64_t width, void* to, int64_t is_float32,
                       int64_t amx, int64_t num_threads) {
    Values values;
    try {
        values = linear_inputs(from, num_rows, width, *weight);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    Team::get().run(std::min(num_threads, weight->num_blocks()), [&](int thread, int count) {
        const auto finish = [&](int64_t row, int64_t block, Floats low, Floats high) {
            const int64_t column = block * BLOCK, left = weight->num_outputs - column;
            const auto write = [&](auto* numbers) {
                auto* at = numbers + row * weight->num_outputs + column;
                store(at, low, lanes(left));
                if (left > TILE) store(at + TILE, high, lanes(left - TILE));
            };
            is_float32 ? write((float*)to) : write((bf16*)to);
        };
#ifdef __AMX_TILE__
        if (amx) {
            multiply<MatrixUnit>(values, *weight, 0, thread, count, finish);
            return _tile_release();
        }
#endif
        multiply<VectorUnit>(values, *weight, 0, thread, count, finish);
    });
    return 0;
}

int secondguess_delta_rule(const DeltaRule* rule, int64_t num_threads) { return run_heads(*rule, num_threads); }

int secondguess_state_space(const StateSpace* model, int64_t num_threads) { return run_heads(*model, num_threads); }
}
#pragma GCC visibility pop
