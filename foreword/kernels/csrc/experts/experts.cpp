// Experts: rows are grouped by expert, and the products of all experts are shared out together.
#include "experts/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/packing.h"
#include "common/portable_math.h"
#include "sampling/topk.h"

namespace foreword {
namespace {

constexpr int64_t ITEM_BYTES = 96 << 10;        // of weights that one item reads, about
constexpr int64_t ITEMS_EACH = 4;               // work items per thread, at least: they do not take equally long
constexpr int64_t MEMORY_BYTES = 128 << 20;     // that the rows of one pass take, about
constexpr int64_t MIN_SHARED_VALUES = 1 << 14;  // values; fewer are laid out sooner than a thread wakes
constexpr int64_t LINE = 64;                    // bytes: the alignment of rows and panels

// Keep the `count` first entries of the ranking of `best` and the ids [begin, end) by values[id].
void rank(const float* values, int64_t begin, int64_t end, int64_t count, std::vector<Entry>& best) {
    best.reserve(count + 1);
    for (int64_t id = begin; id < end; id++) {
        const Entry entry{values[id], static_cast<int32_t>(id)};
        if (static_cast<int64_t>(best.size()) == count && !ranks_before(entry, best.back())) continue;
        best.insert(std::upper_bound(best.begin(), best.end(), entry, ranks_before), entry);
        if (static_cast<int64_t>(best.size()) > count) best.pop_back();
    }
}

// The `top_k` first experts of the ranking by values[id], of the best groups alone; see ExpertsArgs.
std::vector<Entry> rank_experts(const float* values, const ExpertsArgs& args) {
    const int64_t size = args.experts.count / args.groups;
    std::vector<Entry> best, groups;
    if (args.top_groups == args.groups) {
        rank(values, 0, args.experts.count, args.top_k, best);
        return best;
    }
    std::vector<float> scores(args.groups);
    for (int64_t group = 0; group < args.groups; group++) {
        std::vector<Entry> first;
        rank(values, group * size, (group + 1) * size, args.scoring == Scoring::SIGMOID && size > 1 ? 2 : 1, first);
        for (const Entry& entry : first) scores[group] += entry.value;
    }
    rank(scores.data(), 0, args.groups, args.top_groups, groups);
    for (const Entry& group : groups) rank(values, group.id * size, (group.id + 1) * size, args.top_k, best);
    return best;
}

double sigmoid_of(double x) {
    const double power = static_cast<double>(exp_fixed_point(-std::abs(x))) / static_cast<double>(int64_t{1} << FRACTION_BITS);
    return (x < 0 ? power : 1.0) / (1.0 + power);
}

// Weights of the chosen experts by their sigmoids.
void weigh_by_sigmoid(const float* logits, const ExpertsArgs& args, const std::vector<Entry>& best, float* factors) {
    double total = 0.0;
    for (const Entry& entry : best) total += sigmoid_of(logits[entry.id]);
    const double factor = args.renormalize ? args.scale / total : args.scale;
    for (int64_t rank = 0; rank < args.top_k; rank++) factors[rank] = static_cast<float>(sigmoid_of(logits[best[rank].id]) * factor);
}

// The largest of the logits that is no NaN, and the sum of exp(logit - largest) in fixed point: the order of integers is
// free; 0 without a finite maximum.
struct Softmax {
    double top = -INFINITY;
    int64_t total = 0;

    Softmax(const float* logits, int64_t count) {
        for (int64_t id = 0; id < count; id++) top = logits[id] > top ? logits[id] : top;
        for (int64_t id = 0; id < count; id++) total += exp_fixed_point(logits[id] - top);
    }

