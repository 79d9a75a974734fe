// Packs quantized rows into tiles, and back; quantized_layout.h defines the layout.
#include <algorithm>
#include <cmath>
#include <vector>

#include "packing.h"
#include "quantized_half.h"
#include "quantized_layout.h"

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

constexpr uint32_t LOW_HALVES = 0x0f0f0f0f;

// 32 values of one column to its place in a group: `group` points to the column's first quad, quads are 64 bytes apart.
template <int BITS>
void put_group_of(const uint8_t* q, uint8_t* group) {
    constexpr int PER_PLANE = BITS == 6 ? 4 : 8;
    uint32_t quads[8], planes[2] = {0, 0};
    std::memcpy(quads, q, sizeof quads);
    if (BITS == 8) {
        for (int j = 0; j < 8; j++) store_partial(group + 64 * j, quads[j]);
        return;
    }
    for (int j = 0; j < 4; j++) store_partial(group + 64 * j, (quads[j] & LOW_HALVES) | (quads[j + 4] & LOW_HALVES) << 4);
    for (int j = 0; j < 8; j++) planes[j / PER_PLANE] |= (quads[j] >> 4 & LOW_HALVES) << (8 / PER_PLANE * (j % PER_PLANE));
    for (int plane = 0; plane < BITS - 4; plane++) store_partial(group + 256 + 64 * plane, planes[plane]);
}

void put_group(int bits, const uint8_t* q, uint8_t* group) {
    switch (bits) {
        case 4: return put_group_of<4>(q, group);
        case 5: return put_group_of<5>(q, group);
        case 6: return put_group_of<6>(q, group);
        default: return put_group_of<8>(q, group);
    }
}

// The bits of quad j above the fourth.
uint32_t upper_bits(int bits, const uint8_t* group, int j) {
    if (bits == 5) return read_quad(group + 256) >> j & 0x01010101;
    if (bits == 6) return read_quad(group + 256 + 64 * (j / 4)) >> (2 * (j % 4)) & 0x03030303;
    return 0;
}

void get_group(int bits, const uint8_t* group, uint8_t* q) {
    for (int j = 0; j < 8; j++) {
        const uint32_t whole = read_quad(group + 64 * (bits == 8 ? j : j % 4));
        const uint32_t low = whole >> (j / 4 * 4) & LOW_HALVES;
        store_partial(q + 4 * j, bits == 8 ? whole : low | upper_bits(bits, group, j) << 4);
    }
}

void put_small(Format format, const SmallBlock& block, int64_t index, int64_t column, uint8_t* tile) {
    store_partial(tile + scales_at(format, index) + 2 * column, block.d);
    put_group(bits_of(format), block.q, tile + quants_at(format, index) + 4 * column);
}

void get_small(Format format, const uint8_t* tile, int64_t index, int64_t column, SmallBlock& block) {
    block.d = get<uint16_t>(tile + scales_at(format, index) + 2 * column);
    get_group(bits_of(format), tile + quants_at(format, index) + 4 * column, block.q);
}

// Q4_K and Q5_K: d, dmin, and eight scales and minimums; minimums are in pairs.
void put_parts(const SuperBlock& block, int64_t column, uint8_t* super) {
    store_partial(super + 2 * column, block.d);
    store_partial(super + 32 + 2 * column, block.dmin);
    for (int part = 0; part < 8; part++) {
        super[SUPER_SCALES + TILE * part + column] = block.scales[part];
        super[SUPER_MINS + part / 2 * 32 + 2 * column + part % 2] = block.mins[part];
    }
}

void get_parts(const uint8_t* super, int64_t column, SuperBlock& block) {
    block.d = get<uint16_t>(super + 2 * column);
    block.dmin = get<uint16_t>(super + 32 + 2 * column);
    for (int part = 0; part < 8; part++) {
        block.scales[part] = super[SUPER_SCALES + TILE * part + column];
        block.mins[part] = super[SUPER_MINS + part / 2 * 32 + 2 * column + part % 2];
    }
}

