// Packs quantized rows into tiles, and back; quantized_tile_layout.h defines the layout.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/packing.h"
#include "common/half_float.h"
#include "quantized/quantized_tile_layout.h"

namespace foreword {
namespace {

constexpr float TINY = 0x1p-100f;          // a largest magnitude below this counts as zero: its inverse would overflow
constexpr float ROUNDER = 0x1.8p23f;       // added to a small float, leaves it rounded in the lowest bits
constexpr float HALF_MAX = 65504.0f;
// Int4: candidates for the value of largest magnitude in a group; the least squared error wins.
constexpr float INT4_ENDS[] = {-8.0f, -8.5f, -7.5f, -9.0f, -7.0f, -9.5f, -6.5f};

uint32_t read_quad(const uint8_t* bytes) {
    uint32_t quad;
    std::memcpy(&quad, bytes, sizeof quad);
    return quad;
}

template <class T>
void store_partial(uint8_t* bytes, T value) {
    std::memcpy(bytes, &value, sizeof value);
}

template <class T>
T get(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// The words of one column of a group, 64 bytes apart.
template <Format FORMAT>
void put_words(const uint32_t* words, uint8_t* group) {
    for (int i = 0; i < bits_of(FORMAT); i++) store_partial(group + 64 * i, words[i]);
}

template <Format FORMAT>
void get_words(const uint8_t* group, uint32_t* words) {
    for (int i = 0; i < bits_of(FORMAT); i++) words[i] = read_quad(group + 64 * i);
}

// The scale and the minimum of a block: float16, except for an exponent of MXFP4.
template <Format FORMAT>
void put_small(const SmallBlock& block, int64_t index, int64_t column, uint8_t* tile) {
    if constexpr (FORMAT == Format::MXFP4) {
        tile[scales_at(FORMAT, index) + column] = static_cast<uint8_t>(block.d);
    } else {
        store_partial(tile + scales_at(FORMAT, index) + 2 * column, block.d);
    }
    if constexpr (has_minimum(FORMAT)) store_partial(tile + minimums_at(FORMAT, index) + 2 * column, block.m);
    put_words<FORMAT>(block.words, tile + quants_at(FORMAT, index) + 4 * column);
}

template <Format FORMAT>
void get_small(const uint8_t* tile, int64_t index, int64_t column, SmallBlock& block) {
    if constexpr (FORMAT == Format::MXFP4) {
        block.d = tile[scales_at(FORMAT, index) + column];
    } else {
        block.d = get<uint16_t>(tile + scales_at(FORMAT, index) + 2 * column);
    }
    if constexpr (has_minimum(FORMAT)) block.m = get<uint16_t>(tile + minimums_at(FORMAT, index) + 2 * column);
    get_words<FORMAT>(tile + quants_at(FORMAT, index) + 4 * column, block.words);
}

// Where the minimum of a part of Q4_K and Q5_K is: they are in pairs.
int64_t minimum_at(int part, int64_t column) { return SUPER_MINS + part / 2 * 32 + 2 * column + part % 2; }

// Scales and minimums. Of Q2_K, which has halves of bytes, two at a time.
template <Format FORMAT>
void put_parts(const SuperBlock& block, int64_t column, uint8_t* super) {
    store_partial(super + 2 * column, block.d);
    if constexpr (has_minimum(FORMAT)) store_partial(super + 32 + 2 * column, block.dmin);
    uint8_t* scales = super + SUPER_SCALES + column;
    if constexpr (FORMAT == Format::Q2_K) {
        for (int i = 0; i < 8; i++) {
            scales[TILE * i] = static_cast<uint8_t>(block.scales[2 * i] | block.scales[2 * i + 1] << 4);
            super[minimum_at(i, column)] = static_cast<uint8_t>(block.mins[i] | block.mins[i + 8] << 4);
        }
    } else {
        for (int part = 0; part < SUPER / part_of(FORMAT); part++) {
            scales[TILE * part] = block.scales[part];
            if constexpr (has_minimum(FORMAT)) super[minimum_at(part, column)] = block.mins[part];
        }
    }
}

template <Format FORMAT>
void get_parts(const uint8_t* super, int64_t column, SuperBlock& block) {
    block.d = get<uint16_t>(super + 2 * column);
    block.dmin = has_minimum(FORMAT) ? get<uint16_t>(super + 32 + 2 * column) : 0;
    const uint8_t* scales = super + SUPER_SCALES + column;
    for (int part = 0; part < SUPER / part_of(FORMAT); part++) {
        if constexpr (FORMAT == Format::Q2_K) {
            block.scales[part] = scales[TILE * (part / 2)] >> part % 2 * 4 & 15;
            block.mins[part] = super[minimum_at(part % 8, column)] >> part / 8 * 4 & 15;
        } else {
            block.scales[part] = scales[TILE * part];
            if constexpr (has_minimum(FORMAT)) block.mins[part] = super[minimum_at(part, column)];
        }
    }
}

template <Format FORMAT>
void put_super(const SuperBlock& block, int64_t column, uint8_t* super) {
    put_parts<FORMAT>(block, column, super);
    uint8_t* quants = super + super_quants(FORMAT) + 4 * column;
    for (int group = 0; group < 8; group++) put_words<FORMAT>(block.words[group], quants + group * group_bytes(FORMAT));
}

template <Format FORMAT>
void get_super(const uint8_t* super, int64_t column, SuperBlock& block) {
    get_parts<FORMAT>(super, column, block);
    const uint8_t* quants = super + super_quants(FORMAT) + 4 * column;
    for (int group = 0; group < 8; group++) get_words<FORMAT>(quants + group * group_bytes(FORMAT), block.words[group]);
}

// Block by block of all columns, whose tile stays in the L1 cache.
template <Format FORMAT>
void pack_blocks(const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    constexpr int64_t BYTES = file_block_bytes(FORMAT);
    for (int64_t i = 0; i < k / (is_super(FORMAT) ? SUPER : SMALL); i++) {
        for (int64_t column = 0; column < count; column++) {
            const uint8_t* bytes = static_cast<const uint8_t*>(rows[column]) + i * BYTES;
            if constexpr (is_super(FORMAT)) {
                SuperBlock block;
                read_super_block(FORMAT, bytes, block);
                put_super<FORMAT>(block, column, tile + i * super_bytes(FORMAT));
            } else {
                SmallBlock block;
                read_small_block(FORMAT, bytes, block);
                put_small<FORMAT>(block, i, column, tile);
            }
        }
    }
}

template <Format FORMAT>
void unpack_blocks(const uint8_t* tile, int64_t column, int64_t k, float* out) {
    if constexpr (is_super(FORMAT)) {
        SuperBlock block;
        for (int64_t i = 0; i < k / SUPER; i++) {
            get_super<FORMAT>(tile + i * super_bytes(FORMAT), column, block);
            block_values(FORMAT, block, out + i * SUPER);
        }
    } else {
        SmallBlock block;
        float values[SMALL];
        for (int64_t i = 0; i < k; i += SMALL) {
            get_small<FORMAT>(tile, i / SMALL, column, block);
            block_values(FORMAT, block, values);
            std::copy_n(values, std::min<int64_t>(SMALL, k - i), out + i);
        }
    }
}

struct BlockPacking {
    void (*pack)(const void* const* rows, int64_t count, int64_t k, uint8_t* tile);
    void (*unpack)(const uint8_t* tile, int64_t column, int64_t k, float* out);
};

template <Format FORMAT>
constexpr BlockPacking PACKING{pack_blocks<FORMAT>, unpack_blocks<FORMAT>};

const BlockPacking& packing_of(Format format) {
    switch (format) {
        case Format::Q8_0: return PACKING<Format::Q8_0>;
        case Format::Q5_0: return PACKING<Format::Q5_0>;
        case Format::Q4_1: return PACKING<Format::Q4_1>;
        case Format::Q5_1: return PACKING<Format::Q5_1>;
        case Format::IQ4_NL: return PACKING<Format::IQ4_NL>;
        case Format::MXFP4: return PACKING<Format::MXFP4>;
        case Format::Q4_K: return PACKING<Format::Q4_K>;
        case Format::Q5_K: return PACKING<Format::Q5_K>;
        case Format::Q6_K: return PACKING<Format::Q6_K>;
        case Format::Q2_K: return PACKING<Format::Q2_K>;
        case Format::Q3_K: return PACKING<Format::Q3_K>;
        case Format::IQ4_XS: return PACKING<Format::IQ4_XS>;
        default: return PACKING<Format::Q4_0>;  // and I4
    }
}

// The bits of the largest magnitude: bits are ordered like values, with infinity and NaN last.
uint32_t largest_magnitude(const float* values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, bits_of_float(values[i]) & 0x7fffffff);
    return largest;
}

// k values (zero-padded to a multiple of 64) as bytes of the tile; returns their scale.
float pack_int8_row(const float* values, int64_t k, uint8_t* quads) {
    const float largest = float_of_bits(largest_magnitude(values, k));
    if (!std::isfinite(largest)) return float_of_bits(0x7fc00000);
    const float inverse = largest >= TINY ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < round_up(k, I8_MULTIPLE); i += 16) {
        uint8_t bytes[16];
        for (int j = 0; j < 16; j++) bytes[j] = static_cast<uint8_t>(bits_of_float(values[i + j] * inverse + ROUNDER) + 128);
        for (int j = 0; j < 4; j++) store_partial(quads + (i / 4 + j) * 64, read_quad(bytes + 4 * j));
    }
    return largest >= TINY ? largest / 127.0f : 0.0f;
}

void pack_int8_tile(Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    std::vector<float> values(round_up(k, I8_MULTIPLE));
    for (int64_t column = 0; column < count; column++) {
        dequantize(source, rows[column], k, values.data());
        const float scale = pack_int8_row(values.data(), k, tile + 4 * column);
        store_partial(tile + round_up(k, I8_MULTIPLE) * TILE + 4 * column, scale);
    }
}

// One group of int4 of all columns: [32][16] floats, so that columns are vectorized.
struct Int4Group {
    float x[SMALL][TILE];
    float scale[TILE];  // of the best rounding so far
    float error[TILE];
};

float int4_value(float x, float inverse) {
    const float value = x * inverse, above = value < -8.0f ? -8.0f : value;
    return ((above > 7.0f ? 7.0f : above) + ROUNDER) - ROUNDER;
}

float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// Adds the squared error of one value of each column.
void add_errors(const float* x, const float* inverse, const float* scale, float* __restrict error) {
    for (int c = 0; c < TILE; c++) {
        const float missed = x[c] - int4_value(x[c], inverse[c]) * scale[c];
        error[c] += missed * missed;
    }
}

// Wide vectors save seconds of int4 packing at load; the results are the same.
#if FOREWORD_X86 && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOREWORD_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define FOREWORD_WIDE
#endif

// Keep `scale` [16] for the columns where its squared error, summed in order, is the least.
FOREWORD_WIDE void try_scales(Int4Group& group, const float* scale) {
    float inverse[TILE], error[TILE] = {};
    for (int c = 0; c < TILE; c++) inverse[c] = inverse_of(scale[c]);
    for (int i = 0; i < SMALL; i++) add_errors(group.x[i], inverse, scale, error);
    for (int c = 0; c < TILE; c++) {
        if (!(error[c] < group.error[c])) continue;
        group.error[c] = error[c];
        group.scale[c] = scale[c];
    }
}

// The value of largest magnitude of each column.
void find_peaks(const Int4Group& group, float* row_max) {
    float low[TILE] = {}, high[TILE] = {};
    for (int i = 0; i < SMALL; i++) {
        for (int c = 0; c < TILE; c++) {
            low[c] = std::min(low[c], group.x[i][c]);
            high[c] = std::max(high[c], group.x[i][c]);
        }
    }
    for (int c = 0; c < TILE; c++) row_max[c] = -low[c] >= high[c] ? low[c] : high[c];
}

void choose_scales(Int4Group& group) {
    float row_max[TILE], scale[TILE];
    find_peaks(group, row_max);
    std::fill_n(group.scale, TILE, 0.0f);
    std::fill_n(group.error, TILE, HUGE_VALF);
    for (const float end : INT4_ENDS) {
        for (int c = 0; c < TILE; c++) {
            const float wanted = std::min(std::max(row_max[c] / end, -HALF_MAX), HALF_MAX);
            scale[c] = half_to_float(float_to_half(wanted));
        }
        try_scales(group, scale);
    }
}

// The quantized values of a column, 0 to 15. Columns with a non-finite value get a NaN scale.
void put_int4_group(const Int4Group& group, int64_t index, uint8_t* tile) {
    float inverse[TILE], wrong[TILE] = {};
    uint8_t q[SMALL][TILE];
    for (int c = 0; c < TILE; c++) inverse[c] = inverse_of(group.scale[c]);
    for (int i = 0; i < SMALL; i++) {
        for (int c = 0; c < TILE; c++) {
            wrong[c] += group.x[i][c] * 0.0f;
            q[i][c] = static_cast<uint8_t>(bits_of_float(int4_value(group.x[i][c], inverse[c]) + ROUNDER) + 8) & 15;
        }
    }
    for (int c = 0; c < TILE; c++) {
        SmallBlock block{};
        for (int i = 0; i < SMALL / 2; i++) block.words[i / 4] |= static_cast<uint32_t>(q[i][c] | q[i + SMALL / 2][c] << 4) << 8 * (i % 4);
        block.d = wrong[c] == 0.0f ? float_to_half(group.scale[c]) : 0x7e00;
        put_small<Format::Q4_0>(block, index, c, tile);
    }
}

void pack_int4_tile(Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    const int64_t width = round_up(k, SMALL);
    std::vector<float> values(width * TILE);
    for (int64_t column = 0; column < count; column++) dequantize(source, rows[column], k, &values[column * width]);
    Int4Group group;
    for (int64_t index = 0; index < width / SMALL; index++) {
        for (int i = 0; i < SMALL; i++) {
            for (int c = 0; c < TILE; c++) group.x[i][c] = values[c * width + index * SMALL + i];
        }
        choose_scales(group);
        put_int4_group(group, index, tile);
    }
}

void unpack_int8_row(const uint8_t* tile, int64_t column, int64_t k, float* out) {
    const float scale = get<float>(tile + round_up(k, I8_MULTIPLE) * TILE + 4 * column);
    for (int64_t i = 0; i < k; i++) out[i] = scale * static_cast<float>(tile[i / 4 * 64 + 4 * column + i % 4] - 128);
}

}  // namespace

