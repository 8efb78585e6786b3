#include "model.h"

#include <algorithm>

using namespace headrace;

namespace {

KvLayout kv_layout(const headrace_config &config) {
    KvLayout kv{};
    kv.kv_heads = config.num_kv_heads;
    kv.head_dim = config.head_dim;
    kv.padded_dim = static_cast<int>(round_up(config.head_dim, kTileInputs));
    kv.int8 = config.kv_type == HEADRACE_INT8;
    kv.part_bytes = static_cast<int64_t>(kBlockTokens) * kv.padded_dim * (kv.int8 ? 1 : 2);
    kv.head_bytes = 2 * kv.part_bytes + (kv.int8 ? 2 * kBlockTokens * 4 : 0);
    kv.layer_bytes = kv.kv_heads * kv.head_bytes;
    kv.block_bytes = config.num_layers * kv.layer_bytes;
    return kv;
}

void shape_linear(Linear &linear, std::initializer_list<int64_t> rows, int64_t columns) {
    for (const int64_t count : rows) linear.parts.push_back({nullptr, count, columns, nullptr});
}

}  // namespace

void ActivationBuffer::shape(const Level &level, const std::vector<const Linear *> &linears) {
    view.columns = linears[0]->columns();
    view.padded = round_up(view.columns, kTileInputs);
    for (const Linear *linear : linears)
        for (const PackedMatrix &part : linear->parts) {
            if (part.format->blocks()) view.wants_blocks = true;
            if (!part.format->blocks() || !level.has_codes) view.wants_dense = true;
        }
}

bool ActivationBuffer::reserve(const Level &level, int64_t step_rows, int threads) {
    rows_ = step_rows;
    const int64_t rows = step_rows + static_cast<int64_t>(threads) * kOwnRows;
    const auto values = static_cast<size_t>(rows * view.padded), blocks = static_cast<size_t>(rows * view.blocks());
    if (view.wants_dense && !dense_.reserve(values * level.value_bytes)) return false;
    if (view.wants_blocks) {
        if (level.has_codes && !codes_.reserve(values * 2)) return false;
        if (!scales_.reserve(blocks * 4) || !sums_.reserve(blocks * 4)) return false;
    }
    view.dense = dense_.data(), view.codes = codes_.as<int16_t>();
    view.scales = scales_.as<float>(), view.sums = sums_.as<float>();
    return true;
}

Activations ActivationBuffer::own(const Level &level, int thread) const {
    const int64_t row = rows_ + static_cast<int64_t>(thread) * kOwnRows;
    Activations result = view;
    if (view.dense) result.dense += row * view.padded * level.value_bytes;
    if (view.codes) result.codes += row * view.padded;
    if (view.scales) result.scales += row * view.blocks(), result.sums += row * view.blocks();
    return result;
}

headrace_model::headrace_model(const headrace_config &given, Team &team, const Level &level)
    : config(given), team(team), level(level), kv(kv_layout(given)) {
    const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
    const int64_t heads = heads_width(), kv_heads = config.num_kv_heads * config.head_dim;
    weights.layers.resize(config.num_layers);
    for (Layer &layer : weights.layers) {
        shape_linear(layer.qkv, {heads, kv_heads, kv_heads}, hidden);
        shape_linear(layer.attention_out, {hidden}, heads);
        shape_linear(layer.gate_up, {inner, inner}, hidden);
        shape_linear(layer.down, {hidden}, inner);
    }
    shape_linear(weights.embedding, {config.vocab_size}, hidden);
    shape_linear(weights.head, {config.vocab_size}, hidden);
    const int64_t angles = static_cast<int64_t>(config.rope_positions) * (config.rotary_dim / 2);
    weights.cos.assign(config.rope_cos, config.rope_cos + angles);
    weights.sin.assign(config.rope_sin, config.rope_sin + angles);
    weights.windows.assign(config.num_layers, 0);
    if (config.windows) std::copy(config.windows, config.windows + config.num_layers, weights.windows.begin());
    config.rope_cos = config.rope_sin = nullptr, config.windows = nullptr;
    work.scratch = std::vector<Pages>(team.threads());
    work.scratch_of.resize(team.threads());
}

Linear *headrace_model::linear(int matrix, int layer) {
    if (matrix == HEADRACE_EMBEDDING) return &weights.embedding;
    if (matrix == HEADRACE_HEAD) return &weights.head;
    if (layer < 0 || layer >= config.num_layers) return nullptr;
    Layer &at = weights.layers[layer];
    switch (matrix) {
    case HEADRACE_QKV: return &at.qkv;
    case HEADRACE_ATTENTION_OUT: return &at.attention_out;
    case HEADRACE_GATE_UP: return &at.gate_up;
    case HEADRACE_DOWN: return &at.down;
    default: return nullptr;
    }
}

