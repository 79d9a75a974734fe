// Quantized products with AVX2.
//
// Values of up to 6 bits: VPMADDUBSW, whose products are added in 16 bits as long as they fit.
// Values of 8 bits: VPMADDWD, and half as many multiplications by
//     a*p + b*q = (a + q) * (b + p) - a*b - p*q
// whose last two terms depend on x alone and on the weights alone: they are computed once for all columns and rows.
#include "quantized/quantized.h"

#if FOREWORD_X86

#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "common/isa_push_avx2.h"

namespace foreword {
namespace {

#include "quantized/quantized_avx2_primitives.inc"

// With two weights (of 8 bits: four) of 16 registers, an x (two) and a product.
template <int BITS>
constexpr int RUN = BITS == 8 ? 4 : 6;

// Each scale twice.
using Scales = Pairs;

inline Scales twice(Ints scale) {
    for (__m256i& half : scale.half) half = _mm256_blend_epi16(half, _mm256_slli_epi32(half, 16), 0xaa);
    return {{scale.half[0], scale.half[1]}};
}
inline Scales unsigned_scales(const uint8_t* p) { return twice(widen_unsigned(p)); }
inline Scales signed_scales(const uint8_t* p) { return twice(widen_signed(p)); }

template <int SHIFT>
inline Scales nibble_scales(const uint8_t* p) {
    return twice(widen_nibbles<SHIFT>(p));
}

template <int BITS>
constexpr int x_words = BITS == 8 ? 2 : 1;

// For weights of 8 bits, quad a, b, c, d of x becomes words of int16: (a, c) and (b, d); of one row alone, the first word.
inline void store_pairs(__m256i values, int32_t* words, int64_t stride) {
    const __m256i pairs = _mm256_blend_epi16(values, _mm256_slli_epi32(_mm256_shuffle_epi32(values, 0x4e), 16), 0xaa);
    words[0] = _mm256_extract_epi32(pairs, 0);
    words[stride] = _mm256_extract_epi32(pairs, 1);
    words[2 * stride] = _mm256_extract_epi32(pairs, 4);
    words[3 * stride] = _mm256_extract_epi32(pairs, 5);
}

template <int BITS>
inline void store_x(Ints values, int32_t* words, int64_t stride) {
    if (BITS < 8) return store_quads(values, words, stride);
    if (stride == 1) return store_quads(values, words, 2);
    store_pairs(values.half[0], words, stride);
    store_pairs(values.half[1], words + 4 * stride, stride);
}

// 8 bits: 128 times each value, and a * b + c * d of each quad.
inline __m256i terms_of(__m256i values) {
    const __m256i next = _mm256_and_si256(_mm256_srli_epi64(values, 32), _mm256_set1_epi64x(0xffff));
    return _mm256_add_epi32(_mm256_slli_epi32(values, 7), _mm256_madd_epi16(values, next));
}

template <int BITS>
inline Ints start_terms(Ints values, int64_t rows) {
    if (BITS < 8) return values;
    if (rows == 1) return zero_ints();
    return {{terms_of(values.half[0]), terms_of(values.half[1])}};
}

// Fewer bits: one of each half of the quads, as int16.
template <int BITS, int ZERO>
inline int32_t start_value(Ints sum) {
    if constexpr (BITS == 8) return -sum_of(sum);
    const __m256i both = _mm256_add_epi32(sum.half[0], sum.half[1]);
    const __m128i quad = add4(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)), halves = _mm_hadd_epi32(quad, quad);
    return _mm_cvtsi128_si32(_mm_packs_epi32(_mm_mullo_epi32(halves, _mm_set1_epi32(-ZERO)), halves));
}

// Of a group with zeros: zeros of 4 bits twice each, of 8 bits less 128; `sums` are the negative sums of x.
struct ZeroStarts {
    const Pairs& zeros;
    const int32_t* sums;
};
template <int BITS>
inline Pairs zeros_of(const uint8_t* p) {
    const Ints zeros = widen_unsigned(p);
    if (BITS == 4) return twice(zeros);
    const Ints signed_zeros = subtract(zeros, all(128));
    const __m256i low = _mm256_set1_epi32(0xffff);
    return {{_mm256_and_si256(signed_zeros.half[0], low), _mm256_and_si256(signed_zeros.half[1], low)}};
}
template <int STRIDE, int BITS>
inline ZeroStarts starts_of(const Pairs& zeros, const int32_t* sums) {
    return {zeros, sums};
}

template <int BITS>
struct Weights {
    Quads quads[8];
};

// Quads hold the values of formats with a table.
template <>
struct Weights<8> {
    Quads odd[8], even[8];
    Ints products;
    const uint8_t* group;
    Quads quads[8];
};

// Weights p, q, r, s of a quad become (q, s) and (p, r) in int16; products are the sums of p * q + r * s. Few rows, which do
// so in registers, take them from `group`.
template <int R>
inline void load_group(const uint8_t* group, Weights<8>& w) {
    w.group = group;
    if (R <= RUN<8>) return;
    w.products = zero_ints();
    // Rolled: unrolled, all loads would come first.
#pragma GCC unroll 1
    for (int j = 0; j < 8; j++) {
        const Quads bytes = load_bytes(group + 64 * j);
        UNROLLED for (int i = 0; i < 2; i++) {
            const __m256i odd = _mm256_srli_epi16(bytes.half[i], 8), even = _mm256_and_si256(bytes.half[i], _mm256_set1_epi16(255));
            w.odd[j].half[i] = odd;
            w.even[j].half[i] = even;
            w.products.half[i] = _mm256_add_epi32(w.products.half[i], _mm256_madd_epi16(odd, even));
        }
    }
}

template <int R, int BITS>
inline void prepare(Weights<BITS>& w) {
    if constexpr (BITS == 8) load_group<R>(reinterpret_cast<const uint8_t*>(w.quads), w);
}

alignas(32) constexpr int16_t ONES[32] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
alignas(32) constexpr uint16_t EVEN[16] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};

