// log and exp with the same bits on every machine: the operations of portable_math.py, in the same order.
// Compile with -ffp-contract=off: a fused multiply-add would round differently.
#pragma once

#include <cstdint>
#include <cstring>

namespace foreword {

constexpr double LN2_HIGH = 0x1.62e42fee00000p-1;
constexpr double LN2_LOW = 0x1.a39ef35793c76p-33;
constexpr double LOG2_E = 0x1.71547652b82fep+0;
constexpr double SQRT_HALF = 0x1.6a09e667f3bcdp-1;
constexpr double ATANH_SERIES[] = {1.0,        1.0 / 3.0,  1.0 / 5.0,  1.0 / 7.0,  1.0 / 9.0,
                                   1.0 / 11.0, 1.0 / 13.0, 1.0 / 15.0, 1.0 / 17.0, 1.0 / 19.0};
constexpr double EXP_SERIES[] = {1.0,
                                 1.0,
                                 1.0 / 2.0,
                                 1.0 / 6.0,
                                 1.0 / 24.0,
                                 1.0 / 120.0,
                                 1.0 / 720.0,
                                 1.0 / 5040.0,
                                 1.0 / 40320.0,
                                 1.0 / 362880.0,
                                 1.0 / 3628800.0,
                                 1.0 / 39916800.0,
                                 1.0 / 479001600.0,
                                 1.0 / 6227020800.0};
constexpr int FRACTION_BITS = 42;
constexpr double FIXED_POINT_UNIT = 0x1p-42;
constexpr double EXP_MIN_INPUT = -64.0;  // exp(-64) 2^42 rounds to 0
constexpr double ROUND_MAGIC = 0x1.8p52;  // x + ROUND_MAGIC has x, rounded to even, in its low bits, for |x| < 2^51

template <class To, class From>
inline To bits(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <int N>
inline double polynomial(const double (&coefficients)[N], double x) {
    double result = coefficients[N - 1];
    for (int i = N - 2; i >= 0; i--) result = result * x + coefficients[i];
    return result;
}

// Natural logarithm of a positive, normal value.
inline double portable_log(double x) {
    const int64_t raw = bits<int64_t>(x);
    int64_t exponent = (raw >> 52) - 1022;
    double mantissa = bits<double>((raw & 0x000fffffffffffff) | 0x3fe0000000000000);
    if (mantissa < SQRT_HALF) {
        mantissa *= 2;
        exponent -= 1;
    }
    const double e = static_cast<double>(exponent);
    const double s = (mantissa - 1) / (mantissa + 1);
    const double series = polynomial(ATANH_SERIES, s * s);
    return e * LN2_HIGH + (e * LN2_LOW + 2 * s * series);
}

// exp(x) in units of 2^-42 for x <= 0, rounded.
inline int64_t exp_fixed_point(double x) {
    x = x > EXP_MIN_INPUT ? x : EXP_MIN_INPUT;
    const double shifted = x * LOG2_E + ROUND_MAGIC;
    const double n = shifted - ROUND_MAGIC;
    const double r = (x - n * LN2_HIGH) - n * LN2_LOW;
    const int64_t exponent = bits<int64_t>(shifted) - bits<int64_t>(ROUND_MAGIC);
    const double scale = bits<double>((exponent + 1023 + FRACTION_BITS) << 52);
    return bits<int64_t>(polynomial(EXP_SERIES, r) * scale + ROUND_MAGIC) - bits<int64_t>(ROUND_MAGIC);
}

}  // namespace foreword
