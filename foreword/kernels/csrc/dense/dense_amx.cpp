// BF16 weights times tiles of x: TDPBF16PS, for every number of rows. Other formats use AVX-512.
#include "dense/dense.h"

#if FOREWORD_X86
#include <immintrin.h>

#include <cstring>

#include "common/isa_push_amx.h"

namespace foreword {
namespace {

#include "dense/dense_conversions.inc"

constexpr int64_t LINE = 64;                         // bytes of one row of a register, 32 values of k
constexpr int64_t HEIGHT = 16;                       // rows of a register
constexpr int64_t STEP_VALUES = 32, STEP_PAIRS = 16;  // of k
constexpr int64_t STEP_BYTES = HEIGHT * LINE;        // of weights in one tile
constexpr int64_t BLOCK_STEPS = 16;                  // whose weights stay in cache for all rows

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Registers 0..3 hold sums and 4, 5 rows of x, `height` each; 6 and 7 hold weights.
void shape_registers(int64_t height) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = LINE;
        shapes.rows[i] = static_cast<uint8_t>(i < 6 ? height : HEIGHT);
    }
    __asm__ volatile("" ::: "memory");  // g++ 12 takes the first 8 bytes alone for read
    _tile_loadconfig(&shapes);
}

// Operands of one inner loop: steps of x and of weights, and sums of a group of rows.
struct Block {
    const char *x, *next_x;  // of one group of rows, and of the next
    int64_t x_step;          // bytes
    const uint8_t* tiles[MAX_TILES];
    int64_t steps;
    float* sums[MAX_TILES];
};

// The compiler does not know that tile instructions read and write memory.
void memory_barrier() { __asm__ volatile("" ::: "memory"); }

void fetch_ahead(const uint8_t* weights) {
#pragma GCC unroll 16
    for (int i = 0; i < HEIGHT; i++) __builtin_prefetch(weights + AHEAD + i * LINE);
}

// One group of rows, four tiles.
void accumulate_row_group(const Block& block) {
    _tile_loadd(0, block.sums[0], LINE);
    _tile_loadd(1, block.sums[1], LINE);
    _tile_loadd(2, block.sums[2], LINE);
    _tile_loadd(3, block.sums[3], LINE);
    for (int64_t step = 0; step < block.steps; step++) {
        const int64_t at = step * STEP_BYTES;
        for (const uint8_t* tile : block.tiles) fetch_ahead(tile + at);
        _tile_loadd(4, block.x + step * block.x_step, LINE);
        _tile_loadd(6, block.tiles[0] + at, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, block.tiles[1] + at, LINE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, block.tiles[2] + at, LINE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, block.tiles[3] + at, LINE);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, block.sums[0], LINE);
    _tile_stored(1, block.sums[1], LINE);
    _tile_stored(2, block.sums[2], LINE);
    _tile_stored(3, block.sums[3], LINE);
}

// Two groups of rows, two tiles.
void accumulate_square(const Block& block) {
    _tile_loadd(0, block.sums[0], LINE);
    _tile_loadd(1, block.sums[1], LINE);
    _tile_loadd(2, block.sums[2], LINE);
    _tile_loadd(3, block.sums[3], LINE);
    for (int64_t step = 0; step < block.steps; step++) {
        _tile_loadd(6, block.tiles[0] + step * STEP_BYTES, LINE);
        _tile_loadd(4, block.x + step * block.x_step, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, block.tiles[1] + step * STEP_BYTES, LINE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, block.next_x + step * block.x_step, LINE);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, block.sums[0], LINE);
    _tile_stored(1, block.sums[1], LINE);
    _tile_stored(2, block.sums[2], LINE);
    _tile_stored(3, block.sums[3], LINE);
}

// One pass: rows [first_row, first_row + rows) of x times the weights. The rows are divided into one group, or into
// an even number of equal ones; padding repeats the first row.
class Pass {
public:
    Pass(const LinearArgs& args, int64_t first_row, int64_t rows, DenseTiling tiling)
        : args_(args),
          first_row_(first_row),
          rows_(rows),
          tiling_(tiling),
          groups_(rows <= HEIGHT ? 1 : round_up((rows + HEIGHT - 1) / HEIGHT, 2)),
          height_((rows + groups_ - 1) / groups_),
          steps_((args.weight.k + STEP_VALUES - 1) / STEP_VALUES) {}

    void run(Context& context) {
        use_panel(context.shared.get(panel_bytes()));
        const auto fill = [&](int64_t row, int thread) { arrange(row, context.pool, thread); };
        if (panel_bytes() > MIN_PARALLEL_BYTES) {
            context.pool.run(groups_ * height_, fill);
        } else {
            arrange(context.pool, 0);
        }
        const int64_t tiles = num_tiles(args_.weight.n), each = tiling_.item_tiles;
        context.pool.run((tiles + each - 1) / each, [&](int64_t item, int thread) {
            multiply(item * each, smaller((item + 1) * each, tiles), context.pool, thread);
        });
    }

    // Of x as the inner loops read it: [group][step][row of the group][STEP_VALUES].
    int64_t panel_bytes() const { return groups_ * group_bytes(); }

    void use_panel(char* panel) {
        panel_ = panel;
        x_ = rows_ == 1 && readable_in_place() ? row_of_x(0) : panel;
    }

    // Write x to the panel.
    void arrange(ThreadPool& pool, int thread) const {
        for (int64_t row = 0; row < groups_ * height_; row++) arrange(row, pool, thread);
    }

