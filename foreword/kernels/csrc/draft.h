// Several forward passes in one call, each over the token that the one before sampled: how a draft model guesses.
#pragma once

#include <cstdint>

#include "program.h"

namespace foreword {

// One request, as DraftLane in kernels/ops.py.
//   num_tokens  known tokens, computed in the first pass at positions start, start + 1, ...
//   num_blocks  of its table
//   shift       of their places in all directions, for models with M-RoPE: position + shift
//   first       absolute index of the first guess: the counter of its noise
//   max_tokens  guesses at most; 0: the known tokens are computed, and that is all
//   floor       no more guesses once the sum of their log-probabilities is below this
struct Lane {
    int64_t num_tokens, start, num_blocks, shift, first, max_tokens;
    uint64_t seed;
    int64_t greedy, top_k;
    double floor, temperature, top_p, min_p;
};

// token_ids, blocks  those of all lanes, one after the other
// unused             ids that are never sampled
// width              of a row of logits
// guesses, logprobs  [num_lanes, columns]; the first counts[lane] of a line are written
// counts             [num_lanes]
struct Draft {
    const Lane* lanes;
    int64_t num_lanes;
    const int64_t* token_ids;
    const int64_t* blocks;
    const int64_t* unused;
    int64_t num_unused, width, columns;
    int64_t* guesses;
    double* logprobs;
    int64_t* counts;
};

// A forward pass that yields the logits of sampled rows, float32 [num_sampled, width], in the space OUTPUT.
struct Program {
    const Command* commands;
    int64_t count;
};

// Of `inputs` only block_size and the spaces ARENA and OUTPUT are read; they have room for all rows of the first pass.
void run_draft(Machine& machine, const Program& program, const Inputs& inputs, const Draft& draft);

}  // namespace foreword
