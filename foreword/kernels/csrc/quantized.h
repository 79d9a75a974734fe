// Products of rows rounded to int8 with quantized weights: what the instruction sets share.
//
// Rows are taken in groups that share every load of a weight. Of a group of R rows, element i of row r (a quad of int8,
// a scale, a sum) is element i * R + r: one broadcast each, side by side.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "quantized_layout.h"

namespace foreword {

constexpr int MAX_GROUP = 16;  // rows

// How rows are rounded for a kind of weight.
//   block  values that share a scale (their largest magnitude / 127); 0: the whole row
//   part   values that share a sum; 0: the whole row
//   weight each sum is multiplied with; 0: sums stay as they are, as pairs of int16
struct Rounding {
    int64_t block, part;
    int32_t weight;
};

constexpr Rounding rounding_of(Kind kind) {
    if (kind == Kind::I8) return {0, 0, -zero_of(kind)};
    if (kind == Kind::Q6_K) return {SUPER, 16, -zero_of(kind)};
    if (is_super(kind)) return {SUPER, 32, 0};
    return {SMALL, SMALL, -zero_of(kind)};
}

// Elements of one rounded row: quads of int8, float32 scales, sums of 4 bytes.
struct RowSize {
    int64_t quads, scales, sums;
};

inline RowSize row_size(Kind kind, int64_t k) {
    if (kind == Kind::I8) return {round_up(k, I8_MULTIPLE) / 4, 1, 1};
    const Rounding rounding = rounding_of(kind);
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
    Rows y;
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
//   products   by kind (from I8 on) and rows of the group - 1
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
void quantized_amx(Context&, const LinearArgs&);  // few rows are left to AVX-512
#endif

}  // namespace foreword
