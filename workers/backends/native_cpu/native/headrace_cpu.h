/* headrace_cpu: a decoder's whole step on a CPU, behind a plain C interface.
 *
 * Knows nothing of files, requests, sampling or Python. The caller reads the weights, has them packed into buffers of
 * its own (which may lie in a mapped file: packed data holds no addresses), attaches those, and then calls
 * headrace_step once per step of the batch.
 *
 * Functions that can fail return 0, or one of the headrace_status numbers; headrace_error_message() then says what is
 * wrong, in one line, for the calling thread. A model is used by one thread at a time.
 */
#ifndef HEADRACE_CPU_H
#define HEADRACE_CPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HEADRACE_CPU_ABI 1
#define HEADRACE_BLOCK_SIZE 16  /* tokens of a KV block */
#define HEADRACE_ALIGNMENT 64   /* bytes; of packed buffers */

typedef struct headrace_team headrace_team;
typedef struct headrace_model headrace_model;

typedef enum {
    HEADRACE_OK = 0,
    HEADRACE_INVALID = 1,       /* an argument that contradicts the model or the other arguments */
    HEADRACE_NO_MEMORY = 2,
    HEADRACE_NOT_AVAILABLE = 3, /* this CPU lacks the instructions asked for */
} headrace_status;

/* Numeric formats, by GGUF's numbers where GGUF has one. */
typedef enum {
    HEADRACE_F32 = 0,
    HEADRACE_F16 = 1,
    HEADRACE_Q4_0 = 2,
    HEADRACE_Q4_1 = 3,
    HEADRACE_Q5_0 = 6,
    HEADRACE_Q5_1 = 7,
    HEADRACE_Q8_0 = 8,
    HEADRACE_Q4_K = 12,
    HEADRACE_Q5_K = 13,
    HEADRACE_Q6_K = 14,
    HEADRACE_BF16 = 30,
    HEADRACE_INT8 = 1000,       /* one fp32 scale per output channel (and, for KV, per token and KV head) */
} headrace_type;

typedef enum { HEADRACE_SILU = 0, HEADRACE_GELU_TANH = 1 } headrace_activation;

/* Matrices [out, in]. QKV and GATE_UP have parts stacked by output rows, each of a type of its own. */
typedef enum {
    HEADRACE_EMBEDDING = 0,     /* 1 part; layer is ignored for the first two */
    HEADRACE_HEAD = 1,          /* 1 part; not attached: the embedding serves as the head */
    HEADRACE_QKV = 2,           /* parts 0, 1, 2: q, k, v */
    HEADRACE_ATTENTION_OUT = 3, /* 1 part */
    HEADRACE_GATE_UP = 4,       /* parts 0, 1: gate, up */
    HEADRACE_DOWN = 5,          /* 1 part */
} headrace_matrix;

/* fp32 vectors. Those marked * are optional and absent when never attached. */
typedef enum {
    HEADRACE_FINAL_NORM = 0,
    HEADRACE_INPUT_NORM = 1,
    HEADRACE_MLP_NORM = 2,
    HEADRACE_QKV_BIAS = 3,           /* * [(heads + 2 kv_heads) * head_dim] */
    HEADRACE_ATTENTION_OUT_BIAS = 4, /* * */
    HEADRACE_GATE_UP_BIAS = 5,       /* * [2 * intermediate] */
    HEADRACE_DOWN_BIAS = 6,          /* * */
    HEADRACE_Q_NORM = 7,             /* * [head_dim]: RMS norm of each query head before the rotation */
    HEADRACE_K_NORM = 8,             /* * [head_dim] */
    HEADRACE_POST_ATTENTION_NORM = 9,/* * of the attention branch, before it is added */
    HEADRACE_POST_MLP_NORM = 10,     /* * */
} headrace_vector;

typedef struct {
    int32_t abi;                  /* HEADRACE_CPU_ABI */
    int32_t vocab_size;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_layers;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t rotary_dim;           /* leading dimensions of a head that are rotated; even */
    int32_t activation;           /* headrace_activation */
    int32_t kv_type;              /* HEADRACE_BF16 or HEADRACE_INT8 */
    int32_t rope_positions;       /* positions the tables hold, and the longest context */
    float norm_eps;
    float attention_scale;        /* usually head_dim ** -0.5 */
    float attention_softcap;      /* 0: none */
    float logit_softcap;          /* 0: none */
    float embedding_multiplier;   /* 1: none */
    float residual_multiplier;    /* 1: none; of both branches of a layer */
    float logit_multiplier;       /* 1: none */
    const float *rope_cos;        /* [rope_positions, rotary_dim / 2]; copied */
    const float *rope_sin;
    const int32_t *windows;       /* [num_layers] tokens a query sees, itself included, 0 for all; NULL: all; copied */
} headrace_config;

