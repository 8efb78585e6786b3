// Rows of the sampler in AVX-512: no row is sorted whole, and noise is made only for tokens that may still win.
//
// Sums and products that decide which token is drawn are single fp32 operations in the order of workers/sampler.py and
// workers/noise.py; the compiler is told not to fuse them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "noise.h"
#include "sampler_rows.h"
#include "vector_math.h"

namespace headrace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargestNoise = 16.64f;  // workers/noise.py
constexpr float kBucketsPerUnit = 32;

struct Best {
    float value;
    int32_t id;
};

inline __m512i first_ids() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline __m512i ids_from(int64_t first) { return _mm512_add_epi32(first_ids(), _mm512_set1_epi32(static_cast<int>(first))); }
inline __m512 load_or(float other, const float *x, int64_t at, int64_t count) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(other), lanes(count - at), x + at);
}

// The largest over lanes that were each filled with rising ids; the lowest id of equals.
inline Best over_lanes(__m512 values, __m512i ids) {
    const float value = _mm512_reduce_max_ps(values);
    const __mmask16 equal = _mm512_cmp_ps_mask(values, _mm512_set1_ps(value), _CMP_EQ_OQ);
    return {value, _mm512_mask_reduce_min_epi32(equal, ids)};
}

// NaN when there is one.
Best largest(const float *x, int64_t count) {
    __m512 best = _mm512_set1_ps(-kInfinity);
    __m512i ids = first_ids();
    __mmask16 nan = 0;
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 value = load_or(-kInfinity, x, i, count);
        const __mmask16 larger = _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ);
        nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        best = _mm512_mask_mov_ps(best, larger, value);
        ids = _mm512_mask_mov_epi32(ids, larger, ids_from(i));
    }
    return nan ? Best{std::numeric_limits<float>::quiet_NaN(), 0} : over_lanes(best, ids);
}

// --- What a request asks for ---

bool changes_logits(const headrace_sampling_row &row) {
    return row.bias_count || row.allowed_count >= 0 || row.suppressed_count || row.forbidden_count || row.endings_size ||
           row.repetition != 1 || row.frequency != 0 || row.presence != 0;
}

void keep_allowed(const headrace_sampling_row &row, float *logits, int64_t vocab, float *kept) {
    // What is hidden must not pass for sound.
    const float top = largest(logits, vocab).value;
    const bool broken = std::isnan(top) || top == kInfinity;
    for (int32_t i = 0; i < row.allowed_count; i++) kept[i] = logits[row.allowed[i]];
    std::fill_n(logits, vocab, broken ? std::numeric_limits<float>::quiet_NaN() : -kInfinity);
    if (broken) return;
    for (int32_t i = 0; i < row.allowed_count; i++) logits[row.allowed[i]] = kept[i];
}

// Repetition over prompt and output, then frequency and presence over the output.
void penalise(const headrace_sampling_row &row, float *logits, SamplerScratch &scratch) {
    int32_t distinct = 0;
    for (int64_t i = 0; i < row.position; i++) {
        const int32_t id = row.tokens[i];
        if (scratch.counts[id] < 0) scratch.counts[id] = 0, scratch.touched[distinct++] = id;
        scratch.counts[id] += i >= row.prompt_length;
    }
    for (int32_t i = 0; i < distinct; i++) {
        const int32_t id = scratch.touched[i];
        float value = logits[id];
        value = value > 0 ? value / row.repetition : value * row.repetition;
        value -= row.frequency * static_cast<float>(scratch.counts[id]);
        logits[id] = value - row.presence * (scratch.counts[id] > 0 ? 1.0f : 0.0f);
        scratch.counts[id] = -1;
    }
}

void forbid(const headrace_sampling_row &row, float *logits) {
    for (int32_t i = 0; i < row.forbidden_count; i++) logits[row.forbidden[i]] = -kInfinity;
    for (int32_t at = 0; at < row.endings_size;) {
        const int32_t length = row.endings[at], *word = row.endings + at + 1;
        if (length - 1 <= row.position && std::equal(word, word + length - 1, row.tokens + row.position - (length - 1)))
            logits[word[length - 1]] = -kInfinity;
        at += 1 + length;
    }
}

const float *controlled(const headrace_sampling_row &row, const float *logits, int64_t vocab, SamplerScratch &scratch) {
    if (!changes_logits(row)) return logits;
    std::copy_n(logits, vocab, scratch.logits);
    for (int32_t i = 0; i < row.bias_count; i++) scratch.logits[row.bias_ids[i]] += row.biases[i];
    if (row.allowed_count >= 0) keep_allowed(row, scratch.logits, vocab, scratch.scaled);
    for (int32_t i = 0; i < row.suppressed_count; i++) scratch.logits[row.suppressed[i]] = -kInfinity;
    if (row.repetition != 1 || row.frequency != 0 || row.presence != 0) penalise(row, scratch.logits, scratch);
    forbid(row, scratch.logits);
    return scratch.logits;
}

