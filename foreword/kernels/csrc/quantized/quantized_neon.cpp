// Quantized products with NEON: SDOT multiplies four quads of weights, which are signed, with one quad of x.
#include "quantized/quantized.h"

#if FOREWORD_ARM

#include <arm_neon.h>

#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace foreword {
namespace {

// Four columns in each part.
struct Quads {
    int8x16_t part[4];
};
struct Ints {
    int32x4_t part[4];
};
struct Floats {
    float32x4_t part[4];
};
struct Pairs {
    int16x8_t part[4];
};

template <class Result, class Function>
inline Result each(const Function& part) {
    return {{part(0), part(1), part(2), part(3)}};
}

inline Ints all(int32_t a) {
    return each<Ints>([=](int) { return vdupq_n_s32(a); });
}
inline Ints zero_ints() { return all(0); }
inline Floats zero_floats() {
    return each<Floats>([](int) { return vdupq_n_f32(0.0f); });
}
inline Floats all(float a) {
    return each<Floats>([=](int) { return vdupq_n_f32(a); });
}
inline Ints add(const Ints& a, const Ints& b) {
    return each<Ints>([&](int i) { return vaddq_s32(a.part[i], b.part[i]); });
}
inline Floats add(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
inline Ints multiply(const Ints& a, const Ints& b) {
    return each<Ints>([&](int i) { return vmulq_s32(a.part[i], b.part[i]); });
}
inline Ints multiply_small(const Ints& a, int32_t b) {
    return each<Ints>([&](int i) { return vmulq_n_s32(a.part[i], b); });
}
inline Floats multiply(const Floats& a, const Floats& b) {
    return each<Floats>([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}
inline Floats subtract_product(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>([&](int i) { return vfmsq_f32(c.part[i], a.part[i], b.part[i]); });
}
inline Floats scaled(const Floats& a, float scale) {
    return each<Floats>([&](int i) { return vmulq_n_f32(a.part[i], scale); });
}
inline Floats to_floats(const Ints& a) {
    return each<Floats>([&](int i) { return vcvtq_f32_s32(a.part[i]); });
}
inline Ints rounded(const Floats& a) {
    return each<Ints>([&](int i) { return vcvtnq_s32_f32(a.part[i]); });
}
inline Ints maximum(const Ints& a, const Ints& b) {
    return each<Ints>([&](int i) { return vmaxq_s32(a.part[i], b.part[i]); });
}
inline Ints magnitude_bits(const Floats& a) {
    return each<Ints>([&](int i) { return vreinterpretq_s32_f32(vabsq_f32(a.part[i])); });
}
inline int32_t sum_of(const Ints& a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.part[0], a.part[1]), vaddq_s32(a.part[2], a.part[3])));
}
inline int32_t maximum_of(const Ints& a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.part[0], a.part[1]), vmaxq_s32(a.part[2], a.part[3])));
}

inline Floats load_floats(const float* p, int64_t count) {
    float padded[TILE] = {};
    if (count < TILE) p = static_cast<const float*>(std::memcpy(padded, p, count * sizeof(float)));
    return each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline Floats load_bfloats(const uint16_t* p, int64_t count) {
    uint16_t padded[TILE] = {};
    if (count < TILE) p = static_cast<const uint16_t*>(std::memcpy(padded, p, count * sizeof(uint16_t)));
    return each<Floats>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline Floats load_halves(const uint8_t* p) {
    return each<Floats>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
}

inline void store_floats(const Floats& a, char* p, int64_t count) { std::memcpy(p, a.part, count * sizeof(float)); }

// To nearest, ties to even.
inline uint16x4_t round_bfloats(float32x4_t a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff)), nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), up, nan), 16);
}
inline void store_bfloats(const Floats& a, char* p, int64_t count) {
    const uint16x4_t values[4] = {round_bfloats(a.part[0]), round_bfloats(a.part[1]), round_bfloats(a.part[2]), round_bfloats(a.part[3])};
    std::memcpy(p, values, count * sizeof(uint16_t));
}

// int32 in [-128, 127] as four quads.
inline void store_quads(const Ints& values, int32_t* quads, int64_t stride) {
    for (int i = 0; i < 4; i++) {
        const int16x4_t words = vmovn_s32(values.part[i]);
        const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
        vst1_lane_s32(quads + i * stride, vreinterpret_s32_s8(bytes), 0);
    }
}

inline Ints widen_signed(int8x16_t bytes) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
inline Ints widen_signed(const uint8_t* p) { return widen_signed(vreinterpretq_s8_u8(vld1q_u8(p))); }
inline Ints widen_unsigned(const uint8_t* p) { return widen_signed(p); }

