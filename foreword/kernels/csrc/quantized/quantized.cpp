// Quantized products: rows are rounded once, then tiles and groups of rows are shared out among the threads.
#include "quantized/quantized.h"

#include <algorithm>

namespace foreword {
namespace {

constexpr int64_t ITEM_BYTES = 96 << 10;   // of weights that one item reads
constexpr int64_t MIN_PARALLEL_BYTES = 32 << 10;  // of weights times rows that one thread multiplies sooner than it wakes others
constexpr int64_t ITEMS_EACH = 4;          // work items per thread, at least: they do not take equally long
constexpr int64_t CHUNK_BYTES = 512 << 10;  // of rounded rows that stay in a cache while all weights pass
constexpr int64_t TURN_ROWS = 64;  // that use a tile one after the other, at most: whole groups
constexpr int64_t MIN_SHARED_VALUES = 1 << 14;  // values; fewer are quantized sooner than a thread wakes

// The layout of one product.
struct Plan {
    const QuantizedKernels& kernels;
    const LinearArgs& args;
    RowSize size;
    int64_t row_words;     // words of a rounded row
    int64_t tile_stride;   // bytes
    int64_t item_tiles;    // tiles of one item
    int64_t column_items;  // items that make all columns
    int64_t chunk_rows;    // rows of one item
    int64_t group_rows;    // rows of a group, except the last one
    int32_t* words;
    float* scales;
    int32_t* sums;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles of one kernel call.
int64_t tiles_together(const QuantizedKernels& kernels, const LinearArgs& args) {
    return args.weight.format == Format::I8 && kernels.pair != nullptr && args.rows > kernels.max_group ? 2 : 1;
}

int64_t tiles_of_item(const LinearArgs& args, int64_t stride, int64_t together, int threads) {
    const int64_t tiles = num_tiles(args.weight.n);
    if (tiles * stride * args.rows <= MIN_PARALLEL_BYTES) return tiles;
    return std::max(together, std::min(ITEM_BYTES / stride, tiles / (ITEMS_EACH * threads)));
}

Plan make_plan(const QuantizedKernels& kernels, const LinearArgs& args, int threads) {
    const Weight& weight = args.weight;
    const RowSize size = row_size(weight);
    const int64_t row_words = product_bits(weight.format) == 8 ? size.quads * kernels.x_words : size.quads;
    const int64_t stride = tile_bytes(weight);
    const int64_t together = tiles_together(kernels, args);
    const int64_t item_tiles = tiles_of_item(args, stride, together, threads);
    const int64_t group = kernels.max_group;
    const int64_t chunk = std::max<int64_t>(1, CHUNK_BYTES / (4 * row_words) / group) * group;
    const int64_t column_items = ceil_div(num_tiles(weight.n), item_tiles);
    return {kernels, args, size, row_words, stride, item_tiles, column_items, chunk, group, nullptr, nullptr, nullptr};
}

int64_t rounded_bytes(const Plan& plan) { return 4 * plan.args.rows * (plan.row_words + plan.size.scales + plan.size.sums); }

// The memory of all rounded rows.
void use_memory(Plan& plan, char* memory) {
    plan.words = reinterpret_cast<int32_t*>(memory);
    plan.scales = reinterpret_cast<float*>(plan.words + plan.args.rows * plan.row_words);
    plan.sums = plan.words + plan.args.rows * (plan.row_words + plan.size.scales);
}

// The group from row `begin`.
Group group_at(const Plan& plan, int64_t begin) {
    const int64_t rows = std::min(plan.group_rows, plan.args.rows - begin);
    const RowSize& size = plan.size;
    return {plan.words + begin * plan.row_words, plan.scales + begin * size.scales, plan.sums + begin * size.sums, rows};
}

void round_group(const Plan& plan, int64_t begin) {
    const LinearArgs& args = plan.args;
    const Group group = group_at(plan, begin);
    const RowView x{args.x.data + begin * args.x.stride, args.x.stride};
    plan.kernels.round_rows[index_of(args.weight.format)](plan.size, args.x_type, x, args.weight.k, group);
}

void round_rows(ThreadPool& pool, const Plan& plan) {
    const int64_t groups = ceil_div(plan.args.rows, plan.group_rows);
    const auto round = [&](int64_t item, int) { round_group(plan, item * plan.group_rows); };
    if (plan.args.rows * plan.args.weight.k >= MIN_SHARED_VALUES) return pool.run(groups, round);
    for (int64_t item = 0; item < groups; item++) round(item, 0);
}

// Columns of `count` tiles, rows from `row`.
Output output_at(const LinearArgs& args, int64_t row, int64_t tile, int64_t count) {
    const int64_t column = tile * TILE;
    const float* bias = args.weight.bias == nullptr ? nullptr : args.weight.bias + column;
    char* y = args.y.data + row * args.y.stride + column * bytes_of(args.y_type);
    return {{y, args.y.stride}, args.y_type, std::min(count * TILE, args.weight.n - column), bias};
}

// A group of rows times tiles [tile, tile + count): one, or a pair in one kernel call.
void multiply_group(const Plan& plan, int64_t row, int64_t tile, int64_t count) {
    const LinearArgs& args = plan.args;
    const Group group = group_at(plan, row);
    const auto& products = plan.kernels.products[index_of(args.weight.format)];
    const Product product = count == 2 ? plan.kernels.pair : products[group.rows - 1];
    product(args.weight.tiles + tile * plan.tile_stride, plan.size, group, output_at(args, row, tile, count));
}

// Tiles [tile, tile + count), pairs of them only with whole groups.
void multiply_tiles(const Plan& plan, int64_t tile, int64_t count, int64_t row_begin, int64_t row_end) {
    for (int64_t row = row_begin; row < row_end; row += plan.group_rows) {
        if (count == 2 && row_end - row >= plan.group_rows) {
            multiply_group(plan, row, tile, 2);
        } else {
            for (int64_t t = tile; t < tile + count; t++) multiply_group(plan, row, t, 1);
        }
    }
}

// Tiles [tile, tile_end) one after the other, each with all of the rows.
void multiply_run(const Plan& plan, int64_t tile, int64_t tile_end, int64_t row_begin, int64_t row_end) {
    const int64_t together = tiles_together(plan.kernels, plan.args);
    for (int64_t t = tile; t < tile_end; t += together) {
        multiply_tiles(plan, t, std::min(together, tile_end - t), row_begin, row_end);
    }
}

// Items cover all columns for one chunk of rows before the next chunk. Within an item, groups of rows run in turn through
// its tiles, which stay in a cache; their outputs are adjacent.
void multiply_item(const Plan& plan, int64_t item) {
    const int64_t tile = item % plan.column_items * plan.item_tiles, row = item / plan.column_items * plan.chunk_rows;
    const int64_t tile_end = std::min(tile + plan.item_tiles, num_tiles(plan.args.weight.n));
    const int64_t row_end = std::min(row + plan.chunk_rows, plan.args.rows);
    const int64_t turn = TURN_ROWS / plan.group_rows * plan.group_rows;
    for (int64_t r = row; r < row_end; r += turn) multiply_run(plan, tile, tile_end, r, std::min(r + turn, row_end));
}

template <const QuantizedKernels& (*KERNELS)()>
void linear(Context& context, const LinearArgs& args) {
    Plan plan = make_plan(KERNELS(), args, context.pool.size());
    use_memory(plan, context.shared.get(rounded_bytes(plan)));
    round_rows(context.pool, plan);
    const int64_t chunks = ceil_div(args.rows, plan.chunk_rows);
    context.pool.run(plan.column_items * chunks, [&](int64_t item, int) { multiply_item(plan, item); });
}

// With groups of about the same size: a last group of a few rows would take as long as one of many.
Plan make_part_plan(const QuantizedKernels& kernels, const LinearArgs& args, char* memory) {
    Plan plan = make_plan(kernels, args, 1);
    const int64_t groups = ceil_div(args.rows, plan.group_rows);
    if (tiles_together(kernels, args) == 1) plan.group_rows = std::min(round_up(ceil_div(args.rows, groups), 4), plan.group_rows);
    use_memory(plan, memory);
    return plan;
}

#if FOREWORD_X86
const QuantizedKernels& quantized_avx2_vnni() {
    return has_avx_vnni() ? quantized_avx2_vnni_vex() : quantized_avx2_vnni_evex();
}
#endif

template <const QuantizedKernels& (*KERNELS)()>
constexpr LinearParts PARTS = {
    [](const LinearArgs& args) { return rounded_bytes(make_plan(KERNELS(), args, 1)); },
    [](const LinearArgs& args, char* panel, ThreadPool&, int) {
        const Plan plan = make_part_plan(KERNELS(), args, panel);
        for (int64_t row = 0; row < args.rows; row += plan.group_rows) round_group(plan, row);
    },
    [](const LinearArgs& args, char* panel, int64_t tile, int64_t count, ThreadPool&, int) {
        multiply_run(make_part_plan(KERNELS(), args, panel), tile, tile + count, 0, args.rows);
    },
};

}  // namespace

LinearParts quantized_parts(Isa isa) {
#if FOREWORD_X86
    if (isa == Isa::AMX) return QUANTIZED_AMX_PARTS;
    if (isa == Isa::AVX512) return PARTS<quantized_avx512>;
    if (isa == Isa::AVX2_VNNI) return PARTS<quantized_avx2_vnni>;
    if (isa == Isa::AVX2) return PARTS<quantized_avx2>;
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return PARTS<quantized_neon>;
#endif
    (void)isa;
    return PARTS<quantized_portable>;
}

Linear quantized_linear(Isa isa) {
#if FOREWORD_X86
    if (isa == Isa::AMX) return quantized_amx;
    if (isa == Isa::AVX512) return linear<quantized_avx512>;
    if (isa == Isa::AVX2_VNNI) return linear<quantized_avx2_vnni>;
    if (isa == Isa::AVX2) return linear<quantized_avx2>;
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return linear<quantized_neon>;
#endif
    (void)isa;
    return linear<quantized_portable>;
}

}  // namespace foreword