typedef struct {
    int32_t rows;
    int32_t tokens;               /* the sum of lengths */
    int32_t table_width;
    int32_t judged_count;
    const int64_t *token_ids;     /* [tokens] */
    const int32_t *starts;        /* [rows] position of the row's first token */
    const int32_t *lengths;       /* [rows] */
    const int32_t *block_tables;  /* [rows, table_width] */
    const uint8_t *samples;       /* [rows] whether the row's last token needs logits */
    const int64_t *judged;        /* [judged_count] tokens whose hidden states are kept for headrace_judged_logits */
    float *logits;                /* out [sampling rows, vocab_size] */
    int32_t *greedy;              /* out [sampling rows], or NULL: id of the largest logit, the lowest on a tie */
    uint8_t *broken;              /* out [rows]: the row's last hidden state is not finite */
} headrace_step_arguments;

/* --- The library --- */

const char *headrace_error_message(void);
/* Best level of this CPU: "amx", "avx512" or "none"; HEADRACE_CPU_ISA in the environment asks for one of them, and any
 * other word in it, such as "reference", leaves none. */
const char *headrace_isa(void);

/* --- Threads --- */

/* `threads` of them, the caller's included; 0: as many as the affinity mask allows. They sleep between calls. */
int headrace_team_create(int32_t threads, headrace_team **team);
int32_t headrace_team_threads(const headrace_team *team);
void headrace_team_destroy(headrace_team *team);
/* Bytes a second that all threads together read from `data`; the best of `repeats`. */
double headrace_stream_rate(headrace_team *team, const void *data, size_t bytes, int32_t repeats);

/* --- Packing --- */

/* Bytes of a packed matrix; 0 when the type cannot be packed in this shape. */
size_t headrace_packed_bytes(int32_t packed_type, int64_t rows, int64_t columns);
/* Pack a row-major matrix. F32, F16, BF16 and every quantised type become BF16 or INT8; a quantised type becomes
 * itself. `row_order` [rows] names the source row of each target row, or is NULL. `target` is aligned. */
int headrace_pack(headrace_team *team, int32_t source_type, int32_t packed_type, int64_t rows, int64_t columns,
                  const void *source, size_t source_bytes, const int32_t *row_order, void *target);
/* fp32 [count, columns]: rows of a packed matrix as the products see them. */
int headrace_unpack_rows(int32_t packed_type, int64_t rows, int64_t columns, const void *packed,
                         const int64_t *wanted, int64_t count, float *out);
/* One product alone, for tests and measurements: x fp32 [m, columns], as the level rounds it, times the matrix
 * transposed; out fp32 [m, rows]. */
int headrace_linear(headrace_team *team, int32_t packed_type, int64_t rows, int64_t columns, const void *packed,
                    const float *x, int32_t m, float *out);

/* --- The model --- */

int headrace_model_create(const headrace_config *config, headrace_team *team, headrace_model **model);
/* The packed data stays the caller's and must outlive the model. */
int headrace_attach_matrix(headrace_model *model, int32_t matrix, int32_t layer, int32_t part, int32_t packed_type,
                           int64_t rows, int64_t columns, const void *packed);
int headrace_attach_vector(headrace_model *model, int32_t vector, int32_t layer, const float *values, int64_t count);
/* Says what is still missing, if anything. */
int headrace_model_complete(headrace_model *model);
/* Bytes of K and V of all layers for one block. */
size_t headrace_kv_block_bytes(const headrace_model *model);
/* Memory is taken as blocks are first written. */
int headrace_allocate_kv(headrace_model *model, int64_t num_blocks, int32_t block_size);
/* Make room for steps of this size, so that the first is as fast as the rest. */
int headrace_reserve(headrace_model *model, int32_t max_tokens, int32_t max_rows);
int headrace_step(headrace_model *model, const headrace_step_arguments *arguments);
/* Logits of the last step's judged tokens [first, first + count), fp32 [count, vocab_size]. */
int headrace_judged_logits(headrace_model *model, int32_t first, int32_t count, float *logits);
int headrace_clear_blocks(headrace_model *model, const int32_t *blocks, int32_t count);
void headrace_model_destroy(headrace_model *model);

#ifdef __cplusplus
}
#endif
#endif
