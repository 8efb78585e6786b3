// What an instruction level computes: the pieces of a step, each on whole rows, tiles or heads, called from any thread.
//
// Every piece sums in an order that depends on the row alone, never on how many rows there are or who computes them.
#pragma once

#include "formats.h"

namespace headrace {

constexpr int kBlockTokens = HEADRACE_BLOCK_SIZE;
constexpr int kPanelStrips = 4;  // strips of 16 outputs that one product call takes at most
constexpr int kPanelWidth = kPanelStrips * kTileOutputs;
constexpr int kPanelRows = 64;  // and rows
constexpr int kKvTile = 64;     // tokens of a softmax step, from position 0 on
constexpr int kSpan = 512;      // tokens summed from zero; spans are merged in order
constexpr int kUnitRows = 64;   // query rows of an attention unit, unless one token has more

// Rows that enter a product, in the forms its matrices ask for. A row has `padded` values, zeros at the end.
struct Activations {
    int64_t columns = 0;
    int64_t padded = 0;         // to whole tiles
    bool wants_dense = false;   // for bf16 matrices
    bool wants_blocks = false;  // for quantised ones
    uint8_t *dense = nullptr;   // [rows, padded] of the level's values
    int16_t *codes = nullptr;   // [rows, padded], times scales; not every level has them
    float *scales = nullptr;    // [rows, padded / 32]
    float *sums = nullptr;      // [rows, padded / 32] of the values

    int64_t blocks() const { return padded / kTileInputs; }
};

// The KV pool: for each block, layer and KV head
//     K  [head_dim / 2 pairs, 16 tokens, 2]       a tile whose outputs are tokens
//     V  [head_dim / 16, 8 pairs of tokens, 16, 2]  tiles of half the inputs
// and for int8 the scales of 16 K and of 16 V behind them.
struct KvLayout {
    int kv_heads, head_dim, padded_dim;
    bool int8;
    int64_t part_bytes;  // K or V of a head of a block
    int64_t head_bytes;
    int64_t layer_bytes;
    int64_t block_bytes;
};

struct Attention {
    int group;  // query heads of a KV head
    float scale, softcap;
    int window;  // 0: none
    KvLayout kv;
    uint8_t *pool;                // from this layer's part of block 0 on
    const int32_t *block_tables;  // [rows, table_width]
    int table_width;
    int64_t tokens;    // of the step
    uint8_t *queries;  // values [kv_heads, tokens * group, padded_dim]
    float *out;        // [tokens, heads * head_dim]

    // Softmax state of spans: per query row a maximum, a sum and padded_dim weighted values.
    int64_t state_floats() const { return kv.padded_dim + 16; }
};

struct Rotation {
    int rotary_dim;
    const float *cos, *sin;        // at the token's position
    const float *q_norm, *k_norm;  // or nullptr
    float norm_eps;
};

// Some tokens of one row against one KV head, over all spans or, with a state to leave its result in, one of them.
struct AttentionUnit {
    int32_t row, token, count, position, kv_head;
    int32_t span;  // -1: all
    float *state;  // [count * group, state_floats]
};

// Memory of one thread.
struct Scratch {
    float *panel;     // [kPanelRows, kPanelWidth]
    float *panel_up;  // likewise
    float *row;       // longest row
    uint8_t *attention;
};

struct Level {
    const char *name;
    int64_t value_bytes;  // of a dense activation
    bool has_codes;       // quantised products take Activations::codes
    void (*begin)();      // on a thread, before anything else of a step
    void (*end)();

    // panel [rows, kPanelWidth] = activations [row, row + rows) times strips of the matrix.
    void (*product)(const PackedMatrix &, const Activations &, int64_t row, int rows, int64_t strip, int strips,
                    float *panel);
    void (*prepare)(const float *x, int64_t row, Activations &);
    void (*norm)(const float *x, const float *weight, int64_t count, float eps, float *out);

    // What follows a product, on columns [column, column + count) of rows `stride` apart.
    void (*store)(const float *panel, int rows, int count, const float *bias, float *out, int64_t stride);
    void (*add)(const float *panel, int rows, int count, const float *bias, float multiplier, float *out,
                int64_t stride);
    void (*activate)(int activation, const float *gate, const float *up, int rows, int count, const float *gate_bias,
                     const float *up_bias, float *out, int64_t stride);
    void (*finish_logits)(const float *panel, int rows, int count, float multiplier, float softcap, float *out,
                          int64_t stride);
    int (*largest)(const float *values, int count);  // index of the first one; 0 when none is a number

    // Rotate a token's heads of one KV group, leave the queries as values and write K and V into the pool.
    void (*write_kv)(const Attention &, const Rotation &, const float *qkv, int64_t token, int kv_head, int32_t block,
                     int offset, float *scratch);
    int64_t (*attention_scratch)(const Attention &);
    void (*attend)(const Attention &, const AttentionUnit &, uint8_t *scratch);
    // Merge `spans` states of a one-token unit in order; `state` is the first, `stride` floats from the next.
    void (*merge)(const Attention &, const AttentionUnit &, int spans, int64_t stride, uint8_t *scratch);
};

const Level *avx512_level();  // nullptr where the CPU cannot run it
const Level *amx_level();
// The best one, or the one HEADRACE_CPU_ISA asks for; nullptr when there is none.
const Level *choose_level();

}  // namespace headrace
