// Chains of draft tokens for the rows of a batch, each token drawn from the logits of a forward pass over the one
// before it. The numbers are those of single passes and draws from Python, which this saves.
#pragma once

#include "decoder.h"
#include "sampling.h"

// Decides which chains get another node after the ones at this depth, given the probability of the most likely
// token there before any sampling setting (`Chains::confidences`). The answers are written to `Chains::answers`.
using KeepDrafting = void (*)(int64_t depth);
enum Answer { NO_ANSWER = 0, STOP = 1, CONTINUE = 2 };

struct Chains {
    int64_t num_nodes, vocab_size;   // largest number of nodes; logits from `vocab_size` on are not used
    const int64_t* limits;           // [row], numbers of nodes, at least 1
    const Settings* settings;        // [row]
    const RowNoise* noises;          // [row]
    const int64_t *target_ids, *target_lengths; // [vocab_size] of another vocabulary (`base.VocabularyMap`), or null
    KeepDrafting keeps_drafting;     // null to draw all nodes
    double* confidences;             // [row], of rows that drew a node last
    int64_t* answers;                // [row]; none if the call was interrupted
    int64_t* lengths;                // [row], numbers of nodes drawn
    int64_t* tokens;                 // [row][node]
    float* probs;                    // [row][node][vocab_size], distributions of the draws; null at temperature 0
};

enum ChainFailure { CHAIN_NO_MEMORY = -1, CHAIN_UNKNOWN_TOKEN = -2, CHAIN_NOT_FINITE = -3, CHAIN_INTERRUPTED = -4 };

// One call that draws chains.
class Drawing {
    const Decoder& decoder;
    const Chains& chains;
    const int64_t num_rows;
    Forward forward;                            // the next pass
    std::vector<int64_t> active, in_order;      // rows of that pass, and their places in it
    std::vector<int64_t> starts, slots, tokens; // of the rows of that pass
    std::vector<int64_t> ends, last_tokens;     // [row], positions after its tokens so far, and its last token in that pass
    std::vector<int64_t> target_places;         // [row], tokens of the target before the next node
    std::vector<bf16> features;                 // of the rows of that pass

    // Draw the node of a row; returns 0 or a failure.
    int64_t draw_node(int64_t row, int64_t depth) const {
        const int64_t width = chains.vocab_size, node = row * chains.num_nodes + depth;
        const float* logits = forward.logits + row * decoder.head.num_outputs;
        float* probs = chains.probs ? chains.probs + node * width : nullptr;
        if (chains.settings[row].temperature == 0) {
            const Scored found = most_likely(logits, width);  // NaN counts as the largest
            chains.tokens[node] = found.token;
            if (!probs) return 0;
            if (!std::isfinite(found.logit)) return CHAIN_NOT_FINITE;
            std::fill_n(probs, width, 0.0f);
            probs[found.token] = 1;
            return 0;
        }
        if (!write_probs(chains.settings[row], logits, 1, width, width, probs)) return CHAIN_NO_MEMORY;
        if (std::isnan(probs[0])) return CHAIN_NOT_FINITE;
        const RowNoise& noise = chains.noises[row];
        chains.tokens[node] = noise.races ? secondguess_race(probs, width, hash_of(noise.key, noise.position + target_places[row], RACE), chains.target_ids)
                                          : secondguess_draw(probs, width, uniform_of(noise, depth, DRAFT));
        return 0;
    }

    // Draw the nodes at a depth, each by one thread; returns 0 or a failure.
    int64_t draw_nodes(int64_t depth) const {
        std::atomic<int64_t> next{0}, failure{0};
        const auto draw = [&](int, int) {
            for (size_t place; (place = next.fetch_add(1)) < active.size();) {
                const int64_t row = active[place];
                int64_t token;
                if (const int64_t found = draw_node(row, depth))
                    failure = found;
                else if (chains.keeps_drafting)
                    secondguess_most_likely(forward.logits + row * decoder.head.num_outputs, 1, chains.vocab_size, chains.vocab_size, &token,
                                            chains.confidences + row);
            }
        };
        if (active.size() == 1)
            draw(0, 1);
        else
            Team::get().run(std::min<int64_t>(forward.num_threads, active.size()), draw);
        return failure;
    }

