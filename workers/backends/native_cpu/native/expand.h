// Quantised tiles to 16-bit values beside the product: integers as int16, or as bf16, in which they are exact.
//
// Planes of a tile: load r of four holds in each 16-bit word the nibbles of pairs r, r + 4, r + 8, r + 12, lowest
// first. A table look-up takes five bits, so the table repeats and the bit above the nibble does not matter.
#pragma once

#include "formats.h"
#include "vector_math.h"

namespace headrace {
namespace {

enum class Codes { kInt16, kBf16 };

// Values first .. first + 31 as codes, or first .. first + 15 twice.
template <Codes kCodes> inline __m512i code_table(int first, bool repeats) {
    alignas(64) uint16_t entries[32];
    for (int i = 0; i < 32; i++) {
        const int value = first + (repeats ? i % 16 : i);
        entries[i] = kCodes == Codes::kInt16 ? static_cast<uint16_t>(value) : float_to_bf16(static_cast<float>(value));
    }
    return _mm512_load_si512(entries);
}

template <int kType, Codes kCodes> class Expander {
public:
    Expander()
        : low_(code_table<kCodes>(kFirst, kBits < 6)),
          high_(code_table<kCodes>(kFirst + (kBits == 6 ? 32 : 16), kBits < 6)) {}

    // out [16 pairs, 16 outputs, 2]
    inline void operator()(const uint8_t *tile, uint16_t *out) const {
        if constexpr (kBits == 8)
            bytes(tile, out);
        else
            nibbles(tile, out);
    }

private:
    static constexpr int kBits = kType == HEADRACE_INT8 || kType == HEADRACE_Q8_0                             ? 8
                                 : kType == HEADRACE_Q6_K                                                     ? 6
                                 : kType == HEADRACE_Q4_0 || kType == HEADRACE_Q4_1 || kType == HEADRACE_Q4_K ? 4
                                                                                                              : 5;
    static constexpr int kFirst = kType == HEADRACE_Q4_0   ? -8
                                  : kType == HEADRACE_Q5_0 ? -16
                                  : kType == HEADRACE_Q6_K ? -32
                                                           : 0;

    inline void bytes(const uint8_t *tile, uint16_t *out) const {
#pragma GCC unroll 16
        for (int pair = 0; pair < kTilePairs; pair++) {
            const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(tile + pair * 32));
            if constexpr (kCodes == Codes::kInt16) {
                _mm512_storeu_si512(out + pair * 32, _mm512_cvtepi8_epi16(codes));
            } else {
                // Small integers need no rounding: the upper half of their fp32 is their bf16.
                const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
                const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
                const __m256i first = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16));
                const __m256i second = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(b), 16));
                _mm512_storeu_si512(out + pair * 32, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
            }
        }
    }

    inline void nibbles(const uint8_t *tile, uint16_t *out) const {
#pragma GCC unroll 4
        for (int load = 0; load < 4; load++) {
            const __m512i words = _mm512_loadu_si512(tile + load * 64);
#pragma GCC unroll 4
            for (int nibble = 0; nibble < 4; nibble++) {
                const __m512i index = nibble ? _mm512_srli_epi16(words, nibble * 4) : words;
                _mm512_storeu_si512(out + (nibble * 4 + load) * 32, value(tile, nibble * 4 + load, index));
            }
        }
    }

    inline __m512i value(const uint8_t *tile, int pair, __m512i index) const {
        if constexpr (kBits == 4) return _mm512_permutexvar_epi16(index, low_);
        if constexpr (kBits == 5) {
            uint32_t fifth;
            memcpy(&fifth, tile + 256 + pair * 4, 4);
            const __m512i small = _mm512_permutexvar_epi16(index, low_);
            if constexpr (kCodes == Codes::kInt16)
                return _mm512_mask_add_epi16(small, fifth, small, _mm512_set1_epi16(16));
            return _mm512_mask_permutexvar_epi16(small, fifth, index, high_);
        }
        const __m512i plane = _mm512_loadu_si512(tile + 256 + pair / 8 * 64);
        const int field = pair % 8 * 2;  // the two upper bits go to bits 4 and 5
        const __m512i upper = field < 4 ? _mm512_slli_epi16(plane, 4 - field) : _mm512_srli_epi16(plane, field - 4);
        const __m512i six = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15),
                                                      _mm512_and_si512(upper, _mm512_set1_epi16(0x30)), 0xea);
        return _mm512_permutex2var_epi16(low_, six, high_);
    }

    __m512i low_, high_;
};

// Scales of up to four tiles side by side: value = d[half] * code + m.
struct TileScales {
    __m512 d[2][4];
    __m512 m[4];
};

template <int kType>
constexpr bool kHasMinimum =
    kType == HEADRACE_Q4_1 || kType == HEADRACE_Q5_1 || kType == HEADRACE_Q4_K || kType == HEADRACE_Q5_K;
template <int kType> constexpr bool kHasHalves = kType == HEADRACE_Q6_K;

inline __m512 load_halves(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

template <int kType> inline void load_scales(const uint8_t *header, const uint8_t *scales, TileScales &to, int at) {
    if constexpr (kType == HEADRACE_INT8) {
        to.d[0][at] = _mm512_set1_ps(1.0f);
    } else if constexpr (kType == HEADRACE_Q4_K || kType == HEADRACE_Q5_K || kType == HEADRACE_Q6_K) {
        const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(scales));
        const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i *>(scales + 16));
        const __m512 super = load_halves(header);
        to.d[0][at] = _mm512_mul_ps(super, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first)));
        const __m512 other = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second));
        if constexpr (kHasHalves<kType>)
            to.d[1][at] = _mm512_mul_ps(super, other);
        else
            to.m[at] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(load_halves(header + 32), other));
    } else {
        to.d[0][at] = load_halves(scales);
        if constexpr (kHasMinimum<kType>) to.m[at] = load_halves(scales + 32);
    }
}

}  // namespace
}  // namespace headrace
