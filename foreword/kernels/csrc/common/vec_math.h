// Row tails and math functions, the same for every instruction set. Included after a vec_<set>.h.
//
// Lanes mix only in reduce_*, so a value's bits depend neither on its lane nor on its neighbours.
#pragma once

namespace foreword {
namespace {

// The first `count` of LANES values, 0 for the others.
template <class T>
Vec load_padded(const T* p, int64_t count) {
    T padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

template <class T>
void store_padded(T* p, int64_t count, Vec x) {
    T padded[LANES];
    store(padded, x);
    std::memcpy(p, padded, count * sizeof(T));
}

// LANES values from p, zeros beyond `left` > 0 values.
template <class T>
Vec load_partial(const T* p, int64_t left) {
    return left >= LANES ? load(p) : load_padded(p, left);
}

template <class T>
void store_partial(T* p, int64_t left, Vec x) {
    left >= LANES ? store(p, x) : store_padded(p, left, x);
}

// coefficients[0] + coefficients[1] x + ...
template <int N>
Vec polynomial(const float (&coefficients)[N], Vec x) {
    Vec result = splat(coefficients[N - 1]);
    for (int i = N - 2; i >= 0; i--) result = fma(result, x, splat(coefficients[i]));
    return result;
}

// Least relative error over half a unit (exp2) and over log(2) / 2 (exp) to either side: 2e-9.
constexpr float EXP2_SERIES[] = {1.0f,           0.69314718246f,  0.240226462483f, 0.0555032864213f,
                                 0.00961848907f, 0.001339993090f, 0.000153458095f};
constexpr float EXP_SERIES_F32[] = {1.0f,           1.0f,             0.49999991059f, 0.16666419804f,
                                    0.04166822508f, 0.0083748158065f, 0.001383684459f};
constexpr float LOG2_E_F32 = 0x1.715476p+0f;
constexpr float LN2_UPPER = 0x1.63p-1f;  // few bits: n * LN2_UPPER is exact
constexpr float LN2_LOWER = -0x1.bd0106p-13f;

// 2^x; 0 below -127, infinite from 127.5 on.
inline Vec exp2(Vec x) {
    x = min(splat(128.0f), max(splat(-127.0f), x));
    const Vec n = nearest(x);
    return times_power(polynomial(EXP2_SERIES, x - n), n);
}

// e^x; 0 below -88, infinite from 88.4 on.
inline Vec exp(Vec x) {
    x = min(splat(89.0f), max(splat(-88.0f), x));
    const Vec n = nearest(x * splat(LOG2_E_F32));
    const Vec rest = fma(n, splat(-LN2_LOWER), fma(n, splat(-LN2_UPPER), x));
    return times_power(polynomial(EXP_SERIES_F32, rest), n);
}

// The largest of LANES magnitudes, compared as integers: there NaN is the largest.
inline float largest_of(Vec magnitudes) {
    int32_t lanes[LANES], most = 0;
    std::memcpy(lanes, &magnitudes, sizeof lanes);
    for (const int32_t lane : lanes) most = lane > most ? lane : most;
    float result;
    std::memcpy(&result, &most, sizeof result);
    return result;
}

inline Vec magnitude(Vec x) { return max_magnitude(x, splat(0.0f)); }

// 1 / (1 + e^-x), accurate where small.
inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

// x / 2 * (1 + tanh(inner)) as x * sigmoid(2 inner), without cancellation.
inline Vec gelu_tanh(Vec x) {
    const Vec inner = fma(x * x * x, splat(0.044715f), x) * splat(2 * 0.79788456080286536f);
    return x * sigmoid(inner);
}

// (tanh(x) - x) / x^3 in powers of x^2, |x| < 0.625 (Cephes).
constexpr float TANH_SERIES[] = {-3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f, -5.70498872745e-3f};

inline Vec tanh(Vec x) {
    const Vec square = x * x;
    const Vec near = fma(x * square, polynomial(TANH_SERIES, square), x);
    const Vec far = splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp(x + x));
    return pick_less(magnitude(x), splat(0.625f), near, far);
}

// log(erfc(z) / t) + z^2 in powers of t = 1 / (1 + z / 2), z >= 0 (Numerical Recipes, 6.2): relative error 1.2e-7.
constexpr float ERFC_SERIES[] = {-1.26551223f, 1.00002368f,  0.37409196f, 0.09678418f,  -0.18628806f,
                                 0.27886807f,  -1.13520398f, 1.48851587f, -0.82215223f, 0.17087277f};

// Cumulative distribution function of the normal distribution.
inline Vec normal_cdf(Vec x) {
    const Vec z = magnitude(x) * splat(0.70710678118654752f);
    const Vec t = splat(1.0f) / fma(z, splat(0.5f), splat(1.0f));
    const Vec tail = splat(0.5f) * t * exp(polynomial(ERFC_SERIES, t) - z * z);
    return pick_less(x, splat(0.0f), tail, splat(1.0f) - tail);
}

}  // namespace
}  // namespace foreword
