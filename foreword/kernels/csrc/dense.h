// Products with dense weights (F32, BF16, F16): what the files of all instruction sets share.
//
// y[row, column] is one chain of multiply-adds over k, in order, from zero (AMX and VDPBF16PS: in the order of their pairs).
// Nothing else decides its bits: how rows, columns and k are cut up, and who computes what, only moves the chain's
// state between registers and memory.
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

constexpr int64_t MAX_TILES = 4;            // that an inner loop takes together
constexpr int64_t AHEAD = 4096;             // bytes of weights from what is multiplied to what is fetched
constexpr int64_t ALONE_BYTES = 64 * 1024;  // of x that one thread lays out sooner than several

// How a product is cut up. Chosen for speed alone.
struct DenseCuts {
    int64_t pass_rows;    // rows of x laid out and multiplied before the next ones
    int64_t item_tiles;   // tiles that a thread takes at a time
    int64_t block_steps;  // steps over k after which the next tiles and rows have their turn
};

// `group_rows`, `group_tiles`: what one inner loop keeps in registers. `step_bytes`: weights of one tile and step.
struct DenseShape {
    int64_t rows, tiles, steps, step_bytes;
    int64_t group_rows, group_tiles;
};

DenseCuts cut_dense(const DenseShape& shape, int threads);

}  // namespace foreword
