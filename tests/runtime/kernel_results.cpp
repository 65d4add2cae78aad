// Results of the kernels for fixed inputs, to compare two kinds of processors: `test_neon.py`. Each line is a
// name and a hash of bits.
#include <cstdio>

#include "chain.h"
#include "verification.h"

struct Random {
    uint64_t state = 1;

    float next() {  // from -1 to 1
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (float)(int32_t)(state >> 32) * 0x1p-31f;
    }
    std::vector<float> floats(int64_t count, float scale = 1) {
        std::vector<float> numbers(count);
        for (float& each : numbers) each = scale * next();
        return numbers;
    }
    std::vector<bf16> halves(int64_t count, float scale = 1) {
        const std::vector<float> numbers = floats((count + 15) / 16 * 16, scale);
        std::vector<bf16> to(numbers.size());
        for (size_t i = 0; i < to.size(); i += 16) store(&to[i], load(&numbers[i]));
        return to;
    }
} draw;

template <class Number>
void print(const char* name, int64_t detail, const Number* numbers, int64_t count) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < count * sizeof(Number); i++) hash = (hash ^ ((const uint8_t*)numbers)[i]) * 1099511628211u;
    std::printf("%s %ld %016lx\n", name, (long)detail, (unsigned long)hash);
}

// Weight with its memory.
struct Owned {
    std::vector<char> data;
    std::vector<float> scale, bias;
    std::vector<int32_t> sum;
    Weight weight;

    Owned(int64_t num_outputs, int64_t width, Encoding encoding, bool is_gated = false, bool has_bias = false) {
        // codes of MXFP4 are not rounded to: those of INT4 stand for other levels
        weight = {nullptr, nullptr, nullptr, nullptr, num_outputs, (width + 63) / 64 * 64, encoding == MXFP4 ? INT4 : encoding};
        const int64_t num_lines = weight.num_blocks() * BLOCK;
        data.resize(weight.num_blocks() * weight.num_steps() * weight.step_bytes() + PREFETCH_BYTES);
        scale.resize(num_lines), sum.resize(num_lines), bias = draw.floats(num_lines);
        weight.data = data.data(), weight.scale = scale.data(), weight.sum = sum.data();
        if (has_bias) weight.bias = bias.data();
        const int64_t num_rows = is_gated ? num_outputs / 2 : num_outputs;
        const auto first = draw.halves(num_rows * width, 0.1f), second = draw.halves(num_rows * width, 0.1f);
        const Source source = {first.data(), is_gated ? second.data() : nullptr, num_rows, width, 0};
        if (encoding == INT4_GROUPS)
            fill_groups();
        else
            secondguess_pack(&weight, &source, 2);
        weight.encoding = encoding;
    }

    // Fill groups, to which weights are not rounded, with codes and parameters.
    void fill_groups() {
        for (int64_t group = 0; group < weight.num_blocks() * weight.num_steps(); group++) {
            char* codes = data.data() + group * weight.step_bytes();
            for (int i = 0; i < CODE_BYTES; i++) codes[i] = (char)(int)(127 * draw.next());
            uint16_t* parameters = (uint16_t*)(codes + CODE_BYTES);
            for (int i = 0; i < 2 * BLOCK; i++) parameters[i] = to_half(0.01f * draw.next());
        }
    }
};

void print_products() {
    for (const Encoding encoding : {BFLOAT16, INT8, INT4, INT8_GROUPS, MXFP4, INT4_GROUPS}) {
        const int64_t num_outputs = 83, width = 200;
        const Owned owned(num_outputs, width, encoding, false, true);
        print("packed", encoding, owned.data.data(), owned.data.size());
        for (int64_t num_rows = 1; num_rows <= 9; num_rows++) {
            Rows rows;
            rows.reserve(num_rows, width);
            for (int64_t row = 0; row < num_rows; row++) {
                const auto numbers = draw.halves(width);
                std::copy_n(numbers.data(), width, rows.row(row));
                rows.form(row, owned.weight);
            }
            std::vector<float> found(num_rows * owned.weight.num_blocks() * BLOCK);
            multiply<VectorUnit>(rows.values(num_rows), owned.weight, 0, 0, 1, [&](int64_t row, int64_t block, Floats low, Floats high) {
                float* to = &found[(row * owned.weight.num_blocks() + block) * BLOCK];
                store(to, low), store(to + TILE, high);
            });
            print("product", encoding * 100 + num_rows, found.data(), found.size());
        }
    }
}

void print_recurrences() {
    const int64_t tokens = 3, heads = 2, keys = 40, values = 36;
    const auto queries = draw.floats(tokens * heads * keys), key = draw.floats(tokens * heads * keys), value = draw.floats(tokens * heads * values);
    auto decays = draw.floats(tokens * heads, 0.1f);
    const auto rates = draw.floats(tokens * heads), state = draw.floats(heads * keys * values);
    std::vector<float> after(state.size()), outputs(tokens * heads * values);
    const DeltaRule rule = {tokens, heads, heads, keys, values, 1, 1, queries.data(), key.data(), value.data(), decays.data(), rates.data(),
                            state.data(), after.data(), outputs.data()};
    secondguess_delta_rule(&rule, 2);
    print("delta rule", 0, outputs.data(), outputs.size());
    print("delta rule", 1, after.data(), after.size());
}

