#include "common/forward_program.h"

#include <cstring>

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
      attention_(attention(isa)) {}

// Runs the instructions of a program on one batch.
class Interpreter {
public:
    Interpreter(CpuContext& cpu, const ProgramInputs& inputs) : cpu_(cpu), inputs_(inputs), context_{cpu.pool_, cpu.shared_} {}

    // Operations on no rows (nothing is sampled) are skipped: kernels get at least one row.
    void execute(const Instruction& c) {
        if (count(c) == 0) return;
        switch (c.op) {
            case Opcode::LINEAR: return linear(c);
            case Opcode::EMBEDDING: return embedding(c);
            case Opcode::ADD: return add(c);
            case Opcode::INDEX_ROWS: return index_rows(c);
            case Opcode::RMS_NORM: return rms_norm(c);
            case Opcode::ROPE: return rope(c);
            case Opcode::GATED_ACT: return gated_act(c);
            case Opcode::WRITE_KV: return write_kv(c);
            case Opcode::ATTENTION: return attention(c);
            case Opcode::SOFTCAP: return softcap(c);
            case Opcode::EXPERTS: return experts(c);
            case Opcode::SCALE_BY_SIGMOID: return scale_by_sigmoid(c);
            case Opcode::GATHER_COLUMNS: return gather_columns(c);
            case Opcode::ADD_LORA: return add_lora(c);
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

    // in: a, b; sizes: width
    void add(const Instruction& c) {
        cpu_.rows_.add(context_, {c.type, rows(c.in[0]), rows(c.in[1]), rows(c.out), c.sizes[0], count(c)});
    }

    // in: x, row numbers; sizes: bytes of a row
    void index_rows(const Instruction& c) {
        const RowView from = rows(c.in[0]), to = rows(c.out);
        const int64_t* numbers = ints(c.in[1]);
        for (int64_t r = 0; r < count(c); r++)
            std::memcpy(to.data + r * to.stride, from.data + numbers[r] * from.stride, c.sizes[0]);
    }

    // in: x; object: weight; sizes: heads, width; numbers: eps
    void rms_norm(const Instruction& c) {
        const auto* weight = static_cast<const float*>(c.object);
        cpu_.rows_.rms_norm(context_, {weight, c.numbers[0], c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1], count(c)});
    }

    // in: x, positions; object: RopeTable; sizes: heads, dim, rotary
    void rope(const Instruction& c) {
        const auto& [cos_sin, angle_axes] = *static_cast<const RopeTable*>(c.object);
        cpu_.rows_.rope(context_, {cos_sin, angle_axes, rows(c.in[1]), c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1],
                                       c.sizes[2], count(c)});
    }

    // in: x; sizes: width, activation
    void gated_act(const Instruction& c) {
        const auto activation = static_cast<Activation>(c.sizes[1]);
        cpu_.rows_.gated_act(context_, {activation, c.type, rows(c.in[0]), rows(c.out), c.sizes[0], count(c)});
    }

    // in: k, v, slots; object: KV
    void write_kv(const Instruction& c) {
        const KV& kv = *static_cast<const KV*>(c.object);
        cpu_.rows_.write_kv(context_, {kv, ints(c.in[2]), c.type, rows(c.in[0]), rows(c.in[1]), count(c)});
    }

    // in: q; object: AttentionLayer; sizes: heads, window; numbers: scale, softcap
    void attention(const Instruction& c) {
        const auto& [kv, sinks] = *static_cast<const AttentionLayer*>(c.object);
        cpu_.attention_(context_, {kv, ints(AddressSpace::POSITIONS),
                                   ints(AddressSpace::BLOCK_TABLES), ints(AddressSpace::QUERY_START_LOC),
                                   inputs_.num_requests, inputs_.table_width, inputs_.block_size, c.type, rows(c.in[0]),
                                   rows(c.out), c.sizes[0], c.sizes[1], c.numbers[0], c.numbers[1], sinks});
    }

    // out: x, in place; sizes: width; numbers: cap
    void softcap(const Instruction& c) {
        cpu_.rows_.softcap(context_, {c.numbers[0], rows(c.out), c.sizes[0], count(c)});
    }

    // in: x, logits, add_to (or null); object: Experts; sizes: top_k, renormalize, activation
    void experts(const Instruction& c) {
        const auto& weights = *static_cast<const Experts*>(c.object);
        run_experts(context_, cpu_.isa_, {weights, c.sizes[0], c.sizes[1] != 0, static_cast<Activation>(c.sizes[2]), c.type,
                                          rows(c.in[0]), rows(c.in[1]), rows(c.in[2]), rows(c.out), count(c)});
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

    CpuContext& cpu_;
    const ProgramInputs& inputs_;
    Context context_;
};

void CpuContext::run(const Instruction* instructions, int64_t count, const ProgramInputs& inputs) {
    const FloatMode mode;
    Interpreter interpreter(*this, inputs);
    for (int64_t i = 0; i < count; i++) interpreter.execute(instructions[i]);
}

}  // namespace foreword
