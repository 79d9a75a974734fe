#include "common/forward_program.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/linear_by_head.h"
#include "experts/experts.h"
#include "common/float_mode.h"
#include "lora/lora.h"

namespace foreword {
namespace {

constexpr int64_t MIN_SHARED_VALUES = 1 << 15;  // fewer are gathered sooner than a thread wakes

template <class Value>
void gather_values(const char* x, const int64_t* columns, int64_t count, char* y) {
    const auto* from = reinterpret_cast<const Value*>(x);
    auto* to = reinterpret_cast<Value*>(y);
    for (int64_t i = 0; i < count; i++) to[i] = from[columns[i]];
}

}  // namespace

CpuContext::CpuContext(Isa isa, int num_threads)
    : isa_(isa),
      pool_(num_threads),
      rows_(row_kernels(isa)),
      dense_(dense_linear(isa)),
      quantized_(quantized_linear(isa)),
      attention_(attention(isa)),
      states_(state_kernels(isa)) {}

// Memory and rows of the instructions of one run.
class Operands {
protected:
    explicit Operands(const ProgramInputs& inputs) : inputs_(inputs) {}

    int64_t count(const Instruction& c) const { return c.sampled ? inputs_.num_sampled : inputs_.num_rows; }

    char* base(AddressSpace space) const { return inputs_.spaces[static_cast<int>(space)]; }

    // The base of ABSOLUTE is null: no pointer arithmetic on it.
    char* address(const Operand& operand) const {
        const auto begin = reinterpret_cast<uintptr_t>(base(operand.space));
        return reinterpret_cast<char*>(begin + operand.address + operand.per_row * inputs_.num_rows);
    }

    RowView rows(const Operand& operand) const { return {address(operand), operand.stride}; }

    const int64_t* ints(const Operand& operand) const { return reinterpret_cast<const int64_t*>(address(operand)); }

    const int64_t* ints(AddressSpace space) const { return reinterpret_cast<const int64_t*>(base(space)); }

    const ProgramInputs& inputs_;
};

// Checks the values of a batch that lead to memory. All layers use the same ones, so their ranges are remembered.
class InputCheck : Operands {
public:
    explicit InputCheck(const ProgramInputs& inputs) : Operands(inputs) {}

    InputError check(const Instruction& c) {
        if (count(c) == 0) return InputError::NONE;
        switch (c.op) {
            case Opcode::EMBEDDING:
                return check(c.in[0], c, 1, 0, static_cast<const Weight*>(c.object)->n, InputError::TOKEN_ID);
            case Opcode::INDEX_ROWS:
                return check(c.in[1], c, 1, 0, c.sizes[1] > 0 ? c.sizes[1] : inputs_.num_rows, InputError::ROW);
            case Opcode::ROPE: {
                const bool has_axes = static_cast<const RopeTable*>(c.object)->angle_axes != nullptr;
                return check(c.in[1], c, has_axes ? NUM_AXES : 1, 0, c.sizes[3], InputError::POSITION);
            }
            case Opcode::WRITE_KV: return check(c.in[2], c, 1, 0, c.sizes[0], InputError::SLOT);
            case Opcode::ATTENTION: return check_attention(c.sizes[1], c.sizes[2]);
            case Opcode::WRITE_HIDDEN: return check(c.in[1], c, 1, 0, c.sizes[1], InputError::SLOT);
            case Opcode::READ_HIDDEN: return check(c.in[0], c, 1, 0, c.sizes[1], InputError::SLOT);
            case Opcode::ADD_LORA: {
                const int64_t num_slots = static_cast<const LoraTable*>(c.object)->num_slots;
                return check(c.in[1], c, 1, NO_ADAPTER, num_slots, InputError::ADAPTER_SLOT);
            }
            case Opcode::CAUSAL_CONV:
            case Opcode::DELTA_RULE:
            case Opcode::SSM_SCAN: return check_states(static_cast<const StateOperation*>(c.object)->layer);
            default: return InputError::NONE;
        }
    }

private:
    static constexpr int64_t NUM_AXES = 3, NO_ADAPTER = -1;
    static constexpr int MAX_RANGES = 8, MAX_WINDOWS = 4;  // remembered

