// Products on AVX-512: fp32 values for bf16 matrices, 16-bit integers for quantised ones.
//
// fp32 because the CPUs that have a bf16 product without AMX start one every other cycle, but two fp32
// multiply-adds every cycle. 16 bits for activations because two such products start every cycle as well and their
// sums over 32 inputs are exact.
#pragma once

#include <type_traits>

#include "expand.h"
#include "level.h"

namespace headrace {
namespace {

#define INLINE __attribute__((always_inline))

// Rows of a register block and tiles beside each other: 24 accumulators leave registers for the tiles.
constexpr int kBlockRows = 6;
constexpr int kPrefetchRows = 4;  // more rows keep the multipliers busy enough

struct Avx512 {
    using Value = float;
    static constexpr bool kHasCodes = true;
    static constexpr Codes kCodes = Codes::kInt16;

    static void begin() {}
    static void end() {}

    // out [rows, tiles * 16] = (or += if add) x [rows, 2 * pairs] times bf16 tiles that continue for all pairs.
    // With few rows what lies `ahead` values further is brought closer.
    static void product(const float *x, int64_t x_stride, int rows, const uint16_t *const *tiles, int count, int pairs,
                        float *out, int64_t stride, bool add, int64_t ahead = 0) {
        for (int done = 0; done < rows;) {
            const int size = next_rows(rows - done);
            for (int tile = 0; tile < count; tile += tiles_at_once(count - tile))
                kDense[size - 1][tiles_at_once(count - tile) / 2](x + done * x_stride, x_stride, tiles + tile, pairs,
                                                                  out + done * stride + tile * 16, stride, add, ahead);
            done += size;
        }
    }

    // panel += one k-tile of `count` strips, expanded to int16 [count, 16, 32].
    template <bool kHalves, bool kMinimum>
    static void add_tile(const Activations &in, int64_t row, int rows, int64_t tile, const uint16_t *expanded,
                         int count, const TileScales &scales, float *panel) {
        for (int done = 0; done < rows;) {
            const int size = next_rows(rows - done);
            const int64_t first = row + done, block = first * in.blocks() + tile;
            for (int t = 0; t < count; t += tiles_at_once(count - t)) {
                const Integer integer = {in.codes + first * in.padded + tile * kTileInputs,
                                         in.padded,
                                         in.scales + block,
                                         in.sums + block,
                                         in.blocks(),
                                         expanded + t * 512,
                                         &scales,
                                         t};
                kIntegers<kHalves, kMinimum>[size - 1][tiles_at_once(count - t) / 2](
                    integer, panel + done *kPanelWidth + t * 16);
            }
            done += size;
        }
    }

private:
    // Rows in nearly equal groups: 7 as 4 + 3.
    static int next_rows(int left) {
        const int groups = (left + kBlockRows - 1) / kBlockRows;
        return (left + groups - 1) / groups;
    }

