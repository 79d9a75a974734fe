// F32, BF16 and F16 tiles: their rows lie side by side, so that one step over k is one run of bytes.
#include <cstring>
#include <vector>

#include "packing.h"
#include "quantized_half.h"

namespace foreword {
namespace {

constexpr int64_t PIECE = 32;  // values of a row that are laid out at a time; k is filled up to a multiple of it

int64_t value_bytes(Kind kind) { return kind == Kind::F32 ? 4 : 2; }

void narrow_values(Kind kind, const float* values, int64_t count, uint16_t* out) {
    const auto convert = kind == Kind::BF16 ? float_to_bfloat : float_to_half;
    for (int64_t i = 0; i < count; i++) out[i] = convert(values[i]);
}

// `count` values from `first` on of a row of floats or halves, as values of `kind`.
void convert_piece(Kind kind, Kind source, const void* row, int64_t first, int64_t count, void* out) {
    const auto* from = static_cast<const uint8_t*>(row) + first * value_bytes(source);
    if (kind == source) {
        std::memcpy(out, from, count * value_bytes(kind));
    } else if (kind == Kind::F32) {
        dequantize(source, from, count, static_cast<float*>(out));
    } else {
        float values[PIECE];
        dequantize(source, from, count, values);
        narrow_values(kind, values, count, static_cast<uint16_t*>(out));
    }
}

// piece [TILE][units] -> tile [units][TILE]
template <class Unit, int64_t UNITS>
void lay_side_by_side(const Unit (&piece)[TILE][UNITS], uint8_t* tile) {
    Unit turned[UNITS][TILE];
    for (int64_t u = 0; u < UNITS; u++)
        for (int64_t column = 0; column < TILE; column++) turned[u][column] = piece[column][u];
    std::memcpy(tile, turned, sizeof turned);
}

// Unit: what stays together of one row, that is a value, or two of bfloat16.
template <class Unit, int64_t UNITS>
void pack_rows(Kind kind, Kind source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    for (int64_t first = 0; first < k; first += PIECE) {
        const int64_t length = k - first < PIECE ? k - first : PIECE;
        Unit piece[TILE][UNITS];
        if (length < PIECE || count < TILE) std::memset(piece, 0, sizeof piece);
        for (int64_t row = 0; row < count; row++) convert_piece(kind, source, rows[row], first, length, piece[row]);
        lay_side_by_side(piece, tile + first * value_bytes(kind) * TILE);
    }
}

void pack_values(Kind kind, Kind source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    if (kind == Kind::F16) return pack_rows<uint16_t, PIECE>(kind, source, rows, count, k, tile);
    if (kind == Kind::F32) return pack_rows<uint32_t, PIECE>(kind, source, rows, count, k, tile);
    pack_rows<uint32_t, PIECE / 2>(kind, source, rows, count, k, tile);
}

// Place of a value in its tile, counted in values.
int64_t place(Kind kind, int64_t column, int64_t i) {
    return kind == Kind::BF16 ? i / 2 * 2 * TILE + column * 2 + i % 2 : i * TILE + column;
}

}  // namespace

void pack_dense_tile(Kind kind, Kind source, const void* const* rows, int64_t count, int64_t k, uint8_t* tile) {
    if (is_dense(source)) return pack_values(kind, source, rows, count, k, tile);
    std::vector<float> values(count * k);
    const void* floats[TILE];
    for (int64_t row = 0; row < count; row++) {
        dequantize(source, rows[row], k, &values[row * k]);
        floats[row] = &values[row * k];
    }
    pack_values(kind, Kind::F32, floats, count, k, tile);
}

void unpack_dense_row(const Weight& weight, int64_t row, float* out) {
    const uint8_t* tile = weight.tiles + row / TILE * tile_bytes(weight.kind, weight.k);
    for (int64_t i = 0; i < weight.k; i++)
        dequantize(weight.kind, tile + place(weight.kind, row % TILE, i) * value_bytes(weight.kind), 1, out + i);
}

}  // namespace foreword
