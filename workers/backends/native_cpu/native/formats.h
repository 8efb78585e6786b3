// How packed matrices lie in memory, and GGUF's block formats.
//
// A packed matrix [rows (outputs), columns (inputs)] is cut into tiles of 16 outputs x 32 inputs. All tiles of 16
// outputs follow each other along the inputs: a *strip*. Within a tile, inputs go in pairs:
//
//     pair 0:   output 0: k0 k1 | output 1: k0 k1 | ... | output 15: k0 k1       one 64-byte row of bf16
//     pair 1:   output 0: k2 k3 | ...
//
// which is what AMX's and VNNI's products take. Quantised tiles keep their codes in the same order, in planes, with the
// scales of the tile behind them; K-quants have the scales of their 256 inputs in front of each eight tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headrace_cpu.h"

namespace headrace {

constexpr int kTileOutputs = 16;
constexpr int kTileInputs = 32;
constexpr int kTilePairs = kTileInputs / 2;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Where things are in a packed matrix of one type. Bytes.
struct Format {
    int type;
    int tile;            // of one tile, its scales included
    int tiles_of_group;  // that share a header: 8 for K-quants, else 1
    int header;
    int trailer;       // behind each strip
    int high_bits;     // offset in the tile of the bits above the lowest four; 0: none
    int scales;        // offset in the tile of its scales
    bool has_minimum;  // values are d * code + m
    int source_block;  // values of a block in GGUF; 0: not a GGUF block format
    int source_bytes;

    bool blocks() const { return type != HEADRACE_BF16; }
    int64_t strip_bytes(int64_t columns) const {
        const int64_t groups = round_up(columns, kTileInputs) / kTileInputs / tiles_of_group;
        return groups * (header + static_cast<int64_t>(tile) * tiles_of_group) + trailer;
    }
    // Offset of a tile in its strip.
    int64_t tile_offset(int64_t index) const {
        const int64_t group = index / tiles_of_group;
        return group * (header + static_cast<int64_t>(tile) * tiles_of_group) + header + index % tiles_of_group * tile;
    }
    int64_t header_offset(int64_t index) const {
        return index / tiles_of_group * (header + static_cast<int64_t>(tile) * tiles_of_group);
    }
};

// nullptr: not a type that matrices are packed to.
const Format *find_format(int type);

// A packed matrix where it lies.
struct PackedMatrix {
    const Format *format = nullptr;
    int64_t rows = 0;
    int64_t columns = 0;
    const uint8_t *data = nullptr;

    int64_t strips() const { return (rows + kTileOutputs - 1) / kTileOutputs; }
    int64_t tiles() const { return (columns + kTileInputs - 1) / kTileInputs; }  // of a strip
    const uint8_t *strip(int64_t index) const { return data + index * format->strip_bytes(columns); }
};

// 32 consecutive values of a row, as GGUF keeps them: value k is d[k / 16] * code[k] + m.
struct SourceBlock {
    int8_t codes[32];  // signed where the format is symmetric
    float d[2];
    float m;
    uint16_t super_d;  // fp16 as in the file; of the block, or of its 256 values for K-quants
    uint16_t super_m;
    int8_t scale[2];  // K-quants: integers that multiply super_d, one per 16 values in Q6_K
    uint8_t minimum;  // K-quants: integer that multiplies super_m
};

// Block `index` of a row in GGUF's bytes.
void read_source_block(int type, const uint8_t *row, int64_t index, SourceBlock &block);
void write_packed_block(const Format &format, uint8_t *strip, int64_t tile, int output, const SourceBlock &block);
// One row of a packed matrix, fp32 [columns].
void unpack_row(const PackedMatrix &matrix, int64_t row, float *out);

float half_to_float(uint16_t half);
inline float bf16_to_float(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    __builtin_memcpy(&result, &bits, 4);
    return result;
}
// To the nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace headrace
