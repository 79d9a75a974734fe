// Quantized weights times tiles of quantized rows: TDPBUSD and TDPBSSD, for many rows; AVX-512 for few.
//
// Integer sums are exact, and floats follow the order of the other instruction sets: the bits are the same.
#include "quantized/quantized.h"

#if FOREWORD_X86
#include <immintrin.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "common/isa_push_amx.h"

namespace foreword {
namespace {

#include "quantized/quantized_avx512_primitives.inc"
#include "quantized/quantized_kernels.inc"
#include "quantized/quantized_amx_tiles.inc"
#include "quantized/quantized_amx_unpacked.inc"

constexpr int64_t PASS_ROWS = 256;          // that stay in the L2 cache while all weights pass
constexpr int64_t ITEMS_EACH = 4;           // work items per thread, at least
constexpr int64_t MAX_ITEM_TILES = 8;
constexpr int64_t MIN_SHARED_VALUES = 1 << 14;  // values; fewer are quantized sooner than a thread wakes

// Fewer rows do not pay for a register of 16 rows, or for unpacking the weights.
constexpr int64_t min_rows(Format format) {
    if (format == Format::IQ4_XS) return INT64_MAX;  // see digits_of
    return format == Format::I8 || format == Format::Q4_K || format == Format::Q5_K ? 17 : 64;
}

template <Format KIND>
constexpr MultiplyTiles multiply_tiles_of() {
    if constexpr (KIND == Format::I8) return multiply_whole;
    if constexpr (KIND != Format::I8) return multiply_blocks<KIND>;
}

MultiplyTiles multiply_tiles_of(Format format) {
    switch (format) {
        case Format::I8: return multiply_tiles_of<Format::I8>();
        case Format::Q8_0: return multiply_tiles_of<Format::Q8_0>();
        case Format::Q5_0: return multiply_tiles_of<Format::Q5_0>();
        case Format::Q4_1: return multiply_tiles_of<Format::Q4_1>();
        case Format::Q5_1: return multiply_tiles_of<Format::Q5_1>();
        case Format::IQ4_NL: return multiply_tiles_of<Format::IQ4_NL>();
        case Format::MXFP4: return multiply_tiles_of<Format::MXFP4>();
        case Format::G4: return multiply_tiles_of<Format::G4>();
        case Format::G8: return multiply_tiles_of<Format::G8>();
        case Format::Q4_K: return multiply_tiles_of<Format::Q4_K>();
        case Format::Q5_K: return multiply_tiles_of<Format::Q5_K>();
        case Format::Q6_K: return multiply_tiles_of<Format::Q6_K>();
        case Format::Q2_K: return multiply_tiles_of<Format::Q2_K>();
        case Format::Q3_K: return multiply_tiles_of<Format::Q3_K>();
        default: return multiply_tiles_of<Format::Q4_0>();
    }
}

// Quantized rows [first, first + rows), without memory.
Panel make_panel(const LinearArgs& args, int64_t first, int64_t rows) {
    const RowSize size = row_size(args.weight);
    const int64_t steps = (size.quads + STEP_QUADS - 1) / STEP_QUADS, groups = round_up((rows + HEIGHT - 1) / HEIGHT, 2);
    return {size, first, rows, steps, groups, nullptr, nullptr, nullptr};
}

int64_t panel_bytes(const Panel& panel) {
    return panel.groups * HEIGHT * (panel.steps * LINE + 4 * (panel.size.scales + panel.size.sums));
}

void use_memory(Panel& panel, char* memory) {
    panel.x = memory;
    panel.scales = reinterpret_cast<float*>(memory + panel.groups * HEIGHT * panel.steps * LINE);
    panel.sums = reinterpret_cast<int32_t*>(panel.scales + panel.groups * HEIGHT * panel.size.scales);
}

void round_to_panel(const LinearArgs& args, const Panel& panel, int64_t row, char* scratch) {
    const RowSize& size = panel.size;
    const Group alone{reinterpret_cast<int32_t*>(scratch), panel.scales + row * size.scales, panel.sums + row * size.sums, 1};
    const RowView x{args.x.data + (panel.first + row) * args.x.stride, args.x.stride};
    quantized_avx512().round_rows[index_of(args.weight.format)](size, args.x_type, x, args.weight.k, alone);
    char* to = panel.x + row / HEIGHT * panel.group_bytes() + row % HEIGHT * LINE;
    for (int64_t step = 0; step < panel.steps; step++) std::memcpy(to + step * STEP_BYTES, scratch + step * LINE, LINE);
}

void round_rows(Context& context, const LinearArgs& args, const Panel& panel) {
    const auto round = [&](int64_t row, int thread) {
        round_to_panel(args, panel, row, context.pool.scratch(thread, panel.steps * LINE));
    };
    if (panel.rows * args.weight.k >= MIN_SHARED_VALUES) return context.pool.run(panel.rows, round);
    for (int64_t row = 0; row < panel.rows; row++) round(row, 0);
}

int64_t scratch_bytes(Format format, const Panel& panel) {
    return format == Format::I8 ? panel.groups * 2 * STEP_BYTES : unpacked_bytes(format, panel.steps) + 6 * STEP_BYTES;
}

// Tiles [tile, end).
void multiply_run(const LinearArgs& args, const Panel& panel, int64_t tile, int64_t end, ThreadPool& pool, int thread) {
    const MultiplyTiles multiply = multiply_tiles_of(args.weight.format);
    shape_registers(args.weight.format);
    for (; tile < end; tile += 2) multiply(args, panel, tile, pool.scratch(thread, scratch_bytes(args.weight.format, panel)));
    _tile_release();
}

void multiply_panel(Context& context, const LinearArgs& args, const Panel& panel) {
    const int64_t tiles = num_tiles(args.weight.n), fair = tiles / (ITEMS_EACH * context.pool.size());
    const int64_t each = smaller(round_up(fair + 1, 2), MAX_ITEM_TILES);
    context.pool.run((tiles + each - 1) / each, [&](int64_t item, int thread) {
        multiply_run(args, panel, item * each, smaller((item + 1) * each, tiles), context.pool, thread);
    });
}

bool has_few_rows(const LinearArgs& args) { return args.rows < min_rows(args.weight.format); }

}  // namespace

const LinearParts QUANTIZED_AMX_PARTS = {
    [](const LinearArgs& args) {
        return has_few_rows(args) ? quantized_parts(Isa::AVX512).panel_bytes(args) : panel_bytes(make_panel(args, 0, args.rows));
    },
    [](const LinearArgs& args, char* memory, ThreadPool& pool, int thread) {
        if (has_few_rows(args)) return quantized_parts(Isa::AVX512).lay_out(args, memory, pool, thread);
        Panel panel = make_panel(args, 0, args.rows);
        use_memory(panel, memory);
        char* scratch = pool.scratch(thread, panel.steps * LINE);
        for (int64_t row = 0; row < args.rows; row++) round_to_panel(args, panel, row, scratch);
    },
    [](const LinearArgs& args, char* memory, int64_t tile, int64_t count, ThreadPool& pool, int thread) {
        if (has_few_rows(args)) return quantized_parts(Isa::AVX512).multiply(args, memory, tile, count, pool, thread);
        Panel panel = make_panel(args, 0, args.rows);
        use_memory(panel, memory);
        multiply_run(args, panel, tile, tile + count, pool, thread);
    },
};

void quantized_amx(Context& context, const LinearArgs& args) {
    if (has_few_rows(args)) return quantized_linear(Isa::AVX512)(context, args);
    for (int64_t row = 0; row < args.rows; row += PASS_ROWS) {
        Panel panel = make_panel(args, row, smaller(PASS_ROWS, args.rows - row));
        use_memory(panel, context.shared.get(panel_bytes(panel)));
        round_rows(context, args, panel);
        multiply_panel(context, args, panel);
    }
}

}  // namespace foreword

#include "common/isa_pop.h"
#endif
