#include "dense/dense.h"

#include <algorithm>

namespace foreword {
namespace {

constexpr int64_t STREAM_ROWS = 32;        // up to which weights are streamed
constexpr int64_t PASS_ROWS = 256;         // a chain of these rows stays in the L2 cache
constexpr int64_t STRIP_TILES = 8;         // tiles that use it in turn
constexpr int64_t ITEM_BYTES = 96 * 1024;  // of weights: long enough to stream, short enough to share
constexpr int64_t ITEMS_PER_THREAD = 8;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

using Kernels = const DenseKernel& (*)(Format);

Kernels dense_kernels(Isa isa) {
#if FOREWORD_X86
    if (isa == Isa::AMX) return dense_amx;
    if (isa == Isa::AVX512) return dense_avx512;
    if (isa >= Isa::AVX2) return dense_avx2;
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return dense_neon;
#endif
    static_cast<void>(isa);
    return dense_portable;
}

template <Kernels KERNELS>
void linear(Context& context, const LinearArgs& args) {
    KERNELS(args.weight.format).linear(context, args);
}

}  // namespace

// Few rows: weights are streamed, so a work item is a run of weights. Many rows: it needs full inner loops.
DenseTiling choose_tiling(const DenseShape& shape, int threads) {
    const bool few = shape.rows <= std::max(shape.group_rows, STREAM_ROWS);
    const int64_t most = round_up(few ? divide_up(ITEM_BYTES, shape.tile_bytes) : STRIP_TILES, shape.group_tiles);
    const int64_t fair = divide_up(shape.tiles, threads * ITEMS_PER_THREAD);
    DenseTiling tiling;
    const int64_t passes = std::max<int64_t>(divide_up(shape.rows, PASS_ROWS), 1);
    tiling.pass_rows = round_up(divide_up(shape.rows, passes), shape.group_rows);
    tiling.item_tiles = std::clamp<int64_t>(fair, few ? 1 : shape.group_tiles, most);
    tiling.strip_tiles = few ? shape.group_tiles : tiling.item_tiles;
    return tiling;
}

Linear dense_linear(Isa isa) {
#if FOREWORD_X86
    if (isa == Isa::AMX) return linear<dense_amx>;
    if (isa == Isa::AVX512) return linear<dense_avx512>;
    if (isa >= Isa::AVX2) return linear<dense_avx2>;
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return linear<dense_neon>;
#endif
    static_cast<void>(isa);
    return linear<dense_portable>;
}

LinearParts dense_parts(Isa isa, Format format) { return dense_kernels(isa)(format).parts; }

}  // namespace foreword
