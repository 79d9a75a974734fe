// Packs rows whose scales come apart from their values (G4, G8, F8), and back.
#include <algorithm>

#include "common/packing.h"
#include "common/half_float.h"
#include "quantized/quantized_tile_layout.h"

namespace foreword {
namespace {

GroupedLayout layout_of(Format format, int64_t k, int64_t group_size) { return {format, (k + SMALL - 1) / SMALL, group_size / SMALL}; }

template <class T>
T get(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

template <class T>
void put(uint8_t* bytes, T value) {
    std::memcpy(bytes, &value, sizeof value);
}

// Bytes of values [first, first + 32) of a row of k, zeros beyond.
template <Format KIND>
void read_block(const GroupedRow& row, int64_t first, int64_t k, uint8_t (&bytes)[SMALL]) {
    constexpr int64_t BITS = bits_of(KIND), WHOLE = SMALL * BITS / 8;
    const uint8_t* from = row.values + first * BITS / 8;
    if (k - first >= SMALL) return static_cast<void>(std::memcpy(bytes, from, WHOLE));
    std::memset(bytes, 0, WHOLE);
    std::memcpy(bytes, from, (k - first) * BITS / 8);
}

// Eight nibbles, the low one of each byte first, to bytes.
uint64_t spread_nibbles(const uint8_t* bytes) {
    uint64_t wide = get<uint32_t>(bytes);
    wide = (wide | wide << 16) & 0x0000ffff0000ffff;
    wide = (wide | wide << 8) & 0x00ff00ff00ff00ff;
    return (wide | wide << 4) & 0x0f0f0f0f0f0f0f0f;
}

// Two quads to a column of a group of 32 values.
void put_quads(uint64_t quads, uint8_t* group) {
    put(group, static_cast<uint32_t>(quads));
    put(group + 64, static_cast<uint32_t>(quads >> 32));
}

template <Format KIND>
void put_block(const uint8_t* bytes, uint8_t* group) {
    if (KIND == Format::G4) {
        put_quads(spread_nibbles(bytes) | spread_nibbles(bytes + 8) << 4, group);
        put_quads(spread_nibbles(bytes + 4) | spread_nibbles(bytes + 12) << 4, group + 128);
    } else {
        for (int quad = 0; quad < 8; quad += 2) put_quads(get<uint64_t>(bytes + 4 * quad), group + 64 * quad);
    }
}

template <Format KIND>
void pack_ints_tile(const GroupedRow* const* rows, int64_t count, int64_t k, int64_t group_size, uint8_t* tile) {
    const GroupedLayout layout = layout_of(KIND, k, group_size);
    for (int64_t i = 0; i < k; i += SMALL) {
        const int64_t group = i / group_size;
        for (int64_t column = 0; column < count; column++) {
            uint8_t bytes[SMALL];
            read_block<KIND>(*rows[column], i, k, bytes);
            put_block<KIND>(bytes, tile + layout.quants(i / SMALL) + 4 * column);
            if (i % group_size != 0) continue;
            tile[layout.zeros(group) + column] = rows[column]->zeros[group];
            put(tile + layout.scales(group) + 4 * column, rows[column]->scales[group]);
        }
    }
}

// Rows of one group with a zero of 128: the bytes of I8.
void pack_int8_tile(const GroupedRow* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    for (int64_t i = 0; i < k; i += SMALL) {
        for (int64_t column = 0; column < count; column++) {
            uint8_t bytes[SMALL];
            read_block<Format::G8>(*rows[column], i, k, bytes);
            put_block<Format::G8>(bytes, tile + i * TILE + 4 * column);
        }
    }
    for (int64_t column = 0; column < count; column++) {
        put(tile + round_up(k, I8_MULTIPLE) * TILE + 4 * column, rows[column]->scales[0]);
    }
}

constexpr int64_t F8_MULTIPLE = 32;  // k of F8 is padded to a multiple of this

bool is_nan8(uint8_t bits) { return (bits & 0x7f) == 0x7f; }

float float8_to_float(uint8_t bits) {
    if (is_nan8(bits)) return float_of_bits(0x7fc00000);
    return half_to_float(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 0x1p8f;
}

// 32 values of each row, turned. Returns a bit for each row with a NaN.
uint32_t pack_float8_values(const GroupedRow* const* rows, int64_t count, int64_t first, int64_t k, uint8_t* values) {
    uint8_t turned[F8_MULTIPLE][TILE] = {};
    uint32_t nan = 0;
    for (int64_t column = 0; column < count; column++) {
        uint8_t bytes[F8_MULTIPLE] = {}, largest = 0;
        std::memcpy(bytes, rows[column]->values + first, std::min(F8_MULTIPLE, k - first));
        for (int64_t i = 0; i < F8_MULTIPLE; i++) {
            turned[i][column] = bytes[i];
            largest = std::max(largest, static_cast<uint8_t>(bytes[i] & 0x7f));
        }
        nan |= uint32_t{is_nan8(largest)} << column;
    }
    std::memcpy(values, turned, sizeof turned);
    return nan;
}

void pack_float8_tile(const GroupedRow* const* rows, int64_t count, int64_t k, int64_t group_size, uint8_t* tile) {
    const int64_t head = f8_head_bytes(k, group_size);
    uint32_t nan = 0;
    for (int64_t i = 0; i < k; i += F8_MULTIPLE) nan |= pack_float8_values(rows, count, i, k, tile + head + i * TILE);
    for (int64_t column = 0; column < count; column++) {
        put(tile + 4 * column, float_of_bits(nan >> column & 1 ? 0x7fc00000 : 0));
        for (int64_t i = 0; i < k; i += group_size) put(tile + f8_scales_at(i, group_size) + 4 * column, rows[column]->scales[i / group_size]);
    }
}

void unpack_float8_row(const Weight& weight, int64_t row, float* out) {
    const uint8_t* tile = weight.tiles + row / TILE * tile_bytes(weight);
    const uint8_t* values = tile + f8_head_bytes(weight.k, weight.group_size) + row % TILE;
    for (int64_t i = 0; i < weight.k; i++) {
        out[i] = float8_to_float(values[i * TILE]) * get<float>(tile + f8_scales_at(i, weight.group_size) + row % TILE * 4);
    }
}

}  // namespace

int64_t grouped_tile_bytes(Format format, int64_t k, int64_t group_size) {
    if (format == Format::F8) return f8_head_bytes(k, group_size) + TILE * round_up(k, F8_MULTIPLE);
    return layout_of(format, k, group_size).bytes;
}

void pack_grouped_tile(Format format, const GroupedRow* const* rows, int64_t count, int64_t k, int64_t group_size, uint8_t* tile) {
    if (count < TILE) std::memset(tile, 0, tile_bytes(format, k, group_size));
    if (format == Format::F8) return pack_float8_tile(rows, count, k, group_size, tile);
    if (format == Format::I8) return pack_int8_tile(rows, count, k, tile);
    (format == Format::G4 ? pack_ints_tile<Format::G4> : pack_ints_tile<Format::G8>)(rows, count, k, group_size, tile);
}

void unpack_grouped_row(const Weight& weight, int64_t row, float* out) {
    if (weight.format == Format::F8) return unpack_float8_row(weight, row, out);
    const uint8_t* tile = weight.tiles + row / TILE * tile_bytes(weight);
    const GroupedLayout layout = layout_of(weight.format, weight.k, weight.group_size);
    const int64_t column = row % TILE;
    for (int64_t i = 0; i < weight.k; i++) {
        const int64_t group = i / weight.group_size, quad = i % SMALL / 4;
        const uint8_t* quants = tile + layout.quants(i / SMALL) + 4 * column + i % 4;
        const int value = weight.format == Format::G4 ? quants[quad % 4 * 64] >> (quad / 4 * 4) & 15 : quants[quad * 64];
        const int difference = value - tile[layout.zeros(group) + column];
        out[i] = static_cast<float>(difference) * get<float>(tile + layout.scales(group) + 4 * column);
    }
}

}  // namespace foreword
