// Unpacks blocks of files, and converts every file type to float32.
#include "packing.h"
#include "quantized_blocks.h"
#include "quantized_half.h"

namespace foreword {
namespace {

// 16 bytes -> 32 values: low nibbles, then high nibbles.
void split_nibbles(const uint8_t* bytes, int count, uint8_t* q) {
    for (int i = 0; i < count; i++) {
        q[i] = bytes[i] & 15;
        q[i + count] = bytes[i] >> 4;
    }
}

// Bits of 32 bytes, from `shift`, become the upper bits of 32 values.
template <int MASK>
void add_bits(const uint8_t* bytes, int shift, uint8_t* q) {
    for (int i = 0; i < 32; i++) q[i] |= (bytes[i] >> shift & MASK) << 4;
}

void read_q8_0(const uint8_t* bytes, SmallBlock& block) {
    for (int i = 0; i < SMALL; i++) block.q[i] = bytes[2 + i] ^ 0x80;
}

// Bit i of `bits` becomes the fifth bit of q[i].
void add_eight_bits(uint8_t bits, uint8_t* q) {
    constexpr uint64_t EACH = 0x0101010101010101, BIT_OF_EACH = 0x8040201008040201;
    const uint64_t chosen = (bits * EACH) & BIT_OF_EACH;  // each byte is zero or one bit
    uint64_t values;
    std::memcpy(&values, q, sizeof values);
    values |= ((chosen + 0x7f * EACH) & 0x80 * EACH) >> 3;
    std::memcpy(q, &values, sizeof values);
}

// Four bytes of fifth bits, then nibbles.
void read_five_bits(const uint8_t* bytes, SmallBlock& block) {
    split_nibbles(bytes + 4, SMALL / 2, block.q);
    for (int i = 0; i < 4; i++) add_eight_bits(bytes[i], block.q + 8 * i);
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

void read_q4_k(const uint8_t* bytes, SuperBlock& block) {
    read_scales(bytes + 4, block);
    for (int part = 0; part < 4; part++) split_nibbles(bytes + 16 + 32 * part, 32, block.q + 64 * part);
}

void read_q5_k(const uint8_t* bytes, SuperBlock& block) {
    read_scales(bytes + 4, block);
    for (int part = 0; part < 4; part++) split_nibbles(bytes + 48 + 32 * part, 32, block.q + 64 * part);
    for (int part = 0; part < 8; part++) add_bits<1>(bytes + 16, part, block.q + 32 * part);
}

void read_q6_k(const uint8_t* bytes, SuperBlock& block) {
    for (int half = 0; half < 2; half++) {
        uint8_t* q = block.q + 128 * half;
        split_nibbles(bytes + 64 * half, 64, q);
        for (int part = 0; part < 4; part++) add_bits<3>(bytes + 128 + 32 * half, 2 * part, q + 32 * part);
    }
    std::memcpy(block.scales, bytes + 192, 16);
}

// 64 bytes -> 256 values: the lowest two bits of 32 bytes, then the next ones.
void read_two_bits(const uint8_t* bytes, uint8_t* q) {
    for (int part = 0; part < 8; part++) {
        for (int i = 0; i < 32; i++) q[32 * part + i] = bytes[part / 4 * 32 + i] >> (part % 4 * 2) & 3;
    }
}

// A byte for each part: its scale and its minimum.
void read_q2_k(const uint8_t* bytes, SuperBlock& block) {
    for (int part = 0; part < 16; part++) {
        block.scales[part] = bytes[part] & 15;
        block.mins[part] = bytes[part] >> 4;
    }
    read_two_bits(bytes + 16, block.q);
}

// Third bits, two bits, and scales of six bits less 32: halves of eight bytes, then their upper two bits.
void read_q3_k(const uint8_t* bytes, SuperBlock& block) {
    read_two_bits(bytes + 32, block.q);
    for (int part = 0; part < 8; part++) {
        for (int i = 0; i < 32; i++) block.q[32 * part + i] |= (bytes[i] >> part & 1) << 2;
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
        split_nibbles(bytes + 8 + 16 * part, 16, block.q + 32 * part);
    }
}

int value_of(Format format, uint8_t q) { return has_table(format) ? table_of(format)[q] : q; }

template <class Block, class Read>
void dequantize_blocks(Format format, const void* row, int64_t k, float* out, const Read& read) {
    constexpr int64_t values = sizeof Block::q;
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
        case Format::Q8_0: return read_q8_0(bytes, block);
        case Format::Q5_0: return read_five_bits(bytes + 2, block);
        case Format::Q5_1: return read_five_bits(bytes + 4, block);
        case Format::Q4_1: return split_nibbles(bytes + 4, SMALL / 2, block.q);
        case Format::MXFP4: return split_nibbles(bytes + 1, SMALL / 2, block.q);
        default: return split_nibbles(bytes + 2, SMALL / 2, block.q);
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
    for (int i = 0; i < SMALL; i++) out[i] = d * static_cast<float>(value_of(format, block.q[i]) - zero_of(format));
    if (!has_minimum(format)) return;
    const float m = half_to_float(block.m);
    for (int i = 0; i < SMALL; i++) out[i] += m;
}

void block_values(Format format, const SuperBlock& block, float* out) {
    const float d = half_to_float(block.d), dmin = half_to_float(block.dmin);
    const int values = part_of(format);
    for (int part = 0; part < SUPER / values; part++) {
        const int scale = has_minimum(format) ? block.scales[part] : static_cast<int8_t>(block.scales[part]);
        const float step = d * static_cast<float>(scale);
        const float least = has_minimum(format) ? dmin * static_cast<float>(block.mins[part]) : 0.0f;
        for (int i = values * part; i < values * (part + 1); i++) {
            out[i] = step * static_cast<float>(value_of(format, block.q[i]) - zero_of(format)) - least;
        }
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