    // The columns of tiles [begin, end).
    void multiply(int64_t begin, int64_t end, ThreadPool& pool, int thread) const {
        const int64_t bytes = round_up(tiling_.strip_tiles, MAX_TILES) * tile_sums() * 4;
        auto* sums = reinterpret_cast<float*>(pool.scratch(thread, bytes));
        for (int64_t first = begin; first < end; first += tiling_.strip_tiles) {
            const int64_t count = smaller(tiling_.strip_tiles, end - first);
            std::memset(sums, 0, bytes);
            multiply_strip(first, count, sums);
            finish(args_, {sums, first_row_, rows_, first, count, tile_sums()});
        }
    }

private:
    int64_t tile_sums() const { return groups_ * height_ * TILE; }
    int64_t group_bytes() const { return steps_ * height_ * LINE; }

    const char* row_of_x(int64_t row) const { return args_.x.data + (first_row_ + (row < rows_ ? row : 0)) * args_.x.stride; }

    bool readable_in_place() const { return args_.x_type == Type::BF16 && args_.weight.k % STEP_VALUES == 0; }

    void arrange(int64_t row, ThreadPool& pool, int thread) const {
        const char* from = row_of_x(row);
        if (!readable_in_place()) {
            auto* copy = reinterpret_cast<uint32_t*>(pool.scratch(thread, steps_ * LINE));
            pair_values(from, args_.x_type, args_.weight.k, steps_ * STEP_PAIRS, copy);
            from = reinterpret_cast<const char*>(copy);
        }
        char* to = panel_ + row / height_ * group_bytes() + row % height_ * LINE;
        for (int64_t step = 0; step < steps_; step++) std::memcpy(to + step * height_ * LINE, from + step * LINE, LINE);
    }

    void multiply_strip(int64_t first, int64_t count, float* sums) const {
        const int64_t together = groups_ == 1 ? MAX_TILES : MAX_TILES / 2;
        shape_registers(height_);
        memory_barrier();
        for (int64_t step = 0; step < steps_; step += BLOCK_STEPS)
            for (int64_t tile = 0; tile < count; tile += together) {
                if (groups_ == 1) {
                    multiply_group(step, first, tile, count, sums);
                } else {
                    multiply_groups(step, first, tile, count, sums);
                }
            }
        memory_barrier();
        _tile_release();
    }

    // Beyond the last tile, it is multiplied again.
    const uint8_t* weights(int64_t step, int64_t first, int64_t tile, int64_t count) const {
        return args_.weight.tiles + ((first + smaller(tile, count - 1)) * steps_ + step) * STEP_BYTES;
    }

    void multiply_group(int64_t step, int64_t first, int64_t tile, int64_t count, float* sums) const {
        Block block{x_ + step * height_ * LINE, nullptr, height_ * LINE, {}, smaller(BLOCK_STEPS, steps_ - step), {}};
        for (int64_t t = 0; t < MAX_TILES; t++) {
            block.tiles[t] = weights(step, first, tile + t, count);
            block.sums[t] = sums + (tile + t) * tile_sums();
        }
        accumulate_row_group(block);
    }

    void multiply_groups(int64_t step, int64_t first, int64_t tile, int64_t count, float* sums) const {
        Block block{nullptr, nullptr, height_ * LINE, {}, smaller(BLOCK_STEPS, steps_ - step), {}};
        for (int64_t t = 0; t < 2; t++) block.tiles[t] = weights(step, first, tile + t, count);
        for (int64_t group = 0; group < groups_; group += 2) {
            block.x = x_ + group * group_bytes() + step * height_ * LINE;
            block.next_x = block.x + group_bytes();
            for (int64_t i = 0; i < MAX_TILES; i++)
                block.sums[i] = sums + (tile + i % 2) * tile_sums() + (group + i / 2) * height_ * TILE;
            accumulate_square(block);
        }
    }

    const LinearArgs& args_;
    const int64_t first_row_, rows_;
    const DenseTiling tiling_;
    const int64_t groups_, height_, steps_;
    char* panel_ = nullptr;
    const char* x_ = nullptr;  // the panel, or the only row in place
};

DenseTiling tiling_of(const LinearArgs& args, int threads) {
    const bool few = args.rows <= HEIGHT;
    const int64_t bytes = tile_bytes(args.weight);
    return choose_tiling({args.rows, num_tiles(args.weight.n), bytes, few ? HEIGHT : 2 * HEIGHT, few ? MAX_TILES : MAX_TILES / 2},
                         threads);
}

// The only pass of LinearParts.
Pass whole_pass(const LinearArgs& args, char* panel) {
    Pass pass(args, 0, args.rows, tiling_of(args, 1));
    pass.use_panel(panel);
    return pass;
}

constexpr DenseKernel KERNEL = {
    [](Context& context, const LinearArgs& args) {
        const DenseTiling tiling = tiling_of(args, context.pool.size());
        for (int64_t row = 0; row < args.rows; row += tiling.pass_rows)
            Pass(args, row, smaller(tiling.pass_rows, args.rows - row), tiling).run(context);
    },
    {[](const LinearArgs& args) { return whole_pass(args, nullptr).panel_bytes(); },
     [](const LinearArgs& args, char* panel, ThreadPool& pool, int thread) { whole_pass(args, panel).arrange(pool, thread); },
     [](const LinearArgs& args, char* panel, int64_t tile, int64_t count, ThreadPool& pool, int thread) {
         whole_pass(args, panel).multiply(tile, tile + count, pool, thread);
     }},
};

}  // namespace

const DenseKernel& dense_amx(Format format) { return format == Format::BF16 ? KERNEL : dense_avx512(format); }

}  // namespace foreword

#include "common/isa_pop.h"
#endif
