#include "lora/lora.h"

#include <algorithm>
#include <vector>

namespace foreword {
namespace {

constexpr int64_t SHRINK_ROWS = 64;    // of x in a work item: they share the reads of A
constexpr int64_t SHRINK_RANKS = 4;    // rows of A in a work item
constexpr int64_t EXPAND_ROWS = 16;    // of y in a work item: they share the reads of B, and their sums stay in the L1 cache
constexpr int64_t EXPAND_COLUMNS = 512;

// Rows [first, first + count) of the plan's order, which use one part of one slot.
struct Group {
    int64_t slot, first, count;
};

struct ShrinkItem {
    Group group;
    int64_t part, first_rank, num_ranks;
};

struct ExpandItem {
    Group group;
    int64_t part, first_column, num_columns;
};

// Rows by slot, and the work items of both products.
class Plan {
public:
    explicit Plan(const LoraArgs& args) : table_(args.table) {
        std::vector<int64_t> starts(table_.num_slots + 1, 0);
        for (int64_t row = 0; row < args.rows; row++)
            if (args.slots[row] >= 0) starts[args.slots[row] + 1]++;
        for (int64_t slot = 0; slot < table_.num_slots; slot++) starts[slot + 1] += starts[slot];
        rows_.resize(starts.back());
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        for (int64_t row = 0; row < args.rows; row++)
            if (args.slots[row] >= 0) rows_[next[args.slots[row]]++] = row;
        for (int64_t slot = 0; slot < table_.num_slots; slot++) add_items(slot, starts[slot], starts[slot + 1]);
    }

    const std::vector<int64_t>& rows() const { return rows_; }
    const std::vector<ShrinkItem>& shrink() const { return shrink_; }
    const std::vector<ExpandItem>& expand() const { return expand_; }

private:
    void add_items(int64_t slot, int64_t begin, int64_t end) {
        int64_t first_column = 0;
        for (int64_t part = 0; part < table_.num_parts && begin < end; part++) {
            const int64_t rank = table_.ranks[slot * table_.num_parts + part], size = table_.part_sizes[part];
            for (int64_t first = begin; first < end && rank > 0; first += SHRINK_ROWS)
                for (int64_t r = 0; r < rank; r += SHRINK_RANKS)
                    shrink_.push_back({{slot, first, std::min(SHRINK_ROWS, end - first)}, part, r, std::min(SHRINK_RANKS, rank - r)});
            for (int64_t first = begin; first < end && rank > 0; first += EXPAND_ROWS)
                for (int64_t column = 0; column < size; column += EXPAND_COLUMNS)
                    expand_.push_back({{slot, first, std::min(EXPAND_ROWS, end - first)}, part, first_column + column,
                                       std::min(EXPAND_COLUMNS, size - column)});
            first_column += size;
        }
    }

    const LoraTable& table_;
    std::vector<int64_t> rows_;
    std::vector<ShrinkItem> shrink_;
    std::vector<ExpandItem> expand_;
};

}  // namespace

void add_lora(Context& context, const RowKernels& kernels, const LoraArgs& args) {
    const Plan plan(args);
    if (plan.shrink().empty()) return;
    const LoraTable& table = args.table;
    const int64_t bytes = bytes_of(args.type), stride = table.num_parts * table.max_rank;
    const int64_t* rows = plan.rows().data();
    auto* hidden = reinterpret_cast<float*>(
        context.shared.get(static_cast<int64_t>(plan.rows().size()) * stride * bytes_of(Type::F32)));
    context.pool.run(static_cast<int64_t>(plan.shrink().size()), [&](int64_t index, int) {
        const ShrinkItem& item = plan.shrink()[index];
        const int64_t adapter = item.group.slot * table.num_parts + item.part;
        const char* a = table.a + (adapter * table.max_rank + item.first_rank) * table.k * bytes;
        float* out = hidden + item.group.first * stride + item.part * table.max_rank + item.first_rank;
        kernels.lora_shrink({args.type, args.x, rows + item.group.first, item.group.count, a, item.num_ranks, table.k,
                             table.scales[adapter], out, stride});
    });
    context.pool.run(static_cast<int64_t>(plan.expand().size()), [&](int64_t index, int thread) {
        const ExpandItem& item = plan.expand()[index];
        const int64_t rank = table.ranks[item.group.slot * table.num_parts + item.part];
        const char* b = table.b + (item.group.slot * table.max_rank * table.n + item.first_column) * bytes;
        auto* sums = reinterpret_cast<float*>(context.pool.scratch(thread, EXPAND_ROWS * EXPAND_COLUMNS * bytes_of(Type::F32)));
        const float* from = hidden + item.group.first * stride + item.part * table.max_rank;
        const RowView y = {args.y.data + item.first_column * bytes, args.y.stride};
        kernels.lora_expand({args.type, y, rows + item.group.first, item.group.count, b, table.n, item.num_columns, rank,
                             from, stride, sums});
    });
}

}  // namespace foreword
