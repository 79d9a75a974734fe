// Packs rows of a checkpoint into tiles, and back.
//
// A tile holds TILE rows of a weight [n, k]; "column" is a row's place in its tile, an output column of the product.
// Dense formats and I8 are zero-padded along k to a multiple of 32 (I8: 64), the others are whole blocks.
// Values of consecutive k are adjacent for one multiply-add instruction (or one row of an AMX tile):
//
//   F32         [k][16]                     BF16  [k / 2][16][2]        F16  [k][16]
//   I8          [k / 4][16][4] as value + 128, then float32 scale [16]  (scale: largest magnitude of the row / 127)
//   I4, Q8_0 .. block by block; see packing_quantized.cpp
#pragma once

#include <cstdint>

#include "kernels.h"

namespace foreword {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t num_tiles(int64_t n) { return (n + TILE - 1) / TILE; }

int64_t tile_bytes(Format format, int64_t k);

// One row of a file (any format but I8 and I4) -> float32 [k].
void dequantize(Format source, const void* row, int64_t k, float* out);

// Fill one tile from `count` (1..TILE) rows of a file. Blocks keep their format or become F32, BF16 or F16;
// F32, BF16 and F16 rows become any of the three, I8 or I4.
void pack_dense_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile);
void pack_quantized_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile);

// Row `row` of a packed weight -> float32 [k], exactly the values that the products use.
void unpack_dense_row(const Weight& weight, int64_t row, float* out);
void unpack_quantized_row(const Weight& weight, int64_t row, float* out);

inline void unpack_row(const Weight& weight, int64_t row, float* out) {
    (is_dense(weight.format) ? unpack_dense_row : unpack_quantized_row)(weight, row, out);
}

}  // namespace foreword
