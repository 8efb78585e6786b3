// A decoder's weights, its KV pool and the memory that its steps work in.
#pragma once

#include <string>
#include <vector>

#include "level.h"
#include "memory.h"
#include "team.h"

namespace headrace {

// Matrices with one input, stacked by outputs.
struct Linear {
    std::vector<PackedMatrix> parts;
    std::vector<float> bias;  // empty: none

    int64_t columns() const { return parts[0].columns; }
    const float *bias_from(int64_t row) const { return bias.empty() ? nullptr : bias.data() + row; }
};

struct Layer {
    std::vector<float> input_norm, mlp_norm, q_norm, k_norm, post_attention_norm, post_mlp_norm;
    Linear qkv, attention_out, gate_up, down;
};

struct Weights {
    std::vector<Layer> layers;
    Linear embedding, head;
    std::vector<float> final_norm;
    std::vector<float> cos, sin;  // [rope_positions, rotary_dim / 2]
    std::vector<int32_t> windows;

    const Linear &output_head() const { return head.parts[0].data ? head : embedding; }
};

// With so few rows every thread prepares them for itself: it is done before the others could have been waited for.
constexpr int kOwnRows = 2;

// Inputs of a linear, in memory of the model.
class ActivationBuffer {
public:
    // For products with any of these.
    void shape(const Level &level, const std::vector<const Linear *> &linears);
    // For `rows` of a step, and kOwnRows of each thread's own.
    bool reserve(const Level &level, int64_t rows, int threads);
    Activations own(const Level &level, int thread) const;
    Activations view;

private:
    int64_t rows_ = 0;
    Pages dense_, codes_, scales_, sums_;
};

struct Workspace {
    int64_t tokens = 0, rows = 0;  // that there is room for
    Pages hidden;                  // fp32 [tokens, hidden_size]: the residual stream
    Pages qkv;                     // fp32 [tokens, (heads + 2 kv_heads) * head_dim]
    Pages queries;                 // level's values
    Pages attended;                // fp32 [tokens, heads * head_dim]
    Pages inner;                   // fp32 [tokens, intermediate_size]
    Pages branch;                  // fp32 [tokens, hidden_size]; only for models that normalise their branches
    Pages states;                  // of spans that are summed apart
    Pages judged;                  // fp32 [judged, hidden_size]
    Pages logits_best;             // per thread and row, for the largest logit
    ActivationBuffer for_qkv, for_attention_out, for_gate_up, for_down, for_head;
    std::vector<Pages> scratch;  // per thread
    std::vector<Scratch> scratch_of;
};

}  // namespace headrace

struct headrace_model {
    headrace_model(const headrace_config &config, headrace::Team &team, const headrace::Level &level);

    headrace_config config;
    headrace::Team &team;
    const headrace::Level &level;
    headrace::Weights weights;
    headrace::Workspace work;
    headrace::KvLayout kv;
    headrace::Pages pool;
    int64_t num_blocks = 0;
    int64_t judged_count = 0;  // of the last step

    // nullptr and a message when there is no such matrix or vector; sizes are those it must have.
    headrace::Linear *linear(int matrix, int layer);
    std::vector<float> *vector(int vector, int layer, int64_t &count);
    // The first thing missing, or empty. Chooses the forms of activations when nothing is.
    std::string complete();
    bool reserve(int64_t tokens, int64_t rows);
    int heads_width() const { return config.num_heads * config.head_dim; }
    int qkv_width() const { return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim; }
    headrace::Attention attention(int layer) const;
    bool completed = false;
};

namespace headrace {

// One step; arguments are checked by the caller and there is room for them.
void run_step(headrace_model &model, const headrace_step_arguments &arguments);
void run_judged(headrace_model &model, int first, int count, float *logits);

}  // namespace headrace
