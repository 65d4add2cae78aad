// Forward pass of a decoder in one call of all threads: nothing returns to Python between
// two products, and threads are synchronised five times a dense layer. Compiled once for each kind of
// processor (see `vectors.h`).
//
// Weights in bfloat16, their inputs where the processor multiplies bfloat16, cached values and weights of attention are
// in bfloat16, cached keys in float16, and all other numbers in float32.

#pragma once

#include <exception>
#include <new>
#include <numeric>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "modules.h"
#include "packing.h"

enum Activation { SILU, GELU, GELU_TANH };

// A layer without `qkv` has no attention. One with a `router` has `experts`; one without `gate_up` adds the
// activated product by `down` to its input, as the layers of Medusa heads do.
struct Layer {
    Norm attention_norm, query_norm, key_norm, attention_output_norm, mlp_norm, mlp_output_norm;
    Weight qkv, output, gate_up, down;
    int64_t window;    // sliding window in tokens, 0 for full attention
    int64_t rotary;    // index into `Forward::cos_sin`
    Weight router;     // an output per expert
    const Expert* experts;
    const float* sinks;  // score per query head of a key without a value; null for none
};

struct Decoder {
    const Layer* layers;
    int64_t num_layers, width, inner_width, num_queries, num_keys, head_size, activation, num_embedded, amx;
    float scaling, embedding_scale;  // factor on scores; factor on embeddings, 1 if not scaled
    const bf16* embedding;
    Norm norm;
    Weight head;
    // Drafter heads that read a feature with each token (EAGLE, MTP). Both parts are normalised
    // and joined. The joined rows are projected to the input of the first layer; without a
    // projection they are the input of its queries, keys and values (EAGLE-3).
    int64_t joins_features;
    int64_t residual_is_normalised;  // without a projection the states are the normalised feature, not the feature
    int64_t output_is_raw;           // the last level of `Forward::hidden` is not normalised
    Norm token_norm, feature_norm;
    Weight projection;
    int64_t is_bidirectional;  // each token attends to all tokens of its row's step (block drafters)
    // Differences of families from Llama; 0 for none.
    int64_t rotary_size;           // numbers of a head that are rotated, 0 for all
    int64_t is_interleaved;        // rotary layout with pairs of neighbours, not half-split
    int64_t joins_heads_in_norms;  // query and key norms are over all heads together
    int64_t is_parallel;           // attention and feed-forward read the same states
    int64_t has_no_gates;          // `Layer::gate_up` has no gates
    float residual_scale;          // factor on what a layer adds
    float score_cap, logit_cap;    // soft caps
    float logit_divisor;
    // Mixtures of experts, all with as many experts of one size; 0 for none.
    int64_t num_experts, num_selected, expert_width;
    int64_t normalises_routing_weights;  // those of a token's experts are divided by their sum
    // Clamped SwiGLU instead of the activation, `gate * sigmoid(alpha * gate) * (value + 1)`; 0 for none.
    float gate_alpha, gate_limit;
};

// Arguments of a forward pass through layers `first_layer` to `last_layer - 1`. The tokens of all rows
// follow each other without padding. These layers have already run the first `num_known` tokens of
// each row's step. An index counts from the first token of a row's step, including the known ones.
struct Forward {
    int64_t num_rows, num_tokens, num_known, num_indices, num_logits, first_layer, last_layer, capacity, context_length;
    int64_t num_threads;
    int64_t caches_only;         // only write keys and values of `states`, which every layer reads, normalised by `feature_norm`
    const int64_t* tokens;       // [token]
    const float* states;         // [token][width], input of the first layer; null: embeddings
    const bf16* features;        // [token][width], read with the tokens
    const int64_t* firsts;       // [row + 1], first token of each row, then the number of tokens
    const int64_t* starts;       // [row], cached positions before index 0
    const int64_t* slots;        // [row]
    const int64_t* selected;     // [num_logits], tokens whose logits are computed
    const int64_t* places;       // [num_logits], where they are written
    const uint8_t* closure;      // [row][num_indices][num_indices], 1 at ancestors and itself; null for chains
    const float* const* cos_sin;  // rotary tables [position][2 * rotary_size], cosines then sines
    uint16_t* const* keys;       // per layer [slot][head][capacity][size], in float16
    bf16* const* values;
    float* const* hidden;        // per level 0..num_layers the output [token][width], or null
    float* logits;               // [place][vocabulary]
    const int32_t* const* experts;  // per layer [token][num_selected], which tokens select instead of the largest logits; or null
};

