// A forward pass as a list of commands, recorded once (kernels/cpu/program.py) and run for any number of rows.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace foreword {

enum class Op : int32_t { LINEAR, EMBEDDING, ADD, TAKE_ROWS, NORM, ROPE, GATED, WRITE_KV, ATTENTION, SOFTCAP };

// Where an address begins.
enum class Space : int64_t { ABSOLUTE, ARENA, TOKEN_IDS, POSITIONS, SLOTS, BLOCK_TABLES, ROW_STARTS, SAMPLE_ROWS, ROPE_POSITIONS, OUTPUT, COUNT };

// Rows from spaces[space] + address + per_row * (rows of the batch) on, `stride` bytes each.
struct Operand {
    Space space;
    int64_t address;
    int64_t per_row;
    int64_t stride;
};

// How rope turns: as RopeArgs has them.
struct Turns {
    const float* table;
    const int32_t* directions;
};

// One operation. What the fields hold is told by the functions of program.cpp that read them.
//   sampled  it has as many rows as are sampled, else as the batch has
struct Command {
    Op op;
    int32_t sampled;
    Type type, out_type;
    Operand in[3];
    Operand out;
    const void* object;
    int64_t sizes[4];
    float numbers[2];
};

// What differs from one run to the next: see core/batch.py.
struct Inputs {
    int64_t num_rows, num_sampled, num_requests, table_width, block_size;
    char* spaces[static_cast<int>(Space::COUNT)];
};

// One engine's or drafter's way to compute.
class Machine {
public:
    Machine(Isa isa, int num_threads);

    void run(const Command* commands, int64_t count, const Inputs& inputs);
    Pool& pool() { return pool_; }

private:
    Pool pool_;
    Buffer shared_;
    const RowKernels& rows_;
    Linear dense_, quantized_;
    Attention attention_;

    friend class Run;
};

}  // namespace foreword
