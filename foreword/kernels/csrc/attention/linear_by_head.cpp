#include "attention/linear_by_head.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/packing.h"

namespace foreword {
namespace {

constexpr int64_t ITEM_BYTES = 96 << 10;        // of weights that one item reads, about
constexpr int64_t ITEMS_EACH = 4;               // work items per thread, at least: they do not take equally long
constexpr int64_t MAX_PASS_ROWS = 4 * PANEL_ROWS;
constexpr int64_t MIN_SHARED_VALUES = 1 << 14;  // values; fewer are laid out sooner than a thread wakes
constexpr int64_t LINE = 64;                    // bytes: the alignment of panels

// Rows [row, row + rows) of one head, with a panel of x.
struct Unit {
    int64_t head, row, rows, panel;
};

// Tiles [tile, tile + count) of a unit's matrix.
struct Item {
    const Unit* unit;
    int64_t tile, count;
};

// Rows [first, first + rows).
class Pass {
public:
    Pass(Context& context, Isa isa, const LinearByHeadArgs& args, int64_t first, int64_t rows)
        : context_(context), args_(args), weight_(args.weights.weights[0]), parts_(parts_of(isa, weight_)) {
        int64_t bytes = 0;
        for (int64_t head = 0; head < args.weights.heads; head++) {
            for (int64_t row = first; row < first + rows; row += PANEL_ROWS) {
                units_.push_back({head, row, std::min(PANEL_ROWS, first + rows - row), bytes});
                bytes += round_up(parts_.panel_bytes(linear_args(units_.back())), LINE);
            }
        }
        panels_ = context.shared.get(bytes);
    }

    void run() {
        const auto lay_out = [&](int64_t unit, int thread) { prepare(units_[unit], thread); };
        const auto count = static_cast<int64_t>(units_.size());
        if (args_.rows * args_.weights.heads * weight_.k >= MIN_SHARED_VALUES) {
            context_.pool.run(count, lay_out);
        } else {
            for (int64_t unit = 0; unit < count; unit++) lay_out(unit, 0);
        }
        add_items();
        context_.pool.run(static_cast<int64_t>(items_.size()), [&](int64_t index, int thread) {
            const Item& item = items_[index];
            parts_.multiply(linear_args(*item.unit), panels_ + item.unit->panel, item.tile, item.count, context_.pool, thread);
        });
    }

private:
    static LinearParts parts_of(Isa isa, const Weight& weight) {
        return is_dense(weight.format) ? dense_parts(isa, weight.format) : quantized_parts(isa);
    }

    RowView at(const RowView& view, const Unit& unit, int64_t width, int64_t column = 0) const {
        return {view.data + unit.row * view.stride + (unit.head * width + column) * bytes_of(args_.type), view.stride};
    }

    LinearArgs linear_args(const Unit& unit) const {
        const Weight& weight = args_.weights.weights[unit.head];
        const RowView y = at(args_.y, unit, weight.n + args_.appended);
        return {weight, args_.type, args_.type, at(args_.x, unit, weight.k), y, unit.rows};
    }

    void prepare(const Unit& unit, int thread) const {
        parts_.lay_out(linear_args(unit), panels_ + unit.panel, context_.pool, thread);
        if (args_.appended == 0) return;
        const RowView from = at(args_.append, unit, args_.appended);
        const RowView to = at(args_.y, unit, weight_.n + args_.appended, weight_.n);
        for (int64_t row = 0; row < unit.rows; row++)
            std::memcpy(to.data + row * to.stride, from.data + row * from.stride, args_.appended * bytes_of(args_.type));
    }

    // Units of one head that use the same tiles come one after the other.
    void add_items() {
        const int64_t tiles = num_tiles(weight_.n), bytes = tile_bytes(weight_), heads = args_.weights.heads;
        const int64_t fair = std::min(ITEM_BYTES, heads * tiles * bytes / (ITEMS_EACH * context_.pool.size()));
        const int64_t each = round_up(std::max<int64_t>(fair / bytes, 1), PART_TILES);
        const auto per_head = static_cast<int64_t>(units_.size()) / heads;
        for (int64_t head = 0; head < heads; head++)
            for (int64_t tile = 0; tile < tiles; tile += each)
                for (int64_t unit = head * per_head; unit < (head + 1) * per_head; unit++)
                    items_.push_back({&units_[unit], tile, std::min(each, tiles - tile)});
    }

    Context& context_;
    const LinearByHeadArgs& args_;
    const Weight& weight_;  // all heads have its shape and format
    const LinearParts parts_;
    std::vector<Unit> units_;
    std::vector<Item> items_;
    char* panels_;
};

}  // namespace

void linear_by_head(Context& context, Isa isa, const LinearByHeadArgs& args) {
    for (int64_t row = 0; row < args.rows; row += MAX_PASS_ROWS)
        Pass(context, isa, args, row, std::min(MAX_PASS_ROWS, args.rows - row)).run();
}

}  // namespace foreword
