// Unpacks blocks of files, and converts every file type to float32.
#include <type_traits>

#include "common/packing.h"
#include "quantized/gguf_blocks.h"
#include "common/half_float.h"

namespace foreword {
namespace {

// Bits [first, first + count) of each byte.
constexpr uint32_t bits_at(uint32_t bytes, int first, int count) { return bytes >> first & 0x01010101u * ((1u << count) - 1); }

// Four values from i on.
uint32_t quad_at(const uint8_t* bytes, int i) {
    uint32_t quad;
    std::memcpy(&quad, bytes + 4 * i, sizeof quad);
    return quad;
}

// 16 bytes whose low halves are the first 16 values: as in a tile.
void read_halves(const uint8_t* bytes, uint32_t* words) { std::memcpy(words, bytes, 16); }

// 32 bytes whose low (or high) halves are the values of a group.
void read_low_halves(const uint8_t* bytes, uint32_t* words) {
    for (int j = 0; j < 4; j++) words[j] = bits_at(quad_at(bytes, j), 0, 4) | bits_at(quad_at(bytes, j + 4), 0, 4) << 4;
}
void read_high_halves(const uint8_t* bytes, uint32_t* words) {
    for (int j = 0; j < 4; j++) words[j] = bits_at(quad_at(bytes, j), 4, 4) | bits_at(quad_at(bytes, j + 4), 4, 4) << 4;
}

void read_q8_0(const uint8_t* bytes, SmallBlock& block) {
    for (int j = 0; j < 8; j++) block.words[j] = quad_at(bytes, j) ^ 0x80808080;
}

// Four bytes of fifth bits, those of a quad in four bits, then halves.
void read_five_bits(const uint8_t* bytes, SmallBlock& block) {
    constexpr uint32_t SPREAD = 0x00204081;  // times four bits: bit i at 8 * i
    read_halves(bytes + 4, block.words);
    block.words[4] = 0;
    for (int j = 0; j < 8; j++) block.words[4] |= (((bytes[j / 2] >> j % 2 * 4 & 15) * SPREAD) & 0x01010101) << j;
}

// Eight scales and eight minimums of 6 bits in 12 bytes.
void read_scales(const uint8_t* bytes, SuperBlock& block) {
    for (int i = 0; i < 4; i++) {
        block.scales[i] = bytes[i] & 63;
        block.mins[i] = bytes[i + 4] & 63;
        block.scales[i + 4] = static_cast<uint8_t>((bytes[i + 8] & 15) | (bytes[i] >> 6) << 4);
        block.mins[i + 4] = static_cast<uint8_t>(bytes[i + 8] >> 4 | (bytes[i + 4] >> 6) << 4);
    }
}

// 128 bytes: the halves of 32 bytes are the values of two groups.
void read_k_halves(const uint8_t* bytes, SuperBlock& block) {
    for (int pair = 0; pair < 4; pair++) {
        read_low_halves(bytes + 32 * pair, block.words[2 * pair]);
        read_high_halves(bytes + 32 * pair, block.words[2 * pair + 1]);
    }
}

void read_q4_k(const uint8_t* bytes, SuperBlock& block) {
    read_scales(bytes + 4, block);
    read_k_halves(bytes + 16, block);
}

void read_q5_k(const uint8_t* bytes, SuperBlock& block) {
    read_scales(bytes + 4, block);
    read_k_halves(bytes + 48, block);
    for (int group = 0; group < 8; group++) {
        uint32_t fifth = 0;
        for (int j = 0; j < 8; j++) fifth |= bits_at(quad_at(bytes + 16, j), group, 1) << j;
        block.words[group][4] = fifth;
    }
}

// Swap bits of `mask` in b with those that are `shift` higher in a.
void swap_bits(uint32_t& a, uint32_t& b, int shift, uint32_t mask) {
    const uint32_t differing = (a >> shift ^ b) & mask;
    a ^= differing << shift;
    b ^= differing;
}

// 32 bytes with two bits of each of four groups: they become words `first` and `first` + 1 of each. Quads of four consecutive
// words of the file are transposed as a matrix of two bits.
void read_two_bits(const uint8_t* bytes, int first, uint32_t (*groups)[8]) {
    for (int i = 0; i < 2; i++) {
        uint32_t q[4];
        std::memcpy(q, bytes + 16 * i, sizeof q);
        for (int j = 0; j < 4; j += 2) swap_bits(q[j], q[j + 1], 2, 0x33333333);
        for (int j = 0; j < 2; j++) swap_bits(q[j], q[j + 2], 4, 0x0f0f0f0f);
        for (int group = 0; group < 4; group++) groups[group][first + i] = q[group];
    }
}

void read_q6_k(const uint8_t* bytes, SuperBlock& block) {
    for (int half = 0; half < 2; half++) {
        uint32_t(*groups)[8] = block.words + 4 * half;
        for (int group = 0; group < 2; group++) {
            read_low_halves(bytes + 64 * half + 32 * group, groups[group]);
            read_high_halves(bytes + 64 * half + 32 * group, groups[group + 2]);
        }
        read_two_bits(bytes + 128 + 32 * half, 4, groups);
    }
    std::memcpy(block.scales, bytes + 192, 16);
}

// A byte for each part: its scale and its minimum.
void read_q2_k(const uint8_t* bytes, SuperBlock& block) {
    for (int part = 0; part < 16; part++) {
        block.scales[part] = bytes[part] & 15;
        block.mins[part] = bytes[part] >> 4;
    }
    for (int half = 0; half < 2; half++) read_two_bits(bytes + 16 + 32 * half, 0, block.words + 4 * half);
}

// Third bits, two bits, and scales of six bits less 32: halves of eight bytes, then their upper two bits.
void read_q3_k(const uint8_t* bytes, SuperBlock& block) {
    for (int group = 0; group < 8; group++) {
        uint32_t quads[8];
        for (int j = 0; j < 8; j++) {
            const uint32_t two = bits_at(quad_at(bytes + 32 + group / 4 * 32, j), group % 4 * 2, 2);
            quads[j] = two | bits_at(quad_at(bytes, j), group, 1) << 2;
        }
        uint32_t* words = block.words[group];
        for (int j = 0; j < 3; j++) words[j] = quads[2 * j] | quads[2 * j + 1] << 3;
        for (int j = 0; j < 2; j++) {
            words[j] |= bits_at(quads[6 + j], 0, 2) << 6;
            words[2] |= bits_at(quads[6 + j], 2, 1) << (6 + j);
        }
    }
    for (int part = 0; part < 16; part++) {
        const int low = bytes[96 + part % 8] >> (part / 8 * 4) & 15, high = bytes[104 + part % 4] >> (part / 4 * 2) & 3;
        block.scales[part] = static_cast<uint8_t>((low | high << 4) - 32);
    }
}

void read_iq4_xs(const uint8_t* bytes, SuperBlock& block) {
    for (int part = 0; part < 8; part++) {
        const int low = bytes[4 + part / 2] >> (part % 2 * 4) & 15, high = read_half(bytes + 2) >> (2 * part) & 3;
        block.scales[part] = static_cast<uint8_t>((low | high << 4) - 32);
        read_halves(bytes + 8 + 16 * part, block.words[part]);
    }
}

// Quad j of a group.
uint32_t quad_of(int bits, const uint32_t* words, int j) {
    switch (bits) {
        case 2: return bits_at(words[j / 4], 2 * (j % 4), 2);
        case 3: return j < 6 ? bits_at(words[j / 2], 3 * (j % 2), 3) : bits_at(words[j - 6], 6, 2) | bits_at(words[2], j, 1) << 2;
        case 8: return words[j];
        default: break;
    }
    const uint32_t low = bits_at(words[j % 4], j / 4 * 4, 4);
    if (bits == 5) return low | bits_at(words[4], j, 1) << 4;
    if (bits == 6) return low | bits_at(words[4 + j / 4], 2 * (j % 4), 2) << 4;
    return low;
}

// The 32 values of a group, less that of zero.
void group_values(Format format, const uint32_t* words, float* out) {
    const int bits = bits_of(format), zero = zero_of(format);
    for (int j = 0; j < 8; j++) {
        const uint32_t quad = quad_of(bits, words, j);
        for (int i = 0; i < 4; i++) {
            const int q = static_cast<int>(quad >> 8 * i & 255);
            out[4 * j + i] = static_cast<float>((has_table(format) ? table_of(format)[q] : q) - zero);
        }
    }
}

template <class Block, class Read>
void dequantize_blocks(Format format, const void* row, int64_t k, float* out, const Read& read) {
    constexpr int64_t values = std::is_same_v<Block, SmallBlock> ? SMALL : SUPER;
    const auto* bytes = static_cast<const uint8_t*>(row);
    Block block;
    for (int64_t i = 0; i < k / values; i++) {
        read(format, bytes + i * file_block_bytes(format), block);
        block_values(format, block, out + i * values);
    }
}

template <float (*CONVERT)(uint16_t)>
void widen(const void* row, int64_t k, float* out) {
    const auto* values = static_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < k; i++) out[i] = CONVERT(values[i]);
}

}  // namespace

