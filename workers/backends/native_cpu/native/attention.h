// Attention over the paged pool, over an engine: softmax in tiles of kKvTile tokens from position 0 on, summed from
// zero in spans of kSpan, spans merged in order. So what a query gets depends on its position alone, not on the chunk
// or the batch that it is part of.
#pragma once

#include "expand.h"
#include "level.h"
#include "vector_math.h"

namespace headrace {
namespace {

constexpr int kTileBlocks = kKvTile / kBlockTokens;
constexpr int kTileVectors = kKvTile / 16;

// Per query row: its maximum, its sum, and from index 16 on its weighted values, unnormalised.
struct SpanState {
    float *data;
    int64_t stride;
    float &maximum(int row) const { return data[row * stride]; }
    float &sum(int row) const { return data[row * stride + 1]; }
    float *values(int row) const { return data + row * stride + 16; }
};

template <class Engine> class AttentionOf {
    using Value = typename Engine::Value;

public:
    static int64_t scratch_bytes(const Attention &a) {
        const int64_t rows = most_rows(a);
        const int64_t states = 2 * rows * a.state_floats() * 4;
        const int64_t expanded = a.kv.int8 ? 2 * kKvTile * a.kv.padded_dim * 2 : 0;
        return states + rows * kKvTile * 4 + rows * kKvTile * 4 + expanded;
    }

    static void attend(const Attention &a, const AttentionUnit &unit, uint8_t *scratch) {
        AttentionOf self(a, unit, scratch);
        const int last = unit.position + unit.count - 1;
        if (unit.span >= 0) {
            self.attend_span(unit.span, SpanState{unit.state, a.state_floats()});
            return;
        }
        self.clear(self.total_);
        for (int span = 0; span <= last / kSpan; span++) {
            if ((span + 1) * kSpan <= self.first_seen()) continue;
            self.attend_span(span, self.state_);
            self.merge_into_total(self.state_);
        }
        self.finish();
    }

    static void merge(const Attention &a, const AttentionUnit &unit, int spans, int64_t stride, uint8_t *scratch) {
        AttentionOf self(a, unit, scratch);
        self.clear(self.total_);
        for (int span = 0; span < spans; span++)
            self.merge_into_total(SpanState{unit.state + span * stride, a.state_floats()});
        self.finish();
    }

private:
    AttentionOf(const Attention &a, const AttentionUnit &unit, uint8_t *scratch)
        : a_(a), unit_(unit), rows_(unit.count * a.group) {
        const int64_t most = most_rows(a);
        auto take = [&](int64_t bytes) {
            uint8_t *taken = scratch;
            scratch += bytes;
            return taken;
        };
        state_ = {reinterpret_cast<float *>(take(most * a.state_floats() * 4)), a.state_floats()};
        total_ = {reinterpret_cast<float *>(take(most * a.state_floats() * 4)), a.state_floats()};
        scores_ = reinterpret_cast<float *>(take(most * kKvTile * 4));
        weights_ = reinterpret_cast<Value *>(take(most * kKvTile * 4));
        if (a.kv.int8) {
            keys_ = reinterpret_cast<uint16_t *>(take(kKvTile * a.kv.padded_dim * 2));
            values_ = reinterpret_cast<uint16_t *>(take(kKvTile * a.kv.padded_dim * 2));
        }
    }

    static int64_t most_rows(const Attention &a) { return a.group > kUnitRows ? a.group : kUnitRows; }

    // First position that any query of the unit sees.
    int first_seen() const {
        const int first = a_.window ? unit_.position - a_.window + 1 : 0;
        return first > 0 ? first : 0;
    }

    void clear(const SpanState &state) const {
        for (int row = 0; row < rows_; row++) {
            state.maximum(row) = -__builtin_inff();
            state.sum(row) = 0;
            memset(state.values(row), 0, a_.kv.padded_dim * sizeof(float));
        }
    }

    void attend_span(int span, const SpanState &state) {
        clear(state);
        const int end = unit_.position + unit_.count;
        for (int first = span * kSpan; first < (span + 1) * kSpan && first < end; first += kKvTile)
            if (first + kKvTile > first_seen()) attend_tile(first, state);
    }

    void attend_tile(int first, const SpanState &state) {
        const KvLayout &kv = a_.kv;
        const int left = unit_.position + unit_.count - first;
        const int blocks = left >= kKvTile ? kTileBlocks : (left + kBlockTokens - 1) / kBlockTokens;
        const uint16_t *keys[kTileBlocks], *values[kTileBlocks];
        const float *scales[kTileBlocks];
        for (int b = 0; b < blocks; b++) {
            const int32_t block =
                a_.block_tables[static_cast<int64_t>(unit_.row) * a_.table_width + first / kBlockTokens + b];
            const uint8_t *head = a_.pool + block * kv.block_bytes + unit_.kv_head * kv.head_bytes;
            if (kv.int8) {
                keys[b] = keys_ + b * kBlockTokens * kv.padded_dim,
                values[b] = values_ + b * kBlockTokens * kv.padded_dim;
                expand(head, kv.part_bytes, keys_ + b * kBlockTokens * kv.padded_dim);
                expand(head + kv.part_bytes, kv.part_bytes, values_ + b * kBlockTokens * kv.padded_dim);
                scales[b] = reinterpret_cast<const float *>(head + 2 * kv.part_bytes);
            } else {
                keys[b] = reinterpret_cast<const uint16_t *>(head);
                values[b] = reinterpret_cast<const uint16_t *>(head + kv.part_bytes);
            }
        }
        const Value *queries = reinterpret_cast<const Value *>(a_.queries) +
                               (unit_.kv_head * a_.tokens + unit_.token) * a_.group * kv.padded_dim;
        Engine::product(queries, kv.padded_dim, rows_, keys, blocks, kv.padded_dim / 2, scores_, kKvTile, false);
        for (int row = 0; row < rows_; row++) weigh(row, first, blocks, kv.int8 ? scales : nullptr, state);
        for (int column = 0; column < kv.padded_dim; column += 4 * 16) {
            const int tiles = kv.padded_dim - column >= 64 ? 4 : (kv.padded_dim - column) / 16;
            for (int b = 0; b < blocks; b++) {
                const uint16_t *parts[4];
                for (int t = 0; t < tiles; t++) parts[t] = values[b] + (column / 16 + t) * kBlockTokens * 16;
                Engine::product(weights_ + b * kBlockTokens, kKvTile, rows_, parts, tiles, kBlockTokens / 2,
                                state.values(0) + column, state.stride, true);
            }
        }
    }

    // Scores of a row to weights; what was summed before is scaled to the new maximum.
    void weigh(int row, int first, int blocks, const float *const *scales, const SpanState &state) {
        const int position = unit_.position + row / a_.group;
        const int from = a_.window && position - a_.window + 1 > first ? position - a_.window + 1 - first : 0;
        const int until = position + 1 - first;  // of the tile's tokens, [from, until) are seen
        __m512 scores[kTileVectors];
        __mmask16 seen[kTileVectors];
        __m512 largest = _mm512_set1_ps(-__builtin_inff());
        for (int v = 0; v < kTileVectors; v++) {
            seen[v] = v < blocks ? between(from - v * 16, until - v * 16) : 0;
            __m512 score = _mm512_maskz_mul_ps(seen[v], _mm512_loadu_ps(scores_ + row * kKvTile + v * 16),
                                               _mm512_set1_ps(a_.scale));
            if (scales && seen[v]) score = _mm512_maskz_mul_ps(seen[v], score, _mm512_loadu_ps(scales[v]));
            if (a_.softcap > 0) score = soft_capped(score, a_.softcap);
            scores[v] = score;
            largest = _mm512_mask_max_ps(largest, seen[v], score, largest);
        }
        const float before = state.maximum(row), here = _mm512_reduce_max_ps(largest);
        const float maximum = here > before ? here : before;
        const bool any = maximum > -__builtin_inff();
        __m512 sum = _mm512_setzero_ps();
        for (int v = 0; v < kTileVectors; v++) {
            __m512 weight = _mm512_maskz_mov_ps(
                seen[v], exponential(_mm512_sub_ps(scores[v], _mm512_set1_ps(any ? maximum : 0.0f))));
            sum = _mm512_add_ps(sum, weight);
            if (scales && seen[v])
                weight = _mm512_maskz_mul_ps(seen[v], weight, _mm512_loadu_ps(scales[v] + kBlockTokens));
            store_values(weights_ + row * kKvTile + v * 16, 0xffff, weight);
        }
        state.sum(row) = state.sum(row) * rescale(state, row, maximum) + _mm512_reduce_add_ps(sum);
        state.maximum(row) = maximum;
    }

    // Scales a row's values to a new maximum and returns the factor.
    float rescale(const SpanState &state, int row, float maximum) const {
        const float before = state.maximum(row);
        if (!(before > -__builtin_inff()) || before == maximum) return 1.0f;
        const float factor = _mm512_cvtss_f32(exponential(_mm512_set1_ps(before - maximum)));
        float *values = state.values(row);
        for (int i = 0; i < a_.kv.padded_dim; i += 16)
            _mm512_storeu_ps(values + i, _mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(factor)));
        return factor;
    }

