// Results of the kernels for fixed inputs, to compare two kinds of processors: `test_neon.py`. Each line is a
// name and a hash of bits.
#include <cstdio>

#include "chain.h"

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

// Rows of one stored type with random numbers, and zeros up to the last line of a block.
struct Stored {
    std::vector<uint8_t> bytes;
    std::vector<const uint8_t*> rows;
    std::vector<uint8_t> types;

    Stored(int64_t num_rows, int64_t bytes_per_row, uint8_t type)
        : bytes(num_rows * bytes_per_row), rows(round_up(num_rows, BLOCK)), types(round_up(num_rows, BLOCK), type) {
        // parameters in float16 and bfloat16 stay finite and positive
        for (uint8_t& byte : bytes) byte = (uint8_t)(int)(32 + 24 * draw.next());
        for (int64_t row = 0; row < num_rows; row++) rows[row] = bytes.data() + row * bytes_per_row;
    }
    void write_numbers(int64_t width, float scale) {
        for (size_t row = 0; row < bytes.size() / (2 * width); row++)
            std::memcpy(bytes.data() + row * 2 * width, draw.halves(width, scale).data(), 2 * width);
    }
    void keep_bits(int64_t group_bytes, int mask) {
        for (size_t i = 0; i < bytes.size(); i++)
            if ((int64_t)(i % group_bytes) < GROUP) bytes[i] = (uint8_t)(bytes[i] * 37 & mask);
    }
    Source source(int64_t width) const { return {rows.data(), types.data(), width}; }
};

// Weight with its memory: rounded from numbers in bfloat16, or, where it is not, of stored codes.
struct Owned {
    std::vector<char> data;
    std::vector<float> bias;
    Weight weight;

    Owned(int64_t num_outputs, int64_t width, Encoding encoding, bool has_bias = false) {
        weight = {nullptr, nullptr, num_outputs, (width + 63) / 64 * 64, encoding};
        data.resize(weight.num_blocks() * weight.num_steps() * weight.step_bytes() + PREFETCH_BYTES);
        bias = draw.floats(weight.num_blocks() * BLOCK);
        weight.data = data.data();
        if (has_bias) weight.bias = bias.data();
        const uint8_t type = encoding == MXFP4 ? STORED_LEVELS : encoding == INT4_GROUPS ? STORED_CODES_4 : encoding == INT8_GROUPS ? STORED_CODES_8 : STORED_BF16;
        const int64_t group_bytes = stored_group_bytes(type), stored_width = type == STORED_BF16 ? width : round_up(width, GROUP);
        Stored stored(num_outputs, stored_width / GROUP * group_bytes + stored_width % GROUP * 2, type);
        if (type == STORED_BF16)
            stored.write_numbers(width, 0.1f);
        else
            stored.keep_bits(group_bytes, type == STORED_CODES_8 ? 255 : 15);
        const Source source = stored.source(stored_width);
        secondguess_pack(&weight, &source, 2);
    }
};

void print_decoded() {
    const int64_t num_rows = 3, width = 512;
    const std::pair<uint8_t, int64_t> types[] = {
        {STORED_Q4_0, 18}, {STORED_Q4_1, 20}, {STORED_Q5_0, 22}, {STORED_Q5_1, 24}, {STORED_Q8_0, 34}, {STORED_MXFP4, 17},
        {STORED_Q2_K, 84}, {STORED_Q3_K, 110}, {STORED_Q4_K, 144}, {STORED_Q5_K, 176}, {STORED_Q6_K, 210}};
    for (const auto& [type, size] : types) {
        const bool is_large = type >= STORED_Q2_K && type <= STORED_Q6_K;
        const Stored stored(num_rows, width / (is_large ? 256 : GROUP) * size, type);
        const Source source = stored.source(width);
        std::vector<float> numbers(num_rows * width);
        secondguess_decode(&source, num_rows, numbers.data(), 1, 2);
        print("decoded", type, numbers.data(), numbers.size());
    }
}

void print_unpacked(const Owned& owned, int64_t width) {
    std::vector<float> numbers(owned.weight.num_outputs * width);
    std::vector<float*> rows(owned.weight.num_blocks() * BLOCK);
    for (int64_t row = 0; row < owned.weight.num_outputs; row++) rows[row] = &numbers[row * width];
    secondguess_unpack(&owned.weight, rows.data(), width, 2);
    print("unpacked", owned.weight.encoding, numbers.data(), numbers.size());
}

void print_products() {
    for (const Encoding encoding : {BFLOAT16, INT8, INT4, INT8_GROUPS, MXFP4, INT4_GROUPS}) {
        const int64_t num_outputs = 83, width = 200;
        const Owned owned(num_outputs, width, encoding, true);
        print_unpacked(owned, width);
        print("packed", encoding, owned.data.data(), owned.data.size());
        for (int64_t num_rows = 1; num_rows <= 9; num_rows++) {
            Rows rows;
            rows.reserve(num_rows, width);
            for (int64_t row = 0; row < num_rows; row++) {
                const auto numbers = draw.floats(width);
                rows.at(row, 0, owned.weight, [&](auto* to) { convert(numbers.data(), width, to); });
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
    const Norm norm = {norms.data(), nullptr, 1e-6f}, none = {};
    std::vector<Owned> owned;
    owned.reserve(64);
    const auto weight = [&](int64_t num_outputs, int64_t num_inputs) { return owned.emplace_back(num_outputs, num_inputs, encoding).weight; };
    std::vector<Expert> all_experts;
    for (int i = 0; i < experts; i++) all_experts.push_back({weight(2 * 32, width), weight(width, 32)});
    const Weight router = owned.emplace_back(experts, width, BFLOAT16).weight;
    std::vector<Layer> layers;
    for (int i = 0; i < 2; i++) {
        Layer layer = {norm, none, none, none, norm, none, {}, {}, {}, {}, i ? 20 : 0, 0, {}, nullptr, encoding == MXFP4 ? sinks.data() : nullptr};
        layer.qkv = weight((queries + 2 * keys) * size, width), layer.output = weight(width, queries * size);
        if (i && has_experts)
            layer.router = router, layer.experts = all_experts.data();
        else
            layer.gate_up = weight(2 * inner, width), layer.down = weight(width, inner);
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
    const auto cos_sin = draw.floats(capacity * 2 * size);
    std::vector<uint16_t> cache[2][2];
    uint16_t *key_pointers[2], *value_pointers[2];
    for (int i = 0; i < 2; i++) {
        for (auto& each : cache[i]) each.assign(keys * capacity * size, 0);
        key_pointers[i] = cache[i][0].data(), value_pointers[i] = cache[i][1].data();
    }
    std::vector<int64_t> tokens, places;
    for (int64_t i = 0; i < count; i++) tokens.push_back((i * 37 + 11) % vocab), places.push_back(i);
    const float* rotaries[] = {cos_sin.data()};
    std::vector<float> logits(count * vocab);
    std::vector<float> last(count * width);
    float* hidden[] = {nullptr, nullptr, last.data()};
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
    print_decoded();
    print_products();
    print_recurrences();
    print_sampling();
    for (const Encoding encoding : {BFLOAT16, INT8, INT4, INT8_GROUPS, MXFP4, INT4_GROUPS}) print_decoder(encoding, encoding != INT8, encoding == INT4 ? 5.0f : 0);
}
