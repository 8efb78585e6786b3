/* headrace sampler: from logits to token ids and logprob records, one row beside another on a team's threads.
 *
 * The order of a row's stages is fixed; one whose parameters are neutral changes nothing:
 *
 *     logit bias -> allowed ids -> suppressed ids -> penalties -> bad words
 *         -> temperature -> min_p -> top_k -> top_p -> argmax of scaled logit + noise
 *
 * Temperature 0 is the argmax after the bad words; ties go to the lowest id everywhere. The noise is that of
 * workers/noise.py, bit for bit. A row's result depends on its own logits, parameters and tokens alone.
 */
#ifndef HEADRACE_SAMPLER_H
#define HEADRACE_SAMPLER_H

#include "headrace_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct headrace_sampler headrace_sampler;

/* A row's status, by protocol/worker.py's numbers. */
typedef enum {
    HEADRACE_ROW_OK = 0,
    HEADRACE_ROW_EMPTY_SUPPORT = 2, /* no token is allowed */
    HEADRACE_ROW_NAN = 3,           /* a logit is NaN or plus infinity */
} headrace_row_status;

/* One sampling row. Addresses may be NULL where the count beside them is 0; ids are below the vocabulary. */
typedef struct {
    uint64_t seed;
    int64_t position;          /* index the drawn id will have in its sequence */
    const int32_t *tokens;     /* [position] */
    const int32_t *suppressed; /* stop ids that must not come yet */
    const int32_t *bias_ids;   /* no id twice */
    const float *biases;
    const int32_t *allowed;
    const int32_t *forbidden;  /* bad words of one id */
    const int32_t *endings;    /* longer bad words end to end: length, then ids */
    int64_t record;            /* where the row's logprob record goes, bytes from the start of all */
    int32_t prompt_length;     /* tokens from here on are output */
    int32_t suppressed_count;
    int32_t bias_count;
    int32_t allowed_count;     /* -1: every id is allowed */
    int32_t forbidden_count;
    int32_t endings_size;      /* numbers in `endings` */
    int32_t alternatives;      /* of the record, at most 20; -1: no record */
    int32_t top_k;             /* 0: off */
    float temperature;
    float top_p;
    float floor;               /* ln(min_p), minus infinity when off */
    float presence;
    float frequency;
    float repetition;
} headrace_sampling_row;

int headrace_sampler_create(headrace_team *team, int32_t vocab_size, headrace_sampler **sampler);
void headrace_sampler_destroy(headrace_sampler *sampler);
/* Draw an id for each row of logits fp32 [count, vocab]. Records are those of the logits as they are given, packed as
 * protocol/logprobs.py says; meaningless, like ids, where the status is not HEADRACE_ROW_OK. */
int headrace_sample(headrace_sampler *sampler, const headrace_sampling_row *rows, int32_t count, const float *logits,
                    int32_t *ids, uint8_t *status, uint8_t *records);
/* The record of a given token for each row of logits fp32 [count, vocab]; sound[row]: its numbers are all right. */
int headrace_token_records(headrace_sampler *sampler, int32_t count, const float *logits, const int32_t *tokens,
                           const int32_t *alternatives, const int64_t *offsets, uint8_t *records, uint8_t *sound);

#ifdef __cplusplus
}
#endif
#endif