    // Remove the rows whose chains end with the node at this depth; returns 0 or a failure.
    int64_t decide(int64_t depth) {
        const auto keep = [&](auto continues) {
            active.erase(std::remove_if(active.begin(), active.end(), [&](int64_t row) { return !continues(row); }), active.end());
        };
        keep([&](int64_t row) {
            chains.lengths[row] = depth + 1;
            const int64_t length = chains.target_lengths ? chains.target_lengths[chains.tokens[row * chains.num_nodes + depth]] : 1;
            target_places[row] += length;
            return length && depth + 1 < chains.limits[row];
        });
        if (active.empty()) return 0;
        if (chains.keeps_drafting) {
            std::fill_n(chains.answers, num_rows, NO_ANSWER);
            chains.keeps_drafting(depth);
            if (chains.answers[active[0]] == NO_ANSWER) return CHAIN_INTERRUPTED;
            keep([&](int64_t row) { return chains.answers[row] == CONTINUE; });
        }
        return 0;
    }

    // Prepare the pass over the nodes at a depth. The feature of a node is the output at the token before it.
    void advance(const Forward& first, int64_t depth) {
        const int64_t count = active.size(), width = decoder.width;
        starts.resize(count), slots.resize(count), tokens.resize(count);
        if (decoder.joins_features) features.resize(count * width);
        for (int64_t place = 0; place < count; place++) {
            const int64_t row = active[place];
            starts[place] = ends[row]++, slots[place] = first.slots[row];
            tokens[place] = chains.tokens[row * chains.num_nodes + depth];
            if (decoder.joins_features)
                convert(first.hidden[decoder.num_layers] + last_tokens[row] * width, width, features.data() + place * width);
            last_tokens[row] = place;
        }
        forward.num_rows = forward.num_tokens = forward.num_logits = count;
        forward.firsts = forward.selected = in_order.data(), forward.places = active.data();
        forward.starts = starts.data(), forward.slots = slots.data(), forward.tokens = tokens.data();
        if (decoder.joins_features) forward.features = features.data();
    }

    // Set the distributions beyond the nodes of each row to zeros, up to the longest chain.
    void fill_padding() const {
        const int64_t width = chains.vocab_size, longest = *std::max_element(chains.lengths, chains.lengths + num_rows);
        for (int64_t row = 0; row < num_rows; row++)
            std::fill_n(chains.probs + (row * chains.num_nodes + chains.lengths[row]) * width, (longest - chains.lengths[row]) * width, 0.0f);
    }

  public:
    Drawing(const Decoder& decoder, const Forward& first, const Chains& chains)
        : decoder(decoder), chains(chains), num_rows(first.num_rows), forward(first), active(num_rows), in_order(num_rows + 1), ends(num_rows),
          last_tokens(num_rows), target_places(num_rows) {
        std::iota(active.begin(), active.end(), 0);
        std::iota(in_order.begin(), in_order.end(), 0);
        for (int64_t row = 0; row < num_rows; row++) {
            ends[row] = first.starts[row] + first.firsts[row + 1] - first.firsts[row];
            last_tokens[row] = first.firsts[row + 1] - 1;
        }
    }

    // Returns 0 or a failure.
    int64_t run(const Forward& first, void* workspace) {
        for (int64_t depth = 0; !active.empty(); depth++) {
            if (depth) advance(first, depth - 1);
            if (const int failure = secondguess_run(&decoder, &forward, workspace)) return -failure;
            if (const int64_t failure = draw_nodes(depth)) return failure;
            if (const int64_t failure = decide(depth)) return failure;
        }
        if (chains.probs) fill_padding();
        return 0;
    }
};

#pragma GCC visibility push(default)
extern "C" {
int64_t secondguess_size_of_chains() { return sizeof(Chains); }

// Draw chains; `first` is the forward pass over the rows' uncached tokens, with the logits of the last of each row
// at the row's place. A head that reads features returns the hidden states of its last level. Returns 0, or a failure.
int64_t secondguess_draft_chains(const Decoder* decoder, const Forward* first, void* workspace, const Chains* chains) {
    try {
        return Drawing(*decoder, *first, *chains).run(*first, workspace);
    } catch (const std::exception&) {
        return CHAIN_NO_MEMORY;
    }
}
}
#pragma GCC visibility pop