// --- Drawing ---

void scale(const headrace_sampling_row &row, const float *logits, float top, int64_t vocab, float *scaled) {
    const __m512 temperature = _mm512_set1_ps(row.temperature), floor = _mm512_set1_ps(row.floor);
    for (int64_t i = 0; i < vocab; i += 16) {
        const __m512 value = load_or(-kInfinity, logits, i, vocab);
        const __m512 x = _mm512_div_ps(_mm512_sub_ps(value, _mm512_set1_ps(top)), temperature);
        const __mmask16 below = _mm512_cmp_ps_mask(x, floor, _CMP_LT_OQ);
        _mm512_store_ps(scaled + i, _mm512_mask_mov_ps(x, below, _mm512_set1_ps(-kInfinity)));
    }
}

// The last token that is kept, in the order by value downwards, equals by id upwards.
struct Cut {
    float value = -kInfinity;
    int32_t id = INT32_MAX;

    bool before(const Cut &other) const { return value > other.value || (value == other.value && id < other.id); }
    __mmask16 keeps(__m512 values, __m512i ids) const {
        const __m512 last = _mm512_set1_ps(value);
        const __mmask16 equal = _mm512_cmp_ps_mask(values, last, _CMP_EQ_OQ);
        return _mm512_cmp_ps_mask(values, last, _CMP_GT_OQ) | _mm512_mask_cmple_epi32_mask(equal, ids, _mm512_set1_epi32(id));
    }
};

// No noise of u is larger than -ln(1 - u), so a score can reach the bound only where 1 - u <= e ** (value - bound).
// Says where it may, with room for the rounding of the noise: 1 + f is at least 2 ** f for f from 0 to 1.
inline __mmask16 may_reach(__m512 value, __m512 bound, __m512 u) {
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(value, bound), _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(x, 9), rest = _mm512_sub_ps(x, whole);
    const __m512 most = _mm512_scalef_ps(_mm512_add_ps(rest, _mm512_set1_ps(1.001f)), whole);
    return _mm512_cmp_ps_mask(_mm512_sub_ps(_mm512_set1_ps(1.0f), u), most, _CMP_LE_OQ);
}

// Draw from the tokens that `cut` keeps: [padded] scaled logits, the largest of which is 0 at `top`.
int32_t draw(const float *scaled, int64_t vocab, const NoiseKey &key, int32_t top, const Cut &cut) {
    __m512 best = _mm512_set1_ps(-kInfinity), bound = noise_of(uniform(key, _mm512_set1_epi32(top)));
    __m512i ids = _mm512_set1_epi32(top);
    for (int64_t i = 0; i < vocab; i += 16) {
        const __m512 value = _mm512_load_ps(scaled + i);
        const __m512 most = _mm512_add_ps(value, _mm512_set1_ps(kLargestNoise));
        if (!_mm512_cmp_ps_mask(most, bound, _CMP_GE_OQ)) continue;
        const __m512i here = ids_from(i);
        const __m512 u = uniform(key, here);
        const __mmask16 possible = may_reach(value, bound, u) & cut.keeps(value, here);
        if (!possible) continue;
        const __m512 score = _mm512_add_ps(noise_of(u), value);
        const __mmask16 larger = _mm512_mask_cmp_ps_mask(possible, score, best, _CMP_GT_OQ);
        best = _mm512_mask_mov_ps(best, larger, score);
        ids = _mm512_mask_mov_epi32(ids, larger, here);
        bound = _mm512_max_ps(bound, _mm512_set1_ps(_mm512_mask_reduce_max_ps(possible, score)));
    }
    return over_lanes(best, ids).id;
}

// e ** x for x <= 0 within some 1e-16 of it.
inline __m512d exponential(__m512d x) {
    const __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), 8);
    __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(6.93147180369123816490e-01), x);
    r = _mm512_fnmadd_pd(n, _mm512_set1_pd(1.90821492927058770002e-10), r);
    __m512d p = _mm512_set1_pd(1.0 / 6227020800.0);
    constexpr double kFactorials[] = {479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1};
    for (const double factorial : kFactorials) p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / factorial));
    return _mm512_scalef_pd(p, n);
}