static Floats activate(Floats x, int64_t activation) {
    const Floats one = all(1.0f);
    if (activation == SILU) return x / (one + exponential(zeros() - x));
    const Floats half = x * all(0.5f);
    if (activation == GELU_TANH) {
        const Floats inner = add_product(x, x * x * x, all(0.044715f));
        return half * (one + hyperbolic_tangent(inner * all(0.7978845608f)));
    }
    alignas(64) float each[16];
    store(each, x);
    for (float& number : each) number = std::erf(number * 0.70710678f);
    return half * (one + load(each));
}

constexpr int64_t MOST_NORMALISED = 4096;  // numbers that each thread normalises for itself

// Buffers of one decoder's forward passes. Buffers that several threads read are shared. A few
// normalised rows are computed by each thread for itself, which is cheaper than a barrier.
struct Workspace {
    int64_t num_rows = 0, num_threads = 0, num_keys = 0;
    FloatRows states, qkv, added;
    Rows joined, mixed, gated;
    Selection selection;
    Rows expert_inputs, expert_gated;  // inputs of the experts' two products, by assignment
    std::vector<Rows> normalised;  // per thread
    std::vector<Attention> attention;
    std::vector<std::vector<int32_t>> positions;

    // If an allocation fails, sizes stay 0, so that a smaller forward pass can still succeed.
    void reserve(const Decoder& decoder, int64_t rows, int64_t threads, int64_t keys) {
        if (rows > num_rows || threads > num_threads) {
            rows = std::max(rows, num_rows), threads = std::max(threads, num_threads);
            num_rows = num_threads = num_keys = 0;
            const int64_t mixed_width = decoder.num_queries * decoder.head_size;
            if (decoder.joins_features) joined.reserve(rows, 2 * decoder.width);
            states.reserve(rows, decoder.width);
            qkv.reserve(rows, mixed_width + 2 * decoder.num_keys * decoder.head_size);
            mixed.reserve(rows, mixed_width);
            gated.reserve(rows, decoder.inner_width);
            added.reserve(rows, decoder.width);
            if (decoder.num_experts) {
                // the last rows of an expert are read as whole tiles
                const int64_t num_assignments = rows * decoder.num_selected + 2 * TILE;
                selection.reserve(rows, decoder.num_experts, decoder.num_selected);
                expert_inputs.reserve(num_assignments, decoder.width), expert_gated.reserve(num_assignments, decoder.expert_width);
            }
            normalised.resize(threads);
            for (int64_t i = 0; i < threads; i++) normalised[i].reserve(i ? std::min<int64_t>(rows, TILE) : rows, decoder.width);
            attention.resize(threads), positions.resize(threads);
            for (Attention& each : attention) each.set(decoder.head_size, decoder.scaling, decoder.score_cap);
            num_rows = rows, num_threads = threads;
        }
        if (keys > num_keys) {
            num_keys = 0;
            for (auto& each : positions) each.resize(2 * keys);
            num_keys = 2 * keys;
        }
    }
};

// One thread's part of a forward pass.
struct Worker {
    const Decoder& decoder;
    const Forward& forward;
    Workspace& space;
    const int thread, num_threads;
    const int64_t num_rows = forward.num_tokens;  // of the matrices: all tokens of all rows
    // Each thread normalises, and quantises, all rows for itself where that is cheaper than a barrier.
    const bool normalises_all = num_rows == 1 || (num_rows <= TILE && num_rows * decoder.width <= MOST_NORMALISED);

    int64_t num_tokens_of(int64_t row) const { return forward.firsts[row + 1] - forward.firsts[row]; }

    void wait() const { Team::get().barrier(); }

    // Rows that this thread normalises: all if `normalises_all`, else its share for all threads.
    int64_t first_row() const { return normalises_all ? 0 : thread * num_rows / num_threads; }
    int64_t last_row() const { return normalises_all ? num_rows : (thread + 1) * num_rows / num_threads; }
    Rows& normalised_rows() const { return space.normalised[normalises_all ? thread : 0]; }