std::vector<float> *headrace_model::vector(int vector, int layer, int64_t &count) {
    count = config.hidden_size;
    if (vector == HEADRACE_FINAL_NORM) return &weights.final_norm;
    if (layer < 0 || layer >= config.num_layers) return nullptr;
    Layer &at = weights.layers[layer];
    switch (vector) {
    case HEADRACE_INPUT_NORM: return &at.input_norm;
    case HEADRACE_MLP_NORM: return &at.mlp_norm;
    case HEADRACE_POST_ATTENTION_NORM: return &at.post_attention_norm;
    case HEADRACE_POST_MLP_NORM: return &at.post_mlp_norm;
    case HEADRACE_ATTENTION_OUT_BIAS: return &at.attention_out.bias;
    case HEADRACE_DOWN_BIAS: return &at.down.bias;
    case HEADRACE_QKV_BIAS: count = qkv_width(); return &at.qkv.bias;
    case HEADRACE_GATE_UP_BIAS: count = 2 * static_cast<int64_t>(config.intermediate_size); return &at.gate_up.bias;
    case HEADRACE_Q_NORM: count = config.head_dim; return &at.q_norm;
    case HEADRACE_K_NORM: count = config.head_dim; return &at.k_norm;
    default: return nullptr;
    }
}

std::string headrace_model::complete() {
    const auto missing = [](const Linear &linear) {
        return std::any_of(linear.parts.begin(), linear.parts.end(),
                           [](const PackedMatrix &part) { return !part.data; });
    };
    if (missing(weights.embedding)) return "the embedding";
    if (weights.final_norm.empty()) return "the final norm";
    for (size_t i = 0; i < weights.layers.size(); i++) {
        const Layer &layer = weights.layers[i];
        const std::string of = " of layer " + std::to_string(i);
        if (layer.input_norm.empty()) return "the input norm" + of;
        if (layer.mlp_norm.empty()) return "the MLP norm" + of;
        if (missing(layer.qkv)) return "q, k or v" + of;
        if (missing(layer.attention_out)) return "the attention's output matrix" + of;
        if (missing(layer.gate_up)) return "gate or up" + of;
        if (missing(layer.down)) return "the down matrix" + of;
    }
    std::vector<const Linear *> qkv, attention_out, gate_up, down;
    for (const Layer &layer : weights.layers) {
        qkv.push_back(&layer.qkv), attention_out.push_back(&layer.attention_out);
        gate_up.push_back(&layer.gate_up), down.push_back(&layer.down);
    }
    work.for_qkv.shape(level, qkv);
    work.for_attention_out.shape(level, attention_out);
    work.for_gate_up.shape(level, gate_up);
    work.for_down.shape(level, down);
    work.for_head.shape(level, {&weights.output_head()});
    completed = true;
    return "";
}

Attention headrace_model::attention(int layer) const {
    Attention result{};
    result.group = config.num_heads / config.num_kv_heads;
    result.scale = config.attention_scale, result.softcap = config.attention_softcap;
    result.window = weights.windows[layer];
    result.kv = kv;
    result.pool = pool.data() + layer * kv.layer_bytes;
    result.queries = work.queries.data();
    result.out = work.attended.as<float>();
    return result;
}

bool headrace_model::reserve(int64_t tokens, int64_t rows) {
    Workspace &w = work;
    if (tokens <= w.tokens && rows <= w.rows) return true;
    tokens = std::max(tokens, w.tokens), rows = std::max(rows, w.rows);
    const int64_t hidden = config.hidden_size,
                  longest = std::max<int64_t>({hidden, config.intermediate_size, qkv_width()});
    const bool branches = !weights.layers[0].post_attention_norm.empty() || !weights.layers[0].post_mlp_norm.empty();
    bool fits = w.hidden.reserve(tokens * hidden * 4) && w.qkv.reserve(tokens * qkv_width() * 4) &&
                w.queries.reserve(tokens * config.num_heads * kv.padded_dim * level.value_bytes) &&
                w.attended.reserve(tokens * heads_width() * 4) &&
                w.inner.reserve(tokens * config.intermediate_size * 4) &&
                (!branches || w.branch.reserve(tokens * hidden * 4)) &&
                w.logits_best.reserve(static_cast<size_t>(team.threads()) * (rows + 16) * 8) &&
                w.for_qkv.reserve(level, tokens, team.threads()) &&
                w.for_attention_out.reserve(level, tokens, team.threads()) &&
                w.for_gate_up.reserve(level, tokens, team.threads()) &&
                w.for_down.reserve(level, tokens, team.threads()) && w.for_head.reserve(level, rows, team.threads());
    const auto panel = static_cast<int64_t>(kPanelRows) * kPanelWidth * 4;
    const int64_t row = round_up((longest + 16) * 4, HEADRACE_ALIGNMENT);
    for (int thread = 0; fits && thread < team.threads(); thread++) {
        fits = w.scratch[thread].reserve(2 * panel + row + level.attention_scratch(attention(0)));
        uint8_t *at = w.scratch[thread].data();
        w.scratch_of[thread] = {reinterpret_cast<float *>(at), reinterpret_cast<float *>(at + panel),
                                reinterpret_cast<float *>(at + 2 * panel), at + 2 * panel + row};
    }
    if (fits) w.tokens = tokens, w.rows = rows;
    return fits;
}
