// Layout of quantized weights in a tile: TILE columns (rows of the weight), block after block of k.
//
// 32 values of each column are a group: 64 bytes for every bit of a value. Numbered by quads of consecutive k,
//   bytes [4][16][4]  the low halves: quad j in bits 0-3, quad j + 4 in bits 4-7          (8 bits: [8][16][4], whole bytes)
//   bytes [16][4]     the fifth bits: that of quad j in bit j                             (5 bits)
//   bytes [2][16][4]  the fifth and sixth bits: first those of quads 0-3, then 4-7, of the
//                     j-th in bits 2j and 2j + 1                                          (6 bits)
//
// I8                float32 scale [16] after all groups
// I4, Q4_0 .. Q8_0  two groups at a time, after their float16 scales [2][16]; the last one may be alone
// G4, G8            uint8 zeros [groups of the weight][16], padded to 64 bytes; then each group of the weight: float32 scale [16]
//                   and its groups of 32 values
// Q4_K, Q5_K        float16 d [16], dmin [16], uint8 scales [8][16], minimums [4][16][2], then 8 groups
// Q6_K              float16 d [16], nothing [16], int8 scales [16][16], then 8 groups
#pragma once

#include <cstdint>

#include "packing.h"
#include "quantized_blocks.h"

namespace foreword {

constexpr int64_t I8_MULTIPLE = 64;  // k of I8 is padded to a multiple of this

constexpr int64_t group_bytes(Format format) { return 64 * bits_of(format); }

// Formats with a scale for each 32 values: bytes of the tile before the quants and the scales of a block.
constexpr int64_t pair_bytes(Format format) { return 64 + 2 * group_bytes(format); }
constexpr int64_t quants_at(Format format, int64_t block) {
    return block / 2 * pair_bytes(format) + 64 + block % 2 * group_bytes(format);
}
constexpr int64_t scales_at(Format format, int64_t block) { return block / 2 * pair_bytes(format) + block % 2 * 32; }

// G4 and G8: offsets in a tile of `blocks` blocks of 32 values, of which group_blocks share a scale.
struct GroupedLayout {
    constexpr GroupedLayout(Format format, int64_t blocks, int64_t group_blocks)
        : block_bytes(group_bytes(format)),
          group_blocks(group_blocks),
          groups((blocks + group_blocks - 1) / group_blocks),
          bytes(scales(groups) - (groups * group_blocks - blocks) * block_bytes) {}

    constexpr int64_t zeros(int64_t group) const { return group * TILE; }
    constexpr int64_t scales(int64_t group) const {
        return round_up(groups * TILE, 64) + group * (64 + group_blocks * block_bytes);
    }
    constexpr int64_t quants(int64_t block) const {
        return scales(block / group_blocks) + 64 + block % group_blocks * block_bytes;
    }

    int64_t block_bytes, group_blocks, groups, bytes;
};

// Formats with blocks of 256: offsets in a block.
constexpr int64_t SUPER_SCALES = 64, SUPER_MINS = 192;
constexpr int64_t SUPER_QUANTS = 320;
constexpr int64_t super_bytes(Format format) { return SUPER_QUANTS + 8 * group_bytes(format); }

}  // namespace foreword