void read_small_block(Format format, const uint8_t* bytes, SmallBlock& block) {
    block.d = format == Format::MXFP4 ? bytes[0] : read_half(bytes);
    block.m = has_minimum(format) ? read_half(bytes + 2) : 0;
    switch (format) {
        case Format::Q8_0: return read_q8_0(bytes + 2, block);
        case Format::Q5_0: return read_five_bits(bytes + 2, block);
        case Format::Q5_1: return read_five_bits(bytes + 4, block);
        case Format::Q4_1: return read_halves(bytes + 4, block.words);
        case Format::MXFP4: return read_halves(bytes + 1, block.words);
        default: return read_halves(bytes + 2, block.words);
    }
}

void read_super_block(Format format, const uint8_t* bytes, SuperBlock& block) {
    const uint8_t* halves = bytes + halves_at(format);
    block.d = read_half(halves);
    block.dmin = has_minimum(format) ? read_half(halves + 2) : 0;
    switch (format) {
        case Format::Q4_K: return read_q4_k(bytes, block);
        case Format::Q5_K: return read_q5_k(bytes, block);
        case Format::Q2_K: return read_q2_k(bytes, block);
        case Format::Q3_K: return read_q3_k(bytes, block);
        case Format::IQ4_XS: return read_iq4_xs(bytes, block);
        default: return read_q6_k(bytes, block);
    }
}

