#include "program.h"

#include <cstring>

#include "float_mode.h"

namespace foreword {

Machine::Machine(Isa isa, int num_threads)
    : pool_(num_threads),
      rows_(row_kernels(isa)),
      dense_(dense_linear(isa)),
      quantized_(quantized_linear(isa)),
      attention_(attention(isa)) {}

// The commands of one program on the inputs of one batch.
class Run {
public:
    Run(Machine& machine, const Inputs& inputs) : machine_(machine), inputs_(inputs), context_{machine.pool_, machine.shared_} {}

    // An operation on no rows (nothing of the batch is sampled) is none: kernels get at least one.
    void execute(const Command& c) {
        if (count(c) == 0) return;
        switch (c.op) {
            case Op::LINEAR: return linear(c);
            case Op::EMBEDDING: return embedding(c);
            case Op::ADD: return add(c);
            case Op::TAKE_ROWS: return take_rows(c);
            case Op::NORM: return norm(c);
            case Op::ROPE: return rope(c);
            case Op::GATED: return gated(c);
            case Op::WRITE_KV: return write_kv(c);
            case Op::ATTENTION: return attention(c);
            case Op::SOFTCAP: return softcap(c);
        }
    }

private:
    // in: x; object: Weight
    void linear(const Command& c) {
        const Weight& weight = *static_cast<const Weight*>(c.object);
        const Linear kernel = is_dense(weight.kind) ? machine_.dense_ : machine_.quantized_;
        kernel(context_, {weight, c.type, c.out_type, rows(c.in[0]), rows(c.out), count(c)});
    }

    // in: ids; object: Weight; numbers: scale
    void embedding(const Command& c) {
        const Weight& weight = *static_cast<const Weight*>(c.object);
        machine_.rows_.embedding(context_, {weight, ints(c.in[0]), c.numbers[0], c.out_type, rows(c.out), count(c)});
    }

    // in: a, b; sizes: width
    void add(const Command& c) {
        machine_.rows_.add(context_, {c.type, rows(c.in[0]), rows(c.in[1]), rows(c.out), c.sizes[0], count(c)});
    }

    // in: x, row numbers; sizes: bytes of a row
    void take_rows(const Command& c) {
        const Rows from = rows(c.in[0]), to = rows(c.out);
        const int64_t* numbers = ints(c.in[1]);
        for (int64_t r = 0; r < count(c); r++)
            std::memcpy(to.data + r * to.stride, from.data + numbers[r] * from.stride, c.sizes[0]);
    }

    // in: x; object: weight; sizes: heads, width; numbers: eps
    void norm(const Command& c) {
        const auto* weight = static_cast<const float*>(c.object);
        machine_.rows_.norm(context_, {weight, c.numbers[0], c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1], count(c)});
    }

    // in: x, positions; object: Turns; sizes: heads, dim, rotary
    void rope(const Command& c) {
        const auto& [table, directions] = *static_cast<const Turns*>(c.object);
        machine_.rows_.rope(context_, {table, directions, rows(c.in[1]), c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1],
                                       c.sizes[2], count(c)});
    }

    // in: x; sizes: width, activation
    void gated(const Command& c) {
        const auto activation = static_cast<Activation>(c.sizes[1]);
        machine_.rows_.gated(context_, {activation, c.type, rows(c.in[0]), rows(c.out), c.sizes[0], count(c)});
    }

    // in: k, v, slots; object: KV
    void write_kv(const Command& c) {
        const KV& kv = *static_cast<const KV*>(c.object);
        machine_.rows_.write_kv(context_, {kv, ints(c.in[2]), c.type, rows(c.in[0]), rows(c.in[1]), count(c)});
    }

    // in: q; object: KV; sizes: heads, window; numbers: scale, softcap
    void attention(const Command& c) {
        machine_.attention_(context_, {*static_cast<const KV*>(c.object), ints(Space::POSITIONS), ints(Space::BLOCK_TABLES),
                                       ints(Space::ROW_STARTS), inputs_.num_requests, inputs_.table_width, inputs_.block_size,
                                       c.type, rows(c.in[0]), rows(c.out), c.sizes[0], c.sizes[1], c.numbers[0], c.numbers[1]});
    }

    // out: x, in place; sizes: width; numbers: cap
    void softcap(const Command& c) {
        machine_.rows_.softcap(context_, {c.numbers[0], rows(c.out), c.sizes[0], count(c)});
    }

    int64_t count(const Command& c) const { return c.sampled ? inputs_.num_sampled : inputs_.num_rows; }

    char* base(Space space) const { return inputs_.spaces[static_cast<int>(space)]; }

    // Spaces begin anywhere, also nowhere (ABSOLUTE): no pointer arithmetic on a null pointer.
    char* address(const Operand& operand) const {
        const auto begin = reinterpret_cast<uintptr_t>(base(operand.space));
        return reinterpret_cast<char*>(begin + operand.address + operand.per_row * inputs_.num_rows);
    }

    Rows rows(const Operand& operand) const { return {address(operand), operand.stride}; }

    const int64_t* ints(const Operand& operand) const { return reinterpret_cast<const int64_t*>(address(operand)); }

    const int64_t* ints(Space space) const { return reinterpret_cast<const int64_t*>(base(space)); }

    Machine& machine_;
    const Inputs& inputs_;
    Context context_;
};

void Machine::run(const Command* commands, int64_t count, const Inputs& inputs) {
    const FloatMode mode;
    Run run(*this, inputs);
    for (int64_t i = 0; i < count; i++) run.execute(commands[i]);
}

}  // namespace foreword