// Lower (SHIFT 0) or upper (4) halves of bytes.
template <int SHIFT>
inline uint8x16_t nibbles(uint8x16_t bytes) {
    if constexpr (SHIFT == 4) return vshrq_n_u8(bytes, 4);
    return vandq_u8(bytes, vdupq_n_u8(15));
}
template <int SHIFT>
inline Ints widen_nibbles(const uint8_t* p) {
    return widen_signed(vreinterpretq_s8_u8(nibbles<SHIFT>(vld1q_u8(p))));
}
template <int SHIFT>
inline Pairs nibble_pairs(const uint8_t* p) {
    const uint8x16_t low = nibbles<SHIFT>(vld1q_u8(p)), high = nibbles<SHIFT>(vld1q_u8(p + 16));
    return {{vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(low))), vreinterpretq_s16_u16(vmovl_high_u8(low)),
             vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(high))), vreinterpretq_s16_u16(vmovl_high_u8(high))}};
}
// 2^(exponent - 128).
inline Floats half_powers(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    const Ints exponents = {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
                             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))}};
    return each<Floats>([&](int i) {
        const int32x4_t normal = vshlq_n_s32(vsubq_s32(exponents.part[i], vdupq_n_s32(1)), 23);
        return vreinterpretq_f32_s32(vmaxq_s32(normal, vshlq_n_s32(vaddq_s32(exponents.part[i], vdupq_n_s32(1)), 21)));
    });
}
inline Pairs widen_pairs(const uint8_t* p) {
    return each<Pairs>([&](int i) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * i))); });
}
inline Ints dot_pairs(const Ints& sum, const Pairs& a, int32_t pair) {
    const int16x8_t b = vreinterpretq_s16_s32(vdupq_n_s32(pair));
    return each<Ints>([&](int i) {
        const int32x4_t low = vmull_s16(vget_low_s16(a.part[i]), vget_low_s16(b)), high = vmull_high_s16(a.part[i], b);
        return vaddq_s32(sum.part[i], vpaddq_s32(low, high));
    });
}

// 8-bit weights become signed.
inline Quads load_bytes(const uint8_t* p) {
    return each<Quads>([&](int i) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(0x80))); });
}
inline void split_halves(const uint8_t* p, Quads& low, Quads& high) {
    for (int i = 0; i < 4; i++) {
        const uint8x16_t both = vld1q_u8(p + 16 * i);
        low.part[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        high.part[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    }
}

// plane shifted right & MASK
template <int SHIFT, int MASK>
inline Quads extract(const uint8_t* plane) {
    return each<Quads>([&](int i) {
        const uint8x16_t bits = vshlq_u8(vld1q_u8(plane + 16 * i), vdupq_n_s8(-SHIFT));
        return vreinterpretq_s8_u8(vandq_u8(bits, vdupq_n_u8(MASK)));
    });
}

// 8-bit values become signed.
template <Format KIND>
inline Quads look_up(const Quads& codes) {
    const uint8x16_t table = veorq_u8(vld1q_u8(table_of(KIND)), vdupq_n_u8(product_bits(KIND) == 8 ? 0x80 : 0));
    return each<Quads>([&](int i) { return vreinterpretq_s8_u8(vqtbl1q_u8(table, vreinterpretq_u8_s8(codes.part[i]))); });
}

// w | (plane shifted left (or right: negative) & MASK)
template <int SHIFT, int MASK>
inline Quads with_upper(const Quads& w, const uint8_t* plane) {
    return each<Quads>([&](int i) {
        const uint8x16_t bits = vshlq_u8(vld1q_u8(plane + 16 * i), vdupq_n_s8(SHIFT));
        return vorrq_s8(w.part[i], vreinterpretq_s8_u8(vandq_u8(bits, vdupq_n_u8(MASK))));
    });
}

// By element of a register: x needs no broadcast.
inline void add_dot(Ints& sum, const Quads& w, const int32_t& quad) {
    const int8x8_t x = vcreate_s8(static_cast<uint32_t>(quad));
    for (int i = 0; i < 4; i++) sum.part[i] = vdotq_lane_s32(sum.part[i], w.part[i], x, 0);
}

inline void fetch_near(const int32_t*) {}
inline void fetch_ahead(const uint8_t*) {}

// 24 of 32 registers for sums. The weights of several rows are loaded one quad after the other.
template <int BITS>
constexpr int RUN = 6;
constexpr int WHOLE_RUN = 6, SUM_REGISTERS = 4, UNROLLED_ROWS = 1;

#include "quantized/quantized_unrolling.inc"
#include "quantized/quantized_byte_dots.inc"

// Weights of 8 bits are signed already.
template <>
inline int32_t start_value<8, 128>(const Ints&) {
    return 0;
}
template <>
inline Ints zeros_of<8>(const uint8_t* p) {
    return widen_signed(vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80))));
}

#include "quantized/quantized_kernels.inc"

constexpr QuantizedKernels KERNELS = make_kernels<12>();

}  // namespace

const QuantizedKernels& quantized_neon() { return KERNELS; }

}  // namespace foreword

#include "common/isa_pop.h"
#endif
