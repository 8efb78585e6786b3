// Products on AMX: bf16 values times bf16 tiles, or integers that bf16 holds exactly.
//
// Registers in the narrow shape: 0-3 sums of four tiles side by side, 4 rows of x, 5 rows of half a tile's inputs,
// 6 a tile, 7 half of one. In the wide shape: 0-3 sums of two times two tiles, 4 and 5 rows of x, 6 and 7 tiles.
#pragma once

#include <initializer_list>

#ifdef HEADRACE_TILES_EMULATED
#include "tiles_emulated.h"
#else
#include "tiles_amx.h"
#endif

#include "expand.h"
#include "level.h"

namespace headrace {
namespace {

struct Amx {
    using Value = uint16_t;
    static constexpr bool kHasCodes = false;
    static constexpr Codes kCodes = Codes::kBf16;

    static void begin() { shape() = Shape{}; }
    static void end() {
        shape() = Shape{};
        Tiles::release();
    }

    static void product(const uint16_t *x, int64_t x_stride, int rows, const uint16_t *const *tiles, int count,
                        int pairs, float *out, int64_t stride, bool add, int64_t ahead = 0) {
        int done = 0;
        if (rows > 16 && pairs % kTilePairs == 0)
            for (; rows - done > 16;) {
                const int size = rows - done < 32 ? rows - done : 32;
                wide(x + done * x_stride, x_stride, size, tiles, count, pairs, out + done * stride, stride, add);
                done += size;
            }
        for (; done < rows; done += 16) {
            const int size = rows - done < 16 ? rows - done : 16;
            narrow(x + done * x_stride, x_stride, size, tiles, count, pairs, out + done * stride, stride, add,
                   rows <= 16 ? ahead : 0);
        }
    }

    template <bool kHalves, bool kMinimum>
    static void add_tile(const Activations &in, int64_t row, int rows, int64_t tile, const uint16_t *expanded,
                         int count, const TileScales &scales, float *panel) {
        constexpr int kParts = kHalves ? 2 : 1, kPairs = kTilePairs / kParts;
        const auto *x = reinterpret_cast<const uint16_t *>(in.dense) + row * in.padded + tile * kTileInputs;
        for (int part = 0; part < kParts; part++) {
            alignas(64) float products[kPanelRows * kPanelWidth];
            const uint16_t *tiles[kPanelStrips];
            for (int t = 0; t < count; t++) tiles[t] = expanded + t * 512 + part * kPairs * 32;
            product(x + part * kPairs * 2, in.padded, rows, tiles, count, kPairs, products, kPanelWidth, false);
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < count; t++) {
                    const int at = r * kPanelWidth + t * 16;
                    __m512 sum =
                        _mm512_fmadd_ps(_mm512_load_ps(products + at), scales.d[part][t], _mm512_load_ps(panel + at));
                    if constexpr (kMinimum)
                        sum =
                            _mm512_fmadd_ps(scales.m[t], _mm512_set1_ps(in.sums[(row + r) * in.blocks() + tile]), sum);
                    _mm512_store_ps(panel + at, sum);
                }
        }
    }

private:
    struct Shape {
        bool wide = false;
        int first = 0, second = 0;  // rows of x; 0: not configured
    };
    static Shape &shape() {
        thread_local Shape shape;
        return shape;
    }

    static void configure(bool wide, int first, int second) {
        Shape &now = shape();
        if (now.first == first && now.second == second && now.wide == wide) return;
        now = {wide, first, second};
        TileShapes shapes;
        memset(&shapes, 0, sizeof(shapes));
        shapes.palette = 1;
        for (int tile = 0; tile < 8; tile++) shapes.rows[tile] = 16, shapes.column_bytes[tile] = 64;
        const auto set_rows = [&](int tile, int rows) { shapes.rows[tile] = static_cast<uint8_t>(rows); };
        if (wide) {
            for (int tile : {0, 1, 4}) set_rows(tile, first);
            for (int tile : {2, 3, 5}) set_rows(tile, second);
        } else {
            for (int tile : {0, 1, 2, 3, 4, 5}) set_rows(tile, first);
            shapes.column_bytes[5] = 32, shapes.rows[7] = 8;
        }
        Tiles::configure(shapes);
    }