void block_values(Format format, const SmallBlock& block, float* out) {
    const float d = format == Format::MXFP4 ? half_power(block.d) : half_to_float(block.d);
    group_values(format, block.words, out);
    for (int i = 0; i < SMALL; i++) out[i] = d * out[i];
    if (!has_minimum(format)) return;
    const float m = half_to_float(block.m);
    for (int i = 0; i < SMALL; i++) out[i] += m;
}

void block_values(Format format, const SuperBlock& block, float* out) {
    const float d = half_to_float(block.d), dmin = half_to_float(block.dmin);
    const int values = part_of(format);
    for (int group = 0; group < 8; group++) group_values(format, block.words[group], out + SMALL * group);
    for (int part = 0; part < SUPER / values; part++) {
        const int scale = has_minimum(format) ? block.scales[part] : static_cast<int8_t>(block.scales[part]);
        const float step = d * static_cast<float>(scale);
        const float least = has_minimum(format) ? dmin * static_cast<float>(block.mins[part]) : 0.0f;
        for (int i = values * part; i < values * (part + 1); i++) out[i] = step * out[i] - least;
    }
}

void dequantize(Format source, const void* row, int64_t k, float* out) {
    if (source == Format::F32) {
        std::memcpy(out, row, k * sizeof(float));
    } else if (source == Format::BF16) {
        widen<bfloat_to_float>(row, k, out);
    } else if (source == Format::F16) {
        widen<half_to_float>(row, k, out);
    } else if (is_super(source)) {
        dequantize_blocks<SuperBlock>(source, row, k, out, read_super_block);
    } else {
        dequantize_blocks<SmallBlock>(source, row, k, out, read_small_block);
    }
}

}  // namespace foreword