    double weight(double logit) const { return static_cast<double>(exp_fixed_point(logit - top)) / static_cast<double>(total); }
};

void weigh_by_softmax(const float* logits, const ExpertsArgs& args, const std::vector<Entry>& best, float* factors) {
    std::vector<float> chosen;
    for (const Entry& entry : best) chosen.push_back(logits[entry.id]);
    const Softmax softmax = args.renormalize ? Softmax(chosen.data(), args.top_k) : Softmax(logits, args.experts.count);
    for (int64_t rank = 0; rank < args.top_k; rank++) factors[rank] = static_cast<float>(args.scale * softmax.weight(chosen[rank]));
}

// SparseMixer, arXiv 2409.12136; see ExpertsArgs.
void weigh_by_sparse_mixer(const float* logits, const ExpertsArgs& args, const std::vector<Entry>& best, float* factors) {
    std::vector<bool> taken(args.experts.count);
    for (int64_t rank = 0; rank < args.top_k; rank++) {
        const float top = logits[best[rank].id];
        int64_t total = 0;  // see Softmax
        for (int64_t id = 0; id < args.experts.count; id++) {
            const bool far = (top - logits[id]) / std::max(std::abs(logits[id]), top) > args.tolerance;
            if (!far && !taken[id]) total += exp_fixed_point(static_cast<double>(logits[id]) - top);
        }
        factors[rank] = static_cast<float>(args.scale * (static_cast<double>(exp_fixed_point(0.0)) / static_cast<double>(total)));
        if (total == 0) factors[rank] = NAN;  // an infinite logit
        taken[best[rank].id] = true;
    }
}

// What experts are ranked by with a bias, or by their sigmoids; NaN for logits that are NaN.
std::vector<float> biased_scores(const float* logits, const ExpertsArgs& args) {
    const int64_t count = args.experts.count;
    const bool sigmoid = args.scoring == Scoring::SIGMOID;
    const Softmax softmax(logits, sigmoid ? 0 : count);
    std::vector<float> scores(count);
    for (int64_t id = 0; id < count; id++) {
        const auto score = static_cast<float>(sigmoid ? sigmoid_of(logits[id]) : softmax.weight(logits[id]));
        scores[id] = std::isnan(logits[id]) ? NAN : args.experts.bias == nullptr ? score : score + args.experts.bias[id];
    }
    return scores;
}

// The chosen experts of a row, by rank, and their factors.
void choose_experts(const float* logits, const ExpertsArgs& args, int64_t* chosen, float* factors) {
    const int64_t count = args.experts.count;
    const bool ranks_logits = args.scoring != Scoring::SIGMOID && args.experts.bias == nullptr;
    const std::vector<float> scores = ranks_logits ? std::vector<float>() : biased_scores(logits, args);
    const float* values = ranks_logits ? logits : scores.data();
    const bool usable = std::none_of(values, values + count, [](float value) { return std::isnan(value); });
    const std::vector<Entry> best = rank_experts(values, args);
    switch (args.scoring) {
        case Scoring::SOFTMAX: weigh_by_softmax(logits, args, best, factors); break;
        case Scoring::SIGMOID: weigh_by_sigmoid(logits, args, best, factors); break;
        case Scoring::SPARSE_MIXER: weigh_by_sparse_mixer(logits, args, best, factors); break;
    }
    for (int64_t rank = 0; rank < args.top_k; rank++) {
        chosen[rank] = best[rank].id;
        if (args.experts.scales != nullptr) factors[rank] *= args.experts.scales[best[rank].id];
        if (!usable) factors[rank] = NAN;
    }
}

enum Side { GATE_UP, DOWN };

// Some rows of one expert: places [first, first + rows) in the order of experts. The panels of its first block of each
// side have the offsets panels_[panel[side]], those of the others follow.
struct Unit {
    int64_t expert, first, rows;
    size_t panel[2];
};

// Tiles [tile, tile + count) of a block of the unit's expert.
struct Item {
    const Unit* unit;
    int64_t block, tile, count;
};

// The blocks of one expert's matrix.
struct Blocks {
    const Weight *first, *last;

    const Weight* begin() const { return first; }
    const Weight* end() const { return last; }
};

Blocks blocks_of(const Experts& experts, Side side, int64_t expert) {
    const ExpertMatrices& matrices = side == GATE_UP ? experts.gate_up : experts.down;
    return {matrices.blocks + matrices.starts[expert], matrices.blocks + matrices.starts[expert + 1]};
}

LinearParts parts_of(Isa isa, const Weight& weight) {
    return is_dense(weight.format) ? dense_parts(isa, weight.format) : quantized_parts(isa);
}

// Rows [first_row, first_row + rows) of x. A place is a row and a rank; in memory, each has
//   inner_    of `type`: the row of x, then gate_up(x), then the activation in its first half
//   outputs_  float32: the output of the expert; it replaces the panels of x
class Pass {
public:
    Pass(Context& context, Isa isa, const ExpertsArgs& args, int64_t first_row, int64_t rows)
        : context_(context),
          pool_(context.pool),
          isa_(isa),
          args_(args),
          experts_(args.experts),
          first_row_(first_row),
          rows_(rows),
          inner_stride_(inner_stride(args)) {}

    void run() {
        choose();
        group();
        reserve();
        const auto units = static_cast<int64_t>(units_.size());
        const auto lay_out = [&](int64_t item, int thread) { lay_out_rows(units_[item], thread); };
        if (num_places() * experts_.hidden >= MIN_SHARED_VALUES) {
            pool_.run(units, lay_out);
        } else {
            for (int64_t item = 0; item < units; item++) lay_out(item, 0);
        }
        multiply(GATE_UP);
        pool_.run(units, [&](int64_t item, int thread) { activate(units_[item], thread); });
        multiply(DOWN);
        row_kernels(isa_).weighted_sum(context_, {places_.data(), factors_.data(), args_.top_k, args_.type, outputs(0),
                                                  row_at(args_.add_to), row_at(args_.y), experts_.hidden, rows_});
    }