    static int tiles_at_once(int left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

    template <int kRows, int kTiles>
    static void dense(const float *x, int64_t x_stride, const uint16_t *const *tiles, int pairs, float *out,
                      int64_t stride, bool add, int64_t ahead) {
        __m512 sum[kRows][kTiles];
        const uint16_t *from[kTiles];
        each<kTiles>([&](auto t) INLINE { from[t] = tiles[t]; });
        each<kRows>([&](auto r) INLINE {
            each<kTiles>([&](auto t) INLINE {
                sum[r][t] = add ? _mm512_loadu_ps(out + r * stride + t * 16) : _mm512_setzero_ps();
            });
        });
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        for (int pair = 0; pair < pairs; pair++, x += 2) {
            __m512 w[kTiles];
            const auto multiply = [&](int k) INLINE {
                each<kRows>([&](auto r) INLINE {
                    const __m512 value = _mm512_set1_ps(x[r * x_stride + k]);
                    each<kTiles>([&](auto t) INLINE { multiply_add(sum[r][t], value, w[t]); });
                });
            };
            each<kTiles>([&](auto t) INLINE {
                w[t] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from[t] + pair * 32), 16));
            });
            multiply(0);
            if constexpr (kRows <= kPrefetchRows)
                each<kTiles>([&](auto t) INLINE { _mm_prefetch(from[t] + pair * 32 + ahead, _MM_HINT_T0); });
            each<kTiles>([&](auto t) INLINE {
                w[t] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from[t] + pair * 32), upper));
            });
            multiply(1);
        }
        each<kRows>([&](auto r) INLINE {
            each<kTiles>([&](auto t) INLINE { _mm512_storeu_ps(out + r * stride + t * 16, sum[r][t]); });
        });
    }

    struct Integer {
        const int16_t *codes;
        int64_t stride;
        const float *scales, *sums;
        int64_t block_stride;
        const uint16_t *expanded;
        const TileScales *tile_scales;  // whose first to use is `tile`
        int tile;
    };

    template <int kRows, int kTiles, bool kHalves, bool kMinimum>
    static void integers(const Integer &in, float *panel) {
        constexpr int kParts = kHalves ? 2 : 1, kPairs = kTilePairs / kParts;
        each<kParts>([&](auto part) INLINE {
            __m512i sum[kRows][kTiles];
            each<kRows>([&](auto r)
                            INLINE { each<kTiles>([&](auto t) INLINE { sum[r][t] = _mm512_setzero_si512(); }); });
            const int16_t *codes = in.codes + part * kPairs * 2;
            const uint16_t *from = in.expanded + part * kPairs * 32;
            for (int pair = 0; pair < kPairs; pair++, codes += 2, from += 32) {
                __m512i w[kTiles];
                each<kTiles>([&](auto t) INLINE { w[t] = _mm512_load_si512(from + t * 512); });
                each<kRows>([&](auto r) INLINE {
                    int32_t two;
                    memcpy(&two, codes + r * in.stride, 4);
                    const __m512i values = _mm512_set1_epi32(two);
                    each<kTiles>([&](auto t) INLINE { multiply_add(sum[r][t], values, w[t]); });
                });
            }
            each<kRows>([&](auto r) INLINE {
                const __m512 scale = _mm512_set1_ps(in.scales[r * in.block_stride]);
                const __m512 total = kMinimum ? _mm512_set1_ps(in.sums[r * in.block_stride]) : scale;
                each<kTiles>([&](auto t) INLINE {
                    float *at = panel + r * kPanelWidth + t * 16;
                    const __m512 d = _mm512_mul_ps(in.tile_scales->d[part][in.tile + t], scale);
                    __m512 result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][t]), d, _mm512_load_ps(at));
                    if constexpr (kMinimum) result = _mm512_fmadd_ps(in.tile_scales->m[in.tile + t], total, result);
                    _mm512_store_ps(at, result);
                });
            });
        });
    }

    // In assembly, because gcc 12 else copies the sums from register to register and keeps them on the stack as well.
    static void multiply_add(__m512 &sum, __m512 a, __m512 b) {
        asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    }
    static void multiply_add(__m512i &sum, __m512i a, __m512i b) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    }

    // do(0), do(1) ... with constants, so that arrays become registers.
    template <int kCount, int kFirst = 0, typename Do> INLINE static void each(const Do &what) {
        if constexpr (kFirst < kCount) {
            what(std::integral_constant<int, kFirst>{});
            each<kCount, kFirst + 1>(what);
        }
    }

    using Dense = void (*)(const float *, int64_t, const uint16_t *const *, int, float *, int64_t, bool, int64_t);
    using Integers = void (*)(const Integer &, float *);

    // For 1, 2 and 4 tiles.
    template <typename Function> struct ByTiles {
        Function functions[3];
        constexpr Function operator[](int index) const { return functions[index]; }
    };
    template <int kRows> static constexpr ByTiles<Dense> dense_row() {
        return {{dense<kRows, 1>, dense<kRows, 2>, dense<kRows, 4>}};
    }
    template <int kRows, bool kHalves, bool kMinimum> static constexpr ByTiles<Integers> integer_row() {
        return {{integers<kRows, 1, kHalves, kMinimum>, integers<kRows, 2, kHalves, kMinimum>,
                 integers<kRows, 4, kHalves, kMinimum>}};
    }

    static const ByTiles<Dense> kDense[kBlockRows];
    template <bool kHalves, bool kMinimum> static const ByTiles<Integers> kIntegers[kBlockRows];
};

const Avx512::ByTiles<Avx512::Dense> Avx512::kDense[kBlockRows] = {dense_row<1>(), dense_row<2>(), dense_row<3>(),
                                                                   dense_row<4>(), dense_row<5>(), dense_row<6>()};
template <bool kHalves, bool kMinimum>
const Avx512::ByTiles<Avx512::Integers> Avx512::kIntegers[kBlockRows] = {
    integer_row<1, kHalves, kMinimum>(), integer_row<2, kHalves, kMinimum>(), integer_row<3, kHalves, kMinimum>(),
    integer_row<4, kHalves, kMinimum>(), integer_row<5, kHalves, kMinimum>(), integer_row<6, kHalves, kMinimum>()};

#undef INLINE

}  // namespace
}  // namespace headrace
