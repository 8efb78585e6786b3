// AMX tile registers. The instructions are written out because the compiler's intrinsics take the number of a register
// by its spelling, and because gcc 12's for the configuration lets it drop stores to what is being loaded.
#pragma once

#include <cstdint>

namespace headrace {
namespace {

// What ldtilecfg reads.
struct alignas(64) TileShapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};

struct Tiles {
    static void configure(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
    static void release() { asm volatile("tilerelease"); }
    template <int kTile> static void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(kTile)); }
    template <int kTile> static void load(const void *from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile> static void store(void *to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
    }
    // fp32 sum += bf16 a times bf16 b, in pairs
    template <int kSum, int kA, int kB> static void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
    }
};

}  // namespace
}  // namespace headrace
