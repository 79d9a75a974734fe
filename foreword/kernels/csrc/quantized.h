// Products of int8-quantized rows with quantized weights: the part that all instruction sets share.
//
// Rows are taken in groups that share every load of a weight. Of a group of R rows, element i of row r (a quad of int8,
// a scale, a sum) is element i * R + r: one broadcast each, side by side.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "quantized_layout.h"

namespace foreword {

constexpr int MAX_GROUP = 16;  // rows

// How rows are quantized for a weight format.
//   block   values that share a scale (their largest magnitude / 127); 0: the whole row
//   part    values that share a sum; 0: the whole row
//   weight  factor of each sum; 0: sums are stored as pairs of int16
struct Rounding {
    int64_t block, part;
    int32_t weight;
};

constexpr Rounding rounding_of(Format format) {
    if (format == Format::I8) return {0, 0, -zero_of(format)};
    if (format == Format::Q6_K) return {SUPER, 16, -zero_of(format)};
    if (is_super(format)) return {SUPER, 32, 0};
    return {SMALL, SMALL, -zero_of(format)};
}

// Elements of one rounded row: quads of int8, float32 scales, sums of 4 bytes.
struct RowSize {
    int64_t quads, scales, sums;
};

inline RowSize row_size(Format format, int64_t k) {
    if (format == Format::I8) return {round_up(k, I8_MULTIPLE) / 4, 1, 1};
    const Rounding rounding = rounding_of(format);
    const int64_t blocks = (k + rounding.block - 1) / rounding.block;
    const int64_t parts = rounding.block / rounding.part;
    return {blocks * rounding.block / 4, blocks, blocks * (rounding.weight == 0 ? parts / 2 : parts)};
}

// A group of rounded rows; each pointer is its first element.
struct Group {
    int32_t* quads;
    float* scales;
    int32_t* sums;
    int64_t rows;
};

// Columns [0, count) of the tile, of all rows of the group. bias [count] or null.
struct Output {
    RowView y;
    Type type;
    int64_t count;
    const float* bias;
};

// Row `row` of the group from x [k].
using RoundRow = void (*)(const Rounding&, const RowSize&, Type, const char* x, int64_t k, int64_t row, const Group&);

// The products of one tile with one group, to the output.
using Product = void (*)(const uint8_t* tile, const RowSize&, const Group&, const Output&);

//   max_group  rows, at most MAX_GROUP
//   pair       of two tiles of I8, one after the other, with a group of max_group; or null
//   products   by format (from I8 on) and rows of the group - 1
struct QuantizedKernels {
    int64_t max_group;
    RoundRow round_row;
    Product pair;
    Product products[8][MAX_GROUP];
};

const QuantizedKernels& quantized_portable();
#if FOREWORD_X86
const QuantizedKernels& quantized_avx2();
const QuantizedKernels& quantized_avx512();
void quantized_amx(Context&, const LinearArgs&);  // uses AVX-512 for few rows
#endif

}  // namespace foreword
