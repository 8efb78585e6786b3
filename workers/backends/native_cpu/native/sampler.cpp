// The sampler's C interface: hands rows to the team's threads, each with memory of its own.
#include "headrace_sampler.h"

#include <algorithm>
#include <new>
#include <vector>

#include "memory.h"
#include "sampler_rows.h"
#include "team.h"

using namespace headrace;

struct headrace_sampler {
    headrace_sampler(Team &team, int32_t vocab) : team(team), vocab(vocab), memory(team.threads()), scratch(team.threads()) {}

    bool allocate() {
        const size_t padded = (static_cast<size_t>(vocab) + 15) / 16 * 16;
        const size_t bytes = padded * (2 * sizeof(float) + 2 * sizeof(int32_t) + sizeof(uint64_t)) + kBuckets * 12;
        for (size_t thread = 0; thread < scratch.size(); thread++) {
            if (!memory[thread].allocate(bytes)) return false;
            auto *at = memory[thread].data();
            const auto take = [&](size_t count) { auto *taken = at; at += count; return taken; };
            SamplerScratch &own = scratch[thread];
            own.order = reinterpret_cast<uint64_t *>(take(padded * sizeof(uint64_t)));
            own.weights_in = reinterpret_cast<double *>(take(kBuckets * sizeof(double)));
            own.logits = reinterpret_cast<float *>(take(padded * sizeof(float)));
            own.scaled = reinterpret_cast<float *>(take(padded * sizeof(float)));
            own.counts = reinterpret_cast<int32_t *>(take(padded * sizeof(int32_t)));
            own.touched = reinterpret_cast<int32_t *>(take(padded * sizeof(int32_t)));
            own.counts_in = reinterpret_cast<uint32_t *>(take(kBuckets * sizeof(uint32_t)));
            std::fill_n(own.counts, vocab, -1);
        }
        return true;
    }

    // work(row, scratch) for each row; a lone one wakes nobody.
    template <typename Do> void for_rows(int32_t count, Do &&work) {
        if (count <= 1) {
            for (int32_t row = 0; row < count; row++) work(row, scratch[0]);
            return;
        }
        team.run([&](int thread) { team.for_each(count, [&](int64_t row) { work(row, scratch[thread]); }); });
    }

    Team &team;
    const int32_t vocab;
    std::vector<Pages> memory;
    std::vector<SamplerScratch> scratch;
};

int headrace_sampler_create(headrace_team *team, int32_t vocab_size, headrace_sampler **sampler) {
    try {
        auto *created = new headrace_sampler(*team, vocab_size);
        if (created->allocate()) {
            *sampler = created;
            return HEADRACE_OK;
        }
        delete created;
    } catch (const std::bad_alloc &) {
    }
    return HEADRACE_NO_MEMORY;
}

void headrace_sampler_destroy(headrace_sampler *sampler) { delete sampler; }

int headrace_sample(headrace_sampler *sampler, const headrace_sampling_row *rows, int32_t count, const float *logits,
                    int32_t *ids, uint8_t *status, uint8_t *records) {
    const int64_t vocab = sampler->vocab;
    sampler->for_rows(count, [&](int64_t i, SamplerScratch &scratch) {
        const float *own = logits + i * vocab;
        ids[i] = 0;
        status[i] = sample_row(rows[i], own, vocab, scratch, ids[i]);
        if (rows[i].alternatives >= 0) write_record(own, vocab, ids[i], rows[i].alternatives, records + rows[i].record);
    });
    return HEADRACE_OK;
}

int headrace_token_records(headrace_sampler *sampler, int32_t count, const float *logits, const int32_t *tokens,
                           const int32_t *alternatives, const int64_t *offsets, uint8_t *records, uint8_t *sound) {
    const int64_t vocab = sampler->vocab;
    sampler->for_rows(count, [&](int64_t i, SamplerScratch &) {
        sound[i] = write_record(logits + i * vocab, vocab, tokens[i], alternatives[i], records + offsets[i]);
    });
    return HEADRACE_OK;
}
