// Quantized products with AVX2. A product of two bytes is 16 bits wide: products are added in 16 bits as long as they fit.
#include "quantized.h"

#if FOREWORD_X86

#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "isa_push_avx2.h"

namespace foreword {
namespace {

constexpr int64_t AHEAD = 8192;  // bytes of weights to prefetch into the L2 cache

// Columns 0-7 and 8-15.
struct Quads {
    __m256i half[2];
};
struct Ints {
    __m256i half[2];
};
struct Floats {
    __m256 half[2];
};
using Pairs = Quads;

inline Ints zero_ints() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
inline Floats zero_floats() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
inline Ints all(int32_t a) { return {{_mm256_set1_epi32(a), _mm256_set1_epi32(a)}}; }
inline Ints add(Ints a, Ints b) {
    return {{_mm256_add_epi32(a.half[0], b.half[0]), _mm256_add_epi32(a.half[1], b.half[1])}};
}
inline Floats add(Floats a, Floats b) { return {{_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])}}; }
inline Ints multiply(Ints a, Ints b) {
    return {{_mm256_mullo_epi32(a.half[0], b.half[0]), _mm256_mullo_epi32(a.half[1], b.half[1])}};
}
inline Floats multiply(Floats a, Floats b) {
    return {{_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])}};
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
    return {{_mm256_fmadd_ps(a.half[0], b.half[0], c.half[0]), _mm256_fmadd_ps(a.half[1], b.half[1], c.half[1])}};
}
inline Floats subtract_product(Floats a, Floats b, Floats c) {
    return {{_mm256_fnmadd_ps(a.half[0], b.half[0], c.half[0]), _mm256_fnmadd_ps(a.half[1], b.half[1], c.half[1])}};
}
inline Floats scaled(Floats a, float scale) {
    const __m256 all = _mm256_set1_ps(scale);
    return {{_mm256_mul_ps(a.half[0], all), _mm256_mul_ps(a.half[1], all)}};
}
inline Floats to_floats(Ints a) { return {{_mm256_cvtepi32_ps(a.half[0]), _mm256_cvtepi32_ps(a.half[1])}}; }
inline Ints rounded(Floats a) { return {{_mm256_cvtps_epi32(a.half[0]), _mm256_cvtps_epi32(a.half[1])}}; }
inline Ints maximum(Ints a, Ints b) {
    return {{_mm256_max_epi32(a.half[0], b.half[0]), _mm256_max_epi32(a.half[1], b.half[1])}};
}
inline Ints magnitude_bits(Floats a) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {{_mm256_and_si256(_mm256_castps_si256(a.half[0]), mask), _mm256_and_si256(_mm256_castps_si256(a.half[1]), mask)}};
}

inline __m128i fold(__m128i a, __m128i (*combine)(__m128i, __m128i)) {
    a = combine(a, _mm_shuffle_epi32(a, 0x4e));
    return combine(a, _mm_shuffle_epi32(a, 0xb1));
}
inline __m128i add4(__m128i a, __m128i b) { return _mm_add_epi32(a, b); }
inline __m128i maximum4(__m128i a, __m128i b) { return _mm_max_epi32(a, b); }

inline int32_t sum_of(Ints a) {
    const __m256i both = _mm256_add_epi32(a.half[0], a.half[1]);
    return _mm_cvtsi128_si32(fold(add4(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)), add4));
}
inline int32_t maximum_of(Ints a) {
    const __m256i both = _mm256_max_epi32(a.half[0], a.half[1]);
    return _mm_cvtsi128_si32(fold(maximum4(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)), maximum4));
}

inline Floats load_floats(const float* p, int64_t count) {
    if (count == TILE) return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}};
    float padded[TILE] = {};
    std::memcpy(padded, p, count * sizeof(float));
    return {{_mm256_loadu_ps(padded), _mm256_loadu_ps(padded + 8)}};
}

inline __m256 widen_bfloats(__m128i values) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}
inline Floats load_bfloats(const uint16_t* p, int64_t count) {
    uint16_t padded[TILE] = {};
    std::memcpy(padded, p, count * sizeof(uint16_t));
    const auto* values = reinterpret_cast<const __m128i*>(padded);
    return {{widen_bfloats(_mm_loadu_si128(values)), widen_bfloats(_mm_loadu_si128(values + 1))}};
}

inline Floats load_halves(const uint8_t* p) {
    const auto* values = reinterpret_cast<const __m128i*>(p);
    return {{_mm256_cvtph_ps(_mm_load_si128(values)), _mm256_cvtph_ps(_mm_load_si128(values + 1))}};
}

inline void store_floats(Floats a, char* p, int64_t count) {
    float values[TILE];
    _mm256_storeu_ps(values, a.half[0]);
    _mm256_storeu_ps(values + 8, a.half[1]);
    std::memcpy(p, values, count * sizeof(float));
}

// To nearest, ties to even; in the upper halves.
inline __m256i round_bfloats(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 whole = _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(nan), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_castps_si256(whole), 16);
}
inline void store_bfloats(Floats a, char* p, int64_t count) {
    const __m256i mixed = _mm256_packus_epi32(round_bfloats(a.half[0]), round_bfloats(a.half[1]));
    uint16_t values[TILE];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_permute4x64_epi64(mixed, 0xd8));
    std::memcpy(p, values, count * sizeof(uint16_t));
}

