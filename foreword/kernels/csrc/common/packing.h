// Packs rows of a checkpoint into tiles, and back.
//
// A tile holds TILE rows of a weight [n, k]; "column" is a row's place in its tile, an output column of the product.
// Dense formats and I8 are zero-padded along k to a multiple of 32 (I8: 64), the others are whole blocks.
// Values of consecutive k are adjacent for one multiply-add instruction (or one row of an AMX tile):
//
//   F32         [k][16]                     BF16  [k / 2][16][2]        F16  [k][16]
//   I8          [k / 4][16][4] as value + 128, then float32 scale [16]  (scale: largest magnitude of the row / 127)
//   F8          float32 [16]: zero, or NaN for a row with a NaN; float32 scales [k / group_size][16]; then [k][16], k padded to
//               a multiple of 32
//   I4, Q8_0 .. block by block; see quantized/quantized_packing.cpp
#pragma once

#include <cstdint>

#include "common/kernels.h"

namespace foreword {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t num_tiles(int64_t n) { return (n + TILE - 1) / TILE; }

// F8: scales change only at multiples of F8_CHAIN values of k. Bytes before the scales of value i, and before the values.
constexpr int64_t F8_CHAIN = 128;
constexpr int64_t f8_scales_at(int64_t i, int64_t group_size) { return 64 * (1 + i / group_size); }
constexpr int64_t f8_head_bytes(int64_t k, int64_t group_size) { return f8_scales_at(k + group_size - 1, group_size); }

int64_t tile_bytes(Format format, int64_t k, int64_t group_size);
inline int64_t tile_bytes(const Weight& weight) { return tile_bytes(weight.format, weight.k, weight.group_size); }

// One row of a file (any format but I8 and I4) -> float32 [k].
void dequantize(Format source, const void* row, int64_t k, float* out);

// Fill one tile from `count` (1..TILE) rows of a file. Blocks keep their format or become F32, BF16 or F16;
// F32, BF16 and F16 rows become any of the three, I8 or I4.
void pack_dense_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile);
void pack_quantized_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile);

// A row of a grouped format: values as in GroupedInts and Float8Blocks of ops.py, a scale and (of integers) a zero for each
// `group_size` of them: a multiple of 32, at least k for one group.
struct GroupedRow {
    const uint8_t* values;
    const float* scales;
    const uint8_t* zeros;
};

// Fill one tile from `count` rows. They keep their format; G8 with one group and a zero of 128 may become I8.
void pack_grouped_tile(Format format, const GroupedRow* const* rows, int64_t count, int64_t k, int64_t group_size, uint8_t* tile);
int64_t grouped_tile_bytes(Format format, int64_t k, int64_t group_size);

inline void pack_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, int64_t group_size, uint8_t* tile) {
    if (is_grouped(source)) {
        return pack_grouped_tile(format, reinterpret_cast<const GroupedRow* const*>(rows), count, k, group_size, tile);
    }
    (is_dense(format) ? pack_dense_tile : pack_quantized_tile)(format, source, rows, count, k, tile);
}

// Row `row` of a packed weight -> float32 [k], exactly the values that the products use.
void unpack_dense_row(const Weight& weight, int64_t row, float* out);
void unpack_quantized_row(const Weight& weight, int64_t row, float* out);
void unpack_grouped_row(const Weight& weight, int64_t row, float* out);

inline void unpack_row(const Weight& weight, int64_t row, float* out) {
    if (is_grouped(weight.format)) return unpack_grouped_row(weight, row, out);
    (is_dense(weight.format) ? unpack_dense_row : unpack_quantized_row)(weight, row, out);
}

}  // namespace foreword
