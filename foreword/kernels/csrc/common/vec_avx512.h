// Vectors of 16 values. Begins a region for AVX-512: see vec.h.
#pragma once

#include <immintrin.h>

#include "common/vec.h"

#include "common/isa_push_avx512.h"

namespace foreword {
namespace {

using Vec = __m512;
constexpr int64_t LANES = 16;

inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const Bf16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(Bf16* p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline void store(int8_t* p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// The second value where either is NaN.
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

// a < b ? yes : no
inline Vec pick_less(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

// x in the lanes [begin, end), 0 <= begin <= end <= LANES, else other
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, Vec other) {
    const auto lanes = static_cast<__mmask16>((1u << end) - (1u << begin));
    return _mm512_mask_blend_ps(lanes, other, x);
}

// The nearest integer, ties to even.
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// x * 2^n for integers -127 <= n <= 128; 0 for -127.
inline Vec times_power(Vec x, Vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, splat(-127.0f), _CMP_NEQ_UQ), x, n);
}

// The larger magnitude of both; NaN counts as the largest.
inline Vec max_magnitude(Vec a, Vec b) {
    const __m512i all = _mm512_set1_epi32(0x7fffffff);
    const __m512i left = _mm512_and_si512(_mm512_castps_si512(a), all), right = _mm512_and_si512(_mm512_castps_si512(b), all);
    return _mm512_castsi512_ps(_mm512_max_epi32(left, right));
}

inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }

// rows[i][j] -> rows[j][i]
inline void transpose(Vec (&rows)[LANES]) {
    Vec pairs[LANES], fours[LANES], eights[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 4) {
#pragma GCC unroll 16
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(pairs[i + j]), high = _mm512_castps_pd(pairs[i + j + 2]);
            fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 8) {
#pragma GCC unroll 16
        for (int j = 0; j < 4; j++) {
            eights[i + j] = _mm512_shuffle_f32x4(fours[i + j], fours[i + j + 4], 0x88);
            eights[i + j + 4] = _mm512_shuffle_f32x4(fours[i + j], fours[i + j + 4], 0xdd);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < 8; j++) {
        rows[j] = _mm512_shuffle_f32x4(eights[j], eights[j + 8], 0x88);
        rows[j + 8] = _mm512_shuffle_f32x4(eights[j], eights[j + 8], 0xdd);
    }
}

}  // namespace
}  // namespace foreword
