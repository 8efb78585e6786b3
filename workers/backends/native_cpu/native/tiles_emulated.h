// The tile registers in plain C++, with AMX's order of summation: for testing code written for them on CPUs without.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "formats.h"

namespace headrace {
namespace {

struct alignas(64) TileShapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};

class Tiles {
public:
    static void configure(const TileShapes &shapes) {
        state() = State{};
        state().shapes = shapes;
        state().configured = true;
    }
    static void release() { state() = State{}; }
    template <int kTile> static void zero() {
        must(state().configured);
        memset(state().data[kTile], 0, sizeof(state().data[kTile]));
    }
    template <int kTile> static void load(const void *from, int64_t stride) {
        zero<kTile>();
        for (int row = 0; row < rows(kTile); row++)
            memcpy(state().data[kTile][row], static_cast<const uint8_t *>(from) + row * stride, bytes(kTile));
    }
    template <int kTile> static void store(void *to, int64_t stride) {
        must(state().configured);
        for (int row = 0; row < rows(kTile); row++)
            memcpy(static_cast<uint8_t *>(to) + row * stride, state().data[kTile][row], bytes(kTile));
    }
    // Even and odd products are summed apart over the pairs, then together, then to what was there.
    template <int kSum, int kA, int kB> static void dot() {
        const int pairs = bytes(kA) / 4, outputs = bytes(kB) / 4;
        must(rows(kSum) == rows(kA) && rows(kB) == pairs && bytes(kSum) == bytes(kB));
        float b[2][16][16] = {};
        for (int pair = 0; pair < pairs; pair++)
            for (int output = 0; output < outputs; output++)
                for (int i = 0; i < 2; i++) b[i][pair][output] = value(kB, pair, output * 2 + i);
        for (int row = 0; row < rows(kSum); row++) {
            float even[16] = {}, odd[16] = {}, sum[16];
            for (int pair = 0; pair < pairs; pair++) {
                const float first = value(kA, row, pair * 2), second = value(kA, row, pair * 2 + 1);
                for (int output = 0; output < 16; output++) {
                    even[output] += first * b[0][pair][output];
                    odd[output] += second * b[1][pair][output];
                }
            }
            memcpy(sum, state().data[kSum][row], sizeof(sum));
            for (int output = 0; output < outputs; output++) sum[output] += even[output] + odd[output];
            memcpy(state().data[kSum][row], sum, sizeof(sum));
        }
    }

private:
    struct State {
        bool configured = false;
        TileShapes shapes{};
        uint8_t data[8][16][64]{};
    };
    static State &state() {
        thread_local State state;
        return state;
    }
    static void must(bool condition) {
        if (!condition) abort();
    }
    static int rows(int tile) {
        must(state().configured && state().shapes.rows[tile] <= 16);
        return state().shapes.rows[tile];
    }
    static int bytes(int tile) {
        must(state().shapes.column_bytes[tile] <= 64);
        return state().shapes.column_bytes[tile];
    }
    static float value(int tile, int row, int column) {
        uint16_t half;
        memcpy(&half, state().data[tile][row] + column * 2, 2);
        return bf16_to_float(half);
    }
};

}  // namespace
}  // namespace headrace
