// Quantized products with AVX-512.
#include "quantized/quantized.h"

#if FOREWORD_X86

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "common/isa_push_avx512.h"

namespace foreword {
namespace {

#include "quantized/quantized_avx512_primitives.inc"
#include "quantized/quantized_kernels.inc"

inline void add_dot(Ints& sum, Quads w, Quads quads) { __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(quads)); }

// One of the two tiles of an output.
inline Output half_of(const Output& out, int64_t half) {
    const int64_t column = half * TILE, count = out.count - column < TILE ? out.count - column : TILE;
    const float* bias = out.bias == nullptr ? nullptr : out.bias + column;
    return {{out.y.data + column * bytes_of(out.type), out.y.stride}, out.type, count, bias};
}

template <int FIRST>
inline void finish_pair(const uint8_t* tile, const RowSize& size, const Group& x, const Ints (&sums)[8], const Output& out) {
    const Floats scale = load_floats(reinterpret_cast<const float*>(tile + 64 * size.quads), TILE);
    const Floats bias = out.bias == nullptr ? zero_floats() : load_floats(out.bias, out.count);
    UNROLLED for (int r = 0; r < 8; r++) {
        const int row = FIRST + r;
        write_row(whole_value(sums[r], x.sums[row], scale, x.scales[row]), out, bias, row);
    }
}

// Eight rows of a whole group from row FIRST on, of two tiles of I8: a load for each weight and each quad of x makes 16
// multiply-adds, which 16 rows of one tile need 17 loads for.
template <int FIRST>
void pair_rows(const uint8_t* const (&tiles)[2], const RowSize& size, const Group& x, const Output& out) {
    Ints sums[2][8];
    UNROLLED for (int i = 0; i < 16; i++) sums[i / 8][i % 8] = zero_ints();
    for (int64_t i = 0; i < size.quads; i++) {
        const Quads w[2] = {load_bytes(tiles[0] + 64 * i), load_bytes(tiles[1] + 64 * i)};
        const int32_t* quads = x.words + i * 16 + FIRST;
        if (FIRST == 0) fetch_near(quads);
        UNROLLED for (int r = 0; r < 8; r++) {
            const Quads quad = _mm512_set1_epi32(quads[r]);
            add_dot(sums[0][r], w[0], quad);
            add_dot(sums[1][r], w[1], quad);
        }
    }
    finish_pair<FIRST>(tiles[0], size, x, sums[0], half_of(out, 0));
    finish_pair<FIRST>(tiles[1], size, x, sums[1], half_of(out, 1));
}

void pair_product(const uint8_t* tile, const RowSize& size, const Group& x, const Output& out) {
    const uint8_t* const tiles[2] = {tile, tile + 64 * size.quads + 64};
    pair_rows<0>(tiles, size, x, out);
    pair_rows<8>(tiles, size, x, out);
}

constexpr QuantizedKernels KERNELS = make_kernels<16>(pair_product);

}  // namespace

const QuantizedKernels& quantized_avx512() { return KERNELS; }

}  // namespace foreword

#include "common/isa_pop.h"
#endif