// Eight int32 in [-128, 127] as two quads.
inline void store_quads(__m256i values, int32_t* quads, int64_t stride) {
    const __m256i words = _mm256_packs_epi32(values, values), bytes = _mm256_packs_epi16(words, words);
    quads[0] = _mm256_extract_epi32(bytes, 0);
    quads[stride] = _mm256_extract_epi32(bytes, 4);
}
inline void store_quads(Ints values, int32_t* quads, int64_t stride) {
    store_quads(values.half[0], quads, stride);
    store_quads(values.half[1], quads + 2 * stride, stride);
}

inline Ints widen_unsigned(const uint8_t* p) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
    return {{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))}};
}
inline Ints widen_signed(const uint8_t* p) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
    return {{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))}};
}
inline Pairs widen_pairs(const uint8_t* p) {
    const auto* bytes = reinterpret_cast<const __m128i*>(p);
    return {{_mm256_cvtepu8_epi16(_mm_load_si128(bytes)), _mm256_cvtepu8_epi16(_mm_load_si128(bytes + 1))}};
}
inline Ints dot_pairs(Ints sum, Pairs a, int32_t pair) {
    const __m256i b = _mm256_set1_epi32(pair);
    return add(sum, {{_mm256_madd_epi16(a.half[0], b), _mm256_madd_epi16(a.half[1], b)}});
}

inline __m256i load_half(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

inline void fetch_near(const int32_t*) {}

// 8-bit weights become signed.
inline Quads load_bytes(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p + AHEAD), _MM_HINT_T1);
    const __m256i flip = _mm256_set1_epi8(-128);
    return {{_mm256_xor_si256(load_half(p), flip), _mm256_xor_si256(load_half(p + 32), flip)}};
}
inline void split_halves(const uint8_t* p, Quads& low, Quads& high) {
    const __m256i mask = _mm256_set1_epi8(15);
    _mm_prefetch(reinterpret_cast<const char*>(p + AHEAD), _MM_HINT_T1);
    for (int i = 0; i < 2; i++) {
        const __m256i both = load_half(p + 32 * i);
        low.half[i] = _mm256_and_si256(both, mask);
        high.half[i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    }
}

// w | (plane shifted left (or right: negative) & MASK)
template <int SHIFT, int MASK>
inline Quads with_upper(Quads w, const uint8_t* plane) {
    for (int i = 0; i < 2; i++) {
        __m256i bits = load_half(plane + 32 * i);
        if constexpr (SHIFT > 0) bits = _mm256_slli_epi16(bits, SHIFT);
        if constexpr (SHIFT < 0) bits = _mm256_srli_epi16(bits, -SHIFT);
        w.half[i] = _mm256_or_si256(w.half[i], _mm256_and_si256(bits, _mm256_set1_epi8(MASK)));
    }
    return w;
}

// Start value or correction that turns a sum over unsigned weights into that of signed ones; 8-bit weights are signed.
template <int BITS>
inline Ints start(int32_t correction) {
    return BITS == 8 ? zero_ints() : all(correction);
}
template <int BITS>
inline Ints corrected(Ints sum, int32_t) {
    static_assert(BITS == 8);
    return sum;
}

// Pairs of products that fit into 16 bits when added.
template <int BITS>
constexpr int FIT = 32767 / (2 * 127 * (BITS == 8 ? 128 : (1 << BITS) - 1));

// Pairs of products as int16. |w| <= 128 or w <= 63, |x| <= 127: none overflows.
template <int BITS>
inline __m256i products(__m256i w, __m256i x) {
    if constexpr (BITS == 8) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_maddubs_epi16(w, x);
}

inline Ints widen_words(const Quads& words) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {{_mm256_madd_epi16(words.half[0], ones), _mm256_madd_epi16(words.half[1], ones)}};
}

// sums[r] += w . x[r] over COUNT quads; those of one row are STRIDE apart.
template <int BITS, int COUNT, int STRIDE, int ROWS>
inline void dot(Ints (&sums)[ROWS], const Quads (&w)[COUNT], const int32_t* x) {
    Quads words[ROWS];
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const __m256i quad = _mm256_set1_epi32(x[j * STRIDE + r]);
            for (int i = 0; i < 2; i++) {
                const __m256i two = products<BITS>(w[j].half[i], quad);
                words[r].half[i] = j % FIT<BITS> == 0 ? two : _mm256_add_epi16(words[r].half[i], two);
            }
            if ((j + 1) % FIT<BITS> == 0 || j + 1 == COUNT) sums[r] = add(sums[r], widen_words(words[r]));
        }
    }
}

constexpr int RUN = 4;  // rows interleaved to hide latency

#include "quantized_kernels.inc"

constexpr QuantizedKernels KERNELS = make_kernels<4>();

}  // namespace

const QuantizedKernels& quantized_avx2() { return KERNELS; }

}  // namespace foreword

#include "isa_pop.h"

#endif