    template <class Finish>
    void product(const Values& values, const Weight& weight, Finish finish, int64_t first_block = 0) const {
#ifdef __AMX_TILE__
        if (decoder.amx) return multiply<MatrixUnit>(values, weight, first_block, thread, num_threads, finish);
#endif
        multiply<VectorUnit>(values, weight, first_block, thread, num_threads, finish);
    }

    // Return the normalised states as inputs of a product by `weight`.
    Values read_states(const Norm& norm, const Weight& weight) const {
        Rows& to = normalised_rows();
        for (int64_t row = first_row(); row < last_row(); row++) {
            to.at(row, 0, weight, [&](auto* at) { normalise_if(norm, space.states.row(row), decoder.width, at); });
            to.form(row, weight);
        }
        if (!normalises_all) wait();
        return to.values(num_rows);
    }

    // Return rows that all threads have written as inputs of a product by `weight`.
    Values read_shared(Rows& rows, const Weight& weight) const {
        if (Rows::needs_form(weight)) {
            rows.form_share(num_rows, weight, thread, num_threads);
            wait();
        }
        return rows.values(num_rows);
    }

    void write(FloatRows& to, const Values& values, const Weight& weight, int64_t first_block = 0) const {
        product(
            values, weight,
            [&](int64_t row, int64_t block, Floats low, Floats high) {
                float* at = to.row(row) + block * BLOCK;
                store(at, low, lanes(to.stride - block * BLOCK));
                store(at + TILE, high, lanes(to.stride - block * BLOCK - TILE));
            },
            first_block);
    }

    // Add a function of the product, and of the row and first column of each part, to the states.
    template <class Function>
    void add_each(const Values& values, const Weight& weight, Function function) const {
        product(values, weight, [&](int64_t row, int64_t block, Floats low, Floats high) {
            const int64_t column = block * BLOCK;
            float* at = space.states.row(row) + column;
            const Lanes first = lanes(decoder.width - column), second = lanes(decoder.width - column - TILE);
            store(at, load(at, first) + function(low, row, column), first);
            store(at + TILE, load(at + TILE, second) + function(high, row, column + TILE), second);
        });
        wait();
    }

    Floats scaled(Floats added) const { return decoder.residual_scale ? added * all(decoder.residual_scale) : added; }

    // Add the product to the states, normalised first if the family has an output norm.
    void add(const Values& values, const Weight& weight, const Norm& norm) const {
        if (!norm.weight) return add_each(values, weight, [&](Floats added, int64_t, int64_t) { return scaled(added); });
        write(space.added, values, weight);
        wait();
        for (int64_t row = thread * num_rows / num_threads; row < (thread + 1) * num_rows / num_threads; row++) {
            float *added = space.added.row(row), *at = space.states.row(row);
            normalise(added, decoder.width, norm, added);
            for (int64_t i = 0; i < decoder.width; i += 16) {
                const Lanes part = lanes(decoder.width - i);
                store(at + i, load(at + i, part) + scaled(load(added + i, part)), part);
            }
        }
        wait();
    }

    const uint8_t* ancestors(int64_t row, int64_t index) const {
        return forward.closure ? forward.closure + (row * forward.num_indices + index) * forward.num_indices : nullptr;
    }

    // Text position of an index: the number of cached tokens plus the number of its ancestors.
    int64_t position(int64_t row, int64_t index) const {
        int64_t depth = index;
        if (const uint8_t* line = ancestors(row, index)) {
            depth = -1;
            for (int64_t other = 0; other < forward.num_indices; other++) depth += line[other];
        }
        return forward.starts[row] + depth;
    }

    // List the cache positions that an index attends to, in order. Returns their number.
    int64_t list_visible(int64_t row, int64_t index, int64_t window, int32_t* positions) const {
        const int64_t start = forward.starts[row], own_position = position(row, index);
        const int64_t oldest = window ? std::max<int64_t>(0, own_position - window + 1) : 0;
        int64_t count = 0;
        for (int64_t key = oldest; key < start; key++) positions[count++] = key;
        const uint8_t* line = ancestors(row, index);
        const int64_t last = decoder.is_bidirectional ? num_tokens_of(row) - 1 : index;
        for (int64_t other = 0; other <= last; other++)
            if ((!line || line[other]) && (oldest <= start || position(row, other) >= oldest))
                positions[count++] = start + other;
        return count;
    }

    struct Block {
        uint16_t* keys;
        bf16* values;
    };