    // Smallest and largest of `rows` vectors [width].
    struct Range {
        RowView view;
        int64_t rows, width, low, high;
    };

    // Blocks that a layer with this window reads; `error`: of the batch itself.
    struct BlockRange {
        int64_t window, low, high;
        InputError error;
    };

    // The operand's values [count, width] are in [low, limit).
    InputError check(const Operand& operand, const Instruction& c, int64_t width, int64_t low, int64_t limit, InputError error) {
        const Range& range = range_of(rows(operand), count(c), width);
        return low <= range.low && range.high < limit ? InputError::NONE : error;
    }

    const Range& range_of(const RowView& view, int64_t rows, int64_t width) {
        for (int i = 0; i < num_ranges_; i++) {
            const Range& range = ranges_[i];
            const bool is_same = range.view.data == view.data && range.view.stride == view.stride;
            if (is_same && range.rows == rows && range.width == width) return range;
        }
        Range& range = ranges_[num_ranges_ < MAX_RANGES ? num_ranges_++ : MAX_RANGES - 1];
        range = {view, rows, width, INT64_MAX, INT64_MIN};
        for (int64_t row = 0; row < rows; row++) {
            const auto* values = reinterpret_cast<const int64_t*>(view.data + row * view.stride);
            for (int64_t i = 0; i < width; i++) {
                range.low = std::min(range.low, values[i]);
                range.high = std::max(range.high, values[i]);
            }
        }
        return range;
    }

    InputError check_attention(int64_t window, int64_t num_slots) {
        const BlockRange& blocks = blocks_of(window);
        if (blocks.error != InputError::NONE) return blocks.error;
        return 0 <= blocks.low && blocks.high < num_slots / inputs_.block_size ? InputError::NONE : InputError::BLOCK;
    }

    const BlockRange& blocks_of(int64_t window) {
        for (int i = 0; i < num_windows_; i++) {
            if (windows_[i].window == window) return windows_[i];
        }
        BlockRange& blocks = windows_[num_windows_ < MAX_WINDOWS ? num_windows_++ : MAX_WINDOWS - 1];
        blocks = {window, 0, 0, InputError::NONE};
        const int64_t* starts = ints(AddressSpace::QUERY_START_LOC);
        const bool fits = inputs_.block_size > 0 && 0 <= starts[0] && starts[inputs_.num_requests] <= inputs_.num_rows;
        if (!fits) blocks.error = InputError::ROW_STARTS;
        for (int64_t i = 0; i < inputs_.num_requests && blocks.error == InputError::NONE; i++) add_blocks(i, blocks);
        return blocks;
    }

    // The blocks from the first to the last position that a row of the request sees; others may be any.
    void add_blocks(int64_t request, BlockRange& blocks) const {
        const int64_t begin = ints(AddressSpace::QUERY_START_LOC)[request], end = ints(AddressSpace::QUERY_START_LOC)[request + 1];
        if (begin > end || end > inputs_.num_rows) blocks.error = InputError::ROW_STARTS;
        if (begin >= end || blocks.error != InputError::NONE) return;
        const auto [lowest, highest] = std::minmax_element(ints(AddressSpace::POSITIONS) + begin, ints(AddressSpace::POSITIONS) + end);
        if (*lowest < 0 || *highest / inputs_.block_size >= inputs_.table_width) {
            blocks.error = InputError::POSITION;
            return;
        }
        const int64_t first = blocks.window > 0 && *lowest >= blocks.window ? *lowest - blocks.window + 1 : 0;
        const int64_t* table = ints(AddressSpace::BLOCK_TABLES) + request * inputs_.table_width;
        for (int64_t i = first / inputs_.block_size; i <= *highest / inputs_.block_size; i++) {
            blocks.low = std::min(blocks.low, table[i]);
            blocks.high = std::max(blocks.high, table[i]);
        }
    }

