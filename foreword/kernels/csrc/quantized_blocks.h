// The blocks of GGUF files, and how to unpack them.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace foreword {

constexpr int SMALL = 32;    // values of a block of Q8_0, Q5_0, Q4_0 (and I4)
constexpr int SUPER = 256;   // values of a block of Q4_K, Q5_K, Q6_K

constexpr bool is_super(Format format) { return format >= Format::Q4_K; }

// Bits of one quantized value.
constexpr int bits_of(Format format) {
    switch (format) {
        case Format::I8:
        case Format::G8:
        case Format::Q8_0: return 8;
        case Format::Q6_K: return 6;
        case Format::Q5_0:
        case Format::Q5_K: return 5;
        default: return 4;
    }
}

// Quantized values are stored unsigned: the value of zero. (Q4_K and Q5_K have a minimum instead.)
constexpr int zero_of(Format format) { return format == Format::Q4_K || format == Format::Q5_K ? 0 : 1 << (bits_of(format) - 1); }

// Bytes of one block in a file.
constexpr int64_t file_block_bytes(Format format) {
    switch (format) {
        case Format::Q8_0: return 34;
        case Format::Q5_0: return 22;
        case Format::Q4_0: return 18;
        case Format::Q4_K: return 144;
        case Format::Q5_K: return 176;
        default: return 210;
    }
}

// 32 values: d * (q - zero_of(format)). d is a float16.
struct SmallBlock {
    uint16_t d;
    uint8_t q[SMALL];
};

// 256 values. Q4_K, Q5_K: d * scales[i / 32] * q - dmin * mins[i / 32]. Q6_K: d * int8(scales[i / 16]) * (q - 32).
struct SuperBlock {
    uint16_t d, dmin;
    uint8_t scales[16], mins[8];
    uint8_t q[SUPER];
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
