// Block verification of the chain of one row, from logits to the next token, with the numbers of the separate
// steps in `verifiers/block.py`.
#pragma once

#include "sampling.h"

struct Verification {
    int64_t num_nodes, vocab_size, stride;  // `stride` numbers from the logits of one query to those of the next
    Settings settings;                      // with a positive temperature
    RowNoise noise;
    const float* logits;                    // [query][stride]
    const float* draft_probs;               // [node][vocab_size]
    const int64_t* tokens;                  // [node]
    int64_t next_token;
};

constexpr int64_t MOST_KEPT = 1 << 22;        // probabilities, per thread

struct VerificationRoom {
    std::vector<float> probs;               // [query][vocab_size], target probabilities
    std::vector<double> weights, masses;    // [query] and [node], numbers of the prefixes
};

#pragma GCC visibility push(default)
extern "C" {
int64_t secondguess_size_of_verification() { return sizeof(Verification); }

// Returns the number of nodes accepted and writes the next token; -1 if there is no memory or a distribution is
// not defined.
int64_t secondguess_verify_block(Verification* verification) {
    Verification& it = *verification;
    const int64_t num_nodes = it.num_nodes, width = it.vocab_size;
    static thread_local VerificationRoom kept;  // as every round needs it
    VerificationRoom large;
    VerificationRoom& room = (num_nodes + 1) * width <= MOST_KEPT ? kept : large;
    try {
        room.probs.resize((num_nodes + 1) * width), room.weights.resize(num_nodes + 1), room.masses.resize(num_nodes);
    } catch (const std::exception&) {
        return -1;
    }
    float* probs = room.probs.data();
    if (!write_probs(it.settings, it.logits, num_nodes + 1, width, it.stride, probs)) return -1;
    for (int64_t query = 0; query <= num_nodes; query++)
        if (std::isnan(probs[query * width])) return -1;
    const double *weights = room.weights.data(), *masses = room.masses.data();
    secondguess_chain_weights(probs, it.draft_probs, it.tokens, num_nodes, width, room.weights.data(), room.masses.data());
    int64_t accepted = 0;
    for (int64_t length = 1; length <= num_nodes; length++) {
        double chance = weights[length];
        if (length < num_nodes) {
            const double mass = masses[length], total = mass + 1 - weights[length];
            chance = total > 0 ? mass / total : 1;
        }
        if (uniform_of(it.noise, length - 1, ACCEPT) < chance) accepted = length;
    }
    const float* next = probs + accepted * width;
    if (accepted < num_nodes) {
        // The distributions after the next one are not used any more.
        float* residual = probs + (accepted + 1) * width;
        if (secondguess_residual(weights[accepted], next, it.draft_probs + accepted * width, width, residual) > 0) next = residual;
    }
    it.next_token = secondguess_draw(next, width, uniform_of(it.noise, accepted, DRAW));
    return accepted;
}
}
#pragma GCC visibility pop
