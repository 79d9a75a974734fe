// Vectors of 4 values for any processor: the compiler's own, and loops over them that it turns into instructions.
#pragma once

#include "common/vec.h"

namespace foreword {
namespace {

using Vec = float __attribute__((vector_size(16)));
using Lanes = int32_t __attribute__((vector_size(16)));
constexpr int64_t LANES = 4;
constexpr float INTEGERS = 0x1.8p23f;  // x + INTEGERS has x, rounded to even, in its low bits, for |x| < 2^22

inline Lanes bits_of(Vec x) { return reinterpret_cast<Lanes>(x); }
inline Vec from_bits(Lanes x) { return reinterpret_cast<Vec>(x); }
inline Vec pick(Lanes condition, Vec yes, Vec no) {
    return from_bits((condition & bits_of(yes)) | (~condition & bits_of(no)));
}

inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline Vec load(const Bf16* p) {
    Lanes raw = {};
    for (int i = 0; i < LANES; i++) raw[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return from_bits(raw);
}
inline Vec load(const int8_t* p) { return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

// To nearest, ties to even; a NaN stays one.
inline void store(Bf16* p, Vec x) {
    const Lanes raw = bits_of(x);
    const Lanes rounded = raw + (((raw >> 16) & 1) + 0x7fff);
    const Lanes is_number = x == x;
    for (int i = 0; i < LANES; i++) p[i] = is_number[i] ? static_cast<Bf16>(static_cast<uint32_t>(rounded[i]) >> 16) : Bf16{0x7fc0};
}
// Saturates, as the other instruction sets do.
inline void store(int8_t* p, Vec x) {
    for (int i = 0; i < LANES; i++) x[i] = x[i] > 127 ? 127 : x[i] < -127 ? -127 : x[i];
    for (int i = 0; i < LANES; i++) p[i] = static_cast<int8_t>(bits_of(x + INTEGERS)[i]);
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

// The second value where either is NaN.
inline Vec min(Vec a, Vec b) { return pick(a < b, a, b); }
inline Vec max(Vec a, Vec b) { return pick(a > b, a, b); }

// a < b ? yes : no
inline Vec pick_less(Vec a, Vec b, Vec yes, Vec no) { return pick(a < b, yes, no); }

// x in the lanes [begin, end), 0 <= begin <= end <= LANES, else other
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, Vec other) {
    const Lanes lane = {0, 1, 2, 3};
    return pick((lane >= static_cast<int32_t>(begin)) & (lane < static_cast<int32_t>(end)), x, other);
}

// The nearest integer, ties to even; |x| < 2^22.
inline Vec nearest(Vec x) { return (x + INTEGERS) - INTEGERS; }

// x * 2^n for integers -127 <= n <= 128; 0 for -127.
inline Vec times_power(Vec x, Vec n) {
    const Lanes exponent = bits_of(n + INTEGERS) + 127;
    return x * from_bits(exponent << 23);
}

// The larger magnitude of both; NaN counts as the largest.
inline Vec max_magnitude(Vec a, Vec b) {
    const Lanes left = bits_of(a) & 0x7fffffff, right = bits_of(b) & 0x7fffffff;
    return pick(left > right, from_bits(left), from_bits(right));
}

inline float reduce_add(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float reduce_max(Vec x) {
    const Vec other = {x[2], x[3], x[0], x[1]};
    const Vec two = max(x, other);
    return two[0] > two[1] ? two[0] : two[1];
}

// rows[i][j] -> rows[j][i]
inline void transpose(Vec (&rows)[LANES]) {
    const Vec a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    for (int i = 0; i < LANES; i++) rows[i] = Vec{a[i], b[i], c[i], d[i]};
}

}  // namespace
}  // namespace foreword