    // Bytes that a row takes, about.
    static int64_t row_bytes(Isa isa, const ExpertsArgs& args) {
        int64_t panels[2] = {};
        for (const Side side : {GATE_UP, DOWN}) {
            for (const Weight& weight : blocks_of(args.experts, side, 0)) {
                panels[side] += parts_of(isa, weight).panel_bytes({weight, args.type, Type::F32, {}, {}, 1});
            }
        }
        const int64_t outputs = std::max(panels[GATE_UP], args.experts.hidden * bytes_of(Type::F32));
        return args.top_k * (inner_stride(args) + outputs + panels[DOWN]);
    }

private:
    static int64_t inner_stride(const ExpertsArgs& args) {
        return round_up(std::max(args.experts.hidden, 2 * args.experts.inner) * bytes_of(args.type), LINE);
    }

    int64_t num_places() const { return rows_ * args_.top_k; }

    RowView row_at(const RowView& view, int64_t row = 0) const {
        return {view.data == nullptr ? nullptr : view.data + (first_row_ + row) * view.stride, view.stride};
    }

    RowView inner(int64_t place) const { return {inner_ + place * inner_stride_, inner_stride_}; }

    RowView outputs(int64_t place) const {
        const int64_t stride = experts_.hidden * bytes_of(Type::F32);
        return {outputs_ + place * stride, stride};
    }

    void choose() {
        chosen_.resize(num_places());
        factors_.resize(num_places());
        const auto choose = [&](int64_t row, int) {
            const auto* logits = reinterpret_cast<const float*>(row_at(args_.logits, row).data);
            choose_experts(logits, args_, &chosen_[row * args_.top_k], &factors_[row * args_.top_k]);
        };
        if (rows_ * experts_.count >= MIN_SHARED_VALUES) return pool_.run(rows_, choose);
        for (int64_t row = 0; row < rows_; row++) choose(row, 0);
    }

    // Sort the places by expert, and cut those of each into units.
    void group() {
        std::vector<int64_t> ends(experts_.count + 1);
        for (const int64_t expert : chosen_) ends[expert + 1]++;
        for (int64_t expert = 0; expert < experts_.count; expert++) ends[expert + 1] += ends[expert];
        places_.resize(num_places());
        row_of_place_.resize(num_places());
        std::vector<int64_t> next(ends.begin(), ends.end() - 1);
        for (int64_t i = 0; i < num_places(); i++) {
            places_[i] = next[chosen_[i]]++;
            row_of_place_[places_[i]] = i / args_.top_k;
        }
        for (int64_t expert = 0; expert < experts_.count; expert++) {
            for (int64_t first = ends[expert]; first < ends[expert + 1]; first += PANEL_ROWS) {
                units_.push_back({expert, first, std::min(PANEL_ROWS, ends[expert + 1] - first), {}});
            }
        }
    }

    // Lay out the memory of all places and panels.
    void reserve() {
        const int64_t inner = num_places() * inner_stride_;
        const int64_t outputs = round_up(num_places() * experts_.hidden * bytes_of(Type::F32), LINE);
        const int64_t panels = add_panels(GATE_UP, inner);
        const int64_t end = add_panels(DOWN, std::max(panels, inner + outputs));
        inner_ = context_.shared.get(end);
        outputs_ = inner_ + inner;
    }

    // Offsets from `at` on; returns the end.
    int64_t add_panels(Side side, int64_t at) {
        for (Unit& unit : units_) {
            unit.panel[side] = panels_.size();
            for (const Weight& weight : blocks_of(experts_, side, unit.expert)) {
                panels_.push_back(at);
                at += round_up(parts_of(isa_, weight).panel_bytes(linear_args(unit, side, weight, 0)), LINE);
            }
        }
        return at;
    }

    // The product with a block, which makes the columns from `column` on. One row alone is read in place.
    LinearArgs linear_args(const Unit& unit, Side side, const Weight& weight, int64_t column) const {
        const RowView from = inner(unit.first);
        if (side == DOWN) {
            const RowView to = outputs(unit.first);
            return {weight, args_.type, Type::F32, from, {to.data + column * bytes_of(Type::F32), to.stride}, unit.rows};
        }
        const RowView x = unit.rows == 1 ? row_at(args_.x, row_of_place_[unit.first]) : from;
        return {weight, args_.type, args_.type, x, {from.data + column * bytes_of(args_.type), from.stride}, unit.rows};
    }