// Registers 8 and 9: odd, 10 and 11: even, 14 and 15: products.
#define LOAD_WIDE "vmovdqa (%[w]), %%ymm8\n\tvmovdqa 32(%[w]), %%ymm9\n\tvmovdqa 512(%[w]), %%ymm10\n\tvmovdqa 544(%[w]), %%ymm11\n\t"
#define LOAD_PRODUCTS "vmovdqa 1024(%[w]), %%ymm14\n\tvmovdqa 1056(%[w]), %%ymm15\n\t"
#define WIDEN                                                                                                              \
    "vmovdqa (%[w]), %%ymm8\n\tvmovdqa 32(%[w]), %%ymm9\n\tprefetcht1 %c[ahead](%[w])\n\t"                                    \
    "vpand (%[even]), %%ymm8, %%ymm10\n\tvpand (%[even]), %%ymm9, %%ymm11\n\t"                                               \
    "vpsrlw $8, %%ymm8, %%ymm8\n\tvpsrlw $8, %%ymm9, %%ymm9\n\t"                                                             \
    "vpmaddwd %%ymm8, %%ymm10, %%ymm12\n\tvpaddd %%ymm12, %%ymm14, %%ymm14\n\t"                                              \
    "vpmaddwd %%ymm9, %%ymm11, %%ymm13\n\tvpaddd %%ymm13, %%ymm15, %%ymm15\n\t"
#define ZERO_PRODUCTS "vpxor %%xmm14, %%xmm14, %%xmm14\n\tvpxor %%xmm15, %%xmm15, %%xmm15\n\t"
#define SUBTRACT_PRODUCTS(r, lo, hi) "vpsubd %%ymm14, %%ymm" #lo ", %%ymm" #lo "\n\tvpsubd %%ymm15, %%ymm" #hi ", %%ymm" #hi "\n\t"

// sums += (odd + first) * (even + second)
#define ADD_SQUARES(r, lo, hi)                                                                                             \
    "vpbroadcastd 4*" #r "(%[x]), %%ymm12\n\tvpbroadcastd %c[stride]+4*" #r "(%[x]), %%ymm13\n\t"                            \
    "vpaddw %%ymm12, %%ymm8, %%ymm14\n\tvpaddw %%ymm13, %%ymm10, %%ymm15\n\t"                                                \
    "vpmaddwd %%ymm14, %%ymm15, %%ymm14\n\tvpaddd %%ymm14, %%ymm" #lo ", %%ymm" #lo "\n\t"                                   \
    "vpaddw %%ymm12, %%ymm9, %%ymm12\n\tvpaddw %%ymm13, %%ymm11, %%ymm13\n\t"                                                \
    "vpmaddwd %%ymm12, %%ymm13, %%ymm12\n\tvpaddd %%ymm12, %%ymm" #hi ", %%ymm" #hi "\n\t"