int64_t tile_bytes(Format format, int64_t k, int64_t group_size) {
    if (is_grouped(format)) return grouped_tile_bytes(format, k, group_size);
    if (format == Format::F32) return TILE * 4 * round_up(k, 32);
    if (is_dense(format)) return TILE * 2 * round_up(k, 32);
    if (format == Format::I8) return TILE * round_up(k, I8_MULTIPLE) + TILE * 4;
    if (is_super(format)) return k / SUPER * super_bytes(format);
    const int64_t blocks = (k + SMALL - 1) / SMALL;
    const int64_t together = blocks_together(format);
    return (blocks + together - 1) / together * scales_bytes(format) + blocks * group_bytes(format);
}

void pack_quantized_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    std::memset(tile, 0, tile_bytes(format, k, 0));
    if (format == Format::I8) return pack_int8_tile(source, rows, count, k, tile);
    if (format == Format::I4) return pack_int4_tile(source, rows, count, k, tile);
    packing_of(format).pack(rows, count, k, tile);
}

void unpack_quantized_row(const Weight& weight, int64_t row, float* out) {
    const uint8_t* tile = weight.tiles + row / TILE * tile_bytes(weight);
    if (weight.format == Format::I8) return unpack_int8_row(tile, row % TILE, weight.k, out);
    packing_of(weight.format).unpack(tile, row % TILE, weight.k, out);
}

}  // namespace foreword