    // Cached keys and values of one key head of one row in layer `index`.
    Block block_of(int64_t index, int64_t row, int64_t head) const {
        const int64_t offset = (forward.slots[row] * decoder.num_keys + head) * forward.capacity * decoder.head_size;
        return {forward.keys[index] + offset, forward.values[index] + offset};
    }

    void rotate_head(const Layer& layer, float* from, const Norm& norm, int64_t row, int64_t index, float* to) const {
        if (norm.weight && !decoder.joins_heads_in_norms) normalise(from, decoder.head_size, norm, from);
        const int64_t size = decoder.rotary_size ? decoder.rotary_size : decoder.head_size;
        const int64_t at = std::min(position(row, index), forward.context_length - 1) * 2 * size;
        rotate(from, size, decoder.is_interleaved, forward.cos_sin[layer.rotary] + at, to);
        std::memcpy(to + size, from + size, (decoder.head_size - size) * sizeof(float));
    }

    // Normalise the queries of each token, all heads together, and its keys.
    void normalise_joined_heads(const Layer& layer) const {
        const int64_t num_queries = decoder.num_queries * decoder.head_size, num_keys = decoder.num_keys * decoder.head_size;
        for (int64_t row = thread * num_rows / num_threads; row < (thread + 1) * num_rows / num_threads; row++) {
            float *query = space.qkv.row(row), *key = query + num_queries;
            normalise(query, num_queries, layer.query_norm, query);
            normalise(key, num_keys, layer.key_norm, key);
        }
        wait();
    }

    // Rotate the new keys of one key head of one row, and write keys and values to the cache.
    void write_cache(const Layer& layer, int64_t index, int64_t row, int64_t head) const {
        const int64_t size = decoder.head_size;
        const Block at = block_of(index, row, head);
        for (int64_t token = 0; token < num_tokens_of(row); token++) {
            float key[LARGEST_HEAD], *qkv = space.qkv.row(forward.firsts[row] + token);
            const int64_t index_of_token = forward.num_known + token, place = (forward.starts[row] + index_of_token) * size;
            rotate_head(layer, qkv + (decoder.num_queries + head) * size, layer.key_norm, row, index_of_token, key);
            for (int64_t i = 0; i < size; i += 16) store_cached(at.keys + place + i, load(key + i, lanes(size - i)), lanes(size - i));
            convert(qkv + (decoder.num_queries + decoder.num_keys + head) * size, size, at.values + place);
        }
    }

    // Attention of tokens `first` to `last - 1` for the query heads of one key head.
    void attend_tokens(const Layer& layer, int64_t index, int64_t row, int64_t head, int64_t first, int64_t last) const {
        const int64_t group = decoder.num_queries / decoder.num_keys;
        for (int64_t query = first * group; query < last * group; query += MAX_QUERIES)
            attend_queries(layer, index, row, head, query, std::min(query + MAX_QUERIES, last * group));
    }

    // Attention of some queries of one key head, counted over the heads of its tokens.
    void attend_queries(const Layer& layer, int64_t index, int64_t row, int64_t head, int64_t first, int64_t last) const {
        const int64_t size = decoder.head_size, group = decoder.num_queries / decoder.num_keys, start = forward.starts[row];
        const auto column = [&](int64_t query) { return (head * group + query % group) * size; };
        const auto index_of = [&](int64_t query) { return forward.num_known + query / group; };
        const auto line = [&](int64_t query) { return forward.firsts[row] + query / group; };
        const Block at = block_of(index, row, head);
        Attention& attention = space.attention[thread];
        for (int64_t query = first; query < last; query++)
            rotate_head(layer, space.qkv.row(line(query)) + column(query), layer.query_norm, row, index_of(query),
                        attention.begin(query - first, layer.sinks ? layer.sinks[head * group + query % group] : -INFINITY));
        int32_t* positions = space.positions[thread].data();
        int64_t counts[MAX_QUERIES], common = 0;
        if (!layer.window) {
            // All see the cached tokens, chains also those before them in the step.
            for (int64_t query = first; query < last; query++) {
                const int64_t end = decoder.is_bidirectional ? num_tokens_of(row) : index_of(query) + 1;
                counts[query - first] = start + (forward.closure ? 0 : end);
            }
            common = forward.closure ? start / BLOCK_KEYS * BLOCK_KEYS : counts[last - 1 - first];
            std::iota(positions, positions + common, 0);
            attention.attend(at.keys, at.values, positions, 0, common, 0, last - first, counts);
        }
        for (int64_t query = first, next; query < last && (layer.window || forward.closure); query = next) {
            next = std::min(last, (query / group + 1) * group);  // the first query of the next token
            const int64_t count = list_visible(row, index_of(query), layer.window, positions);
            std::fill(counts + query - first, counts + next - first, count);
            attention.attend(at.keys, at.values, positions, common, count, query - first, next - first, counts);
        }
        for (int64_t query = first; query < last; query++)
            space.mixed.at(line(query), column(query), layer.output, [&](auto* to) { attention.end(query - first, to); });
    }

