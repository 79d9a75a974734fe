// LoRA: the adapters of one linear layer, and the parts of add_lora() that each instruction set has of its own.
//
// Sums have one order everywhere, and products are rounded before they are added: the bits of a row depend neither on
// other rows nor on the instruction set. `h` is A x: WIDE_LANES sums over every WIDE_LANES-th value of k, added as a tree, then
// scaled. y + B h is a sum over the rank in ascending order, then one addition to y.
#pragma once

#include "common/kernels.h"

namespace foreword {

// See LoraTable in kernels/ops.py; a and b have the type of x and y.
struct LoraTable {
    int64_t num_slots, num_parts, max_rank, k, n;
    const char* a;              // [num_slots, num_parts, max_rank, k]
    const char* b;              // [num_slots, max_rank, n]
    const int64_t* ranks;       // [num_slots, num_parts]
    const float* scales;        // [num_slots, num_parts]
    const int64_t* part_sizes;  // [num_parts], n in all
};

// y [rows, n] += scale * B (A x) of the adapter in each row's slot, -1 for none; x [rows, k]. `type` is that of x and y.
struct LoraArgs {
    const LoraTable& table;
    const int64_t* slots;
    Type type;
    RowView x, y;
    int64_t rows;
};

void add_lora(Context& context, const RowKernels& kernels, const LoraArgs& args);

}  // namespace foreword
