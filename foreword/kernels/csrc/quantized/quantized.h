// Products of int8-quantized rows with quantized weights: the part that all instruction sets share.
//
// Rows are taken in groups that share every load of a weight. Of a group of R rows, element i of row r (a word of x, a
// scale, a sum) is element i * R + r: one broadcast each, side by side. A word is a quad of int8; instruction sets without
// products of bytes have two words of int16 a quad instead, for values of 8 bits.
#pragma once

#include <cstdint>

#include "common/kernels.h"
#include "quantized/quantized_tile_layout.h"

namespace foreword {

constexpr int MAX_GROUP = 16;  // rows

// How rows are quantized for a weight format.
//   block   values that share a scale (their largest magnitude / 127); 0: the whole row
//   part    values that share a sum; 0: the whole row
// A sum becomes the start value of the product (formats with a zero), a float times the scale of x (Q4_1, Q5_1), or half of
// a pair of int16 (has_pairs).
struct Rounding {
    int64_t block, part;
};

constexpr Rounding rounding_of(Format format) {
    if (format == Format::I8) return {0, 0};
    return {is_super(format) ? SUPER : SMALL, part_of(format)};
}

constexpr bool has_pairs(Format format) { return is_super(format) && has_minimum(format); }

// Elements of one rounded row: quads of values, float32 scales, sums of 4 bytes. group_blocks: blocks of weights that share a
// scale (G4, G8).
struct RowSize {
    int64_t quads, scales, sums;
    int64_t group_blocks = 1;
};

// Sums of a block. G8 has one for a zero of 128 and one for the rest of the zero.
constexpr int64_t sums_of(Format format) {
    if (format == Format::G8) return 2;
    const Rounding rounding = rounding_of(format);
    const int64_t parts = rounding.block / rounding.part;
    return has_pairs(format) ? parts / 2 : parts;
}

inline RowSize row_size(const Weight& weight) {
    if (weight.format == Format::I8) return {round_up(weight.k, I8_MULTIPLE) / 4, 1, 1};
    const int64_t block = rounding_of(weight.format).block, blocks = (weight.k + block - 1) / block;
    return {blocks * block / 4, blocks, blocks * sums_of(weight.format), is_grouped(weight.format) ? weight.group_size / SMALL : 1};
}

// A group of rounded rows; each pointer is its first element.
struct Group {
    int32_t* words;
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

// The rows of the group from x [rows, k].
using RoundRows = void (*)(const RowSize&, Type, const RowView& x, int64_t k, const Group&);

// The products of one tile with one group, to the output.
using Product = void (*)(const uint8_t* tile, const RowSize&, const Group&, const Output&);

constexpr int index_of(Format format) { return static_cast<int>(format) - static_cast<int>(Format::I8); }
constexpr int NUM_QUANTIZED = index_of(static_cast<Format>(NUM_FORMATS));

//   max_group  rows, at most MAX_GROUP
//   x_words    words of a quad of x for values of 8 bits (product_bits): 1 or 2; for others it is 1
//   pair       of two tiles of I8, one after the other, with a group of max_group; or null
//   round_rows by index of the format
//   products   by index of the format and rows of the group - 1
struct QuantizedKernels {
    int64_t max_group, x_words;
    Product pair;
    RoundRows round_rows[NUM_QUANTIZED];
    Product products[NUM_QUANTIZED][MAX_GROUP];
};

const QuantizedKernels& quantized_portable();
#if FOREWORD_X86
const QuantizedKernels& quantized_avx2();
const QuantizedKernels& quantized_avx2_vnni_vex();
const QuantizedKernels& quantized_avx2_vnni_evex();
const QuantizedKernels& quantized_avx512();
void quantized_amx(Context&, const LinearArgs&);  // uses AVX-512 for few rows
extern const LinearParts QUANTIZED_AMX_PARTS;
#elif FOREWORD_ARM
const QuantizedKernels& quantized_neon();
#endif

}  // namespace foreword