    // All layers have as many slots and anchors, but for layers of other models.
    InputError check_states(const StateLayer& layer) {
        if (layer.num_slots == checked_slots_ && layer.num_anchors == checked_anchors_) return InputError::NONE;
        if (base(AddressSpace::STATE_SLOTS) == nullptr || base(AddressSpace::ANCHOR_TABLES) == nullptr) return InputError::STATE;
        const int64_t* starts = ints(AddressSpace::QUERY_START_LOC);
        if (starts[0] < 0 || starts[inputs_.num_requests] > inputs_.num_rows) return InputError::ROW_STARTS;
        for (int64_t i = 0; i < inputs_.num_requests; i++) {
            if (starts[i] > starts[i + 1] || starts[i + 1] > inputs_.num_rows) return InputError::ROW_STARTS;
            if (starts[i] < starts[i + 1] && !is_state_valid(layer, i)) return InputError::STATE;
        }
        checked_slots_ = layer.num_slots;
        checked_anchors_ = layer.num_anchors;
        return InputError::NONE;
    }

    // The positions of a request's rows follow each other; its first segment has an anchor unless it starts at 0.
    bool is_state_valid(const StateLayer& layer, int64_t request) const {
        const int64_t begin = ints(AddressSpace::QUERY_START_LOC)[request], end = ints(AddressSpace::QUERY_START_LOC)[request + 1];
        const int64_t* positions = ints(AddressSpace::POSITIONS);
        const int64_t first = positions[begin], slot = ints(AddressSpace::STATE_SLOTS)[request];
        if (first < 0 || slot < 0 || slot >= layer.num_slots) return false;
        for (int64_t row = begin; row < end; row++)
            if (positions[row] != first + row - begin) return false;
        const int64_t segments = (first + end - begin) / SEGMENT - first / SEGMENT + 1;
        if (segments > inputs_.anchor_width) return false;
        const int64_t* anchors = ints(AddressSpace::ANCHOR_TABLES) + request * inputs_.anchor_width;
        for (int64_t i = 0; i < segments; i++)
            if (anchors[i] < NO_ANCHOR || anchors[i] >= layer.num_anchors) return false;
        return first < SEGMENT || anchors[0] != NO_ANCHOR;
    }

    Range ranges_[MAX_RANGES];
    int64_t checked_slots_ = -1, checked_anchors_ = -1;
    BlockRange windows_[MAX_WINDOWS];
    int num_ranges_ = 0, num_windows_ = 0;
};

// Runs the instructions of a program on one batch.
class Interpreter : Operands {
public:
    Interpreter(CpuContext& cpu, const ProgramInputs& inputs) : Operands(inputs), cpu_(cpu), context_{cpu.pool_, cpu.shared_} {}

    // Operations on no rows (nothing is sampled) are skipped: kernels get at least one row.
    void execute(const Instruction& c) {
        if (count(c) == 0) return;
        switch (c.op) {
            case Opcode::LINEAR: return linear(c);
            case Opcode::EMBEDDING: return embedding(c);
            case Opcode::ADD: return add(c);
            case Opcode::INDEX_ROWS: return index_rows(c);
            case Opcode::RMS_NORM: return rms_norm(c);
            case Opcode::LAYER_NORM: return layer_norm(c);
            case Opcode::ROPE: return rope(c);
            case Opcode::GATED_ACT: return gated_act(c);
            case Opcode::WRITE_KV: return write_kv(c);
            case Opcode::ATTENTION: return attention(c);
            case Opcode::SOFTCAP: return softcap(c);
            case Opcode::EXPERTS: return experts(c);
            case Opcode::SCALE_BY_SIGMOID: return scale_by_sigmoid(c);
            case Opcode::GATHER_COLUMNS: return gather_columns(c);
            case Opcode::ADD_LORA: return add_lora(c);
            case Opcode::GATE: return gate(c);
            case Opcode::CAUSAL_CONV: return causal_conv(c);
            case Opcode::DELTA_RULE: return delta_rule(c);
            case Opcode::SSM_SCAN: return ssm_scan(c);
            case Opcode::LINEAR_BY_HEAD: return linear_by_head(c);
            case Opcode::WRITE_HIDDEN: return write_hidden(c);
            case Opcode::READ_HIDDEN: return read_hidden(c);
            case Opcode::COPY: return copy(c);
            case Opcode::EXPAND_VOCAB: return expand_vocab(c);
        }
    }

private:
    // in: x; object: Weight
    void linear(const Instruction& c) {
        const Weight& weight = *static_cast<const Weight*>(c.object);
        const Linear kernel = is_dense(weight.format) ? cpu_.dense_ : cpu_.quantized_;
        kernel(context_, {weight, c.type, c.out_type, rows(c.in[0]), rows(c.out), count(c)});
    }