    template <int kTile> static void start(const float *out, int64_t stride, bool add) {
        if (add)
            Tiles::load<kTile>(out, stride * 4);
        else
            Tiles::zero<kTile>();
    }

    static void narrow(const uint16_t *x, int64_t x_stride, int rows, const uint16_t *const *tiles, int count,
                       int pairs, float *out, int64_t stride, bool add, int64_t ahead) {
        configure(false, rows, 0);
        start<0>(out, stride, add);
        if (count > 1) start<1>(out + 16, stride, add);
        if (count > 2) start<2>(out + 32, stride, add);
        if (count > 3) start<3>(out + 48, stride, add);
        int pair = 0;
        for (; pair + kTilePairs <= pairs; pair += kTilePairs) {
            for (int t = 0; ahead && t < count; t++)
                for (int line = 0; line < kTilePairs; line++)
                    _mm_prefetch(tiles[t] + (pair + line) * 32 + ahead, _MM_HINT_T0);
            Tiles::load<4>(x + pair * 2, x_stride * 2);
            Tiles::load<6>(tiles[0] + pair * 32, 64), Tiles::dot<0, 4, 6>();
            if (count > 1) Tiles::load<6>(tiles[1] + pair * 32, 64), Tiles::dot<1, 4, 6>();
            if (count > 2) Tiles::load<6>(tiles[2] + pair * 32, 64), Tiles::dot<2, 4, 6>();
            if (count > 3) Tiles::load<6>(tiles[3] + pair * 32, 64), Tiles::dot<3, 4, 6>();
        }
        if (pair < pairs) {
            Tiles::load<5>(x + pair * 2, x_stride * 2);
            Tiles::load<7>(tiles[0] + pair * 32, 64), Tiles::dot<0, 5, 7>();
            if (count > 1) Tiles::load<7>(tiles[1] + pair * 32, 64), Tiles::dot<1, 5, 7>();
            if (count > 2) Tiles::load<7>(tiles[2] + pair * 32, 64), Tiles::dot<2, 5, 7>();
            if (count > 3) Tiles::load<7>(tiles[3] + pair * 32, 64), Tiles::dot<3, 5, 7>();
        }
        Tiles::store<0>(out, stride * 4);
        if (count > 1) Tiles::store<1>(out + 16, stride * 4);
        if (count > 2) Tiles::store<2>(out + 32, stride * 4);
        if (count > 3) Tiles::store<3>(out + 48, stride * 4);
    }

    // 17 to 32 rows.
    static void wide(const uint16_t *x, int64_t x_stride, int rows, const uint16_t *const *tiles, int count, int pairs,
                     float *out, int64_t stride, bool add) {
        configure(true, 16, rows - 16);
        const uint16_t *x_below = x + 16 * x_stride;
        for (int t = 0; t < count; t += 2) {
            const bool both = t + 1 < count;
            float *above = out + t * 16, *below = above + 16 * stride;
            start<0>(above, stride, add), start<2>(below, stride, add);
            if (both) start<1>(above + 16, stride, add), start<3>(below + 16, stride, add);
            for (int pair = 0; pair < pairs; pair += kTilePairs) {
                Tiles::load<4>(x + pair * 2, x_stride * 2);
                Tiles::load<6>(tiles[t] + pair * 32, 64), Tiles::dot<0, 4, 6>();
                Tiles::load<5>(x_below + pair * 2, x_stride * 2), Tiles::dot<2, 5, 6>();
                if (!both) continue;
                Tiles::load<7>(tiles[t + 1] + pair * 32, 64), Tiles::dot<1, 4, 7>();
                Tiles::dot<3, 5, 7>();
            }
            Tiles::store<0>(above, stride * 4), Tiles::store<2>(below, stride * 4);
            if (both) Tiles::store<1>(above + 16, stride * 4), Tiles::store<3>(below + 16, stride * 4);
        }
    }
};

}  // namespace
}  // namespace headrace
