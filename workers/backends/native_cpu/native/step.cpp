// A step from token ids to logits: what every thread of the team does, phase by phase.
#include <algorithm>
#include <cstring>
#include <new>

#include "model.h"

namespace headrace {

namespace {

struct Best {
    float value;
    int32_t id;
};

class Step {
public:
    Step(headrace_model &model, const headrace_step_arguments &in)
        : model_(model), level_(model.level), team_(model.team), in_(in) {
        hidden_ = model.work.hidden.as<float>();
        token_row_.resize(in.tokens), position_.resize(in.tokens);
        int token = 0;
        for (int row = 0; row < in.rows; row++) {
            for (int i = 0; i < in.lengths[row]; i++, token++)
                token_row_[token] = row, position_[token] = in.starts[row] + i;
            last_.push_back(token - 1);
            if (in.samples[row])
                sampling_.push_back(hidden_ + static_cast<int64_t>(token - 1) * model.config.hidden_size);
        }
        plan_attention();
    }

    void run() {
        // Of every thread: one that sleeps through the step has seen no logits.
        for (int thread = 0; thread < team_.threads(); thread++)
            std::fill_n(best_of(thread), sampling_.size(), Best{-__builtin_inff(), -1});
        team_.run([this](int thread) {
            level_.begin();
            embed();
            for (int layer = 0; layer < model_.config.num_layers; layer++) run_layer(layer, thread);
            finish(thread);
            level_.end();
        });
        if (in_.greedy) merge_best();
    }

    // Logits of rows of fp32 hidden states.
    void head(int thread, const float *const *rows, int64_t count, float *logits, bool greedy) {
        const auto &weights = model_.weights;
        const Activations in = prepared(model_.work.for_head, count, thread, [&](int64_t row, Activations &to) {
            norm_and_prepare(thread, rows[row], weights.final_norm, row, to);
        });
        Best *best = greedy ? best_of(thread) : nullptr;
        const int64_t vocab = model_.config.vocab_size;
        products(weights.output_head(), in, count, thread, [&](const Panel &panel) {
            float *out = logits + panel.row * vocab + panel.column;
            level_.finish_logits(panel.data, panel.rows, panel.columns, model_.config.logit_multiplier,
                                 model_.config.logit_softcap, out, vocab);
            for (int row = 0; best && row < panel.rows; row++)
                note_largest(out + row * vocab, panel, best[panel.row + row]);
        });
    }

private:
    struct Panel {
        const float *data;
        int64_t row, column;  // first of the output
        int rows, columns;
    };

    // --- Phases. ---

    void embed() {
        const PackedMatrix &embedding = model_.weights.embedding.parts[0];
        const int64_t width = model_.config.hidden_size;
        const float multiplier = model_.config.embedding_multiplier;
        team_.for_each(in_.tokens, [&](int64_t token) {
            float *to = hidden_ + token * width;
            unpack_row(embedding, in_.token_ids[token], to);
            if (multiplier != 1.0f)
                for (int64_t i = 0; i < width; i++) to[i] *= multiplier;
        });
    }

    void run_layer(int index, int thread) {
        const Layer &layer = model_.weights.layers[index];
        Workspace &work = model_.work;
        float *qkv = work.qkv.as<float>();
        const int64_t width = model_.qkv_width();
        const Activations normed = normed_hidden(work.for_qkv, layer.input_norm, thread);
        products(layer.qkv, normed, in_.tokens, thread, [&](const Panel &panel) {
            level_.store(panel.data, panel.rows, panel.columns, layer.qkv.bias_from(panel.column),
                         qkv + panel.row * width + panel.column, width);
        });
        attend(layer, index, thread);
        const Activations attended = prepared_rows(work.for_attention_out, work.attended.as<float>(), thread);
        add_branch(layer.attention_out, attended, layer.post_attention_norm, thread);
        gate_and_up(layer.gate_up, normed_hidden(work.for_gate_up, layer.mlp_norm, thread), thread);
        add_branch(layer.down, prepared_rows(work.for_down, work.inner.as<float>(), thread), layer.post_mlp_norm,
                   thread);
    }