    // Attention of all rows. Key heads are divided among the threads. If they cannot be divided
    // evenly and there are enough tokens, the tokens of each head are divided instead, after a
    // barrier for the keys.
    void run_attention(const Layer& layer, int64_t index) const {
        const int64_t num_heads = forward.num_rows * decoder.num_keys;
        const int64_t first = thread * num_heads / num_threads, last = (thread + 1) * num_heads / num_threads;
        for (int64_t item = first; item < last; item++) write_cache(layer, index, item / decoder.num_keys, item % decoder.num_keys);
        if (num_heads % num_threads == 0 || forward.num_tokens < num_threads * forward.num_rows) {
            for (int64_t item = first; item < last; item++) {
                const int64_t row = item / decoder.num_keys;
                attend_tokens(layer, index, row, item % decoder.num_keys, 0, num_tokens_of(row));
            }
            return;
        }
        wait();
        const int64_t limit = std::max<int64_t>(1, MAX_QUERIES * decoder.num_keys / decoder.num_queries);
        for (int64_t item = 0; item < num_heads; item++) {
            // pieces alternate between threads, because later tokens attend to more keys
            const int64_t row = item / decoder.num_keys, count = num_tokens_of(row);
            const int64_t piece = std::min(limit, (count + num_threads - 1) / num_threads);
            for (int64_t token = thread * piece; token < count; token += num_threads * piece)
                attend_tokens(layer, index, row, item % decoder.num_keys, token, std::min(count, token + piece));
        }
    }

    // Write keys and values of the states, which are the input of every layer.
    void write_caches() const {
        const int64_t num_heads = forward.num_rows * decoder.num_keys;
        for (int64_t index = forward.first_layer; index < forward.last_layer; index++) {
            const Layer& layer = decoder.layers[index];
            write(space.qkv, read_states(decoder.feature_norm, layer.qkv), layer.qkv, decoder.num_queries * decoder.head_size / BLOCK);
            wait();
            for (int64_t item = thread * num_heads / num_threads; item < (thread + 1) * num_heads / num_threads; item++)
                write_cache(layer, index, item / decoder.num_keys, item % decoder.num_keys);
            wait();
        }
    }

    void run_attention_part(const Layer& layer, int64_t index) const {
        const bool reads_joined = index == 0 && decoder.joins_features && !decoder.projection.num_outputs;
        write(space.qkv, reads_joined ? read_shared(space.joined, layer.qkv) : read_states(layer.attention_norm, layer.qkv),
              layer.qkv);
        wait();
        if (decoder.joins_heads_in_norms) normalise_joined_heads(layer);
        run_attention(layer, index);
        wait();
        const Values values = read_shared(space.mixed, layer.output);
        if (decoder.is_parallel)
            write(space.added, values, layer.output);  // added with the feed-forward, which reads the same states
        else
            add(values, layer.output, layer.attention_output_norm);
    }

    // Product of values and their activated gates.
    Floats open_gate(Floats gate, Floats value) const {
        if (!decoder.gate_alpha) return activate(gate, decoder.activation) * value;
        const Floats one = all(1.0f), limit = all(decoder.gate_limit);
        gate = smallest(limit, gate), value = smallest(limit, largest(zeros() - limit, value));
        const Floats share = one / (one + exponential(zeros() - gate * all(decoder.gate_alpha)));
        return (value + one) * (gate * share);
    }