    // in: ids; object: Weight; numbers: scale
    void embedding(const Instruction& c) {
        const Weight& weight = *static_cast<const Weight*>(c.object);
        cpu_.rows_.embedding(context_, {weight, ints(c.in[0]), c.numbers[0], c.out_type, rows(c.out), count(c)});
    }

    // in: a, b; sizes: width; numbers: scale
    void add(const Instruction& c) {
        cpu_.rows_.add(context_, {c.numbers[0], c.type, rows(c.in[0]), rows(c.in[1]), rows(c.out), c.sizes[0], count(c)});
    }

    // in: x, row numbers; sizes: bytes of a row, rows of x (0: those of the batch)
    void index_rows(const Instruction& c) {
        const RowView from = rows(c.in[0]), to = rows(c.out);
        const int64_t* numbers = ints(c.in[1]);
        for (int64_t r = 0; r < count(c); r++)
            std::memcpy(to.data + r * to.stride, from.data + numbers[r] * from.stride, c.sizes[0]);
    }

    // in: x; object: weight; sizes: heads, width, stride of the weight; numbers: eps
    void rms_norm(const Instruction& c) {
        const auto* weight = static_cast<const float*>(c.object);
        cpu_.rows_.rms_norm(context_, {weight, c.numbers[0], c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1], count(c), c.sizes[2]});
    }

