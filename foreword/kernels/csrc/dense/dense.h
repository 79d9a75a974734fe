// Products with dense weights (F32, BF16, F16, F8): the part that all instruction sets share.
//
// y[row, column] is a sum of chains, added in order: one for each CHAIN values of k, multiplied and added one after the
// other from zero. So errors grow with the square root of k, as in torch. Tiling and threading only move sums between
// registers and memory and change no bit. F8: chains of F8_CHAIN values, times their scales. (AMX: one chain, in the order of its instruction.)
#pragma once

#include "common/kernels.h"
#include "common/packing.h"

namespace foreword {

// The product with one format.
struct DenseKernel {
    Linear linear;
    LinearParts parts;
};

const DenseKernel& dense_portable(Format format);
#if FOREWORD_X86
const DenseKernel& dense_avx2(Format format);
const DenseKernel& dense_avx512(Format format);
const DenseKernel& dense_amx(Format format);
#elif FOREWORD_ARM
const DenseKernel& dense_neon(Format format);
#endif

constexpr int64_t CHAIN = 256;              // values of k
constexpr int64_t MAX_TILES = 4;            // of an inner loop
constexpr int64_t AHEAD = 4096;             // bytes of weights to prefetch ahead
constexpr int64_t MIN_PARALLEL_BYTES = 64 * 1024;  // of x; less is arranged sooner by one thread

// How a product is tiled; affects speed only.
struct DenseTiling {
    int64_t pass_rows;    // rows of x of one pass
    int64_t item_tiles;   // tiles of a work item
    int64_t strip_tiles;  // tiles whose chains are computed side by side
};

// group_rows, group_tiles: held in registers by one inner loop.
struct DenseShape {
    int64_t rows, tiles, tile_bytes;
    int64_t group_rows, group_tiles;
};

DenseTiling choose_tiling(const DenseShape& shape, int threads);

}  // namespace foreword
