// Mixtures of experts: the experts that each token selects, sorted by expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "product.h"

// Weights of an expert, as `Layer::gate_up` and `Layer::down`.
struct Expert {
    Weight gate_up, down;
};

// Experts selected by the tokens of a pass. The assignments of tokens to an expert are adjacent, in the order of
// the tokens.
struct Selection {
    int64_t num_experts = 0, num_selected = 0;
    std::vector<float> logits;           // [token][expert]
    std::vector<int32_t> experts;        // [token][num_selected]
    std::vector<float> routing_weights;  // [token][num_selected]
    std::vector<int64_t> firsts;         // [expert + 1], first assignment of each expert
    std::vector<int32_t> tokens;         // [assignment]
    std::vector<float> weights;          // [assignment], its routing weight

    void reserve(int64_t num_tokens, int64_t experts_of_layer, int64_t selected) {
        num_experts = experts_of_layer, num_selected = selected;
        logits.resize(num_tokens * num_experts);
        firsts.resize(num_experts + 1);
        for (auto* each : {&experts, &tokens}) each->resize(num_tokens * num_selected);
        for (auto* each : {&routing_weights, &weights}) each->resize(num_tokens * num_selected);
    }

    // Select the experts of a token with the largest logits, the first among equals, or those in `given`. Their
    // weights are softmax probabilities over all experts, divided by their sum if `normalises`.
    void select(int64_t token, bool normalises, const int32_t* given) {
        float* const all_of_token = logits.data() + token * num_experts;
        const float largest = *std::max_element(all_of_token, all_of_token + num_experts);
        float total = 0, selected_total = 0;
        for (int64_t expert = 0; expert < num_experts; expert++)
            total += all_of_token[expert] = std::exp(all_of_token[expert] - largest);
        int32_t* const chosen = experts.data() + token * num_selected;
        float* const to = routing_weights.data() + token * num_selected;
        for (int64_t place = 0; place < num_selected; place++) {
            int64_t best = given ? given[token * num_selected + place] : -1;
            for (int64_t expert = 0; !given && expert < num_experts; expert++)
                if (std::find(chosen, chosen + place, expert) == chosen + place && (best < 0 || all_of_token[expert] > all_of_token[best]))
                    best = expert;
            chosen[place] = (int32_t)best;
            selected_total += to[place] = all_of_token[best];
        }
        for (int64_t place = 0; place < num_selected; place++) to[place] /= normalises ? selected_total : total;
    }

    // Sort the assignments of all tokens.
    void sort(int64_t num_tokens) {
        std::fill(firsts.begin(), firsts.end(), 0);
        for (int64_t i = 0; i < num_tokens * num_selected; i++) firsts[experts[i] + 1]++;
        for (int64_t expert = 0; expert < num_experts; expert++) firsts[expert + 1] += firsts[expert];
        for (int64_t i = 0; i < num_tokens * num_selected; i++) {
            const int64_t place = firsts[experts[i]]++;
            tokens[place] = (int32_t)(i / num_selected), weights[place] = routing_weights[i];
        }
        for (int64_t expert = num_experts; expert > 0; expert--) firsts[expert] = firsts[expert - 1];
        firsts[0] = 0;
    }
};