    // in: x; object: NormVectors; sizes: heads, width, stride of the weight; numbers: eps
    void layer_norm(const Instruction& c) {
        const auto& [weight, bias] = *static_cast<const NormVectors*>(c.object);
        cpu_.rows_.layer_norm(context_, {weight, bias, c.numbers[0], c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1], count(c),
                                             c.sizes[2]});
    }

    // in: x, positions; object: RopeTable; sizes: heads, dim, rotary, positions of the table
    void rope(const Instruction& c) {
        const auto& [cos_sin, angle_axes] = *static_cast<const RopeTable*>(c.object);
        cpu_.rows_.rope(context_, {cos_sin, angle_axes, rows(c.in[1]), c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1],
                                       c.sizes[2], count(c)});
    }

    // in: x; sizes: width, activation, whether there is `up`; numbers: alphas
    void gated_act(const Instruction& c) {
        const auto activation = static_cast<Activation>(c.sizes[1]);
        const bool has_up = c.sizes[2] != 0;
        cpu_.rows_.gated_act(context_, {activation, c.type, rows(c.in[0]), rows(c.out), c.sizes[0], count(c), has_up, {c.numbers[0], c.numbers[1]}});
    }

    // in: k, v, slots; object: KV; sizes: slots of the cache
    void write_kv(const Instruction& c) {
        const KV& kv = *static_cast<const KV*>(c.object);
        cpu_.rows_.write_kv(context_, {kv, ints(c.in[2]), c.type, rows(c.in[0]), rows(c.in[1]), count(c)});
    }

    // in: q; object: AttentionLayer; sizes: heads, window, slots of the cache, first position, whether rows see later rows;
    // numbers: scale, softcap
    void attention(const Instruction& c) {
        const auto& [kv, sinks] = *static_cast<const AttentionLayer*>(c.object);
        cpu_.attention_(context_, {kv, c.sizes[4] != 0 ? last_positions() : ints(AddressSpace::POSITIONS),
                                   ints(AddressSpace::BLOCK_TABLES), ints(AddressSpace::QUERY_START_LOC),
                                   inputs_.num_requests, inputs_.table_width, inputs_.block_size, c.type, rows(c.in[0]),
                                   rows(c.out), c.sizes[0], c.sizes[1], c.sizes[3], c.numbers[0], c.numbers[1], sinks});
    }

    // For each row, the position of its request's last row.
    const int64_t* last_positions() {
        if (last_positions_.empty()) {
            const int64_t* starts = ints(AddressSpace::QUERY_START_LOC);
            last_positions_.resize(inputs_.num_rows);
            for (int64_t i = 0; i < inputs_.num_requests; i++)
                std::fill(last_positions_.begin() + starts[i], last_positions_.begin() + starts[i + 1],
                          ints(AddressSpace::POSITIONS)[std::max<int64_t>(starts[i + 1], 1) - 1]);
        }
        return last_positions_.data();
    }

    // out: x, in place; sizes: width; numbers: cap
    void softcap(const Instruction& c) {
        cpu_.rows_.softcap(context_, {c.numbers[0], rows(c.out), c.sizes[0], count(c)});
    }

    // in: x, logits, add_to (or null); object: Experts; sizes: top_k, renormalize, activation, Scoring, groups, top
    // groups; numbers: scale, tolerance
    void experts(const Instruction& c) {
        const auto& weights = *static_cast<const Experts*>(c.object);
        run_experts(context_, cpu_.isa_, {weights, c.sizes[0], c.sizes[1] != 0, static_cast<Scoring>(c.sizes[3]), c.sizes[4], c.sizes[5],
                                          c.numbers[0], c.numbers[1], static_cast<Activation>(c.sizes[2]), c.type, rows(c.in[0]), rows(c.in[1]), rows(c.in[2]), rows(c.out), count(c)});
    }

    // in: x, gate; sizes: width, type of the gate
    void scale_by_sigmoid(const Instruction& c) {
        const auto gate_type = static_cast<Type>(c.sizes[1]);
        cpu_.rows_.scale_by_sigmoid(context_, {c.type, gate_type, rows(c.in[0]), rows(c.in[1]), rows(c.out), c.sizes[0], count(c)});
    }

    // in: x; object: int64 numbers of its columns; sizes: how many
    void gather_columns(const Instruction& c) {
        const auto gather = c.type == Type::BF16 ? gather_values<uint16_t> : gather_values<uint32_t>;
        const auto* columns = static_cast<const int64_t*>(c.object);
        const RowView x = rows(c.in[0]), y = rows(c.out);
        const auto gather_row = [&](int64_t row, int) { gather(x.data + row * x.stride, columns, c.sizes[0], y.data + row * y.stride); };
        if (count(c) * c.sizes[0] >= MIN_SHARED_VALUES) return context_.pool.run(count(c), gather_row);
        for (int64_t row = 0; row < count(c); row++) gather_row(row, 0);
    }

    // in: x, slots of adapters; out: y, in place; object: LoraTable
    void add_lora(const Instruction& c) {
        const LoraTable& table = *static_cast<const LoraTable*>(c.object);
        foreword::add_lora(context_, cpu_.rows_, {table, ints(c.in[1]), c.type, rows(c.in[0]), rows(c.out), count(c)});
    }

    // in: x, gate; sizes: width, kind of gate
    void gate(const Instruction& c) {
        const auto kind = static_cast<Gate>(c.sizes[1]);
        cpu_.states_.gate(context_, {kind, c.type, rows(c.in[0]), rows(c.in[1]), rows(c.out), c.sizes[0], count(c)});
    }

    StateRows state_rows() const {
        return {ints(AddressSpace::POSITIONS), ints(AddressSpace::QUERY_START_LOC), ints(AddressSpace::STATE_SLOTS),
                ints(AddressSpace::ANCHOR_TABLES), inputs_.num_requests, inputs_.anchor_width};
    }

    // in: x; object: StateOperation; sizes: kind of gate
    void causal_conv(const Instruction& c) {
        const auto& [layer, weight, bias, _] = *static_cast<const StateOperation*>(c.object);
        const auto kind = static_cast<Gate>(c.sizes[0]);
        cpu_.states_.causal_conv(context_, {layer, state_rows(), weight, bias, kind, rows(c.in[0]), rows(c.out)});
    }

    // in: qkv, alpha, beta; object: StateOperation with rates and offsets
    void delta_rule(const Instruction& c) {
        const auto& [layer, rates, offsets, skips] = *static_cast<const StateOperation*>(c.object);
        cpu_.states_.delta_rule(context_, {layer, state_rows(), rates, offsets, skips, 0.0f, 0.0f, rows(c.in[0]), rows(c.in[1]), rows(c.in[2]), rows(c.out)});
    }

    // in: C, B and x; time steps; object: StateOperation with rates, offsets and skips; numbers: limits of time steps
    void ssm_scan(const Instruction& c) {
        const auto& [layer, rates, offsets, skips] = *static_cast<const StateOperation*>(c.object);
        cpu_.states_.ssm_scan(context_, {layer, state_rows(), rates, offsets, skips, c.numbers[0], c.numbers[1], rows(c.in[0]), rows(c.in[1]), {}, rows(c.out)});
    }

    // in: x, append (or null); object: HeadWeights; sizes: values of `append` for each head
    void linear_by_head(const Instruction& c) {
        const auto& weights = *static_cast<const HeadWeights*>(c.object);
        foreword::linear_by_head(context_, cpu_.isa_, {weights, c.type, rows(c.in[0]), rows(c.in[1]), rows(c.out), c.sizes[0], count(c)});
    }

    // in: x, slots; object: the cache; sizes: bytes of a row, slots of the cache
    void write_hidden(const Instruction& c) {
        const RowView x = rows(c.in[0]);
        const int64_t* slots = ints(c.in[1]);
        auto* cache = static_cast<char*>(const_cast<void*>(c.object));
        for (int64_t r = 0; r < count(c); r++) std::memcpy(cache + slots[r] * c.sizes[0], x.data + r * x.stride, c.sizes[0]);
    }

    // in: slots; object: the cache; sizes: bytes of a row, slots of the cache
    void read_hidden(const Instruction& c) {
        const int64_t* slots = ints(c.in[0]);
        const RowView y = rows(c.out);
        const auto* cache = static_cast<const char*>(c.object);
        for (int64_t r = 0; r < count(c); r++) std::memcpy(y.data + r * y.stride, cache + slots[r] * c.sizes[0], c.sizes[0]);
    }

    // in: x; sizes: bytes of a row
    void copy(const Instruction& c) {
        const RowView x = rows(c.in[0]), y = rows(c.out);
        for (int64_t r = 0; r < count(c); r++) std::memcpy(y.data + r * y.stride, x.data + r * x.stride, c.sizes[0]);
    }

    // in: logits; object: int64 ids of their columns; sizes: how many, columns of the result
    void expand_vocab(const Instruction& c) {
        const RowView x = rows(c.in[0]), y = rows(c.out);
        const auto* ids = static_cast<const int64_t*>(c.object);
        for (int64_t r = 0; r < count(c); r++) {
            const auto* from = reinterpret_cast<const float*>(x.data + r * x.stride);
            auto* to = reinterpret_cast<float*>(y.data + r * y.stride);
            std::fill(to, to + c.sizes[1], -std::numeric_limits<float>::infinity());
            for (int64_t i = 0; i < c.sizes[0]; i++) to[ids[i]] = from[i];
        }
    }

    CpuContext& cpu_;
    Context context_;
    std::vector<int64_t> last_positions_;  // empty until they are read
};

InputError CpuContext::run(const Instruction* instructions, int64_t count, const ProgramInputs& inputs) {
    InputCheck inputs_check(inputs);
    for (int64_t i = 0; i < count; i++) {
        if (const InputError error = inputs_check.check(instructions[i]); error != InputError::NONE) return error;
    }
    const FloatMode mode;
    Interpreter interpreter(*this, inputs);
    for (int64_t i = 0; i < count; i++) interpreter.execute(instructions[i]);
    return InputError::NONE;
}

}  // namespace foreword
