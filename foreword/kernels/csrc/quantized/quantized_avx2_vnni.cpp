// Quantized products with AVX2 and VPDPBUSD, which processors with AVX-VNNI encode with VEX, others with EVEX. All of these
// have AVX-512 too: they prefer it.
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

template <int BITS>
constexpr int RUN = 4;
constexpr int WHOLE_RUN = 6, SUM_REGISTERS = 2, UNROLLED_ROWS = MAX_GROUP;

inline void fetch_near(const int32_t*) {}

namespace vex {

inline void add_dot(Ints& sum, const Quads& w, const int32_t& quad) {
    const __m256i x = _mm256_set1_epi32(quad);
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.half[0]) : "x"(w.half[0]), "x"(x));
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.half[1]) : "x"(w.half[1]), "x"(x));
}

#include "quantized/quantized_byte_dots.inc"
#include "quantized/quantized_kernels.inc"

constexpr QuantizedKernels KERNELS = make_kernels<16>();

}  // namespace vex

namespace evex {

inline void add_dot(Ints& sum, const Quads& w, const int32_t& quad) {
    const __m256i x = _mm256_set1_epi32(quad);
    __asm__("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum.half[0]) : "x"(w.half[0]), "x"(x));
    __asm__("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum.half[1]) : "x"(w.half[1]), "x"(x));
}

#include "quantized/quantized_byte_dots.inc"
#include "quantized/quantized_kernels.inc"

constexpr QuantizedKernels KERNELS = make_kernels<16>();

}  // namespace evex

}  // namespace

const QuantizedKernels& quantized_avx2_vnni() { return has_avx_vnni() ? vex::KERNELS : evex::KERNELS; }

}  // namespace foreword

#include "common/isa_pop.h"

#endif
