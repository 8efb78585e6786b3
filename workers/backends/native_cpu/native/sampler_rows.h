// What the sampler does to one row of logits.
#pragma once

#include "headrace_sampler.h"

namespace headrace {

constexpr int kMostAlternatives = 20;
constexpr int kBuckets = 1024;

// Memory of one thread, for rows of one vocabulary. Sizes are in values, `padded` ones a multiple of 16.
struct SamplerScratch {
    float *logits;       // [padded] the row after what a request asks for
    float *scaled;       // [padded]
    int32_t *counts;     // [vocab] how often an id is in the output; -1: not in the sequence
    int32_t *touched;    // [vocab] ids whose count is not -1
    uint64_t *order;     // [vocab] tokens of one bucket, to be sorted
    double *weights_in;  // [kBuckets]
    uint32_t *counts_in; // [kBuckets]
};

// The id of a row; returns its status.
uint8_t sample_row(const headrace_sampling_row &row, const float *logits, int64_t vocab, SamplerScratch &scratch,
                   int32_t &id);
// A token's record; returns whether the row's numbers are all right.
bool write_record(const float *logits, int64_t vocab, int32_t token, int alternatives, uint8_t *record);

}  // namespace headrace
