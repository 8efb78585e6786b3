#include "formats.h"

#include <cstring>

namespace headrace {

namespace {

//  type            tile               group header trailer high  scales  minimum  block bytes
constexpr Format kFormats[] = {
    {HEADRACE_BF16, 1024, 1, 0, 0, 0, 0, false, 0, 0},
    {HEADRACE_INT8, 512, 1, 0, 64, 0, 0, false, 0, 0},
    {HEADRACE_Q4_0, 256 + 32, 1, 0, 0, 0, 256, false, 32, 18},
    {HEADRACE_Q4_1, 256 + 64, 1, 0, 0, 0, 256, true, 32, 20},
    {HEADRACE_Q5_0, 256 + 64 + 32, 1, 0, 0, 256, 320, false, 32, 22},
    {HEADRACE_Q5_1, 256 + 64 + 64, 1, 0, 0, 256, 320, true, 32, 24},
    {HEADRACE_Q8_0, 512 + 32, 1, 0, 0, 0, 512, false, 32, 34},
    {HEADRACE_Q4_K, 256 + 32, 8, 64, 0, 0, 256, true, 256, 144},
    {HEADRACE_Q5_K, 256 + 64 + 32, 8, 64, 0, 256, 320, true, 256, 176},
    {HEADRACE_Q6_K, 256 + 128 + 32, 8, 32, 0, 256, 384, false, 256, 210},
};

uint16_t load16(const uint8_t *from) {
    uint16_t value;
    memcpy(&value, from, 2);
    return value;
}

void read_simple(SourceBlock &block, uint16_t d, uint16_t m) {
    block.super_d = d, block.super_m = m;
    block.d[0] = block.d[1] = half_to_float(d);
    block.m = half_to_float(m);
}

// Four bits a value: values 0..15 in the low halves of 16 bytes, 16..31 in the high ones.
void read_nibbles(SourceBlock &block, const uint8_t *nibbles, const uint8_t *fifth_bits, int offset) {
    uint32_t fifth = 0;
    if (fifth_bits) memcpy(&fifth, fifth_bits, 4);
    for (int i = 0; i < 16; i++) {
        block.codes[i] = static_cast<int8_t>((nibbles[i] & 15) + (fifth >> i & 1) * 16 - offset);
        block.codes[i + 16] = static_cast<int8_t>((nibbles[i] >> 4) + (fifth >> (i + 16) & 1) * 16 - offset);
    }
}

// Q4_K and Q5_K keep eight 6-bit scales and minimums in 12 bytes.
void read_six_bit(const uint8_t *packed, int index, uint8_t &scale, uint8_t &minimum) {
    if (index < 4) {
        scale = packed[index] & 63, minimum = packed[index + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((packed[index + 4] & 15) | (packed[index - 4] >> 6 << 4));
        minimum = static_cast<uint8_t>((packed[index + 4] >> 4) | (packed[index] >> 6 << 4));
    }
}

void read_k45(SourceBlock &block, const uint8_t *super, int sub, bool five) {
    uint8_t scale, minimum;
    read_six_bit(super + 4, sub, scale, minimum);
    block.super_d = load16(super), block.super_m = load16(super + 2);
    block.scale[0] = block.scale[1] = static_cast<int8_t>(scale), block.minimum = minimum;
    block.d[0] = block.d[1] = half_to_float(block.super_d) * static_cast<float>(scale);
    block.m = -(half_to_float(block.super_m) * static_cast<float>(minimum));
    const uint8_t *nibbles = super + (five ? 48 : 16) + sub / 2 * 32;
    for (int i = 0; i < 32; i++) {
        int code = sub % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
        if (five) code += (super[16 + i] >> sub & 1) * 16;
        block.codes[i] = static_cast<int8_t>(code);
    }
}

void read_k6(SourceBlock &block, const uint8_t *super, int sub) {
    const int half = sub / 4, quarter = sub % 4;
    const uint8_t *low = super + half * 64 + quarter % 2 * 32, *high = super + 128 + half * 32;
    for (int i = 0; i < 32; i++) {
        const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        block.codes[i] = static_cast<int8_t>((nibble | (high[i] >> 2 * quarter & 3) << 4) - 32);
    }
    block.super_d = load16(super + 208);
    for (int i = 0; i < 2; i++) {
        block.scale[i] = static_cast<int8_t>(super[192 + sub * 2 + i]);
        block.d[i] = half_to_float(block.super_d) * static_cast<float>(block.scale[i]);
    }
    block.m = 0;
}

bool eight_bit(int type) { return type == HEADRACE_INT8 || type == HEADRACE_Q8_0; }

// What is added to a code before it is stored without a sign.
int code_offset(int type) {
    switch (type) {
    case HEADRACE_Q4_0: return 8;
    case HEADRACE_Q5_0: return 16;
    case HEADRACE_Q6_K: return 32;
    default: return 0;
    }
}

// Planes of a tile, for the value of pair `pair` in lane 2 * output + k % 2: see expand.h, which reads them.
void put_code(const Format &format, uint8_t *tile, int pair, int lane, int code) {
    if (eight_bit(format.type)) {
        tile[pair * 32 + lane] = static_cast<uint8_t>(code);
        return;
    }
    code += code_offset(format.type);
    const int nibble = pair / 4;
    uint8_t &low = tile[pair % 4 * 64 + lane * 2 + nibble / 2];
    const int shift = nibble % 2 * 4;
    low = static_cast<uint8_t>((low & ~(15 << shift)) | (code & 15) << shift);
    if (!format.high_bits) return;
    uint8_t *plane = tile + format.high_bits;
    if (format.type == HEADRACE_Q6_K) {
        uint8_t &high = plane[pair / 8 * 64 + lane * 2 + pair % 8 / 4];
        const int at = pair % 4 * 2;
        high = static_cast<uint8_t>((high & ~(3 << at)) | (code >> 4) << at);
    } else {
        uint8_t &high = plane[pair * 4 + lane / 8];
        high = static_cast<uint8_t>((high & ~(1 << lane % 8)) | (code >> 4) << lane % 8);
    }
}

int get_code(const Format &format, const uint8_t *tile, int pair, int lane) {
    if (eight_bit(format.type)) return static_cast<int8_t>(tile[pair * 32 + lane]);
    const int nibble = pair / 4;
    int code = tile[pair % 4 * 64 + lane * 2 + nibble / 2] >> nibble % 2 * 4 & 15;
    if (format.high_bits) {
        const uint8_t *plane = tile + format.high_bits;
        if (format.type == HEADRACE_Q6_K)
            code |= (plane[pair / 8 * 64 + lane * 2 + pair % 8 / 4] >> pair % 4 * 2 & 3) << 4;
        else
            code |= (plane[pair * 4 + lane / 8] >> lane % 8 & 1) << 4;
    }
    return code - code_offset(format.type);
}

}  // namespace

const Format *find_format(int type) {
    for (const Format &format : kFormats)
        if (format.type == type) return &format;
    return nullptr;
}

float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half >> 15) << 31, exponent = half >> 10 & 31, fraction = half & 1023;
    uint32_t bits;
    if (exponent == 31)
        bits = sign | 0x7f800000 | fraction << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        const float tiny = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

void read_source_block(int type, const uint8_t *row, int64_t index, SourceBlock &block) {
    const Format &format = *find_format(type);
    const int per_source = format.source_block / 32;
    const uint8_t *from = row + index / per_source * format.source_bytes;
    const int sub = static_cast<int>(index % per_source);
    switch (type) {
    case HEADRACE_Q4_0: read_simple(block, load16(from), 0), read_nibbles(block, from + 2, nullptr, 8); break;
    case HEADRACE_Q4_1:
        read_simple(block, load16(from), load16(from + 2)), read_nibbles(block, from + 4, nullptr, 0);
        break;
    case HEADRACE_Q5_0: read_simple(block, load16(from), 0), read_nibbles(block, from + 6, from + 2, 16); break;
    case HEADRACE_Q5_1:
        read_simple(block, load16(from), load16(from + 2)), read_nibbles(block, from + 8, from + 4, 0);
        break;
    case HEADRACE_Q8_0: read_simple(block, load16(from), 0), memcpy(block.codes, from + 2, 32); break;
    case HEADRACE_Q4_K: read_k45(block, from, sub, false); break;
    case HEADRACE_Q5_K: read_k45(block, from, sub, true); break;
    default: read_k6(block, from, sub); break;
    }
}

void write_packed_block(const Format &format, uint8_t *strip, int64_t tile, int output, const SourceBlock &block) {
    uint8_t *to = strip + format.tile_offset(tile), *scales = to + format.scales;
    for (int k = 0; k < kTileInputs; k++) put_code(format, to, k / 2, output * 2 + k % 2, block.codes[k]);
    if (format.tiles_of_group > 1) {
        uint8_t *header = strip + format.header_offset(tile);
        memcpy(header + output * 2, &block.super_d, 2);
        if (format.has_minimum) memcpy(header + 32 + output * 2, &block.super_m, 2);
        scales[output] = static_cast<uint8_t>(block.scale[0]);
        scales[16 + output] = format.has_minimum ? block.minimum : static_cast<uint8_t>(block.scale[1]);
    } else {
        memcpy(scales + output * 2, &block.super_d, 2);
        if (format.has_minimum) memcpy(scales + 32 + output * 2, &block.super_m, 2);
    }
}

void unpack_row(const PackedMatrix &matrix, int64_t row, float *out) {
    const Format &format = *matrix.format;
    const uint8_t *strip = matrix.strip(row / kTileOutputs);
    const int output = static_cast<int>(row % kTileOutputs);
    for (int64_t tile = 0; tile < matrix.tiles(); tile++) {
        const uint8_t *from = strip + format.tile_offset(tile), *scales = from + format.scales;
        float d[2] = {1, 1}, m = 0;
        if (format.type == HEADRACE_INT8) {
            memcpy(d, strip + format.strip_bytes(matrix.columns) - 64 + output * 4, 4);
            d[1] = d[0];
        } else if (format.tiles_of_group > 1) {
            const uint8_t *header = strip + format.header_offset(tile);
            const float super = half_to_float(load16(header + output * 2));
            const auto second = format.has_minimum ? output : output + 16;
            d[0] = super * static_cast<float>(static_cast<int8_t>(scales[output]));
            d[1] = super * static_cast<float>(static_cast<int8_t>(scales[second]));
            if (format.has_minimum) m = -(half_to_float(load16(header + 32 + output * 2)) * scales[16 + output]);
        } else if (format.blocks()) {
            d[0] = d[1] = half_to_float(load16(scales + output * 2));
            if (format.has_minimum) m = half_to_float(load16(scales + 32 + output * 2));
        }
        const int64_t first = tile * kTileInputs;
        for (int k = 0; k < kTileInputs && first + k < matrix.columns; k++) {
            const int pair = k / 2, lane = output * 2 + k % 2;
            if (format.blocks())
                out[first + k] = d[k / 16] * static_cast<float>(get_code(format, from, pair, lane)) + m;
            else
                out[first + k] = bf16_to_float(load16(from + pair * 64 + lane * 2));
        }
    }
}

}  // namespace headrace
