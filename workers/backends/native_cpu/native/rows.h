// What a step does to single rows, and to the panels that products leave.
#pragma once

#include "level.h"
#include "vector_math.h"

namespace headrace {
namespace {

inline void norm(const float *x, const float *weight, int64_t count, float eps, float *out) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 value = _mm512_maskz_loadu_ps(lanes(count - i), x + i);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(count);
    const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = lanes(count - i);
        const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), factor);
        _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, weight + i)));
    }
}

inline __m512 panel_value(const float *panel, int row, int column, __mmask16 mask, const float *bias) {
    const __m512 value = _mm512_load_ps(panel + row * kPanelWidth + column);
    return bias ? _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, bias + column)) : value;
}

inline void store(const float *panel, int rows, int count, const float *bias, float *out, int64_t stride) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < count; c += 16) {
            const __mmask16 mask = lanes(count - c);
            _mm512_mask_storeu_ps(out + r * stride + c, mask, panel_value(panel, r, c, mask, bias));
        }
}

inline void add(const float *panel, int rows, int count, const float *bias, float multiplier, float *out,
                int64_t stride) {
    const __m512 factor = _mm512_set1_ps(multiplier);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < count; c += 16) {
            const __mmask16 mask = lanes(count - c);
            float *at = out + r * stride + c;
            const __m512 sum =
                _mm512_fmadd_ps(panel_value(panel, r, c, mask, bias), factor, _mm512_maskz_loadu_ps(mask, at));
            _mm512_mask_storeu_ps(at, mask, sum);
        }
}

inline __m512 activated(int activation, __m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    if (activation == HEADRACE_SILU) {
        const __m512 negative = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), x));
        return _mm512_div_ps(x, _mm512_add_ps(one, exponential(negative)));
    }
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(x, x), x), _mm512_set1_ps(0.044715f), x);
    const __m512 tanh = hyperbolic_tangent(_mm512_mul_ps(cubic, _mm512_set1_ps(0.7978845608f)));
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x), _mm512_add_ps(one, tanh));
}

inline void activate(int activation, const float *gate, const float *up, int rows, int count, const float *gate_bias,
                     const float *up_bias, float *out, int64_t stride) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < count; c += 16) {
            const __mmask16 mask = lanes(count - c);
            const __m512 g = panel_value(gate, r, c, mask, gate_bias), u = panel_value(up, r, c, mask, up_bias);
            _mm512_mask_storeu_ps(out + r * stride + c, mask, _mm512_mul_ps(activated(activation, g), u));
        }
}

inline void finish_logits(const float *panel, int rows, int count, float multiplier, float softcap, float *out,
                          int64_t stride) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < count; c += 16) {
            __m512 value = _mm512_mul_ps(_mm512_load_ps(panel + r * kPanelWidth + c), _mm512_set1_ps(multiplier));
            if (softcap > 0) value = soft_capped(value, softcap);
            _mm512_mask_storeu_ps(out + r * stride + c, lanes(count - c), value);
        }
}

inline int largest(const float *values, int count) {
    const __m512 least = _mm512_set1_ps(-__builtin_inff());
    __m512 most = least;
    for (int i = 0; i < count; i += 16)
        most = _mm512_max_ps(_mm512_mask_loadu_ps(least, lanes(count - i), values + i), most);
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int i = 0; i < count; i += 16) {
        const __mmask16 equal =
            _mm512_cmp_ps_mask(_mm512_mask_loadu_ps(least, lanes(count - i), values + i), most, _CMP_EQ_OQ);
        if (equal & lanes(count - i)) return i + __builtin_ctz(equal);
    }
    return 0;
}

// Rotates the halves of the leading rotary_dim values: (low, high) -> (low cos - high sin, high cos + low sin).
inline void rotate(float *head, const Rotation &rotation) {
    const int half = rotation.rotary_dim / 2;
    for (int i = 0; i < half; i += 16) {
        const __mmask16 mask = lanes(half - i);
        const __m512 low = _mm512_maskz_loadu_ps(mask, head + i), high = _mm512_maskz_loadu_ps(mask, head + half + i);
        const __m512 cos = _mm512_maskz_loadu_ps(mask, rotation.cos + i),
                     sin = _mm512_maskz_loadu_ps(mask, rotation.sin + i);
        _mm512_mask_storeu_ps(head + i, mask, _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin)));
        _mm512_mask_storeu_ps(head + half + i, mask, _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin)));
    }
}

