#include "dense/dense.h"

#if FOREWORD_ARM
#include <arm_neon.h>

#include <cstring>

namespace foreword {
namespace {

constexpr int64_t LANES = 2;

#include "dense/dense_conversions.inc"

#include "dense/dense_product.inc"

#include "dense/dense_float_cores.inc"

struct Vector {
    using Part = float32x4_t;
    static constexpr int WIDTH = 4;

    static Part zero() { return vdupq_n_f32(0.0f); }
    static Part load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Part part) { vst1q_f32(to, part); }
    static Part fill(const uint32_t* x) {
        float value;
        std::memcpy(&value, x, sizeof value);
        return vdupq_n_f32(value);
    }
    static Part plus(Part a, Part b) { return vaddq_f32(a, b); }
    static Part multiply_add(Part a, Part b, Part c) { return vfmaq_f32(c, a, b); }
    static Part halves(const uint8_t* from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
    static void small_floats(const uint8_t* from, Part (&parts)[4]) {
        const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(from));
        for (int i = 0; i < 4; i += 2) {
            const int16x8_t words = vshlq_n_s16(vmovl_s8(i == 0 ? vget_low_s8(bytes) : vget_high_s8(bytes)), 7);
            const float16x8_t halves = vreinterpretq_f16_s16(vandq_s16(words, vdupq_n_s16(static_cast<int16_t>(0xbf80))));
            parts[i] = vcvt_f32_f16(vget_low_f16(halves));
            parts[i + 1] = vcvt_f32_f16(vget_high_f16(halves));
        }
    }

    static Part first_of_pairs(const uint8_t* from) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs(from), 16)); }
    static Part second_of_pairs(const uint8_t* from) { return vreinterpretq_f32_u32(vandq_u32(pairs(from), vdupq_n_u32(0xffff0000))); }

    static uint32x4_t pairs(const uint8_t* from) { return vreinterpretq_u32_u8(vld1q_u8(from)); }
};

// 32 registers: four for the sums of each row and tile, four (BF16, F8: eight) for the weights, one or two for x of each row.
template <class Core>
struct Loops {
    static constexpr Loop FEW[] = {loop<Core, 1, 2>(), loop<Core, 2, 1>(), loop<Core, 4, 1>()};
    static constexpr Loop MANY[] = {loop<Core, 4, 1>()};
};

}  // namespace

const DenseKernel& dense_neon(Format format) { return kernel_of<BF16Core<Vector>, F16Core<Vector>, F32Core<Vector>, F8Core<Vector>>(format); }

}  // namespace foreword

#endif
