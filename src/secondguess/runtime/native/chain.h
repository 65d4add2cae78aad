// Chains of draft tokens for one row, each token drawn from the logits of a forward pass over the one
// before it. The numbers are those of single passes and draws from Python, which this saves.
#pragma once

#include "decoder.h"
#include "sampling.h"

// Decides whether to draft another node after the one at this depth, given the probability of the most
// likely token there before any sampling setting. The answer is written to `Chain::answer`.
using KeepDrafting = void (*)(int64_t depth, double confidence);
enum Answer { NO_ANSWER = 0, STOP = 1, GO_ON = 2 };

// Rule that draws another node after the one at depth d if own[b0] * ... * own[bd] * following[bd] > least[d],
// with bi the group of node i: the number of edges up to its confidence (`core.StoppingRule`).
struct StoppingRule {
    int64_t num_edges;
    const double *edges, *own, *following, *least;
    int64_t* groups;                 // [node]
};

struct Chain {
    int64_t num_nodes, vocab_size;   // largest number of nodes; logits from `vocab_size` on are not used
    Settings settings;
    RowNoise noise;
    const int64_t *target_ids, *target_lengths; // [vocab_size] of another vocabulary (`base.VocabularyMap`), or null
    const StoppingRule* rule;        // or
    KeepDrafting keeps_drafting;     // both null to draw all nodes
    int64_t answer;                  // none if the call was interrupted
    int64_t* tokens;                 // [node]
    float* probs;                    // [node][vocab_size], distributions of the draws; null at temperature 0
};

enum ChainFailure { CHAIN_NO_MEMORY = -1, CHAIN_UNKNOWN_TOKEN = -2, CHAIN_NOT_FINITE = -3, CHAIN_INTERRUPTED = -4 };

// Draw the node at a depth from logits, by the race at a place after the row's tokens; returns 0 or a failure.
static int64_t draw_node(const Chain& chain, const float* logits, int64_t depth, int64_t place) {
    const int64_t width = chain.vocab_size;
    int64_t& token = chain.tokens[depth];
    if (chain.settings.temperature == 0) {
        const float maximum = largest_in(logits, width);  // NaN counts as the largest
        token = std::find_if(logits, logits + width, [&](float each) { return each == maximum || std::isnan(each); }) - logits;
        return 0;
    }
    float* probs = chain.probs + depth * width;
    if (!write_probs(chain.settings, logits, 1, width, width, probs)) return CHAIN_NO_MEMORY;
    if (std::isnan(probs[0])) return CHAIN_NOT_FINITE;
    const RowNoise& noise = chain.noise;
    token = noise.races ? secondguess_race(probs, width, hash_of(noise.key, noise.position + place, RACE), chain.target_ids)
                        : secondguess_draw(probs, width, uniform_of(noise, depth, DRAFT));
    return 0;
}

#pragma GCC visibility push(default)
extern "C" {
int64_t secondguess_size_of_chain() { return sizeof(Chain); }

// Draw a chain; `first` is the forward pass over the row's uncached tokens, with the logits of the last.
// A head that reads features has room for its output, the last of `hidden`, at all tokens and nodes but the
// last: the output at a token is the feature of the next. Returns the number of nodes, or a failure.
int64_t secondguess_draft_chain(const Decoder* decoder, const Forward* first, void* workspace, Chain* chain) {
    Forward forward = *first;
    double survival = 1;
    int64_t start = first->starts[0] + first->num_tokens, place = 0;
    const int64_t firsts[] = {0, 1}, only = 0;
    std::vector<void*> hidden;
    try {
        hidden.assign(first->hidden, first->hidden + decoder->num_layers + 1);
    } catch (const std::exception&) {
        return CHAIN_NO_MEMORY;
    }
    forward.hidden = hidden.data();
    for (int64_t depth = 0;; depth++) {
        if (const int failure = secondguess_run(decoder, &forward, workspace)) return -failure;
        if (const int64_t failure = draw_node(*chain, forward.logits, depth, place)) return failure;
        const int64_t length = chain->target_lengths ? chain->target_lengths[chain->tokens[depth]] : 1;
        if (!length || depth + 1 == chain->num_nodes) return depth + 1;
        place += length;
        int64_t token;
        double confidence;
        if (chain->rule || chain->keeps_drafting)
            secondguess_most_likely(forward.logits, 1, chain->vocab_size, chain->vocab_size, &token, &confidence);
        if (const StoppingRule* rule = chain->rule) {
            const int64_t group = std::upper_bound(rule->edges, rule->edges + rule->num_edges, confidence) - rule->edges;
            rule->groups[depth] = group;
            survival *= rule->own[group];
            if (!(survival * rule->following[group] > rule->least[depth])) return depth + 1;
        } else if (chain->keeps_drafting) {
            chain->answer = NO_ANSWER;
            chain->keeps_drafting(depth, confidence);
            if (chain->answer == NO_ANSWER) return CHAIN_INTERRUPTED;
            if (chain->answer == STOP) return depth + 1;
        }
        forward.num_tokens = 1, forward.firsts = firsts, forward.selected = forward.places = &only;
        forward.starts = &start, forward.tokens = &chain->tokens[depth];
        start += depth > 0;
        if (decoder->joins_features) {
            bf16* output = (bf16*)hidden[decoder->num_layers];
            forward.features = output + (depth ? 0 : first->num_tokens - 1) * decoder->width;
            hidden[decoder->num_layers] = (bf16*)forward.features + decoder->width;
        }
    }
}
}
#pragma GCC visibility pop