    void attend(const Layer &layer, int index, int thread) {
        Attention attention = model_.attention(index);
        attention.block_tables = in_.block_tables, attention.table_width = in_.table_width,
        attention.tokens = in_.tokens;
        const int kv_heads = attention.kv.kv_heads, half = model_.config.rotary_dim / 2;
        const float *qkv = model_.work.qkv.as<float>();
        const Scratch &scratch = model_.work.scratch_of[thread];
        const auto write = [&](int64_t token, int kv_head) {
            const int64_t position = position_[token], row = token_row_[token];
            const Rotation rotation = {model_.config.rotary_dim,
                                       model_.weights.cos.data() + position * half,
                                       model_.weights.sin.data() + position * half,
                                       layer.q_norm.empty() ? nullptr : layer.q_norm.data(),
                                       layer.k_norm.empty() ? nullptr : layer.k_norm.data(),
                                       model_.config.norm_eps};
            const int32_t block = in_.block_tables[row * in_.table_width + position / kBlockTokens];
            level_.write_kv(attention, rotation, qkv + token * model_.qkv_width(), token, kv_head, block,
                            static_cast<int>(position % kBlockTokens), scratch.row);
        };
        // A unit that is one token by itself reads of this step only what it has written.
        if (!lone_units_)
            team_.for_each(static_cast<int64_t>(in_.tokens) * kv_heads,
                           [&](int64_t unit) { write(unit / kv_heads, static_cast<int>(unit % kv_heads)); });
        team_.for_each(static_cast<int64_t>(units_.size()), [&](int64_t index) {
            const AttentionUnit &unit = units_[index];
            if (lone_units_) write(unit.token, unit.kv_head);
            level_.attend(attention, unit, scratch.attention);
        });
        if (merges_.empty()) return;
        const int64_t stride = attention.group * attention.state_floats();
        team_.for_each(static_cast<int64_t>(merges_.size()), [&](int64_t unit) {
            level_.merge(attention, merges_[unit].unit, merges_[unit].spans, stride, scratch.attention);
        });
    }

    void gate_and_up(const Linear &linear, const Activations &in, int thread) {
        const int64_t inner = model_.config.intermediate_size;
        float *out = model_.work.inner.as<float>();
        const PackedMatrix &gate = linear.parts[0], &up = linear.parts[1];
        const Scratch &scratch = model_.work.scratch_of[thread];
        const int width = panel_strips(2 * gate.strips());
        for_panels(gate.strips(), width, in_.tokens, [&](int64_t strip, int strips, int64_t row, int rows) {
            level_.product(gate, in, row, rows, strip, strips, scratch.panel);
            level_.product(up, in, row, rows, strip, strips, scratch.panel_up);
            const int64_t column = strip * kTileOutputs;
            const int columns = static_cast<int>(std::min<int64_t>(strips * kTileOutputs, inner - column));
            level_.activate(model_.config.activation, scratch.panel, scratch.panel_up, rows, columns,
                            linear.bias_from(column), linear.bias_from(inner + column), out + row * inner + column,
                            inner);
        });
    }

    // hidden += multiplier * (products, normalised for models that do)
    void add_branch(const Linear &linear, const Activations &in, const std::vector<float> &norm, int thread) {
        const int64_t hidden = model_.config.hidden_size;
        const float multiplier = model_.config.residual_multiplier;
        float *branch = model_.work.branch.as<float>();
        products(linear, in, in_.tokens, thread, [&](const Panel &panel) {
            const int64_t at = panel.row * hidden + panel.column;
            const float *bias = linear.bias_from(panel.column);
            if (norm.empty())
                level_.add(panel.data, panel.rows, panel.columns, bias, multiplier, hidden_ + at, hidden);
            else
                level_.store(panel.data, panel.rows, panel.columns, bias, branch + at, hidden);
        });
        if (norm.empty()) return;
        float *normed = model_.work.scratch_of[thread].row;
        team_.for_each(in_.tokens, [&](int64_t token) {
            level_.norm(branch + token * hidden, norm.data(), hidden, model_.config.norm_eps, normed);
            for (int64_t i = 0; i < hidden; i++) hidden_[token * hidden + i] += multiplier * normed[i];
        });
    }

