// AVX-512 helpers. Everything here is local to its translation unit, which may be compiled for another CPU than others.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace headrace {
namespace {

inline __mmask16 lanes(int64_t count) {
    return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1);
}

// e ** x within 2e-7 of it, for x <= 88; 0 far below.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // in this order NaN stays NaN
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    // ln 2 in two parts, so that the rest keeps all its bits.
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

inline __m512 hyperbolic_tangent(__m512 x) {
    const __m512 bound = _mm512_set1_ps(15.0f);
    x = _mm512_min_ps(bound, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), bound), x));
    const __m512 one = _mm512_set1_ps(1.0f), e = exponential(_mm512_add_ps(x, x));
    return _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one));
}

inline __m512 soft_capped(__m512 x, float cap) {
    return _mm512_mul_ps(_mm512_set1_ps(cap), hyperbolic_tangent(_mm512_div_ps(x, _mm512_set1_ps(cap))));
}

// To bf16, to the nearest, ties to even; NaN stays NaN.
inline __m256i to_bf16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline __m512 from_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline void store_values(float *to, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(to, mask, x); }
inline void store_values(uint16_t *to, __mmask16 mask, __m512 x) { _mm256_mask_storeu_epi16(to, mask, to_bf16(x)); }

inline float largest_magnitude(const float *x, int64_t count) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16)
        largest = _mm512_max_ps(_mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(count - i), x + i)), largest);
    return _mm512_reduce_max_ps(largest);
}

inline bool all_finite(const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16)
        if (_mm512_fpclass_ps_mask(_mm512_maskz_loadu_ps(lanes(count - i), x + i), 0x99)) return false;
    return true;
}

}  // namespace
}  // namespace headrace
