// Layout of quantized weights in a tile: TILE columns (rows of the weight), block after block of k.
//
// 32 values of each column are a group: 64 bytes for every bit of a value. Numbered by quads of consecutive k,
//   bytes [4][16][4]  the low halves: quad j in bits 0-3, quad j + 4 in bits 4-7          (8 bits: [8][16][4], whole bytes)
//   bytes [16][4]     the fifth bits: that of quad j in bit j                             (5 bits)
//   bytes [2][16][4]  the fifth and sixth bits: first those of quads 0-3, then 4-7, of the
//                     j-th in bits 2j and 2j + 1                                          (6 bits; 2 bits: these alone)
//   bytes [3][16][4]  quads 0, 2, 4 in bits 0-2 and 1, 3, 5 in bits 3-5; the lower bits of quads 6 and 7 are bits 6-7 of
//                     the first two, their third bits are bits 6 and 7 of the last one    (3 bits)
//
// I8                float32 scale [16] after all groups
// 32 values a scale two groups at a time, after their float16 scales [2][16]; Q4_1 and Q5_1: and float16 minimums [2][16]
// MXFP4             four groups at a time, after their exponents [4][16]. The last groups may be fewer.
// G4, G8            uint8 zeros [groups of the weight][16], padded to 64 bytes; then each group of the weight: float32 scale [16]
//                   and its groups of 32 values
// Q4_K, Q5_K        float16 d [16], dmin [16], uint8 scales [8][16], minimums [4][16][2], then 8 groups
// Q2_K              float16 d [16], dmin [16], scales [8][16]: parts 2i and 2i + 1 in the halves of a byte, minimums
//                   [4][16][2]: parts 2i and 2i + 1 in low halves, 2i + 8 and 2i + 9 in high ones; then 8 groups
// Q6_K, Q3_K        float16 d [16], nothing [16], int8 scales [16][16], then 8 groups
// IQ4_XS            float16 d [16], nothing [16], int8 scales [8][16], then 8 groups
#pragma once

#include <cstdint>

#include "common/packing.h"
#include "quantized/gguf_blocks.h"

namespace foreword {

constexpr int64_t I8_MULTIPLE = 64;  // k of I8 is padded to a multiple of this

constexpr int64_t group_bytes(Format format) { return 64 * bits_of(format); }

// Formats with a scale for each 32 values: blocks whose scales are together, the bytes of these scales (and minimums), and
// bytes of the tile before the quants, the scales and the minimums of a block.
constexpr int64_t blocks_together(Format format) { return format == Format::MXFP4 ? 4 : 2; }
constexpr int64_t scales_bytes(Format format) { return has_minimum(format) ? 128 : 64; }
constexpr int64_t together_bytes(Format format) { return scales_bytes(format) + blocks_together(format) * group_bytes(format); }
constexpr int64_t quants_at(Format format, int64_t block) {
    const int64_t together = blocks_together(format);
    return block / together * together_bytes(format) + scales_bytes(format) + block % together * group_bytes(format);
}
constexpr int64_t scales_at(Format format, int64_t block) {
    const int64_t together = blocks_together(format);
    return block / together * together_bytes(format) + block % together * (64 / together);
}
constexpr int64_t minimums_at(Format format, int64_t block) { return scales_at(format, block) + 64; }

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
constexpr int64_t super_quants(Format format) { return format == Format::IQ4_XS ? 192 : 320; }
constexpr int64_t super_bytes(Format format) { return super_quants(format) + 8 * group_bytes(format); }

}  // namespace foreword