    // Write products of gates and values as inputs of a product by `next`, from a row on. A block holds 16 gates and the
    // 16 values that they multiply.
    void write_gated(const Values& values, const Weight& weight, Rows& to, const Weight& next, int64_t first) const {
        product(values, weight, [&, first](int64_t row, int64_t block, Floats gate, Floats up) {
            to.at(first + row, block * TILE, next, [&](auto* at) { store(at, open_gate(gate, up)); });
        });
    }

    // Call a function with the expert, first assignment and number of assignments of each expert that is selected.
    template <class Function>
    void for_each_expert(const Layer& layer, Function function) const {
        const auto& firsts = space.selection.firsts;
        for (int64_t expert = 0; expert < decoder.num_experts; expert++)
            if (const int64_t count = firsts[expert + 1] - firsts[expert]) function(layer.experts[expert], firsts[expert], count);
    }

    // Form this thread's share of the inputs of the experts' second products; returns whether there are any to form.
    bool form_gated(const Layer& layer) const {
        bool has_any = false;
        for_each_expert(layer, [&](const Expert& expert, int64_t first, int64_t count) {
            if (!Rows::needs_form(expert.down)) return;
            has_any = true;
            for (int64_t i = first; i < first + count; i++)
                if (i % num_threads == thread) space.expert_gated.form(i, expert.down);
        });
        return has_any;
    }

    // Select the experts of all tokens, and list the inputs of each expert.
    void select_experts(const Layer& layer, int64_t index) const {
        Selection& selection = space.selection;
        const Values values = read_states(layer.mlp_norm, layer.router);
        product(values, layer.router, [&](int64_t row, int64_t block, Floats low, Floats high) {
            float* at = selection.logits.data() + row * decoder.num_experts + block * BLOCK;
            store(at, low, lanes(decoder.num_experts - block * BLOCK));
            store(at + TILE, high, lanes(decoder.num_experts - block * BLOCK - TILE));
        });
        wait();
        const int32_t* given = forward.experts ? forward.experts[index] : nullptr;
        for (int64_t token = thread * num_rows / num_threads; token < (thread + 1) * num_rows / num_threads; token++)
            selection.select(token, decoder.normalises_routing_weights, given);
        wait();
        if (thread == 0) selection.sort(num_rows);
        wait();
        for_each_expert(layer, [&](const Expert& expert, int64_t first, int64_t count) {
            for (int64_t i = first; i < first + count; i++) {
                if (i % num_threads != thread) continue;
                const float* states = space.states.row(selection.tokens[i]);
                space.expert_inputs.at(i, 0, expert.gate_up, [&](auto* at) { normalise_if(layer.mlp_norm, states, decoder.width, at); });
                space.expert_inputs.form(i, expert.gate_up);
            }
        });
        wait();
    }