    void finish(int thread) {
        const int64_t hidden = model_.config.hidden_size;
        float *kept = model_.work.judged.as<float>(), *normed = model_.work.scratch_of[thread].row;
        team_.for_each(in_.judged_count, [&](int64_t i) {
            memcpy(kept + i * hidden, hidden_ + in_.judged[i] * hidden, hidden * sizeof(float));
        });
        team_.for_each(in_.rows, [&](int64_t row) {
            level_.norm(hidden_ + last_[row] * hidden, model_.weights.final_norm.data(), hidden, model_.config.norm_eps,
                        normed);
            in_.broken[row] =
                !std::all_of(normed, normed + hidden, [](float value) { return __builtin_isfinite(value); });
        });
        if (sampling_.empty()) return;
        head(thread, sampling_.data(), static_cast<int64_t>(sampling_.size()), in_.logits, in_.greedy != nullptr);
    }

    // --- Helpers ---

    void norm_and_prepare(int thread, const float *x, const std::vector<float> &weight, int64_t row, Activations &to) {
        float *normed = model_.work.scratch_of[thread].row;
        level_.norm(x, weight.data(), to.columns, model_.config.norm_eps, normed);
        level_.prepare(normed, row, to);
    }

    // Inputs of a linear, made by prepare(row, to): by all threads together, or of few rows by each for itself.
    template <typename Prepare>
    Activations prepared(const ActivationBuffer &buffer, int64_t rows, int thread, Prepare &&prepare) {
        Activations to = rows <= kOwnRows ? buffer.own(level_, thread) : buffer.view;
        if (rows > kOwnRows)
            team_.for_each(rows, [&](int64_t row) { prepare(row, to); });
        else
            for (int64_t row = 0; row < rows; row++) prepare(row, to);
        return to;
    }

    Activations prepared_rows(const ActivationBuffer &buffer, const float *x, int thread) {
        return prepared(buffer, in_.tokens, thread,
                        [&](int64_t token, Activations &to) { level_.prepare(x + token * to.columns, token, to); });
    }

    Activations normed_hidden(const ActivationBuffer &buffer, const std::vector<float> &weight, int thread) {
        return prepared(buffer, in_.tokens, thread, [&](int64_t token, Activations &to) {
            norm_and_prepare(thread, hidden_ + token * model_.config.hidden_size, weight, token, to);
        });
    }

    // Strips of a work unit: as many as leave each thread some units.
    int panel_strips(int64_t strips) const {
        return static_cast<int>(std::clamp<int64_t>(strips / (team_.threads() * 6), 1, kPanelStrips));
    }

    template <typename Do> void for_panels(int64_t strips, int width, int64_t rows, Do &&work) {
        const int64_t panels = (strips + width - 1) / width, chunks = (rows + kPanelRows - 1) / kPanelRows;
        team_.for_each(panels * chunks, [&](int64_t index) {
            const int64_t strip = index / chunks * width, row = index % chunks * kPanelRows;
            work(strip, static_cast<int>(std::min<int64_t>(width, strips - strip)), row,
                 static_cast<int>(std::min<int64_t>(kPanelRows, rows - row)));
        });
    }

    // All panels of a linear's output; `use` gets each once, on some thread.
    template <typename Use>
    void products(const Linear &linear, const Activations &in, int64_t rows, int thread, Use &&use) {
        float *data = model_.work.scratch_of[thread].panel;
        int64_t strips = 0;
        for (const PackedMatrix &part : linear.parts) strips += part.strips();
        const int width = panel_strips(strips);
        int64_t panels = 0;
        for (const PackedMatrix &part : linear.parts) panels += (part.strips() + width - 1) / width;
        const int64_t chunks = (rows + kPanelRows - 1) / kPanelRows;
        team_.for_each(panels * chunks, [&](int64_t index) {
            int64_t panel = index / chunks, first_column = 0;
            const PackedMatrix *part = linear.parts.data();
            for (int64_t own; panel >= (own = (part->strips() + width - 1) / width); part++)
                panel -= own, first_column += part->rows;
            const int64_t strip = panel * width, row = index % chunks * kPanelRows, column = strip * kTileOutputs;
            const int count = static_cast<int>(std::min<int64_t>(width, part->strips() - strip));
            const int here = static_cast<int>(std::min<int64_t>(kPanelRows, rows - row));
            level_.product(*part, in, row, here, strip, count, data);
            use(Panel{data, row, first_column + column, here,
                      static_cast<int>(std::min<int64_t>(count * kTileOutputs, part->rows - column))});
        });
    }

