// How attention is divided into tasks, and the kernels of a task.
//
// A "pair" is a row and a query head. The positions of a request are cut into splits at multiples of SPLIT. A pair's result
// over one split is a state: the softmax over its visible positions there. The states of its splits are merged in order.
// Each step is one fixed sequence of operations for each pair, so neither the grouping of pairs nor the order of splits
// changes a bit.
#pragma once

#include "common/kernels.h"

namespace foreword {

constexpr int64_t SPLIT = 512;     // positions
constexpr int64_t MIN_PAIRS = 112, MAX_PAIRS = 448;  // of a task: they share one packed split of a KV head

// State of a pair: the largest score (to base 2), the sum of weights, then from HEADER on the weighted values.
constexpr int64_t TOP = 0, TOTAL = 1, HEADER = 16;

// Floats from one state to the next; whole vectors of any instruction set.
inline int64_t state_size(const AttentionArgs& args) { return HEADER + (args.kv.value_dim + 15) / 16 * 16; }

struct Span {
    int64_t begin, end;
};

// The positions that a row attends to; possibly none.
inline Span visible_positions(const AttentionArgs& args, int64_t row) {
    const int64_t end = args.positions[row] + 1;
    const int64_t begin = args.window > 0 && end - args.window > args.first ? end - args.window : args.first;
    return {begin, end > begin ? end : begin};
}

// Rows [row, row + rows) of one request with the query heads of one KV head, over splits [first, last).
struct AttnTask {
    int64_t request, kv_head, row, rows, first, last;
    int64_t states;  // offset of the states of split `first` in shared memory, in floats; -1: thread-local
};

struct AttentionKernels {
    // All splits of a task: states to `states` (one split only), or merged to the output if that is null.
    void (*attend)(ThreadPool& pool, int thread, const AttentionArgs& args, const AttnTask& task, float* states);

    // Merge the states of a task's splits, `stride` floats apart, and write the output.
    void (*merge)(ThreadPool& pool, int thread, const AttentionArgs& args, const AttnTask& task, const float* states,
                  int64_t stride);
};

extern const AttentionKernels ATTENTION_PORTABLE;
#if FOREWORD_X86
extern const AttentionKernels ATTENTION_AVX2;
extern const AttentionKernels ATTENTION_AVX512;
#elif FOREWORD_ARM
extern const AttentionKernels ATTENTION_NEON;
#endif

}  // namespace foreword
