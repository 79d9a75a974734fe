// Quantized rows to tiles and back. quantized_layout.h says how tiles look.
#include "packing.h"
#include "quantized_half.h"
#include "quantized_layout.h"

namespace foreword {

int64_t tile_bytes(Kind kind, int64_t k) {
    if (kind == Kind::F32) return TILE * 4 * round_up(k, 32);
    if (is_dense(kind)) return TILE * 2 * round_up(k, 32);
    if (kind == Kind::I8) return TILE * round_up(k, I8_MULTIPLE) + TILE * 4;
    if (is_super(kind)) return k / SUPER * super_bytes(kind);
    const int64_t blocks = (k + SMALL - 1) / SMALL;
    return (blocks + 1) / 2 * 64 + blocks * group_bytes(kind);
}

}  // namespace foreword