void print_sampling() {
    const int64_t width = 1013, nodes = 3;
    const auto logits = draw.floats((nodes + 1) * width, 6), others = draw.floats(nodes * width, 6);
    std::vector<float> probs((nodes + 1) * width), draft(nodes * width), residual(width);
    secondguess_softmax(logits.data(), nodes + 1, width, width, 0.8f, -7.0f, probs.data());
    print("softmax", 0, probs.data(), probs.size());
    secondguess_softmax(others.data(), nodes, width, width, 1.0f, -87.0f, draft.data());
    const double mass = secondguess_residual(0.7f, probs.data(), draft.data(), width, residual.data());
    print("residual", 0, residual.data(), residual.size());
    print("residual", 1, &mass, 1);
    std::vector<int64_t> tokens;
    for (int i = 0; i < 50; i++) tokens.push_back(secondguess_draw(probs.data(), width, (i + 0.5) / 50));
    for (int i = 0; i < 50; i++) tokens.push_back(secondguess_race(probs.data(), width, i, nullptr));
    print("tokens", 0, tokens.data(), tokens.size());
    secondguess_truncated_softmax(logits.data(), nodes + 1, width, width, 0.9, 40, 0.9, -5.0, probs.data());
    print("truncated softmax", 0, probs.data(), probs.size());
}

// A decoder with two layers, a window and experts in the second one, for MXFP4 with what gpt-oss has beside that.
void print_decoder(Encoding encoding, bool has_experts, float score_cap) {
    const int64_t width = 72, inner = 112, queries = 4, keys = 2, size = 40, vocab = 90, capacity = 128, experts = 5, selected = 2;
    const auto norms = draw.floats(width + 16, 0.5f);
    const auto sinks = draw.floats(queries);
    const Norm norm = {norms.data(), nullptr, 1e-6f, 1}, none = {};
    std::vector<Owned> owned;
    owned.reserve(64);
    const auto weight = [&](int64_t num_outputs, int64_t num_inputs, bool is_gated = false) {
        return owned.emplace_back(num_outputs, num_inputs, encoding, is_gated).weight;
    };
    std::vector<Expert> all_experts;
    for (int i = 0; i < experts; i++) all_experts.push_back({weight(2 * 32, width, true), weight(width, 32)});
    const Weight router = owned.emplace_back(experts, width, BFLOAT16).weight;
    std::vector<Layer> layers;
    for (int i = 0; i < 2; i++) {
        Layer layer = {norm, none, none, none, norm, none, {}, {}, {}, {}, i ? 20 : 0, 0, {}, nullptr, encoding == MXFP4 ? sinks.data() : nullptr};
        layer.qkv = weight((queries + 2 * keys) * size, width), layer.output = weight(width, queries * size);
        if (i && has_experts)
            layer.router = router, layer.experts = all_experts.data();
        else
            layer.gate_up = weight(2 * inner, width, true), layer.down = weight(width, inner);
        layers.push_back(layer);
    }
    const auto embedding = draw.halves(vocab * width);
    Decoder decoder = {};
    decoder.layers = layers.data(), decoder.num_layers = 2, decoder.width = width, decoder.inner_width = inner;
    decoder.num_queries = queries, decoder.num_keys = keys, decoder.head_size = size, decoder.activation = SILU, decoder.num_embedded = vocab;
    decoder.scaling = 0.2f, decoder.embedding_scale = 1, decoder.embedding = embedding.data(), decoder.norm = norm;
    decoder.head = weight(vocab, width), decoder.residual_scale = 1, decoder.score_cap = score_cap, decoder.logit_divisor = 1;
    if (encoding == MXFP4) decoder.gate_alpha = 1.7f, decoder.gate_limit = 0.5f;
    if (has_experts) decoder.num_experts = experts, decoder.num_selected = selected, decoder.expert_width = 32;

    const int64_t count = 45;
    const auto cos_sin = draw.halves(capacity * 2 * size);
    std::vector<bf16> cache[2][2];
    bf16 *key_pointers[2], *value_pointers[2];
    for (int i = 0; i < 2; i++) {
        for (auto& each : cache[i]) each.assign(keys * capacity * size, 0);
        key_pointers[i] = cache[i][0].data(), value_pointers[i] = cache[i][1].data();
    }
    std::vector<int64_t> tokens, places;
    for (int64_t i = 0; i < count; i++) tokens.push_back((i * 37 + 11) % vocab), places.push_back(i);
    const void* rotaries[] = {cos_sin.data()};
    std::vector<float> logits(count * vocab);
    std::vector<bf16> last(count * width);
    void* hidden[] = {nullptr, nullptr, last.data()};
    const int64_t firsts[] = {0, count}, starts[] = {0}, slots[] = {0};
    Forward forward = {};
    forward.num_rows = 1, forward.num_tokens = count, forward.num_indices = count, forward.num_logits = count, forward.last_layer = 2;
    forward.capacity = capacity, forward.context_length = capacity, forward.num_threads = 2;
    forward.tokens = tokens.data(), forward.firsts = firsts, forward.starts = starts, forward.slots = slots;
    forward.selected = forward.places = places.data(), forward.cos_sin = rotaries;
    forward.keys = key_pointers, forward.values = value_pointers, forward.hidden = hidden, forward.logits = logits.data();
    void* workspace = secondguess_workspace();
    const int failed = secondguess_run(&decoder, &forward, workspace);
    secondguess_free(workspace);
    const int64_t detail = failed * 1000 + encoding * 10 + has_experts;
    print("logits", detail, logits.data(), logits.size());
    print("hidden states", detail, last.data(), last.size());
    for (const auto& layer_cache : cache) print("keys", detail, layer_cache[0].data(), layer_cache[0].size());
}

int main() {
    print_products();
    print_recurrences();
    print_sampling();
    for (const Encoding encoding : {BFLOAT16, INT8, INT4, INT8_GROUPS, MXFP4, INT4_GROUPS}) print_decoder(encoding, encoding != INT8, encoding == INT4 ? 5.0f : 0);
}
