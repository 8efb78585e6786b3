#include "pack.h"

#include <cmath>
#include <cstring>

namespace headrace {

namespace {

bool is_float(int type) { return type == HEADRACE_F32 || type == HEADRACE_F16 || type == HEADRACE_BF16; }

void read_float_row(int type, const uint8_t *row, int64_t columns, float *out) {
    if (type == HEADRACE_F32) {
        memcpy(out, row, columns * 4);
        return;
    }
    for (int64_t k = 0; k < columns; k++) {
        uint16_t value;
        memcpy(&value, row + k * 2, 2);
        out[k] = type == HEADRACE_F16 ? half_to_float(value) : bf16_to_float(value);
    }
}

void read_row(int type, const uint8_t *row, int64_t columns, float *out) {
    if (is_float(type)) return read_float_row(type, row, columns, out);
    SourceBlock block;
    for (int64_t tile = 0; tile < columns / kTileInputs; tile++) {
        read_source_block(type, row, tile, block);
        for (int k = 0; k < kTileInputs; k++)
            out[tile * kTileInputs + k] = block.d[k / 16] * static_cast<float>(block.codes[k]) + block.m;
    }
}

void write_bf16(const Format &format, uint8_t *strip, int output, const float *row, int64_t columns) {
    for (int64_t k = 0; k < columns; k++) {
        const uint16_t value = float_to_bf16(row[k]);
        const int64_t tile = k / kTileInputs;
        const int within = static_cast<int>(k % kTileInputs);
        memcpy(strip + tile * format.tile + within / 2 * 64 + (output * 2 + within % 2) * 2, &value, 2);
    }
}

void write_int8(const Format &format, uint8_t *strip, int output, const float *row, int64_t columns) {
    float largest = 0;
    for (int64_t k = 0; k < columns; k++) largest = std::fmax(largest, std::fabs(row[k]));
    const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
    memcpy(strip + format.strip_bytes(columns) - 64 + output * 4, &scale, 4);
    for (int64_t k = 0; k < columns; k++) {
        const int64_t tile = k / kTileInputs;
        const int within = static_cast<int>(k % kTileInputs);
        const auto code = static_cast<int8_t>(std::lrintf(row[k] * inverse));
        strip[tile * format.tile + within / 2 * 32 + output * 2 + within % 2] = static_cast<uint8_t>(code);
    }
}

}  // namespace

size_t packed_bytes(int packed_type, int64_t rows, int64_t columns) {
    const Format *format = find_format(packed_type);
    if (!format || rows < 1 || columns < 1) return 0;
    if (format->source_block && columns % format->source_block) return 0;
    return static_cast<size_t>(round_up(rows, kTileOutputs) / kTileOutputs * format->strip_bytes(columns));
}

size_t source_row_bytes(int source_type, int64_t columns) {
    if (source_type == HEADRACE_F32) return static_cast<size_t>(columns) * 4;
    if (is_float(source_type)) return static_cast<size_t>(columns) * 2;
    const Format *format = find_format(source_type);
    if (!format || !format->source_block || columns % format->source_block) return 0;
    return static_cast<size_t>(columns / format->source_block * format->source_bytes);
}

bool can_pack(int source_type, int packed_type) {
    const Format *source = find_format(source_type);
    const bool readable = is_float(source_type) || (source && source->source_block);
    return readable && (packed_type == HEADRACE_BF16 || packed_type == HEADRACE_INT8 || packed_type == source_type);
}

void pack_matrix(Team &team, int source_type, const PackedMatrix &target, const uint8_t *source,
                 const int32_t *row_order) {
    const Format &format = *target.format;
    const size_t row_bytes = source_row_bytes(source_type, target.columns);
    team.run([&](int) {
        std::vector<float> values(format.source_block ? 0 : target.columns);
        team.for_each(target.strips(), [&](int64_t index) {
            // Outputs and inputs beyond the matrix are zeros.
            auto *strip = const_cast<uint8_t *>(target.strip(index));
            memset(strip, 0, static_cast<size_t>(format.strip_bytes(target.columns)));
            for (int output = 0; output < kTileOutputs; output++) {
                const int64_t row = index * kTileOutputs + output;
                if (row >= target.rows) break;
                const uint8_t *from = source + (row_order ? row_order[row] : row) * row_bytes;
                if (format.source_block) {
                    SourceBlock block;
                    for (int64_t tile = 0; tile < target.tiles(); tile++) {
                        read_source_block(source_type, from, tile, block);
                        write_packed_block(format, strip, tile, output, block);
                    }
                    continue;
                }
                read_row(source_type, from, target.columns, values.data());
                if (format.type == HEADRACE_BF16)
                    write_bf16(format, strip, output, values.data(), target.columns);
                else
                    write_int8(format, strip, output, values.data(), target.columns);
            }
        });
    });
}

}  // namespace headrace
