// float16 and bfloat16 as bits, converted by any processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace foreword {

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// 2^(exponent - 128), subnormal for exponents below 2.
inline float half_power(uint32_t exponent) {
    return float_of_bits(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23);
}

inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
    const float subnormal = static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f;
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    const uint32_t bits = exponent == 0 ? bits_of_float(subnormal) : wide << 23 | mantissa << 13;
    return float_of_bits(sign | bits);
}

// To nearest, ties to even; overflow becomes infinity, NaN stays NaN.
inline uint16_t float_to_half(float value) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // below 2^-14: the unit in the last place is 2^-24, as of 0.5f
        return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f)));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return static_cast<uint16_t>(sign | (magnitude + 0xfff + odd - (112u << 23)) >> 13);
}

inline float bfloat_to_float(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }

inline uint16_t float_to_bfloat(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace foreword