// The same in two registers fewer: x is loaded twice.
#define ADD_SQUARE(r, odd, even, sum)                                                                                      \
    "vpbroadcastd 4*" #r "(%[x]), %%ymm12\n\tvpbroadcastd %c[stride]+4*" #r "(%[x]), %%ymm13\n\t"                            \
    "vpaddw %%ymm12, %%ymm" #odd ", %%ymm12\n\tvpaddw %%ymm13, %%ymm" #even ", %%ymm13\n\t"                                  \
    "vpmaddwd %%ymm12, %%ymm13, %%ymm12\n\tvpaddd %%ymm12, %%ymm" #sum ", %%ymm" #sum "\n\t"
#define ADD_SQUARES_OF_FEW(r, lo, hi) ADD_SQUARE(r, 8, 10, lo) ADD_SQUARE(r, 9, 11, hi)
#define NEXT_SQUARES "add $64, %[w]\n\tadd $2*%c[stride], %[x]\n\t"

// The second sum of each row times zeros.
#define ADD_ZEROS(r, lo, hi)                                                                                               \
    "vpbroadcastd %c[stride]+4*" #r "(%[starts]), %%ymm12\n\t"                                                             \
    "vpmaddwd (%[zeros]), %%ymm12, %%ymm13\n\tvpaddd %%ymm13, %%ymm" #lo ", %%ymm" #lo "\n\t"                             \
    "vpmaddwd 32(%[zeros]), %%ymm12, %%ymm12\n\tvpaddd %%ymm12, %%ymm" #hi ", %%ymm" #hi "\n\t"

// One row needs no order of instructions, and is sooner done with signed bytes: |w| times x with the sign of w.
inline void add_row(Ints& sum, const uint8_t* group, const int32_t* x) {
    const __m256i flip = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
    UNROLLED for (int j = 0; j < 8; j++) {
        const Quads bytes = load_bytes(group + 64 * j);
        const __m256i quad = _mm256_set1_epi32(x[2 * j]);
        UNROLLED for (int i = 0; i < 2; i++) {
            const __m256i w = _mm256_xor_si256(bytes.half[i], flip);
            const __m256i words = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(quad, w));
            sum.half[i] = _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(words, ones));
        }
    }
}

#define BEGIN_WHOLE(ROWS) FOR_##ROWS(LOAD_SUMS)
#define END_WHOLE(ROWS) FOR_##ROWS(STORE_SUMS)
#define BEGIN_WHOLE_FEW(ROWS) ZERO_PRODUCTS FOR_##ROWS(LOAD_SUMS)
#define END_WHOLE_FEW(ROWS) FOR_##ROWS(SUBTRACT_PRODUCTS) FOR_##ROWS(STORE_SUMS)
#define BEGIN_SQUARES(ROWS) LOAD_PRODUCTS FOR_##ROWS(LOAD_START) FOR_##ROWS(SUBTRACT_PRODUCTS)
#define END_SQUARES(ROWS) FOR_##ROWS(ADD_VALUES)
#define BEGIN_SQUARES_FEW(ROWS) ZERO_PRODUCTS FOR_##ROWS(LOAD_START)
#define END_SQUARES_FEW(ROWS) FOR_##ROWS(SUBTRACT_PRODUCTS) FOR_##ROWS(ADD_VALUES)
#define BEGIN_GROUPED(ROWS) BEGIN_SQUARES(ROWS) FOR_##ROWS(ADD_ZEROS)
#define END_GROUPED(ROWS) END_SQUARES(ROWS)
#define BEGIN_GROUPED_FEW(ROWS) BEGIN_SQUARES_FEW(ROWS) FOR_##ROWS(ADD_ZEROS)
#define END_GROUPED_FEW(ROWS) END_SQUARES_FEW(ROWS)

