// Quantized products for any processor.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "quantized/quantized.h"
#include "common/half_float.h"

namespace foreword {
namespace {

struct Quads {
    uint8_t at[4 * TILE];
};
struct Ints {
    int32_t at[TILE];
};
struct Floats {
    float at[TILE];
};
struct Pairs {
    uint8_t at[2 * TILE];
};

template <class Result, class Function>
inline Result each(const Function& value) {
    Result result;
    for (int c = 0; c < TILE; c++) result.at[c] = value(c);
    return result;
}

inline Ints all(int32_t a) {
    return each<Ints>([=](int) { return a; });
}
inline Ints zero_ints() { return all(0); }
inline Floats zero_floats() {
    return each<Floats>([](int) { return 0.0f; });
}
inline Floats all(float a) {
    return each<Floats>([=](int) { return a; });
}
inline Ints add(const Ints& a, const Ints& b) {
    return each<Ints>([&](int c) { return a.at[c] + b.at[c]; });
}
inline Floats add(const Floats& a, const Floats& b) {
    return each<Floats>([&](int c) { return a.at[c] + b.at[c]; });
}
inline Ints multiply(const Ints& a, const Ints& b) {
    return each<Ints>([&](int c) { return a.at[c] * b.at[c]; });
}
inline Ints multiply_small(const Ints& a, int32_t b) { return multiply(a, all(b)); }
inline Floats multiply(const Floats& a, const Floats& b) {
    return each<Floats>([&](int c) { return a.at[c] * b.at[c]; });
}
inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>([&](int i) { return std::fma(a.at[i], b.at[i], c.at[i]); });
}
inline Floats subtract_product(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>([&](int i) { return std::fma(-a.at[i], b.at[i], c.at[i]); });
}
inline Floats scaled(const Floats& a, float scale) {
    return each<Floats>([&](int c) { return a.at[c] * scale; });
}
inline Floats to_floats(const Ints& a) {
    return each<Floats>([&](int c) { return static_cast<float>(a.at[c]); });
}
inline Ints rounded(const Floats& a) {
    return each<Ints>([&](int c) { return static_cast<int32_t>(std::nearbyintf(a.at[c])); });
}
inline Ints maximum(const Ints& a, const Ints& b) {
    return each<Ints>([&](int c) { return std::max(a.at[c], b.at[c]); });
}
inline int32_t maximum_of(const Ints& a) { return *std::max_element(a.at, a.at + TILE); }
inline int32_t sum_of(const Ints& a) {
    int32_t sum = 0;
    for (const int32_t value : a.at) sum += value;
    return sum;
}
inline Ints magnitude_bits(const Floats& a) {
    return each<Ints>([&](int c) { return static_cast<int32_t>(bits_of_float(a.at[c]) & 0x7fffffff); });
}

inline Floats load_floats(const float* p, int64_t count) {
    Floats values = zero_floats();
    std::memcpy(values.at, p, count * sizeof(float));
    return values;
}
inline Floats load_bfloats(const uint16_t* p, int64_t count) {
    return each<Floats>([&](int c) { return c < count ? bfloat_to_float(p[c]) : 0.0f; });
}
inline Floats load_halves(const uint8_t* p) {
    return each<Floats>([&](int c) { return half_to_float(read_half(p + 2 * c)); });
}
inline Floats half_powers(const uint8_t* p) {
    return each<Floats>([&](int c) { return half_power(p[c]); });
}
inline void store_floats(const Floats& a, char* p, int64_t count) { std::memcpy(p, a.at, count * sizeof(float)); }
inline void store_bfloats(const Floats& a, char* p, int64_t count) {
    uint16_t values[TILE];
    for (int c = 0; c < TILE; c++) values[c] = float_to_bfloat(a.at[c]);
    std::memcpy(p, values, count * sizeof(uint16_t));
}

inline void store_quads(const Ints& values, int32_t* quads, int64_t stride) {
    for (int i = 0; i < 4; i++) {
        int8_t quad[4];
        for (int j = 0; j < 4; j++) quad[j] = static_cast<int8_t>(values.at[4 * i + j]);
        std::memcpy(quads + i * stride, quad, sizeof quad);
    }
}

inline Ints widen_unsigned(const uint8_t* p) {
    return each<Ints>([&](int c) { return p[c]; });
}
inline Ints widen_signed(const uint8_t* p) {
    return each<Ints>([&](int c) { return static_cast<int8_t>(p[c]); });
}
inline Pairs widen_pairs(const uint8_t* p) {
    Pairs pairs;
    std::memcpy(pairs.at, p, sizeof pairs.at);
    return pairs;
}
// Lower (SHIFT 0) or upper (4) halves of bytes.
template <int SHIFT>
inline Ints widen_nibbles(const uint8_t* p) {
    return each<Ints>([&](int c) { return p[c] >> SHIFT & 15; });
}
template <int SHIFT>
inline Pairs nibble_pairs(const uint8_t* p) {
    Pairs pairs;
    for (int i = 0; i < 2 * TILE; i++) pairs.at[i] = p[i] >> SHIFT & 15;
    return pairs;
}
inline Ints dot_pairs(const Ints& sum, const Pairs& a, int32_t pair) {
    int16_t b[2];
    std::memcpy(b, &pair, sizeof b);
    return each<Ints>([&](int c) { return sum.at[c] + a.at[2 * c] * b[0] + a.at[2 * c + 1] * b[1]; });
}

inline Quads load_bytes(const uint8_t* p) {
    Quads w;
    std::memcpy(w.at, p, sizeof w.at);
    return w;
}
inline void split_halves(const uint8_t* p, Quads& low, Quads& high) {
    for (int i = 0; i < 4 * TILE; i++) {
        low.at[i] = p[i] & 15;
        high.at[i] = p[i] >> 4;
    }
}

// plane shifted right & MASK
template <int SHIFT, int MASK>
inline Quads extract(const uint8_t* plane) {
    Quads w;
    for (int i = 0; i < 4 * TILE; i++) w.at[i] = plane[i] >> SHIFT & MASK;
    return w;
}

template <Format KIND>
inline Quads look_up(const Quads& codes) {
    Quads w;
    for (int i = 0; i < 4 * TILE; i++) w.at[i] = table_of(KIND)[codes.at[i]];
    return w;
}

// w | (plane shifted left (or right: negative) & MASK)
template <int SHIFT, int MASK>
inline Quads with_upper(Quads w, const uint8_t* plane) {
    for (int i = 0; i < 4 * TILE; i++) w.at[i] |= (SHIFT > 0 ? plane[i] << (SHIFT & 7) : plane[i] >> (-SHIFT & 7)) & MASK;
    return w;
}

inline void add_dot(Ints& sum, const Quads& w, const int32_t& quad) {
    int8_t x[4];
    std::memcpy(x, &quad, sizeof x);
    for (int c = 0; c < TILE; c++) {
        for (int i = 0; i < 4; i++) sum.at[c] += w.at[4 * c + i] * x[i];
    }
}

inline void fetch_near(const int32_t*) {}
inline void fetch_ahead(const uint8_t*) {}

template <int BITS>
constexpr int RUN = 4;
constexpr int WHOLE_RUN = 4, SUM_REGISTERS = 1, UNROLLED_ROWS = 0;

#include "quantized/quantized_unrolling.inc"
#include "quantized/quantized_byte_dots.inc"
#include "quantized/quantized_kernels.inc"

constexpr QuantizedKernels KERNELS = make_kernels<4>();

}  // namespace

const QuantizedKernels& quantized_portable() { return KERNELS; }

}  // namespace foreword