void put_super(Format format, const SuperBlock& block, int64_t column, uint8_t* super) {
    if (format == Format::Q6_K) {
        store_partial(super + 2 * column, block.d);
        for (int part = 0; part < 16; part++) super[SUPER_SCALES + TILE * part + column] = block.scales[part];
    } else {
        put_parts(block, column, super);
    }
    for (int group = 0; group < 8; group++) {
        put_group(bits_of(format), block.q + SMALL * group, super + SUPER_QUANTS + group * group_bytes(format) + 4 * column);
    }
}

void get_super(Format format, const uint8_t* super, int64_t column, SuperBlock& block) {
    if (format == Format::Q6_K) {
        block.d = get<uint16_t>(super + 2 * column);
        block.dmin = 0;
        for (int part = 0; part < 16; part++) block.scales[part] = super[SUPER_SCALES + TILE * part + column];
    } else {
        get_parts(super, column, block);
    }
    for (int group = 0; group < 8; group++) {
        get_group(bits_of(format), super + SUPER_QUANTS + group * group_bytes(format) + 4 * column, block.q + SMALL * group);
    }
}

void pack_file_row(Format format, const uint8_t* row, int64_t k, int64_t column, uint8_t* tile) {
    if (is_super(format)) {
        SuperBlock block;
        for (int64_t i = 0; i < k / SUPER; i++) {
            read_super_block(format, row + i * file_block_bytes(format), block);
            put_super(format, block, column, tile + i * super_bytes(format));
        }
        return;
    }
    SmallBlock block;
    for (int64_t i = 0; i < k / SMALL; i++) {
        read_small_block(format, row + i * file_block_bytes(format), block);
        put_small(format, block, i, column, tile);
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
        SmallBlock block;
        for (int i = 0; i < SMALL; i++) block.q[i] = q[i][c];
        block.d = wrong[c] == 0.0f ? float_to_half(group.scale[c]) : 0x7e00;
        put_small(Format::I4, block, index, c, tile);
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

void unpack_small_row(Format format, const uint8_t* tile, int64_t column, int64_t k, float* out) {
    SmallBlock block;
    float values[SMALL];
    for (int64_t i = 0; i < k; i += SMALL) {
        get_small(format, tile, i / SMALL, column, block);
        block_values(format, block, values);
        std::copy_n(values, std::min<int64_t>(SMALL, k - i), out + i);
    }
}

void unpack_super_row(Format format, const uint8_t* tile, int64_t column, int64_t k, float* out) {
    SuperBlock block;
    for (int64_t i = 0; i < k / SUPER; i++) {
        get_super(format, tile + i * super_bytes(format), column, block);
        block_values(format, block, out + i * SUPER);
    }
}

}  // namespace

int64_t tile_bytes(Format format, int64_t k, int64_t group_size) {
    if (is_grouped(format)) return grouped_tile_bytes(format, k, group_size);
    if (format == Format::F32) return TILE * 4 * round_up(k, 32);
    if (is_dense(format)) return TILE * 2 * round_up(k, 32);
    if (format == Format::I8) return TILE * round_up(k, I8_MULTIPLE) + TILE * 4;
    if (is_super(format)) return k / SUPER * super_bytes(format);
    const int64_t blocks = (k + SMALL - 1) / SMALL;
    return (blocks + 1) / 2 * 64 + blocks * group_bytes(format);
}

void pack_quantized_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    std::memset(tile, 0, tile_bytes(format, k, 0));
    if (format == Format::I8) return pack_int8_tile(source, rows, count, k, tile);
    if (format == Format::I4) return pack_int4_tile(source, rows, count, k, tile);
    for (int64_t column = 0; column < count; column++) {
        pack_file_row(format, static_cast<const uint8_t*>(rows[column]), k, column, tile);
    }
}

void unpack_quantized_row(const Weight& weight, int64_t row, float* out) {
    const uint8_t* tile = weight.tiles + row / TILE * tile_bytes(weight);
    if (weight.format == Format::I8) return unpack_int8_row(tile, row % TILE, weight.k, out);
    if (is_super(weight.format)) return unpack_super_row(weight.format, tile, row % TILE, weight.k, out);
    unpack_small_row(weight.format, tile, row % TILE, weight.k, out);
}

}  // namespace foreword