#define SQUARES(ROWS, KIND, ...)                                                                                           \
    {                                                                                                                      \
        if constexpr (STRIDE > RUN<8>) {                                                                                   \
            const Quads* w = weights.odd;                                                                                  \
            LOOP(ROWS, 8, BEGIN_##KIND, LOAD_WIDE, ADD_SQUARES, NEXT_SQUARES, END_##KIND, __VA_ARGS__);                     \
        } else {                                                                                                           \
            const uint8_t* w = weights.group;                                                                              \
            LOOP(ROWS, 8, BEGIN_##KIND##_FEW, WIDEN, ADD_SQUARES_OF_FEW, NEXT_SQUARES, END_##KIND##_FEW, [even] "r"(EVEN),   \
                 [ahead] "i"(AHEAD), __VA_ARGS__);                                                                         \
        }                                                                                                                  \
    }

// sums[r] += w . x[r], except for start values and, of more rows than RUN, w.products.
template <int STRIDE, int ROWS>
inline void add_dot(Ints* sums, const Weights<8>& weights, const int32_t* x) {
    if constexpr (STRIDE == 1) return add_row(*sums, weights.group, x);
    if constexpr (ROWS == 2) SQUARES(2, WHOLE, "m"(*sums))
    if constexpr (ROWS == 3) SQUARES(3, WHOLE, "m"(*sums))
    if constexpr (ROWS == 4) SQUARES(4, WHOLE, "m"(*sums))
}

template <int STRIDE, int ROWS>
inline void add_small_dot(Floats* sums, const Floats& scale, const float* x_scales, const Weights<8>& weights, const int32_t* x,
                          const int32_t* starts) {
    if constexpr (STRIDE == 1) {
        Ints sum = zero_ints();
        add_row(sum, weights.group, x);
        *sums = multiply_add(to_floats(sum), scaled(scale, *x_scales), *sums);
    }
#define SQUARES_OF(ROWS) SQUARES(ROWS, SQUARES, [starts] "r"(starts), [scale] "r"(&scale), [x_scales] "r"(x_scales))
    if constexpr (ROWS == 2) SQUARES_OF(2)
    if constexpr (ROWS == 3) SQUARES_OF(3)
    if constexpr (ROWS == 4) SQUARES_OF(4)
#undef SQUARES_OF
}

template <int STRIDE, int ROWS>
inline void add_small_dot(Floats* sums, const Floats& scale, const float* x_scales, const Weights<8>& weights, const int32_t* x,
                          const ZeroStarts& grouped) {
    const int32_t* starts = grouped.sums;
    if constexpr (STRIDE == 1) {
        const Pairs& zeros = grouped.zeros;
        Ints sum = multiply_small({{zeros.half[0], zeros.half[1]}}, starts[1]);
        add_row(sum, weights.group, x);
        *sums = multiply_add(to_floats(sum), scaled(scale, *x_scales), *sums);
    }
#define SQUARES_OF(ROWS)                                                                                                   \
    SQUARES(ROWS, GROUPED, [starts] "r"(starts), [zeros] "r"(&grouped.zeros), [scale] "r"(&scale), [x_scales] "r"(x_scales))
    if constexpr (ROWS == 2) SQUARES_OF(2)
    if constexpr (ROWS == 3) SQUARES_OF(3)
    if constexpr (ROWS == 4) SQUARES_OF(4)
#undef SQUARES_OF
}

// |x| <= 127. A start value makes weights signed: words before the last ones may wrap.
template <int BITS, int COUNT>
constexpr int fit(bool is_signed) {
    const int most = 32767 / (2 * 127 * (is_signed ? 1 << (BITS - 1) : (1 << BITS) - 1));
    return most < COUNT ? most : COUNT;
}

#define ADD_BYTES(r, lo, hi)                                                                                               \
    "vpbroadcastd 4*" #r "(%[x]), %%ymm14\n\t"                                                                              \
    "vpmaddubsw %%ymm14, %%ymm12, %%ymm15\n\tvpaddw %%ymm15, %%ymm" #lo ", %%ymm" #lo "\n\t"                                 \
    "vpmaddubsw %%ymm14, %%ymm13, %%ymm14\n\tvpaddw %%ymm14, %%ymm" #hi ", %%ymm" #hi "\n\t"
#define MULTIPLY_WORDS(lo, hi)                                                                                             \
    "vpmaddwd (%[factors]), %%ymm" #lo ", %%ymm" #lo "\n\tvpmaddwd 32(%[factors]), %%ymm" #hi ", %%ymm" #hi "\n\t"
#define ADD_SCALED(r, lo, hi) MULTIPLY_WORDS(lo, hi) ADD_SUMS(r, lo, hi)
#define ADD_SMALL(r, lo, hi) MULTIPLY_WORDS(lo, hi) ADD_VALUES(r, lo, hi)
#define BEGIN_BYTES(ROWS) FOR_##ROWS(LOAD_START)
#define LOAD_ZERO_START(r, lo, hi)                                                                                         \
    "vpbroadcastd 4*" #r "(%[starts]), %%ymm12\n\tvpmullw (%[zeros]), %%ymm12, %%ymm" #lo "\n\t"                          \
    "vpmullw 32(%[zeros]), %%ymm12, %%ymm" #hi "\n\t"
#define BEGIN_ZEROS(ROWS) FOR_##ROWS(LOAD_ZERO_START)
#define END_SCALED(ROWS) FOR_##ROWS(ADD_SCALED)
#define END_SMALL(ROWS) FOR_##ROWS(ADD_SMALL)

inline __m256i start_words(const int32_t* starts, int) { return _mm256_set1_epi32(*starts); }
inline __m256i start_words(const ZeroStarts& starts, int half) {
    return _mm256_mullo_epi16(starts.zeros.half[half], _mm256_set1_epi32(*starts.sums));
}

// factors . (start + w . x), where w . x is added in 16 bits. See add_row.
template <int COUNT, class Starts>
inline Ints dot_row(const Quads* w, const int32_t* x, const Starts& starts, const Pairs& factors) {
    Ints sum;
    UNROLLED for (int i = 0; i < 2; i++) {
        __m256i words = start_words(starts, i);
        UNROLLED for (int j = 0; j < COUNT; j++) {
            words = _mm256_add_epi16(words, _mm256_maddubs_epi16(w[j].half[i], _mm256_set1_epi32(x[j])));
        }
        sum.half[i] = _mm256_madd_epi16(words, factors.half[i]);
    }
    return sum;
}

// sums[r] += scale * (starts[r] + w . x[r]), where w . x[r] is added in 16 bits.
template <int STRIDE, int ROWS, int COUNT>
inline void add_scaled(Ints* sums, const Scales& scale, const Quads* w, const int32_t* x, const int32_t* starts) {
    if constexpr (ROWS == 1) *sums = add(*sums, dot_row<COUNT>(w, x, starts, scale));
#define BYTES(ROWS) LOOP(ROWS, COUNT, BEGIN_BYTES, LOAD_BYTES, ADD_BYTES, NEXT_BYTES, END_SCALED, [factors] "r"(&scale), [starts] "r"(starts))
    if constexpr (ROWS == 2) BYTES(2);
    if constexpr (ROWS == 3) BYTES(3);
    if constexpr (ROWS == 4) BYTES(4);
    if constexpr (ROWS == 5) BYTES(5);
    if constexpr (ROWS == 6) BYTES(6);
#undef BYTES
}

constexpr int32_t NO_STARTS[6] = {};

inline const int32_t* address(const int32_t* starts) { return starts; }
inline const int32_t* address(NoStarts) { return NO_STARTS; }

template <int STRIDE, int ROWS, int FIRST, int COUNT, int BITS, class Starts>
inline void add_scaled_dot(Ints* sums, const Scales& scale, const Weights<BITS>& w, const int32_t* x, const Starts& starts) {
    constexpr bool SIGNED = !std::is_same_v<Starts, NoStarts>;
    constexpr int FIT = fit<BITS, COUNT>(SIGNED);
    static_assert(COUNT % FIT == 0 && (!SIGNED || COUNT == FIT));
    UNROLLED for (int j = FIRST; j < FIRST + COUNT; j += FIT) {
        add_scaled<STRIDE, ROWS, FIT>(sums, scale, w.quads + j, x + j * STRIDE, address(starts));
    }
}

// Values of 8 bits, of a table.
template <int STRIDE, int ROWS, int FIRST, int COUNT>
inline void add_scaled_dot(Ints* sums, const Scales& scale, const Weights<8>& weights, const int32_t* x, const int32_t* starts) {
    static_assert(FIRST == 0 && COUNT == 8);
    Ints dots[ROWS];
    UNROLLED for (int r = 0; r < ROWS; r++) dots[r] = all(starts[r]);
    add_dot<STRIDE, ROWS>(dots, weights, x);
    const Ints once = {{_mm256_srai_epi32(scale.half[0], 16), _mm256_srai_epi32(scale.half[1], 16)}};
    UNROLLED for (int r = 0; r < ROWS; r++) {
        if (STRIDE > RUN<8>) dots[r] = subtract(dots[r], weights.products);
        sums[r] = add(sums[r], multiply(dots[r], once));
    }
}

template <int STRIDE, int ROWS, int BITS, class Starts>
inline void add_small_dot(Floats* sums, const Floats& scale, const float* x_scales, const Weights<BITS>& weights, const int32_t* x,
                          const Starts& start_values) {
    const Quads* w = weights.quads;
    const int32_t* starts = address(start_values);
    if constexpr (fit<BITS, 8>(!std::is_same_v<Starts, NoStarts>) < 8) {
        const __m256i ones = _mm256_set1_epi16(1);
        Ints dots[ROWS];
        UNROLLED for (Ints& dot : dots) dot = zero_ints();
        add_scaled_dot<STRIDE, ROWS, 0, 8>(dots, Scales{{ones, ones}}, weights, x, start_values);
        UNROLLED for (int r = 0; r < ROWS; r++) sums[r] = multiply_add(to_floats(dots[r]), scaled(scale, x_scales[r]), sums[r]);
        return;
    }
    if constexpr (ROWS == 1) {
        const __m256i ones = _mm256_set1_epi16(1);
        *sums = multiply_add(to_floats(dot_row<8>(w, x, starts, {{ones, ones}})), scaled(scale, *x_scales), *sums);
    }
#define BYTES(ROWS)                                                                                                        \
    LOOP(ROWS, 8, BEGIN_BYTES, LOAD_BYTES, ADD_BYTES, NEXT_BYTES, END_SMALL, [factors] "r"(ONES), [starts] "r"(starts),       \
         [scale] "r"(&scale), [x_scales] "r"(x_scales))
    if constexpr (ROWS == 2) BYTES(2);
    if constexpr (ROWS == 3) BYTES(3);
    if constexpr (ROWS == 4) BYTES(4);
    if constexpr (ROWS == 5) BYTES(5);
    if constexpr (ROWS == 6) BYTES(6);
#undef BYTES
}

// Zeros of 4 bits are at most 16: sums fit as in signed weights.
template <int STRIDE, int ROWS>
inline void add_small_dot(Floats* sums, const Floats& scale, const float* x_scales, const Weights<4>& weights, const int32_t* x,
                          const ZeroStarts& grouped) {
    const Quads* w = weights.quads;
    static_assert(8 * 2 * 127 * 16 <= 32767);
    if constexpr (ROWS == 1) {
        const __m256i ones = _mm256_set1_epi16(1);
        *sums = multiply_add(to_floats(dot_row<8>(w, x, grouped, {{ones, ones}})), scaled(scale, *x_scales), *sums);
    }
#define BYTES(ROWS)                                                                                                        \
    LOOP(ROWS, 8, BEGIN_ZEROS, LOAD_BYTES, ADD_BYTES, NEXT_BYTES, END_SMALL, [factors] "r"(ONES), [zeros] "r"(&grouped.zeros), \
         [starts] "r"(grouped.sums), [scale] "r"(&scale), [x_scales] "r"(x_scales))
    if constexpr (ROWS == 2) BYTES(2);
    if constexpr (ROWS == 3) BYTES(3);
    if constexpr (ROWS == 4) BYTES(4);
    if constexpr (ROWS == 5) BYTES(5);
    if constexpr (ROWS == 6) BYTES(6);
#undef BYTES
}

template <int R>
inline void add_whole_dot(Ints (&sums)[R], const uint8_t* tile, int64_t quads, const int32_t* x) {
    Ints products = zero_ints();
    for (int64_t i = 0; i < quads; i += 8) {
        Weights<8> w;
        load_group<R>(tile + 64 * i, w);
        if (R > RUN<8>) products = add(products, w.products);
        each_run<RUN<8>, R>([&](auto first, auto count) { add_dot<R, count>(sums + first, w, x + 2 * i * R + first); });
    }
    UNROLLED for (Ints& sum : sums) sum = subtract(sum, products);
}

#include "quantized/quantized_kernels.inc"

constexpr QuantizedKernels KERNELS = make_kernels<16>();

}  // namespace

const QuantizedKernels& quantized_avx2() { return KERNELS; }

}  // namespace foreword

#include "common/isa_pop.h"

#endif
