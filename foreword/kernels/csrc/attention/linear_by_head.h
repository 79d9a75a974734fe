// The product of each head's values with a matrix of its own.
#pragma once

#include <cstdint>

#include "common/kernels.h"

namespace foreword {

// Matrices [n, k] of all heads, of one format.
struct HeadWeights {
    int64_t heads;
    const Weight* weights;
};

// x [rows, heads * k] -> y [rows, heads * (n + appended)]: the linear product of each head, then its values of `append` [rows,
// heads * appended], copied.
struct LinearByHeadArgs {
    const HeadWeights& weights;
    Type type;
    RowView x, append, y;
    int64_t appended, rows;
};

void linear_by_head(Context& context, Isa isa, const LinearByHeadArgs& args);

}  // namespace foreword
