// The noise of workers/noise.py, bit for bit: single fp32 operations, which the compiler must not fuse.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace headrace {
namespace {

struct NoiseKey {
    __m512i low, high;
};

inline uint64_t mix64(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

inline NoiseKey key_of(uint64_t seed, int64_t position) {
    const uint64_t key = mix64(mix64(seed) + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u);
    return {_mm512_set1_epi32(static_cast<int>(key)), _mm512_set1_epi32(static_cast<int>(key >> 32))};
}

// ln of positive normal numbers, every operation rounded on its own.
inline __m512 noise_ln(__m512 a) {
    constexpr float kCoefficients[] = {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f,
                                       -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                                       2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i exponent = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3F3504F3)), 23);
    const __m512 mantissa = _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(exponent, 23)));
    const __m512 f = _mm512_sub_ps(mantissa, _mm512_set1_ps(1.0f)), e = _mm512_cvtepi32_ps(exponent);
    const __m512 z = _mm512_mul_ps(f, f);
    __m512 p = _mm512_set1_ps(kCoefficients[0]);
    for (int i = 1; i < 9; i++) p = _mm512_add_ps(_mm512_mul_ps(p, f), _mm512_set1_ps(kCoefficients[i]));
    __m512 y = _mm512_mul_ps(_mm512_mul_ps(f, z), p);
    y = _mm512_add_ps(y, _mm512_mul_ps(e, _mm512_set1_ps(-2.12194440e-4f)));
    y = _mm512_add_ps(_mm512_sub_ps(y, _mm512_mul_ps(z, _mm512_set1_ps(0.5f))), f);
    return _mm512_add_ps(y, _mm512_mul_ps(e, _mm512_set1_ps(0.693359375f)));
}

inline __m512 negative(__m512 x) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN)));
}

inline __m512 uniform(const NoiseKey &key, __m512i ids) {
    const auto shifted = [](__m512i x, int by) { return _mm512_xor_si512(x, _mm512_srli_epi32(x, by)); };
    __m512i x = _mm512_mullo_epi32(ids, _mm512_set1_epi32(static_cast<int>(0x9E3779B1u)));
    x = shifted(_mm512_xor_si512(x, key.low), 16);
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7FEB352D));
    x = shifted(_mm512_xor_si512(x, key.high), 15);
    x = shifted(_mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0x846CA68Bu))), 16);
    x = _mm512_or_si512(_mm512_srli_epi32(x, 8), _mm512_set1_epi32(1));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(0x1p-24f));
}

inline __m512 noise_of(__m512 u) { return negative(noise_ln(negative(noise_ln(u)))); }

}  // namespace
}  // namespace headrace
