// A mixture of experts: each row is sent through a few of them.
#pragma once

#include <cstdint>

#include "common/kernels.h"

namespace foreword {

// One matrix of every expert. That of expert e is stacked from blocks [starts[e], starts[e + 1]).
struct ExpertMatrices {
    const Weight* blocks;
    const int64_t* starts;  // [experts + 1]
};

struct Experts {
    int64_t count, hidden, inner;
    ExpertMatrices gate_up;  // [2 * inner, hidden], or without gates [inner, hidden]
    ExpertMatrices down;     // [hidden, inner]
    const float* bias;       // [count] or null: see ExpertsArgs
    const float* scales;     // [count] or null: of the experts' factors
};

enum class Scoring : int32_t { SOFTMAX, SIGMOID, SPARSE_MIXER };

// x [rows, hidden], router logits float32 [rows, count] -> y [rows, hidden]: for each row, the sum over its top_k experts,
// in order of falling logits (ties: ascending id), of factor * down(activation(gate_up(x))), plus add_to unless it is null.
// Factors are `scale` times the softmax over the chosen logits (renormalize) or over all; or (sigmoid) times the sigmoids
// of the chosen logits, divided by their sum (renormalize); or these times the scale of the expert. With a bias, experts
// are chosen by the sigmoid, or the softmax over all, plus the bias. Experts are `groups` of equal size, and a row chooses
// from the `top_groups` best: by the largest of what experts are chosen by, or (sigmoid) by the sum of the two largest;
// ties: ascending group. Sparse mixer: each choice is weighed by the softmax over its own logit and those that are not
// chosen before it and near it, which is (own - other) / max(|other|, own) <= tolerance. gate_up and the activation are
// rounded to `type`; the rest is float32, rounded once. A row whose logits hold NaN or no finite maximum becomes NaN.
struct ExpertsArgs {
    const Experts& experts;
    int64_t top_k;
    bool renormalize;
    Scoring scoring;
    int64_t groups, top_groups;
    float scale, tolerance;
    Activation activation;
    Type type;
    RowView x, logits, add_to, y;
    int64_t rows;
};

// Each expert's weights are read once for all rows that chose it, except for very long prompts.
void run_experts(Context& context, Isa isa, const ExpertsArgs& args);

}  // namespace foreword
