#include "dense.h"

#include <algorithm>

namespace foreword {
namespace {

constexpr int64_t PASS_ROWS = 256;           // x of one block of k then stays in the second-level cache
constexpr int64_t ITEM_BYTES = 96 * 1024;    // of weights: long enough to stream, short enough to share out
constexpr int64_t BLOCK_BYTES = 32 * 1024;   // of weights that the rows of a pass read one after the other
constexpr int64_t ITEMS_PER_THREAD = 8;
constexpr int64_t PASS_ITEM_TILES = 8;       // their sums stay in the second-level cache too

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

DenseCuts cut_dense(const DenseShape& shape, int threads) {
    const bool one_group = shape.rows <= shape.group_rows;
    const int64_t tile_bytes = std::max<int64_t>(shape.steps * shape.step_bytes, 1);
    const int64_t wanted = one_group ? divide_up(ITEM_BYTES, tile_bytes) : PASS_ITEM_TILES;
    const int64_t fair = divide_up(shape.tiles, threads * ITEMS_PER_THREAD);
    const int64_t most = std::max(shape.group_tiles, round_up(wanted, shape.group_tiles));
    DenseCuts cuts;
    cuts.pass_rows = round_up(divide_up(shape.rows, divide_up(shape.rows, PASS_ROWS)), shape.group_rows);
    cuts.item_tiles = std::clamp<int64_t>(fair, one_group ? 1 : shape.group_tiles, most);
    cuts.block_steps = one_group ? shape.steps : divide_up(BLOCK_BYTES, shape.step_bytes * shape.group_tiles);
    return cuts;
}

Linear dense_linear(Isa isa) {
#if FOREWORD_X86
    switch (isa) {
        case Isa::AMX: return dense_amx;
        case Isa::AVX512: return dense_avx512;
        case Isa::AVX2: return dense_avx2;
        case Isa::PORTABLE: break;
    }
#endif
    return dense_portable;
}

}  // namespace foreword