// Where value `dim` of a token goes in K and in V of a block: index of a 16- or 8-bit value.
inline int64_t key_index(int dim, int token) { return (dim / 2 * kBlockTokens + token) * 2 + dim % 2; }
inline int64_t value_index(int dim, int token) {
    return ((dim / 16 * (kBlockTokens / 2) + token / 2) * 16 + dim % 16) * 2 + token % 2;
}

// 127 integers and a scale; what is not finite makes the scale NaN.
inline float to_int8(const float *x, int count, int8_t *codes) {
    const float largest = largest_magnitude(x, count);
    if (!all_finite(x, count)) {
        memset(codes, 0, count);
        return __builtin_nanf("");
    }
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? 127.0f / largest : 0.0f);
    for (int i = 0; i < count; i += 16) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes(count - i), x + i), inverse));
        _mm_mask_storeu_epi8(codes + i, lanes(count - i), _mm512_cvtsepi32_epi8(code));
    }
    return largest > 1e-30f ? largest / 127.0f : 0.0f;
}

inline void put_head(const KvLayout &kv, uint8_t *head, const float *key, const float *value, int token) {
    uint8_t *values = head + kv.part_bytes;
    if (kv.int8) {
        alignas(64) int8_t k[512], v[512];
        auto *scales = reinterpret_cast<float *>(head + 2 * kv.part_bytes);
        scales[token] = to_int8(key, kv.head_dim, k);
        scales[kBlockTokens + token] = to_int8(value, kv.head_dim, v);
        for (int dim = 0; dim < kv.head_dim; dim++) {
            head[key_index(dim, token)] = static_cast<uint8_t>(k[dim]);
            values[value_index(dim, token)] = static_cast<uint8_t>(v[dim]);
        }
        return;
    }
    alignas(64) uint16_t k[512], v[512];
    for (int i = 0; i < kv.head_dim; i += 16) {
        const __mmask16 mask = lanes(kv.head_dim - i);
        store_values(k + i, mask, _mm512_maskz_loadu_ps(mask, key + i));
        store_values(v + i, mask, _mm512_maskz_loadu_ps(mask, value + i));
    }
    for (int dim = 0; dim < kv.head_dim; dim++) {
        memcpy(head + key_index(dim, token) * 2, &k[dim], 2);
        memcpy(values + value_index(dim, token) * 2, &v[dim], 2);
    }
}

template <class Engine>
void write_kv(const Attention &attention, const Rotation &rotation, const float *qkv, int64_t token, int kv_head,
              int32_t block, int offset, float *scratch) {
    using Value = typename Engine::Value;
    const KvLayout &kv = attention.kv;
    const int width = kv.head_dim, group = attention.group, heads = group * kv.kv_heads;
    const auto turn = [&](const float *from, const float *weight) {
        if (weight)
            norm(from, weight, width, rotation.norm_eps, scratch);
        else
            memcpy(scratch, from, width * sizeof(float));
        rotate(scratch, rotation);
    };
    auto *queries =
        reinterpret_cast<Value *>(attention.queries) + (kv_head * attention.tokens + token) * group * kv.padded_dim;
    for (int g = 0; g < group; g++) {
        turn(qkv + (kv_head * group + g) * width, rotation.q_norm);
        for (int i = 0; i < kv.padded_dim; i += 16)
            store_values(queries + g * kv.padded_dim + i, 0xffff,
                         i < width ? _mm512_maskz_loadu_ps(lanes(width - i), scratch + i) : _mm512_setzero_ps());
    }
    turn(qkv + (heads + kv_head) * width, rotation.k_norm);
    uint8_t *head = attention.pool + block * kv.block_bytes + kv_head * kv.head_bytes;
    put_head(kv, head, scratch, qkv + (heads + kv.kv_heads + kv_head) * width, offset);
}

}  // namespace
}  // namespace headrace
