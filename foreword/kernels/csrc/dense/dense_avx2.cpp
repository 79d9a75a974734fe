#include "dense/dense.h"

#if FOREWORD_X86
#include <immintrin.h>

#include <cstring>

#include "common/isa_push_avx2.h"

namespace foreword {
namespace {

constexpr int64_t LANES = 2;

#include "dense/dense_conversions.inc"

#include "dense/dense_product.inc"

#include "dense/dense_float_cores.inc"

struct Vector {
    using Part = __m256;
    static constexpr int WIDTH = 8;

    static Part zero() { return _mm256_setzero_ps(); }
    static Part load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Part part) { _mm256_storeu_ps(to, part); }
    static Part fill(const uint32_t* x) { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(*x))); }
    static Part plus(Part a, Part b) { return _mm256_add_ps(a, b); }
    static Part multiply_add(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
    static Part halves(const uint8_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }

    static void small_floats(const uint8_t* from, Part (&parts)[2]) {
        const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        const __m256i floats = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
        parts[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(floats));
        parts[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(floats, 1));
    }

    static Part first_of_pairs(const uint8_t* from) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs(from), 16)); }

    static Part second_of_pairs(const uint8_t* from) {
        return _mm256_castsi256_ps(_mm256_and_si256(pairs(from), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }

    static __m256i pairs(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
};

// 16 registers: two for the sums of each row and tile, two (BF16, F8: four) for the weights, one or two for x.
template <class Core>
struct Loops {
    static constexpr Loop FEW[] = {loop<Core, 1, 2>(), loop<Core, 2, 2>(), loop<Core, 4, 1>()};
    static constexpr Loop MANY[] = {loop<Core, 6, 1>(), loop<Core, 4, 1>()};
};

template <class Core>
struct PairLoops {
    static constexpr Loop FEW[] = {loop<Core, 1, 2>(), loop<Core, 2, 1>(), loop<Core, 4, 1>()};
    static constexpr Loop MANY[] = {loop<Core, 4, 1>()};
};
template <>
struct Loops<BF16Core<Vector>> : PairLoops<BF16Core<Vector>> {};
template <>
struct Loops<F8Core<Vector>> : PairLoops<F8Core<Vector>> {};

}  // namespace

const DenseKernel& dense_avx2(Format format) { return kernel_of<BF16Core<Vector>, F16Core<Vector>, F32Core<Vector>, F8Core<Vector>>(format); }

}  // namespace foreword

#include "common/isa_pop.h"
#endif