inline __m512d low_half(__m512 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline __m512d high_half(__m512 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }

// The sum of e ** (x - top) over what `cut` keeps, in double precision and one order.
double sum_of_exponentials(const float *x, int64_t count, float top, const Cut &cut = {}) {
    const float nothing = top - 50;  // a vocabulary of these is lost beside the 1 of the largest
    const __m512 least = _mm512_set1_ps(std::max(nothing, cut.value));
    const __m512d shift = _mm512_set1_pd(top);
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (int64_t i = 0; i < count; i += 16) {
        const __m512 value = load_or(-kInfinity, x, i, count);
        if (!_mm512_cmp_ps_mask(value, least, _CMP_GE_OQ)) continue;
        const __mmask16 kept = cut.keeps(value, ids_from(i));
        const __m512 sound = _mm512_max_ps(value, _mm512_set1_ps(top - 1000));
        const auto add = [&](__m512d sum, __mmask8 mask, __m512d half) {
            return _mm512_mask_add_pd(sum, mask, sum, exponential(_mm512_sub_pd(half, shift)));
        };
        low = add(low, static_cast<__mmask8>(kept), low_half(sound));
        high = add(high, static_cast<__mmask8>(kept >> 8), high_half(sound));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

inline __m512i buckets_of(__m512 scaled) {
    const __m512 depth = _mm512_mul_ps(scaled, _mm512_set1_ps(-kBucketsPerUnit));
    return _mm512_cvttps_epi32(_mm512_min_ps(depth, _mm512_set1_ps(kBuckets - 1)));
}

// Tokens sorted roughly, by how far they lie below the largest: only the bucket where a cut falls is put in order.
class Buckets {
public:
    // [padded] scaled logits, 0 at most; tokens from `least` on.
    Buckets(const float *scaled, int64_t vocab, float least, bool weighted, SamplerScratch &scratch)
        : scaled_(scaled), vocab_(vocab), scratch_(scratch) {
        std::fill_n(scratch.counts_in, kBuckets, 0u);
        std::fill_n(scratch.weights_in, kBuckets, 0.0);
        for (int64_t i = 0; i < vocab; i += 16) {
            const __m512 value = _mm512_load_ps(scaled + i);
            __mmask16 in = _mm512_cmp_ps_mask(value, _mm512_set1_ps(-kInfinity), _CMP_GT_OQ);
            in &= _mm512_cmp_ps_mask(value, _mm512_set1_ps(least), _CMP_GE_OQ);
            if (!in) continue;
            alignas(64) int32_t buckets[16];
            alignas(64) double weights[16];
            _mm512_store_si512(buckets, buckets_of(value));
            if (weighted) {
                const __m512 sound = _mm512_max_ps(value, _mm512_set1_ps(-700.0f));
                _mm512_store_pd(weights, exponential(low_half(sound)));
                _mm512_store_pd(weights + 8, exponential(high_half(sound)));
            }
            for (; in; in &= in - 1) {
                const int lane = __builtin_ctz(in);
                scratch.counts_in[buckets[lane]]++;
                if (weighted) scratch.weights_in[buckets[lane]] += weights[lane];
            }
        }
    }

    // Keeps the `most` largest.
    Cut by_rank(int64_t most) {
        int64_t held = 0;
        for (int bucket = 0; bucket < kBuckets; bucket++) {
            const int64_t more = scratch_.counts_in[bucket];
            if (held + more < most) {
                held += more;
                continue;
            }
            order(bucket);
            return at(most - held - 1);
        }
        return {};
    }

    // Keeps those that have less than `limit` of weight before them, and the first.
    Cut by_weight(double limit) {
        double before = 0;
        for (int bucket = 0; bucket < kBuckets; bucket++) {
            if (!scratch_.counts_in[bucket]) continue;
            if (before + scratch_.weights_in[bucket] < limit) {
                before += scratch_.weights_in[bucket];
                continue;
            }
            const int64_t count = order(bucket);
            int64_t kept = 1;
            for (double sum = before + weight(0); kept < count && sum < limit; kept++) sum += weight(kept);
            return at(kept - 1);
        }
        return {};
    }

private:
    // Puts a bucket's tokens in order; returns how many.
    int64_t order(int bucket) {
        int64_t count = 0;
        for (int64_t i = 0; i < vocab_; i += 16) {
            const __m512 value = _mm512_load_ps(scaled_ + i);
            __mmask16 in = _mm512_cmp_ps_mask(value, _mm512_set1_ps(-kInfinity), _CMP_GT_OQ);
            in = _mm512_mask_cmpeq_epi32_mask(in, buckets_of(value), _mm512_set1_epi32(bucket));
            for (; in; in &= in - 1) scratch_.order[count++] = sortable(static_cast<int32_t>(i + __builtin_ctz(in)));
        }
        std::sort(scratch_.order, scratch_.order + count);
        return count;
    }
    // Scaled logits are 0 or negative, so that their bits, the sign aside, grow as they fall.
    uint64_t sortable(int32_t id) const {
        uint32_t bits;
        memcpy(&bits, scaled_ + id, 4);
        return static_cast<uint64_t>(bits & 0x7fffffff) << 32 | static_cast<uint32_t>(id);
    }
    Cut at(int64_t index) const {
        const auto id = static_cast<int32_t>(scratch_.order[index]);
        return {scaled_[id], id};
    }
    double weight(int64_t index) const { return std::exp(static_cast<double>(at(index).value)); }

    const float *scaled_;
    const int64_t vocab_;
    SamplerScratch &scratch_;
};

Cut cut_of(const headrace_sampling_row &row, const float *scaled, int64_t vocab, SamplerScratch &scratch) {
    Cut cut;
    if (row.top_k > 0 && row.top_k < vocab) cut = Buckets(scaled, vocab, -kInfinity, false, scratch).by_rank(row.top_k);
    if (!(row.top_p < 1)) return cut;
    const double mass = row.top_p, total = sum_of_exponentials(scaled, vocab, 0, cut);
    // What all tokens below this weigh together is too little for one of them to be kept.
    const auto spare = static_cast<float>(std::log((1 - mass) * total / static_cast<double>(vocab))) - 0.01f;
    const Cut other = Buckets(scaled, vocab, std::max(spare, cut.value), true, scratch).by_weight(mass * total);
    return other.before(cut) ? other : cut;
}

// --- Records ---

// The `count` largest logits in order, equals by the lower id.
void find_largest(const float *logits, int64_t vocab, int count, Best *found) {
    if (!count) return;
    int held = 0;
    const auto insert = [&](float value, int32_t id) {
        int at = held < count ? held++ : count - 1;
        for (; at && found[at - 1].value < value; at--) found[at] = found[at - 1];
        found[at] = {value, id};
    };
    for (int32_t id = 0; id < count; id++) insert(logits[id], id);
    for (int64_t i = count; i < vocab; i += 16) {
        const __m512 value = load_or(-kInfinity, logits, i, vocab);
        __mmask16 larger = _mm512_cmp_ps_mask(value, _mm512_set1_ps(found[count - 1].value), _CMP_GT_OQ);
        for (; larger; larger &= larger - 1) {
            const auto id = static_cast<int32_t>(i + __builtin_ctz(larger));
            if (logits[id] > found[count - 1].value) insert(logits[id], id);
        }
    }
}

uint32_t rank_of(const float *logits, int64_t vocab, int32_t token) {
    const __m512 own = _mm512_set1_ps(logits[token]);
    int64_t ahead = 0;
    for (int64_t i = 0; i < vocab; i += 16) {
        const __m512 value = load_or(-kInfinity, logits, i, vocab);
        const __mmask16 equal = _mm512_mask_cmp_ps_mask(lanes(token - i), value, own, _CMP_EQ_OQ);
        ahead += __builtin_popcount(_mm512_cmp_ps_mask(value, own, _CMP_GT_OQ) | (i < token ? equal : 0));
    }
    return static_cast<uint32_t>(1 + ahead);
}

}  // namespace

uint8_t sample_row(const headrace_sampling_row &row, const float *logits, int64_t vocab, SamplerScratch &scratch,
                   int32_t &id) {
    const float *changed = controlled(row, logits, vocab, scratch);
    const Best top = largest(changed, vocab);
    if (std::isnan(top.value) || top.value == kInfinity) return HEADRACE_ROW_NAN;
    if (top.value == -kInfinity) return HEADRACE_ROW_EMPTY_SUPPORT;
    id = top.id;
    if (!(row.temperature > 0)) return HEADRACE_ROW_OK;
    scale(row, changed, top.value, vocab, scratch.scaled);
    const Cut cut = cut_of(row, scratch.scaled, vocab, scratch);
    id = draw(scratch.scaled, vocab, key_of(row.seed, row.position), top.id, cut);
    return HEADRACE_ROW_OK;
}

bool write_record(const float *logits, int64_t vocab, int32_t token, int alternatives, uint8_t *record) {
    const float top = largest(logits, vocab).value;
    const bool sound = std::isfinite(top);
    const double total = sound ? std::log(sum_of_exponentials(logits, vocab, top)) : 0;
    const uint32_t rank = rank_of(logits, vocab, token);
    Best shown[1 + kMostAlternatives];
    shown[0] = {logits[token], token};
    find_largest(logits, vocab, alternatives, shown + 1);
    memcpy(record, &rank, 4);
    for (int i = 0; i <= alternatives; i++) {
        float value = static_cast<float>(static_cast<double>(shown[i].value) - top - total);
        if (!sound) value = std::numeric_limits<float>::quiet_NaN();
        memcpy(record + 4 + i * 8, &shown[i].id, 4);
        memcpy(record + 8 + i * 8, &value, 4);
    }
    return sound;
}

}  // namespace headrace
