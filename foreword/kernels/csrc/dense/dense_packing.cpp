// F32, BF16 and F16 tiles: rows are interleaved, so that one step over k is contiguous.
#include <cstring>
#include <vector>

#include "common/packing.h"
#include "common/half_float.h"

namespace foreword {
namespace {

constexpr int64_t PIECE = 32;  // values of a row packed at a time; k is padded to a multiple

int64_t value_bytes(Format format) { return format == Format::F32 ? 4 : 2; }

void narrow_values(Format format, const float* values, int64_t count, uint16_t* out) {
    const auto convert = format == Format::BF16 ? float_to_bfloat : float_to_half;
    for (int64_t i = 0; i < count; i++) out[i] = convert(values[i]);
}

// `count` values from `first` on of a row of floats or halves, as values of `format`.
void convert_piece(Format format, Format source, const void* row, int64_t first, int64_t count, void* out) {
    const auto* from = static_cast<const uint8_t*>(row) + first * value_bytes(source);
    if (format == source) {
        std::memcpy(out, from, count * value_bytes(format));
    } else if (format == Format::F32) {
        dequantize(source, from, count, static_cast<float*>(out));
    } else {
        float values[PIECE];
        dequantize(source, from, count, values);
        narrow_values(format, values, count, static_cast<uint16_t*>(out));
    }
}

// piece [TILE][units] -> tile [units][TILE]
template <class Unit, int64_t UNITS>
void lay_side_by_side(const Unit (&task)[TILE][UNITS], uint8_t* tile) {
    Unit turned[UNITS][TILE];
    for (int64_t u = 0; u < UNITS; u++)
        for (int64_t column = 0; column < TILE; column++) turned[u][column] = task[column][u];
    std::memcpy(tile, turned, sizeof turned);
}

// Unit: a value, or two bfloat16 values, of one row.
template <class Unit, int64_t UNITS>
void pack_rows(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    for (int64_t first = 0; first < k; first += PIECE) {
        const int64_t length = k - first < PIECE ? k - first : PIECE;
        Unit task[TILE][UNITS];
        if (length < PIECE || count < TILE) std::memset(task, 0, sizeof task);
        for (int64_t row = 0; row < count; row++) convert_piece(format, source, rows[row], first, length, task[row]);
        lay_side_by_side(task, tile + first * value_bytes(format) * TILE);
    }
}

void pack_values(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    if (format == Format::F16) return pack_rows<uint16_t, PIECE>(format, source, rows, count, k, tile);
    if (format == Format::F32) return pack_rows<uint32_t, PIECE>(format, source, rows, count, k, tile);
    pack_rows<uint32_t, PIECE / 2>(format, source, rows, count, k, tile);
}

// Place of a value in its tile, counted in values.
int64_t place(Format format, int64_t column, int64_t i) {
    return format == Format::BF16 ? i / 2 * 2 * TILE + column * 2 + i % 2 : i * TILE + column;
}

}  // namespace

void pack_dense_tile(Format format, Format source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    if (is_dense(source)) return pack_values(format, source, rows, count, k, tile);
    std::vector<float> values(count * k);
    const void* floats[TILE];
    for (int64_t row = 0; row < count; row++) {
        dequantize(source, rows[row], k, &values[row * k]);
        floats[row] = &values[row * k];
    }
    pack_values(format, Format::F32, floats, count, k, tile);
}

void unpack_dense_row(const Weight& weight, int64_t row, float* out) {
    const uint8_t* tile = weight.tiles + row / TILE * tile_bytes(weight);
    for (int64_t i = 0; i < weight.k; i++)
        dequantize(weight.format, tile + place(weight.format, row % TILE, i) * value_bytes(weight.format), 1, out + i);
}

}  // namespace foreword
