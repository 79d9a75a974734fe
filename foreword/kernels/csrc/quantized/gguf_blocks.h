// The blocks of GGUF files, and how to unpack them.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/kernels.h"

namespace foreword {

constexpr int SMALL = 32;    // values of a block of Q8_0, Q5_0, Q4_0, Q4_1, Q5_1, IQ4_NL, MXFP4 (and I4)
constexpr int SUPER = 256;   // values of a block of Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_XS

constexpr bool is_super(Format format) { return format >= Format::Q4_K; }

// Values are stored as codes that a table translates.
constexpr bool has_table(Format format) {
    return format == Format::IQ4_NL || format == Format::MXFP4 || format == Format::IQ4_XS;
}

// A minimum is added to (Q4_1, Q5_1) or subtracted from the scaled values of a part.
constexpr bool has_minimum(Format format) {
    switch (format) {
        case Format::Q4_1:
        case Format::Q5_1:
        case Format::Q4_K:
        case Format::Q5_K:
        case Format::Q2_K: return true;
        default: return false;
    }
}

// Stored bits of one quantized value.
constexpr int bits_of(Format format) {
    switch (format) {
        case Format::I8:
        case Format::G8:
        case Format::Q8_0: return 8;
        case Format::Q6_K: return 6;
        case Format::Q5_0:
        case Format::Q5_1:
        case Format::Q5_K: return 5;
        case Format::Q3_K: return 3;
        case Format::Q2_K: return 2;
        default: return 4;
    }
}

// Bits of one unsigned value in a product.
constexpr int product_bits(Format format) {
    if (format == Format::MXFP4) return 5;
    return has_table(format) ? 8 : bits_of(format);
}

// Unsigned values of products: the value of zero. Formats with a minimum need none.
constexpr int zero_of(Format format) { return has_minimum(format) ? 0 : 1 << (product_bits(format) - 1); }

// Unsigned values of the 16 codes: what a code stands for (MXFP4: twice that) plus zero_of(format).
alignas(16) constexpr uint8_t IQ4_TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t MXFP4_TABLE[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

constexpr const uint8_t* table_of(Format format) { return format == Format::MXFP4 ? MXFP4_TABLE : IQ4_TABLE; }

// Values that share a scale.
constexpr int part_of(Format format) {
    return format == Format::Q6_K || format == Format::Q2_K || format == Format::Q3_K ? 16 : 32;
}

// Bytes of one block in a file.
constexpr int64_t file_block_bytes(Format format) {
    switch (format) {
        case Format::Q8_0: return 34;
        case Format::Q5_0: return 22;
        case Format::Q4_1: return 20;
        case Format::Q5_1: return 24;
        case Format::MXFP4: return 17;
        case Format::Q4_K: return 144;
        case Format::Q5_K: return 176;
        case Format::Q6_K: return 210;
        case Format::Q2_K: return 84;
        case Format::Q3_K: return 110;
        case Format::IQ4_XS: return 136;
        default: return 18;  // Q4_0, IQ4_NL
    }
}

// Bytes of a block in a file before its float16 scale and minimum.
constexpr int64_t halves_at(Format format) {
    switch (format) {
        case Format::Q6_K: return 208;
        case Format::Q2_K: return 80;
        case Format::Q3_K: return 108;
        default: return 0;
    }
}

// A block of a file, its values as words of one column of a tile (quantized_tile_layout.h): word i is 64 * i bytes behind the
// first one of its group of 32 values.

// 32 values: d * (value - zero_of(format)) + m. d and m are float16; the d of MXFP4 is an exponent, see half_power().
struct SmallBlock {
    uint16_t d, m;
    uint32_t words[8];
};

// 256 values in parts of part_of(format): d * scale * (value - zero_of(format)) - dmin * minimum. Scales of formats without
// minimums are signed.
struct SuperBlock {
    uint16_t d, dmin;
    uint8_t scales[16], mins[16];
    uint32_t words[8][8];
};

inline uint16_t read_half(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, sizeof half);
    return half;
}

void read_small_block(Format format, const uint8_t* bytes, SmallBlock& block);
void read_super_block(Format format, const uint8_t* bytes, SuperBlock& block);
void block_values(Format format, const SmallBlock& block, float* out);
void block_values(Format format, const SuperBlock& block, float* out);

}  // namespace foreword
