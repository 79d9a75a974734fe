// Vectors of 8 values. Begins a region for AVX2 with FMA: see vec.h.
#pragma once

#include <immintrin.h>

#include "common/vec.h"

#include "common/isa_push_avx2.h"

namespace foreword {
namespace {

using Vec = __m256;
constexpr int64_t LANES = 8;

inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const Bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline Vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }

// To nearest, ties to even; a NaN stays one.
inline void store(Bf16* p, Vec x) {
    const __m256i raw = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(raw, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store(int8_t* p, Vec x) {
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// The second value where either is NaN.
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

// a < b ? yes : no
inline Vec pick_less(Vec a, Vec b, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

// x in the lanes [begin, end), 0 <= begin <= end <= LANES, else other
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, Vec other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(begin)), lane);
    const __m256i within = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(end)), lane);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(before, within)));
}

// The nearest integer, ties to even.
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// x * 2^n for integers -127 <= n <= 128; 0 for -127.
inline Vec times_power(Vec x, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

// The larger magnitude of both; NaN counts as the largest.
inline Vec max_magnitude(Vec a, Vec b) {
    const __m256i all = _mm256_set1_epi32(0x7fffffff);
    const __m256i left = _mm256_and_si256(_mm256_castps_si256(a), all), right = _mm256_and_si256(_mm256_castps_si256(b), all);
    return _mm256_castsi256_ps(_mm256_max_epi32(left, right));
}

inline float reduce_add(Vec x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float reduce_max(Vec x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// rows[i][j] -> rows[j][i]
inline void transpose(Vec (&rows)[LANES]) {
    Vec pairs[LANES], fours[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 4) {
#pragma GCC unroll 16
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < 4; j++) {
        rows[j] = _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x20);
        rows[j + 4] = _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x31);
    }
}

}  // namespace
}  // namespace foreword