    // Add the weighted outputs of each token's experts to its state. They are added up in the order of the
    // experts, so a token's bits do not depend on the other tokens. A thread computes the same columns of all
    // experts, whose outputs it can therefore add without waiting for other threads.
    void run_experts(const Layer& layer, int64_t index) const {
        select_experts(layer, index);
        for_each_expert(layer, [&](const Expert& expert, int64_t first, int64_t count) {
            write_gated(space.expert_inputs.values(count, first), expert.gate_up, space.expert_gated, expert.down, first);
        });
        wait();
        if (form_gated(layer)) wait();
        const int64_t num_blocks = (decoder.width + BLOCK - 1) / BLOCK;
        const int64_t start = thread * num_blocks / num_threads * BLOCK;
        const int64_t end = std::min((thread + 1) * num_blocks / num_threads * BLOCK, decoder.width);
        for (int64_t row = 0; row < num_rows; row++) std::fill(space.added.row(row) + start, space.added.row(row) + end, 0);
        for_each_expert(layer, [&](const Expert& expert, int64_t first, int64_t count) {
            product(space.expert_gated.values(count, first), expert.down, [&](int64_t row, int64_t block, Floats low, Floats high) {
                const Floats factor = all(space.selection.weights[first + row]);
                const int64_t column = block * BLOCK;
                float* at = space.added.row(space.selection.tokens[first + row]) + column;
                const Lanes parts[2] = {lanes(decoder.width - column), lanes(decoder.width - column - TILE)};
                store(at, add_product(load(at, parts[0]), low, factor), parts[0]);
                store(at + TILE, add_product(load(at + TILE, parts[1]), high, factor), parts[1]);
            });
        });
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t i = start; i < end; i += 16) {
                float* at = space.states.row(row) + i;
                const Lanes part = lanes(end - i);
                store(at, load(at, part) + load(space.added.row(row) + i, part), part);
            }
        wait();
    }

    void run_layer(const Layer& layer, int64_t index) const {
        if (layer.qkv.num_outputs) run_attention_part(layer, index);
        if (layer.router.num_outputs) return run_experts(layer, index);
        if (!layer.gate_up.num_outputs) {
            const Values values = read_states(layer.mlp_norm, layer.down);
            wait();  // other threads still read the states
            return add_each(values, layer.down,
                            [&](Floats added, int64_t, int64_t) { return activate(added, decoder.activation); });
        }
        const Values values = read_states(layer.mlp_norm, layer.gate_up);
        if (decoder.has_no_gates)
            product(values, layer.gate_up, [&](int64_t row, int64_t block, Floats low, Floats high) {
                space.gated.at(row, block * BLOCK, layer.down, [&](auto* at) {
                    store(at, activate(low, decoder.activation)), store(at + TILE, activate(high, decoder.activation));
                });
            });
        else
            write_gated(values, layer.gate_up, space.gated, layer.down, 0);
        wait();
        const Values gated = read_shared(space.gated, layer.down);
        if (decoder.is_parallel)
            add_each(gated, layer.down, [&](Floats added, int64_t row, int64_t column) {
                return added + load(space.added.row(row) + column);
            });
        else
            add(gated, layer.down, layer.mlp_output_norm);
    }

    // Start from hidden states that the caller passes in.
    void load_states() const {
        for (int64_t row = thread * num_rows / num_threads; row < (thread + 1) * num_rows / num_threads; row++)
            std::memcpy(space.states.row(row), forward.states + row * decoder.width, decoder.width * sizeof(float));
        wait();
    }

    void embed_token(int64_t row, float* to) const {
        const Floats scale = all(decoder.embedding_scale);
        const bf16* from = decoder.embedding + forward.tokens[row] * decoder.width;
        for (int64_t i = 0; i < decoder.width; i += 16) {
            const Lanes part = lanes(decoder.width - i);
            store(to + i, load(from + i, part) * scale, part);
        }
    }

    void embed() const {
        for (int64_t row = thread * num_rows / num_threads; row < (thread + 1) * num_rows / num_threads; row++)
            embed_token(row, space.states.row(row));
        wait();
    }

    // Start from tokens and features.
    void join_features() const {
        const int64_t width = decoder.width;
        const Weight& next = decoder.projection.num_outputs ? decoder.projection : decoder.layers[0].qkv;
        for (int64_t row = thread * num_rows / num_threads; row < (thread + 1) * num_rows / num_threads; row++) {
            float* const states = space.states.row(row);
            const bf16* const feature = forward.features + row * width;
            embed_token(row, states);
            space.joined.at(row, 0, next, [&](auto* at) {
                normalise_if(decoder.token_norm, states, width, at);
                normalise_if(decoder.feature_norm, feature, width, at + width);
                decoder.residual_is_normalised ? convert(at + width, width, states) : convert(feature, width, states);
            });
        }
        wait();
        if (decoder.projection.num_outputs) {
            write(space.states, read_shared(space.joined, decoder.projection), decoder.projection);
            wait();
        }
    }

    // Copy the hidden states of all tokens to the caller if this level was requested.
    void copy_hidden(int64_t level) const {
        if (!forward.hidden[level]) return;
        for (int64_t row = thread * num_rows / num_threads; row < (thread + 1) * num_rows / num_threads; row++) {
            const bool is_last = level == decoder.num_layers && !decoder.output_is_raw;
            normalise_if(is_last ? decoder.norm : Norm{}, space.states.row(row), decoder.width, forward.hidden[level] + row * decoder.width);
        }
    }

    void compute_logits() const {
        Rows& rows = normalised_rows();
        const int64_t num_selected = forward.num_logits;
        const int64_t first = normalises_all ? 0 : thread * num_selected / num_threads;
        const int64_t last = normalises_all ? num_selected : (thread + 1) * num_selected / num_threads;
        for (int64_t selected = first; selected < last; selected++) {
            const int64_t row = forward.selected[selected];
            rows.at(selected, 0, decoder.head, [&](auto* at) { normalise_if(decoder.norm, space.states.row(row), decoder.width, at); });
            rows.form(selected, decoder.head);
        }
        if (!normalises_all) wait();
        const int64_t vocab = decoder.head.num_outputs;
        product(rows.values(num_selected), decoder.head, [&](int64_t selected, int64_t block, Floats low, Floats high) {
            float* at = forward.logits + forward.places[selected] * vocab + block * BLOCK;
            store(at, scaled_logits(low), lanes(vocab - block * BLOCK));
            store(at + TILE, scaled_logits(high), lanes(vocab - block * BLOCK - TILE));
        });
    }

    Floats scaled_logits(Floats logits) const {
        if (decoder.logit_divisor) logits = logits / all(decoder.logit_divisor);
        return decoder.logit_cap ? capped(logits, decoder.logit_cap) : logits;
    }

    void run_layers() const {
        for (int64_t index = forward.first_layer; index < forward.last_layer; index++) {
            copy_hidden(index);
            run_layer(decoder.layers[index], index);
        }
        copy_hidden(forward.last_layer);
        if (forward.num_logits) compute_logits();
    }

    void run() const {
        if (forward.states)
            load_states();
        else if (decoder.joins_features)
            join_features();
        else
            embed();
        if (forward.caches_only)
            write_caches();
        else
            run_layers();
#ifdef __AMX_TILE__
        if (decoder.amx) _tile_release();
#endif
    }
};