    void merge_into_total(const SpanState &span) {
        for (int row = 0; row < rows_; row++) {
            const float here = span.maximum(row), before = total_.maximum(row);
            if (!(here > -__builtin_inff()) && span.sum(row) == 0) continue;  // sees nothing of it
            const float maximum = here > before ? here : before;
            const float old = rescale(total_, row, maximum);
            const float factor = here == maximum ? 1.0f : _mm512_cvtss_f32(exponential(_mm512_set1_ps(here - maximum)));
            total_.sum(row) = total_.sum(row) * old + span.sum(row) * factor;
            total_.maximum(row) = maximum;
            for (int i = 0; i < a_.kv.padded_dim; i += 16) {
                float *at = total_.values(row) + i;
                _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(span.values(row) + i), _mm512_set1_ps(factor),
                                                     _mm512_loadu_ps(at)));
            }
        }
    }

    void finish() const {
        const int width = a_.kv.head_dim;
        for (int row = 0; row < rows_; row++) {
            const int64_t token = unit_.token + row / a_.group;
            float *out = a_.out + (token * a_.kv.kv_heads + unit_.kv_head) * a_.group * width + row % a_.group * width;
            const __m512 factor = _mm512_set1_ps(1.0f / total_.sum(row));
            for (int i = 0; i < width; i += 16)
                _mm512_mask_storeu_ps(out + i, lanes(width - i),
                                      _mm512_mul_ps(_mm512_loadu_ps(total_.values(row) + i), factor));
        }
    }

    static void expand(const uint8_t *codes, int64_t count, uint16_t *out) {
        const Expander<HEADRACE_Q8_0, Codes::kBf16> expander;
        for (int64_t i = 0; i < count; i += 512) expander(codes + i, out + i);
    }

    static __mmask16 between(int from, int until) {
        if (until <= 0 || from >= 16) return 0;
        const __mmask16 below = lanes(until), skipped = from > 0 ? lanes(from) : 0;
        return static_cast<__mmask16>(below & ~skipped);
    }

    const Attention &a_;
    const AttentionUnit &unit_;
    int rows_;
    SpanState state_{}, total_{};
    float *scores_ = nullptr;
    Value *weights_ = nullptr;
    uint16_t *keys_ = nullptr, *values_ = nullptr;
};

}  // namespace
}  // namespace headrace
