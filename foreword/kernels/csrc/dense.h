// Products with dense weights (F32, BF16, F16): what the files of all instruction sets share.
//
// y[row, column] is a sum of chains, added in order: one for each CHAIN values of k, multiplied and added one after the
// other from zero. So errors grow with the square root of k, as those of torch do, and nothing else decides its bits: how
// rows and columns are cut up, and who computes what, only moves sums between registers and memory. (AMX: one chain, in
// the order of its instruction.)
#pragma once

#include "kernels.h"
#include "packing.h"

namespace foreword {

void dense_portable(Context& context, const LinearArgs& args);
#if FOREWORD_X86
void dense_avx2(Context& context, const LinearArgs& args);
void dense_avx512(Context& context, const LinearArgs& args);
void dense_amx(Context& context, const LinearArgs& args);
#endif

constexpr int64_t CHAIN = 256;              // values of k
constexpr int64_t MAX_TILES = 4;            // that an inner loop takes together
constexpr int64_t AHEAD = 4096;             // bytes of weights from what is multiplied to what is fetched
constexpr int64_t ALONE_BYTES = 64 * 1024;  // of x that one thread lays out sooner than several

// How a product is cut up, for speed alone.
struct DenseCuts {
    int64_t pass_rows;    // rows of x laid out and multiplied before the next ones
    int64_t item_tiles;   // tiles that a thread takes at a time
    int64_t strip_tiles;  // tiles whose chains are computed side by side, before the next ones
};

// `group_rows`, `group_tiles`: what one inner loop keeps in registers.
struct DenseShape {
    int64_t rows, tiles, tile_bytes;
    int64_t group_rows, group_tiles;
};

DenseCuts cut_dense(const DenseShape& shape, int threads);

}  // namespace foreword
