// Products of activations with packed matrices, over an engine.
#pragma once

#include "level.h"
#include "vector_math.h"

namespace headrace {
namespace {

// With few rows a product waits for its weights. They are brought closer this many bytes before they are needed, at
// the end of a strip those of the next panel: strips are too short for the processor to find that out by itself.
constexpr int kAhead = 2048;
constexpr int kFewRows = 16;
constexpr int kRowBytes = 64;  // of a tile of bf16

inline void fetch_ahead(const uint8_t *strip, int64_t offset, int64_t bytes, int64_t strip_bytes, int strips) {
    int64_t at = offset + kAhead;
    if (at >= strip_bytes) at += (strips - 1) * strip_bytes;
    for (int64_t line = 0; line < bytes; line += kRowBytes)
        _mm_prefetch(reinterpret_cast<const char *>(strip + at + line), _MM_HINT_T0);
}

template <class Engine, int kType>
void quantised_product(const PackedMatrix &matrix, const Activations &in, int64_t row, int rows, int64_t strip,
                       int strips, float *panel) {
    const Expander<kType, Engine::kCodes> expand;
    const Format &format = *matrix.format;
    const int64_t tiles = matrix.tiles();
    const uint8_t *from[kPanelStrips];
    for (int s = 0; s < strips; s++) from[s] = matrix.strip(strip + s);
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < strips; s++) _mm512_store_ps(panel + r * kPanelWidth + s * 16, _mm512_setzero_ps());
    alignas(64) uint16_t expanded[kPanelStrips * 512];
    TileScales scales;
    const int64_t strip_bytes = format.strip_bytes(matrix.columns);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t offset = format.tile_offset(tile), header = format.header_offset(tile);
        for (int s = 0; s < strips; s++) {
            fetch_ahead(from[s], offset, format.tile, strip_bytes, strips);
            expand(from[s] + offset, expanded + s * 512);
            load_scales<kType>(from[s] + header, from[s] + offset + format.scales, scales, s);
        }
        Engine::template add_tile<kHasHalves<kType>, kHasMinimum<kType>>(in, row, rows, tile, expanded, strips, scales,
                                                                         panel);
    }
    if constexpr (kType == HEADRACE_INT8)
        for (int s = 0; s < strips; s++) {
            const __m512 scale = _mm512_loadu_ps(from[s] + format.strip_bytes(matrix.columns) - 64);
            for (int r = 0; r < rows; r++) {
                float *at = panel + r * kPanelWidth + s * 16;
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), scale));
            }
        }
}

template <class Engine>
void dense_product(const PackedMatrix &matrix, const Activations &in, int64_t row, int rows, int64_t strip, int strips,
                   float *panel) {
    const uint16_t *tiles[kPanelStrips];
    for (int s = 0; s < strips; s++) tiles[s] = reinterpret_cast<const uint16_t *>(matrix.strip(strip + s));
    const auto *x = reinterpret_cast<const typename Engine::Value *>(in.dense) + row * in.padded;
    const int pairs = static_cast<int>(in.padded / 2), last = pairs - kAhead / kRowBytes;
    if (rows > kFewRows || last <= 0) {
        Engine::product(x, in.padded, rows, tiles, strips, pairs, panel, kPanelWidth, false);
        return;
    }
    constexpr int64_t kFurther = kAhead / 2;
    Engine::product(x, in.padded, rows, tiles, strips, last, panel, kPanelWidth, false, kFurther);
    for (int s = 0; s < strips; s++) tiles[s] += last * 32;
    const int64_t next_panel = kFurther + (strips - 1) * pairs * 32;
    Engine::product(x + last * 2, in.padded, rows, tiles, strips, pairs - last, panel, kPanelWidth, true, next_panel);
}

template <class Engine>
void product(const PackedMatrix &matrix, const Activations &in, int64_t row, int rows, int64_t strip, int strips,
             float *panel) {
    switch (matrix.format->type) {
    case HEADRACE_BF16: return dense_product<Engine>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_INT8: return quantised_product<Engine, HEADRACE_INT8>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_Q4_0: return quantised_product<Engine, HEADRACE_Q4_0>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_Q4_1: return quantised_product<Engine, HEADRACE_Q4_1>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_Q5_0: return quantised_product<Engine, HEADRACE_Q5_0>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_Q5_1: return quantised_product<Engine, HEADRACE_Q5_1>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_Q8_0: return quantised_product<Engine, HEADRACE_Q8_0>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_Q4_K: return quantised_product<Engine, HEADRACE_Q4_K>(matrix, in, row, rows, strip, strips, panel);
    case HEADRACE_Q5_K: return quantised_product<Engine, HEADRACE_Q5_K>(matrix, in, row, rows, strip, strips, panel);
    default: return quantised_product<Engine, HEADRACE_Q6_K>(matrix, in, row, rows, strip, strips, panel);
    }
}

// Blocks of 32 as 16-bit integers times a scale. What is not finite stays so: its scale is NaN.
inline void to_codes(const float *x, int64_t columns, int64_t row, Activations &to) {
    for (int64_t block = 0; block < to.blocks(); block++) {
        const int64_t first = block * kTileInputs, left = columns - first;
        const __m512 a = _mm512_maskz_loadu_ps(lanes(left), x + first);
        const __m512 b = left > 16 ? _mm512_maskz_loadu_ps(lanes(left - 16), x + first + 16) : _mm512_setzero_ps();
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        const bool finite = !(_mm512_fpclass_ps_mask(a, 0x99) | _mm512_fpclass_ps_mask(b, 0x99));
        const bool zero = finite && largest < 1e-30f;
        const float scale = !finite ? __builtin_nanf("") : zero ? 0.0f : largest / 32767.0f;
        const __m512 inverse = _mm512_set1_ps(finite && !zero ? 32767.0f / largest : 0.0f);
        const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)),
                      q = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        auto *codes = reinterpret_cast<__m256i *>(to.codes + row * to.padded + first);
        _mm256_storeu_si256(codes, _mm512_cvtsepi32_epi16(p));
        _mm256_storeu_si256(codes + 1, _mm512_cvtsepi32_epi16(q));
        to.scales[row * to.blocks() + block] = scale;
        to.sums[row * to.blocks() + block] =
            scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(p, q)));
    }
}

template <class Value> inline __m512 load_values(const Value *from);
template <> inline __m512 load_values(const float *from) { return _mm512_loadu_ps(from); }
template <> inline __m512 load_values(const uint16_t *from) {
    return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

template <class Engine> void prepare(const float *x, int64_t row, Activations &to) {
    using Value = typename Engine::Value;
    auto *dense = reinterpret_cast<Value *>(to.dense) + row * to.padded;
    if (to.wants_dense || !Engine::kHasCodes)
        for (int64_t i = 0; i < to.padded; i += 16)
            store_values(dense + i, 0xffff,
                         i < to.columns ? _mm512_maskz_loadu_ps(lanes(to.columns - i), x + i) : _mm512_setzero_ps());
    if (!to.wants_blocks) return;
    if constexpr (Engine::kHasCodes) {
        to_codes(x, to.columns, row, to);
    } else {
        for (int64_t block = 0; block < to.blocks(); block++) {
            const Value *from = dense + block * kTileInputs;
            const __m512 sum = _mm512_add_ps(load_values(from), load_values(from + 16));
            to.sums[row * to.blocks() + block] = _mm512_reduce_add_ps(sum);
        }
    }
}

}  // namespace
}  // namespace headrace
