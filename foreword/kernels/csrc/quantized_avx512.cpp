// Quantized products with AVX-512: one VPDPBUSD takes 64 weights and a broadcast quad of x.
#include "quantized.h"

#if FOREWORD_X86

#include <immintrin.h>

#include <type_traits>
#include <utility>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")

namespace foreword {
namespace {

using Quads = __m512i;
using Ints = __m512i;
using Floats = __m512;
using Pairs = __m512i;

constexpr int64_t AHEAD = 8192;  // bytes that weights are fetched into the second cache before their use
constexpr int64_t X_AHEAD = 256;  // quads of x that are fetched into the first cache before their use

inline __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats scaled(Floats a, float scale) { return _mm512_mul_ps(a, _mm512_set1_ps(scale)); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints rounded(Floats a) { return _mm512_cvtps_epi32(a); }
inline Ints maximum(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline int32_t maximum_of(Ints a) { return _mm512_reduce_max_epi32(a); }
inline int32_t sum_of(Ints a) { return _mm512_reduce_add_epi32(a); }
inline Ints magnitude_bits(Floats a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }

inline Floats load_floats(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
inline Floats load_bfloats(const uint16_t* p, int64_t count) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), p)), 16));
}
inline Floats load_halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))); }

inline void store_floats(Floats a, char* p, int64_t count) { _mm512_mask_storeu_ps(p, first(count), a); }

// To the nearest, ties to even. (VCVTNEPS2BF16 takes subnormal numbers for zero.)
inline void store_bfloats(Floats a, char* p, int64_t count) {
    const __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i whole = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtepi32_epi16(_mm512_srli_epi32(whole, 16)));
}

inline void store_quads(Ints values, int32_t* quads, int64_t stride) {
    const __m128i bytes = _mm512_cvtepi32_epi8(values);
    quads[0] = _mm_extract_epi32(bytes, 0);
    quads[stride] = _mm_extract_epi32(bytes, 1);
    quads[2 * stride] = _mm_extract_epi32(bytes, 2);
    quads[3 * stride] = _mm_extract_epi32(bytes, 3);
}

inline Ints widen_unsigned(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }
inline Ints widen_signed(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }
inline Pairs widen_pairs(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints dot_pairs(Ints sum, Pairs a, int32_t pair) { return _mm512_dpwssd_epi32(sum, a, _mm512_set1_epi32(pair)); }

// x is read again and again from the second cache.
inline void fetch_near(const int32_t* x) { _mm_prefetch(reinterpret_cast<const char*>(x + X_AHEAD), _MM_HINT_T0); }

inline Quads load_bytes(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p + AHEAD), _MM_HINT_T1);
    return _mm512_load_si512(p);
}
inline void split_halves(const uint8_t* p, Quads& low, Quads& high) {
    const __m512i both = load_bytes(p), mask = _mm512_set1_epi8(15);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}

// w | (plane shifted left (or right: negative) & MASK)
template <int SHIFT, int MASK>
inline Quads with_upper(Quads w, const uint8_t* plane) {
    __m512i bits = load_bytes(plane);
    if constexpr (SHIFT > 0) bits = _mm512_slli_epi16(bits, SHIFT);
    if constexpr (SHIFT < 0) bits = _mm512_srli_epi16(bits, -SHIFT);
    return _mm512_ternarylogic_epi32(w, bits, _mm512_set1_epi8(MASK), 0xf8);
}

// What a sum of products of unsigned weights begins with, or is corrected with, to be that of the signed ones.
template <int BITS>
inline Ints start(int32_t correction) {
    return _mm512_set1_epi32(correction);
}
template <int BITS>
inline Ints corrected(Ints sum, int32_t correction) {
    return add(sum, _mm512_set1_epi32(correction));
}

// sum + w . quad. As assembly: GCC 12 copies the sums of the intrinsic back and forth, and loads the quad apart.
inline void add_dot(Ints& sum, Quads w, const int32_t& quad) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(quad));
}

// sums[r] += w . x[r] over COUNT quads; those of one row are STRIDE apart. Rows take turns, so that none waits for itself.
template <int BITS, int COUNT, int STRIDE, int ROWS>
inline void dot(Ints (&sums)[ROWS], const Quads (&w)[COUNT], const int32_t* x) {
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) add_dot(sums[r], w[j], x[j * STRIDE + r]);
    }
}

constexpr int RUN = 4;  // rows that take turns

#include "quantized_kernels.inc"

constexpr QuantizedKernels KERNELS = make_kernels<16>();

}  // namespace

const QuantizedKernels& quantized_avx512() { return KERNELS; }

}  // namespace foreword

#pragma GCC pop_options

#endif