    void lay_out(const Unit& unit, Side side, int thread) const {
        size_t panel = unit.panel[side];
        for (const Weight& weight : blocks_of(experts_, side, unit.expert)) {
            parts_of(isa_, weight).lay_out(linear_args(unit, side, weight, 0), inner_ + panels_[panel++], pool_, thread);
        }
    }

    void lay_out_rows(const Unit& unit, int thread) const {
        const int64_t bytes = experts_.hidden * bytes_of(args_.type);
        for (int64_t place = unit.first; unit.rows > 1 && place < unit.first + unit.rows; place++) {
            std::memcpy(inner(place).data, row_at(args_.x, row_of_place_[place]).data, bytes);
        }
        lay_out(unit, GATE_UP, thread);
    }

    void activate(const Unit& unit, int thread) const {
        const RowView rows = inner(unit.first);
        int64_t columns = 0;
        for (const Weight& weight : blocks_of(experts_, GATE_UP, unit.expert)) columns += weight.n;
        const bool has_up = columns > experts_.inner;
        row_kernels(isa_).gated_act_alone({args_.activation, args_.type, rows, rows, experts_.inner, unit.rows, has_up});
        lay_out(unit, DOWN, thread);
    }

    // Items of units [begin, end) of one expert. They use a few tiles one after the other, so that these stay in a cache.
    void add_items(Side side, const Unit* begin, const Unit* end, int64_t item_bytes) {
        const Blocks blocks = blocks_of(experts_, side, begin->expert);
        for (const Weight& weight : blocks) {
            const int64_t tiles = num_tiles(weight.n);
            const int64_t each = round_up(std::max<int64_t>(item_bytes / tile_bytes(weight), 1), PART_TILES);
            for (int64_t tile = 0; tile < tiles; tile += each) {
                for (const Unit* unit = begin; unit < end; unit++) {
                    items_.push_back({unit, &weight - blocks.first, tile, std::min(each, tiles - tile)});
                }
            }
        }
    }

    // body(first unit, end) for each expert that has any.
    template <class Body>
    void each_expert(const Body& body) const {
        const Unit* const last = units_.data() + units_.size();
        for (const Unit *unit = units_.data(), *end = unit; unit < last; unit = end) {
            while (end < last && end->expert == unit->expert) end++;
            body(unit, end);
        }
    }

    void multiply(Side side) {
        int64_t bytes = 0;
        each_expert([&](const Unit* unit, const Unit*) {
            for (const Weight& weight : blocks_of(experts_, side, unit->expert)) {
                bytes += num_tiles(weight.n) * tile_bytes(weight);
            }
        });
        const int64_t item_bytes = std::min(ITEM_BYTES, bytes / (ITEMS_EACH * pool_.size()));
        items_.clear();
        each_expert([&](const Unit* begin, const Unit* end) { add_items(side, begin, end, item_bytes); });
        pool_.run(static_cast<int64_t>(items_.size()), [&](int64_t item, int thread) { run_item(side, items_[item], thread); });
    }

    void run_item(Side side, const Item& item, int thread) const {
        const Weight* blocks = blocks_of(experts_, side, item.unit->expert).first;
        int64_t column = 0;
        for (int64_t block = 0; block < item.block; block++) column += blocks[block].n;
        const Weight& weight = blocks[item.block];
        char* panel = inner_ + panels_[item.unit->panel[side] + item.block];
        const LinearArgs args = linear_args(*item.unit, side, weight, column);
        parts_of(isa_, weight).multiply(args, panel, item.tile, item.count, pool_, thread);
    }

    Context& context_;
    ThreadPool& pool_;
    const Isa isa_;
    const ExpertsArgs& args_;
    const Experts& experts_;
    const int64_t first_row_, rows_, inner_stride_;
    std::vector<int64_t> chosen_, places_, row_of_place_;  // chosen_ and places_ by row and rank
    std::vector<float> factors_;
    std::vector<Unit> units_;
    std::vector<int64_t> panels_;  // offsets from inner_
    std::vector<Item> items_;
    char* inner_ = nullptr;
    char* outputs_ = nullptr;
};

}  // namespace

void run_experts(Context& context, Isa isa, const ExpertsArgs& args) {
    const int64_t passes = args.rows * Pass::row_bytes(isa, args) / MEMORY_BYTES + 1, rows = (args.rows + passes - 1) / passes;
    for (int64_t row = 0; row < args.rows; row += rows) Pass(context, isa, args, row, std::min(rows, args.rows - row)).run();
}

}  // namespace foreword
