// Vectors of 4 values for ARM: see vec.h. Every 64-bit ARM processor has these instructions, so no region begins here.
#pragma once

#include <arm_neon.h>

#include "common/vec.h"

namespace foreword {
namespace {

using Vec = float32x4_t;
constexpr int64_t LANES = 4;

inline Vec splat(float x) { return vdupq_n_f32(x); }
inline Vec load(const float* p) { return vld1q_f32(p); }
inline Vec load(const Bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16)); }
inline Vec load(const int8_t* p) {
    uint32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}

inline void store(float* p, Vec x) { vst1q_f32(p, x); }

// To nearest, ties to even; a NaN stays one.
inline void store(Bf16* p, Vec x) {
    const uint32x4_t raw = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(raw, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(raw, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t bits = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(bits, 16));
}
inline void store(int8_t* p, Vec x) {
    const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(x));
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
    std::memcpy(p, &bytes, sizeof bytes);
}

inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }

// a < b ? yes : no
inline Vec pick_less(Vec a, Vec b, Vec yes, Vec no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }

// The second value where either is NaN.
inline Vec min(Vec a, Vec b) { return pick_less(a, b, a, b); }
inline Vec max(Vec a, Vec b) { return pick_less(b, a, a, b); }

// x in the lanes [begin, end), 0 <= begin <= end <= LANES, else other
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, Vec other) {
    const int32x4_t lane = {0, 1, 2, 3};
    const uint32x4_t from = vcgeq_s32(lane, vdupq_n_s32(static_cast<int32_t>(begin)));
    return vbslq_f32(vandq_u32(from, vcltq_s32(lane, vdupq_n_s32(static_cast<int32_t>(end)))), x, other);
}

// The nearest integer, ties to even.
inline Vec nearest(Vec x) { return vrndnq_f32(x); }

// x * 2^n for integers -127 <= n <= 128; 0 for -127.
inline Vec times_power(Vec x, Vec n) {
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return x * vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
}

// The larger magnitude of both; NaN counts as the largest.
inline Vec max_magnitude(Vec a, Vec b) {
    return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(vabsq_f32(a)), vreinterpretq_s32_f32(vabsq_f32(b))));
}

inline float reduce_add(Vec x) { return vaddvq_f32(x); }
inline float reduce_max(Vec x) { return vmaxvq_f32(x); }

// rows[i][j] -> rows[j][i]
inline void transpose(Vec (&rows)[LANES]) {
    const float32x4x2_t upper = vtrnq_f32(rows[0], rows[1]), lower = vtrnq_f32(rows[2], rows[3]);
    for (int i = 0; i < 2; i++) {
        rows[i] = vcombine_f32(vget_low_f32(upper.val[i]), vget_low_f32(lower.val[i]));
        rows[i + 2] = vcombine_f32(vget_high_f32(upper.val[i]), vget_high_f32(lower.val[i]));
    }
}

}  // namespace
}  // namespace foreword
