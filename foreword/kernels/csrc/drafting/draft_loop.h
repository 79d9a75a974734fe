// A draft in one call: forward passes, each over the token sampled from the previous one.
#pragma once

#include <cstdint>

#include "common/forward_program.h"

namespace foreword {

// One request, as DraftJob in kernels/ops.py.
//   num_tokens       known tokens, computed in the first pass at positions start_position, start_position + 1, ...
//   num_blocks       entries of its block table
//   mrope_offset     M-RoPE position minus position, on all axes
//   first_index      absolute index of the first draft token: the counter of its noise
//   max_tokens       draft tokens at most; 0: only compute the known tokens
//   fixed_position   position of all rows, instead of the indices of their slots; -1: none
//   in_one_pass      the last max_tokens known tokens are masks or the last token: each is sampled in the first pass
//   mask_slot        slot of the hidden state that all rows but the first read; -1: those before them
//   min_logprob_sum  stop once the sum of log-probabilities is below this
struct DraftJob {
    int64_t num_tokens, start_position, num_blocks, mrope_offset, first_index, max_tokens, fixed_position, in_one_pass, mask_slot;
    uint64_t seed;
    int64_t greedy, top_k;
    double min_logprob_sum, temperature, top_p, min_p;
};

// token_ids, block_tables    of all jobs, concatenated
// draft_ids, draft_logprobs  [num_jobs, max_tokens]; the first draft_lengths[job] of a row are written
// draft_lengths              [num_jobs]
struct DraftArgs {
    const DraftJob* jobs;
    int64_t num_jobs;
    const int64_t* token_ids;
    const int64_t* block_tables;
    const int64_t* never_sampled_ids;
    int64_t num_never_sampled, vocab_size, max_tokens;
    int64_t* draft_ids;
    double* draft_logprobs;
    int64_t* draft_lengths;
};

// A forward pass that writes the logits of sampled rows, float32 [num_sampled, vocab_size], to the space OUTPUT.
struct Program {
    const Instruction* instructions;
    int64_t count;
};

// Only block_size and the spaces ARENA and OUTPUT of `inputs` are read; they have room for the rows of the first pass.
// An error ends the draft before the pass that it is in.
InputError run_draft(CpuContext& cpu, const Program& program, const ProgramInputs& inputs, const DraftArgs& draft);

}  // namespace foreword
