#include "dense/dense.h"

#if FOREWORD_X86
#include <immintrin.h>

#include <cstring>

#include "common/isa_push_avx512.h"

namespace foreword {
namespace {

constexpr int64_t LANES = 4;

#include "dense/dense_conversions.inc"

#include "dense/dense_product.inc"

#include "dense/dense_float_cores.inc"

struct Vector {
    using Part = __m512;
    static constexpr int WIDTH = 16;

    static Part zero() { return _mm512_setzero_ps(); }
    static Part load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Part part) { _mm512_storeu_ps(to, part); }
    static Part fill(const uint32_t* x) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*x))); }
    static Part plus(Part a, Part b) { return _mm512_add_ps(a, b); }
    static Part multiply_add(Part a, Part b, Part c) { return _mm512_fmadd_ps(a, b, c); }
    static Part halves(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

    static void small_floats(const uint8_t* from, Part (&parts)[1]) {
        const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        parts[0] = _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
    }
};

// VDPBF16PS: pairs of weights times pairs of x.
struct PairCore {
    using Sum = __m512;
    using Weights = __m512bh;
    static constexpr int64_t STEP_VALUES = 2, STEP_UNITS = 1, STEP_BYTES = 4 * TILE;
    static constexpr bool PAIRS = true, ROUNDED = true, SCALED = false;

    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Sum sum) { _mm512_storeu_ps(to, sum); }
    static Sum plus(Sum a, Sum b) { return _mm512_add_ps(a, b); }
    static Weights weights(const uint8_t* step) { return reinterpret_cast<Weights>(_mm512_loadu_si512(step)); }

    template <int64_t LANES>
    static Weights value(const uint32_t* x) {
        return reinterpret_cast<Weights>(_mm512_set1_epi32(static_cast<int>(*x)));
    }

    static Sum add(Sum sum, Weights weights, Weights value) { return _mm512_dpbf16_ps(sum, weights, value); }
};

// 32 registers: 16 sums at least hide the latency of a step; each tile needs one more, x another.
template <class Core>
struct Loops {
    static constexpr Loop FEW[] = {loop<Core, 1, 4>(), loop<Core, 2, 4>(),  loop<Core, 4, 4>(),
                                   loop<Core, 8, 2>(), loop<Core, 12, 2>(), loop<Core, 16, 1>()};
    static constexpr Loop MANY[] = {loop<Core, 12, 2>(), loop<Core, 8, 2>()};
};

}  // namespace

const DenseKernel& dense_avx512(Format format) { return kernel_of<PairCore, F16Core<Vector>, F32Core<Vector>, F8Core<Vector>>(format); }

}  // namespace foreword

#include "common/isa_pop.h"
#endif
