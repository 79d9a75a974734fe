// Multiply-adds on registers alone: the ceilings of foreword/bench/roofline.py. Each function returns their number.
#include "common/isa.h"

#if FOREWORD_X86
#include <immintrin.h>
#endif

namespace foreword {
namespace {

enum class PeakType : int32_t { FLOAT32, BFLOAT16, INT8, INT4 };  // PEAK_TYPES in roofline.py

#if FOREWORD_X86
constexpr int SUMS = 10;  // at least latency times ports of a multiply-add, and at most the registers of AVX2

// The compiler must not know a value, or it would compute a product once for all rounds, and one of all sums that are equal.
#define HIDE(value) __asm__ volatile("" : "+v"(value))

#include "common/isa_push_avx2.h"
double float32_avx2(int64_t rounds) {
    __m256 sums[SUMS] = {}, a = _mm256_setzero_ps();
#pragma GCC unroll 10
    for (__m256& sum : sums) HIDE(sum);
    for (int64_t i = 0; i < rounds; i++) {
        HIDE(a);
#pragma GCC unroll 10
        for (__m256& sum : sums) sum = _mm256_fmadd_ps(a, a, sum);
    }
    for (__m256& sum : sums) HIDE(sum);
    return static_cast<double>(rounds) * SUMS * 8;
}

// Bytes are multiplied to sums of 16 bits, `CHAINED` of which are added before they are widened to 32 bits.
template <int CHAINED>
double bytes_avx2(int64_t rounds) {
    constexpr int FEW = 6;  // the products in between hide the latency, and take registers
    __m256i sums[FEW] = {}, a = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 6
        for (__m256i& sum : sums) {
            __m256i narrow = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int c = 0; c < CHAINED; c++) {
                HIDE(a);
                const __m256i product = _mm256_maddubs_epi16(a, a);
                narrow = c ? _mm256_add_epi16(narrow, product) : product;
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, ones));
        }
    }
    for (__m256i& sum : sums) HIDE(sum);
    return static_cast<double>(rounds) * FEW * 32 * CHAINED;
}
#include "common/isa_pop.h"

#include "common/isa_push_avx512.h"
double float32_avx512(int64_t rounds) {
    __m512 sums[SUMS] = {}, a = _mm512_setzero_ps();
#pragma GCC unroll 10
    for (__m512& sum : sums) HIDE(sum);
    for (int64_t i = 0; i < rounds; i++) {
        HIDE(a);
#pragma GCC unroll 10
        for (__m512& sum : sums) sum = _mm512_fmadd_ps(a, a, sum);
    }
    for (__m512& sum : sums) HIDE(sum);
    return static_cast<double>(rounds) * SUMS * 16;
}

double bfloat16_avx512(int64_t rounds) {
    __m512 sums[SUMS] = {};
    __m512i a = _mm512_setzero_si512();
#pragma GCC unroll 10
    for (__m512& sum : sums) HIDE(sum);
    for (int64_t i = 0; i < rounds; i++) {
        HIDE(a);
#pragma GCC unroll 10
        for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)a);
    }
    for (__m512& sum : sums) HIDE(sum);
    return static_cast<double>(rounds) * SUMS * 32;
}

double bytes_avx512(int64_t rounds) {
    __m512i sums[SUMS] = {}, a = _mm512_setzero_si512();
#pragma GCC unroll 10
    for (__m512i& sum : sums) HIDE(sum);
    for (int64_t i = 0; i < rounds; i++) {
        HIDE(a);
#pragma GCC unroll 10
        for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, a);
    }
    for (__m512i& sum : sums) HIDE(sum);
    return static_cast<double>(rounds) * SUMS * 64;
}
#include "common/isa_pop.h"

#include "common/isa_push_amx.h"
// Two tiles of rows times two of columns, 16 rows of 64 bytes each.
template <bool IS_INT8>
double tiles_amx(int64_t rounds) {
    struct alignas(64) {
        uint8_t palette = 1, reserved[15] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = 16;
    }
    __asm__ volatile("" ::: "memory");  // g++ 12 takes the first 8 bytes alone for read
    _tile_loadconfig(&shapes);  // zeroes all tiles
    for (int64_t i = 0; i < rounds; i++) {
        if constexpr (IS_INT8) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_release();
    return static_cast<double>(rounds) * 4 * 16 * 16 * (IS_INT8 ? 64 : 32);
}
#include "common/isa_pop.h"
#endif

}  // namespace
}  // namespace foreword

// Multiply-adds of `rounds` rounds on one core; 0: there is no loop for this instruction set and type.
extern "C" double foreword_peak([[maybe_unused]] int32_t isa, [[maybe_unused]] int32_t type, [[maybe_unused]] int64_t rounds) {
#if FOREWORD_X86
    using namespace foreword;
    const auto on = static_cast<Isa>(isa);
    const auto of = static_cast<PeakType>(type);
    const bool is_bytes = of == PeakType::INT8 || of == PeakType::INT4;
    if (on == Isa::AMX && of != PeakType::FLOAT32) return is_bytes ? tiles_amx<true>(rounds) : tiles_amx<false>(rounds);
    if (on == Isa::AVX512 || on == Isa::AMX) {
        if (is_bytes) return bytes_avx512(rounds);
        return of == PeakType::BFLOAT16 ? bfloat16_avx512(rounds) : float32_avx512(rounds);
    }
    if (on == Isa::AVX2) {
        if (!is_bytes) return float32_avx2(rounds);
        return of == PeakType::INT4 ? bytes_avx2<4>(rounds) : bytes_avx2<1>(rounds);
    }
#endif
    return 0;
}
