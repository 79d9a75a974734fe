#include <cstring>

#include "dense/dense.h"

namespace foreword {
namespace {

constexpr int64_t LANES = 2;

#include "dense/dense_conversions.inc"

#include "dense/dense_product.inc"

#include "dense/dense_float_cores.inc"

// Vectors of four floats by compiler extension.
struct Vector {
    typedef float Part __attribute__((vector_size(16)));
    typedef uint32_t Bits __attribute__((vector_size(16)));
    typedef uint16_t Halves __attribute__((vector_size(8)));
    typedef uint8_t Bytes __attribute__((vector_size(4)));
    static constexpr int WIDTH = 4;

    static Part zero() { return Part{}; }
    static void store(float* to, Part part) { std::memcpy(to, &part, sizeof part); }
    static Part plus(Part a, Part b) { return a + b; }
    static Part multiply_add(Part a, Part b, Part c) { return a * b + c; }
    static Part load(const float* from) { return read<Part>(from); }

    static Part fill(const uint32_t* x) {
        float value;
        std::memcpy(&value, x, sizeof value);
        return Part{value, value, value, value};
    }

    // Exponent and mantissa shifted into float32 places are too small by 2^112, also for subnormals.
    static Part halves(const uint8_t* from) {
        const Bits half = __builtin_convertvector(read<Halves>(from), Bits);
        const Part magnitude = reinterpret_cast<Part>((half & 0x7fff) << 13) * 0x1p112f;
        const Bits not_finite = reinterpret_cast<Bits>((half & 0x7c00) == 0x7c00) & 0x7f800000;
        return reinterpret_cast<Part>(reinterpret_cast<Bits>(magnitude) | not_finite | (half & 0x8000) << 16);
    }

    static void small_floats(const uint8_t* from, Part (&parts)[4]) {
        for (int i = 0; i < 4; i++) {
            const Bits bits = __builtin_convertvector(read<Bytes>(from + 4 * i), Bits);
            const Part magnitude = reinterpret_cast<Part>((bits & 0x7f) << 20) * 0x1p112f;
            parts[i] = reinterpret_cast<Part>(reinterpret_cast<Bits>(magnitude) | (bits & 0x80) << 24);
        }
    }

    static Part first_of_pairs(const uint8_t* from) { return reinterpret_cast<Part>(read<Bits>(from) << 16); }
    static Part second_of_pairs(const uint8_t* from) { return reinterpret_cast<Part>(read<Bits>(from) & 0xffff0000); }

    template <class To>
    static To read(const void* from) {
        To value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
};

#if defined(__aarch64__)
constexpr int MOST_ROWS = 4;  // 32 registers, four for the sums of each row
#else
constexpr int MOST_ROWS = 2;
#endif

template <class Core>
struct Loops {
    static constexpr Loop FEW[] = {loop<Core, 1, 1>(), loop<Core, MOST_ROWS, 1>()};
    static constexpr Loop MANY[] = {loop<Core, MOST_ROWS, 1>()};
};

}  // namespace

const DenseKernel& dense_portable(Format format) { return kernel_of<BF16Core<Vector>, F16Core<Vector>, F32Core<Vector>, F8Core<Vector>>(format); }

}  // namespace foreword