    // Chunks are cut into a few tokens each; a single token with a long past into spans.
    void plan_attention() {
        const int group = model_.config.num_heads / model_.config.num_kv_heads, kv_heads = model_.config.num_kv_heads;
        const int at_once = std::max(1, kUnitRows / group);
        const int64_t state = group * model_.attention(0).state_floats();
        int64_t states = 0;
        int32_t token = 0;
        for (int row = 0; row < in_.rows; row++) {
            const int length = in_.lengths[row], spans = in_.starts[row] / kSpan + 1;
            for (int head = 0; head < kv_heads; head++) {
                AttentionUnit unit{row, token, length, in_.starts[row], head, -1, nullptr};
                if (length == 1 && spans > 1) {
                    merges_.push_back({unit, spans, states});
                    states += spans;
                    continue;
                }
                for (int done = 0; done < length; done += at_once) {
                    unit.token = token + done, unit.position = in_.starts[row] + done;
                    unit.count = std::min(at_once, length - done);
                    units_.push_back(unit);
                }
            }
            token += length;
        }
        lone_units_ = merges_.empty() && in_.tokens == in_.rows;
        if (merges_.empty()) return;
        if (!model_.work.states.reserve(static_cast<size_t>(states * state) * 4)) throw std::bad_alloc();
        for (Merge &merge : merges_) {
            merge.unit.state = model_.work.states.as<float>() + merge.first_state * state;
            for (int span = 0; span < merge.spans; span++) {
                AttentionUnit unit = merge.unit;
                unit.span = span, unit.state += span * state;
                units_.push_back(unit);
            }
        }
    }

    Best *best_of(int thread) { return model_.work.logits_best.as<Best>() + thread * (model_.work.rows + 16); }

    void note_largest(const float *values, const Panel &panel, Best &best) const {
        const int index = level_.largest(values, panel.columns);
        const auto id = static_cast<int32_t>(panel.column + index);
        if (values[index] > best.value || (values[index] == best.value && id < best.id)) best = {values[index], id};
    }

    void merge_best() {
        for (size_t row = 0; row < sampling_.size(); row++) {
            Best best = best_of(0)[row];
            for (int thread = 1; thread < team_.threads(); thread++) {
                const Best &other = best_of(thread)[row];
                if (other.id >= 0 &&
                    (other.value > best.value || best.id < 0 || (other.value == best.value && other.id < best.id)))
                    best = other;
            }
            in_.greedy[row] = std::max(best.id, 0);
        }
    }

    struct Merge {
        AttentionUnit unit;
        int spans;
        int64_t first_state;
    };

    headrace_model &model_;
    const Level &level_;
    Team &team_;
    const headrace_step_arguments &in_;
    float *hidden_ = nullptr;
    bool lone_units_ = false;  // each attention unit is the only one that reads what its token writes
    std::vector<int32_t> token_row_, position_;
    std::vector<int> last_;                // token of each row
    std::vector<const float *> sampling_;  // hidden states whose logits are wanted
    std::vector<AttentionUnit> units_;
    std::vector<Merge> merges_;
};

}  // namespace

void run_step(headrace_model &model, const headrace_step_arguments &arguments) { Step(model, arguments).run(); }

void run_judged(headrace_model &model, int first, int count, float *logits) {
    headrace_step_arguments none{};
    Step step(model, none);
    const int64_t hidden = model.config.hidden_size;
    std::vector<const float *> rows;
    for (int i = 0; i < count; i++) rows.push_back(model.work.judged.as<float>() + (first + i) * hidden);
    model.team.run([&](int thread) {
        model.level.begin();
        step.head(thread, rows.data(), count, logits, false);
        model.level.end();
    });
}

}  // namespace headrace
