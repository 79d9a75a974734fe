// A forward pass as a list of instructions, traced once (kernels/cpu/program.py) and run for any number of rows.
#pragma once

#include <cstdint>

#include "common/input_error.h"
#include "common/kernels.h"
#include "states/states.h"

namespace foreword {

enum class Opcode : int32_t {
    LINEAR, EMBEDDING, ADD, INDEX_ROWS, RMS_NORM, ROPE, GATED_ACT, WRITE_KV, ATTENTION, SOFTCAP, EXPERTS, SCALE_BY_SIGMOID,
    GATHER_COLUMNS, ADD_LORA, GATE, CAUSAL_CONV, DELTA_RULE, SSM_SCAN, LAYER_NORM, LINEAR_BY_HEAD, WRITE_HIDDEN, READ_HIDDEN, COPY,
    EXPAND_VOCAB
};

// The base of an address.
enum class AddressSpace : int64_t {
    ABSOLUTE, ARENA, TOKEN_IDS, POSITIONS, SLOTS, BLOCK_TABLES, QUERY_START_LOC, SAMPLE_ROWS, MROPE_POSITIONS, OUTPUT, LORA_SLOTS,
    STATE_SLOTS, ANCHOR_TABLES, PREV_SLOTS, COUNT
};

// Rows from spaces[space] + address + per_row * (rows of the batch), `stride` bytes apart.
struct Operand {
    AddressSpace space;
    int64_t address;
    int64_t per_row;
    int64_t stride;
};

// Fields of LayerNormArgs.
struct NormVectors {
    const float* weight;
    const float* bias;
};

// Fields of RopeArgs.
struct RopeTable {
    const float* cos_sin;
    const int32_t* angle_axes;
};

// K and V of a layer, and sinks [heads] or null.
struct AttentionLayer {
    KV kv;
    const float* sinks;
};

// A layer with state, and vectors of its operation: see CausalConvArgs and StateRuleArgs.
struct StateOperation {
    StateLayer layer;
    const float* weight;
    const float* bias;
    const float* skips;
};

// One operation; the functions of forward_program.cpp define its fields.
//   sampled  it runs on the sampled rows, else on all rows of the batch
struct Instruction {
    Opcode op;
    int32_t sampled;
    Type type, out_type;
    Operand in[3];
    Operand out;
    const void* object;
    int64_t sizes[6];
    float numbers[2];
};

// The inputs of one run: see core/batch.py.
struct ProgramInputs {
    int64_t num_rows, num_sampled, num_requests, table_width, block_size, anchor_width;
    char* spaces[static_cast<int>(AddressSpace::COUNT)];
};

// Threads and kernels of one model.
class CpuContext {
public:
    CpuContext(Isa isa, int num_threads);

    // Checks the ids, slots and rows of the batch first: nothing is computed unless the result is NONE.
    InputError run(const Instruction* instructions, int64_t count, const ProgramInputs& inputs);
    ThreadPool& pool() { return pool_; }

private:
    const Isa isa_;
    ThreadPool pool_;
    Buffer shared_;
    const RowKernels& rows_;
    Linear dense_, quantized_;
    Attention attention_;
    const StateKernels& states_;

    friend class Interpreter;
};

}  // namespace foreword
