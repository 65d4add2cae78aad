// Verification of the chains of a batch, from logits to the next tokens, with the numbers of the separate steps
// in `verifiers/`. Each row is verified by one thread.
#pragma once

#include "sampling.h"
#include "team.h"

enum class Rule : int64_t { BLOCK = 0, MATCH = 1 };  // of `verifiers/block.py` and `verifiers/coupled.py`

struct Verification {
    int64_t num_rows, num_nodes, vocab_size;  // `num_nodes` of the longest chain
    int64_t row_stride, stride;               // numbers from the logits of one row or query to those of the next
    int64_t probs_stride;                     // numbers from the distributions of one row's draft to those of the next
    int64_t num_threads;
    const float* logits;
    const float* draft_probs;                 // [row][node][vocab_size], rows `probs_stride` apart; null if no row has the rule `BLOCK`
    const int64_t *tokens, *lengths;          // [row][node] and [row]
    const Rule* rules;                        // [row]
    const Settings* settings;                 // [row]
    const RowNoise* noises;                   // [row]
    int64_t *accepted, *next_tokens;          // [row]; numbers of accepted nodes, -1 where verification failed
    int64_t* samples;                         // [row][node + 1], for the rule `MATCH`: the token sampled at each query
};

constexpr int64_t MAX_KEPT = 1 << 24;         // probabilities, of all threads

struct VerificationRoom {
    std::vector<float> probs;               // [query][vocab_size], target probabilities
    std::vector<double> weights, masses;    // [query] and [node], numbers of the prefixes
};

// Returns null if there is no memory, or a distribution is not defined.
inline const float* target_probs(const Settings& settings, const float* logits, int64_t num_queries, int64_t width, int64_t stride,
                                 VerificationRoom& room) {
    room.probs.resize(num_queries * width);
    float* probs = room.probs.data();
    if (!write_probs(settings, logits, num_queries, width, stride, probs)) return nullptr;
    for (int64_t query = 0; query < num_queries; query++)
        if (std::isnan(probs[query * width])) return nullptr;
    return probs;
}

// Returns the number of nodes accepted and writes the next token; -1 if a distribution is not defined, or lacks a token.
inline int64_t verify_block(const Verification& it, int64_t row, VerificationRoom& room) {
    const int64_t num_nodes = it.lengths[row], width = it.vocab_size;
    const float* draft_probs = it.draft_probs + row * it.probs_stride;
    const int64_t* tokens = it.tokens + row * it.num_nodes;
    if (std::any_of(tokens, tokens + num_nodes, [&](int64_t token) { return token < 0 || token >= width; })) return -1;
    const RowNoise& noise = it.noises[row];
    const float* probs = target_probs(it.settings[row], it.logits + row * it.row_stride, num_nodes + 1, width, it.stride, room);
    if (!probs) return -1;
    room.weights.resize(num_nodes + 1), room.masses.resize(num_nodes);
    const double *weights = room.weights.data(), *masses = room.masses.data();
    secondguess_chain_weights(probs, draft_probs, tokens, num_nodes, width, room.weights.data(), room.masses.data());
    int64_t accepted = 0;
    for (int64_t length = 1; length <= num_nodes; length++) {
        double prob = weights[length];
        if (length < num_nodes) {
            const double mass = masses[length], total = mass + 1 - weights[length];
            prob = total > 0 ? mass / total : 1;
        }
        if (uniform_of(noise, length - 1, ACCEPT) < prob) accepted = length;
    }
    const float* next = probs + accepted * width;
    if (accepted < num_nodes) {
        // The distributions after the next one are not used any more.
        float* residual = room.probs.data() + (accepted + 1) * width;
        if (secondguess_residual(weights[accepted], next, draft_probs + accepted * width, width, residual) > 0) next = residual;
    }
    it.next_tokens[row] = secondguess_draw(next, width, uniform_of(noise, accepted, DRAW));
    return accepted;
}

// The token sampled at a query of a row; -1 if its distribution is not defined.
inline int64_t sample_query(const Verification& it, int64_t row, int64_t query, VerificationRoom& room) {
    const float* logits = it.logits + row * it.row_stride + query * it.stride;
    const Settings& settings = it.settings[row];
    if (settings.temperature == 0) {
        const Scored found = most_likely(logits, it.vocab_size);
        return std::isfinite(found.logit) ? found.token : -1;
    }
    const float* probs = target_probs(settings, logits, 1, it.vocab_size, it.stride, room);
    if (!probs) return -1;
    const RowNoise& noise = it.noises[row];
    return noise.races ? secondguess_race(probs, it.vocab_size, hash_of(noise.key, noise.position + query, RACE), nullptr)
                       : secondguess_draw(probs, it.vocab_size, uniform_of(noise, query, RACE));
}

// As `verify_block`, by the rule `MATCH`.
inline int64_t verify_match(const Verification& it, int64_t row, VerificationRoom& room) {
    const int64_t num_nodes = it.lengths[row];
    const int64_t* tokens = it.tokens + row * it.num_nodes;
    int64_t* samples = it.samples + row * (it.num_nodes + 1);
    for (int64_t query = 0; query <= num_nodes; query++)
        if ((samples[query] = sample_query(it, row, query, room)) < 0) return -1;
    int64_t accepted = 0;
    while (accepted < num_nodes && samples[accepted] == tokens[accepted]) accepted++;
    it.next_tokens[row] = samples[accepted];
    return accepted;
}

inline int64_t verify_row(const Verification& it, int64_t row) {
    static thread_local VerificationRoom kept;  // as every round needs it
    VerificationRoom large;
    const int64_t num_queries = it.rules[row] == Rule::MATCH ? 1 : it.lengths[row] + 1;
    VerificationRoom& room = num_queries * it.vocab_size <= MAX_KEPT / std::max<int64_t>(it.num_threads, 4) ? kept : large;
    try {
        return it.rules[row] == Rule::MATCH ? verify_match(it, row, room) : verify_block(it, row, room);
    } catch (const std::exception&) {  // no memory
        return -1;
    }
}

#pragma GCC visibility push(default)
extern "C" {
int64_t secondguess_size_of_verification() { return sizeof(Verification); }

void secondguess_verify(const Verification* verification) {
    const Verification& it = *verification;
    if (it.num_rows == 1) {  // no other thread is woken
        it.accepted[0] = verify_row(it, 0);
        return;
    }
    std::atomic<int64_t> next{0};
    Team::get().run(std::min(it.num_threads, it.num_rows), [&](int, int) {
        for (int64_t row; (row = next.fetch_add(1)) < it.num_rows;) it.accepted[row] = verify_row(it, row);
    });
}
}
#pragma GCC visibility pop
