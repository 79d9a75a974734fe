#include "attention/attention.h"

#if FOREWORD_X86

#include <cfloat>
#include <cmath>

#include "common/vec_avx512.h"
#include "common/vec_math.h"

namespace foreword {
namespace {
constexpr int MAX_ROWS = 6, VECS = 4;  // 24 sums and their operands: 32 registers
}
}  // namespace foreword

#include "attention/attention_task.inc"

namespace foreword {
namespace {

// Pairs of bfloat16; sums in float32. An int8 value is a bfloat16 exactly.
struct Bf16PairProduct {
    using Value = Bf16;
    static constexpr int64_t DEPTH = 2;

    static __m512bh as_bf16(Vec x) { return reinterpret_cast<__m512bh>(x); }

    static Vec multiply(Vec sum, float left, Vec right) { return _mm512_dpbf16_ps(sum, as_bf16(splat(left)), as_bf16(right)); }

    static Vec whole_elements(const Bf16* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
    static Vec whole_elements(const int8_t* p) { return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(load(p + LANES), load(p))); }

    template <class T>
    static Vec elements(const T* p, int64_t left) {
        if (left >= 2 * LANES) return whole_elements(p);
        T padded[2 * LANES] = {};
        std::memcpy(padded, p, left * sizeof(T));
        return whole_elements(padded);
    }

    static void interleave(Vec (&rows)[2]) {
        const __m512i a = _mm512_castps_si512(rows[0]), b = _mm512_castps_si512(rows[1]);
        const __m512i order = _mm512_cvtepi8_epi16(_mm256_setr_epi8(0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40,
                                                                   9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47));
        rows[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, order, b));
        rows[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, _mm512_add_epi16(order, _mm512_set1_epi16(16)), b));
    }

    struct Guard {
        Guard() : most(_mm512_setzero_si512()) {}
        void watch(Vec x) {
            most = _mm512_max_epi16(most, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi16(0x7fff)));
        }
        bool finite() const { return _mm512_cmpge_epi16_mask(most, _mm512_set1_epi16(0x7f80)) == 0; }
        __m512i most;
    };
};

}  // namespace

const AttentionKernels ATTENTION_AVX512 = {attend_any<Bf16PairProduct>, merge_task};

}  // namespace foreword
#include "common/isa_pop.h"

#endif