// Only these functions are visible outside of the library.
#pragma GCC visibility push(default)
extern "C" {

// SHA-256 of the headers, which `setup.py` passes in (see `sources.py`).
const char* secondguess_sources() { return SECONDGUESS_SOURCES; }

// Sizes of the structures, for the caller to check that it uses the same definitions.
void secondguess_sizes(int64_t* sizes) {
    sizes[0] = sizeof(Weight), sizes[1] = sizeof(Norm), sizes[2] = sizeof(Layer), sizes[3] = sizeof(Decoder);
    sizes[4] = sizeof(Forward), sizes[5] = sizeof(DeltaRule), sizes[6] = sizeof(StateSpace);
    sizes[7] = sizeof(Expert), sizes[8] = sizeof(Source);
}

void* secondguess_workspace() { return new (std::nothrow) Workspace; }

void secondguess_free(void* workspace) { delete (Workspace*)workspace; }

// Returns 0 on success, 1 if the workspace cannot be allocated, 2 if a token id is out of range.
int secondguess_run(const Decoder* decoder, const Forward* forward, void* workspace) {
    Workspace& space = *(Workspace*)workspace;
    for (int64_t i = 0; !forward->states && i < forward->num_tokens; i++)
        if (forward->tokens[i] < 0 || forward->tokens[i] >= decoder->num_embedded) return 2;
    int64_t longest = 0;
    for (int64_t row = 0; row < forward->num_rows; row++)
        longest = std::max(longest, forward->starts[row] + forward->firsts[row + 1] - forward->firsts[row]);
    try {
        space.reserve(*decoder, forward->num_tokens, forward->num_threads, longest + forward->num_known);
    } catch (const std::exception&) {
        return 1;
    }
    Team::get().run(forward->num_threads, [&](int thread, int num_threads) {
        Worker{*decoder, *forward, space, thread, num_threads}.run();
    });
    return 0;
}

// Logits [row][vocabulary] of hidden states: after the last norm if `is_normalised`, else of inputs of
// the first layer of a decoder without attention. Returns 0 on success, 1 if memory could not be
// allocated.
int secondguess_unembed(const Decoder* decoder, const float* states, int64_t num_rows, int64_t is_normalised, float* logits,
                        int64_t num_threads, void* workspace) {
    Decoder head = *decoder;
    if (is_normalised) head.num_layers = 0, head.norm.weight = nullptr;
    Forward forward{};
    forward.num_tokens = forward.num_logits = num_rows, forward.num_threads = num_threads;
    forward.last_layer = head.num_layers;
    forward.states = states, forward.logits = logits;
    try {
        std::vector<int64_t> each(num_rows);
        std::iota(each.begin(), each.end(), 0);
        const std::vector<float*> hidden(head.num_layers + 1, nullptr);
        forward.selected = forward.places = each.data(), forward.hidden = hidden.data();
        return secondguess_run(&head, &forward, workspace);
    } catch (const std::exception&) {
        return 1;
    }
}
}
#pragma GCC visibility pop
