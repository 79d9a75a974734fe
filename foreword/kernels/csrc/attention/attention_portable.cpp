#include "attention/attention.h"

#include <cfloat>
#include <cmath>

#include "common/vec_portable.h"
#include "common/vec_math.h"

namespace foreword {
namespace {
constexpr int MAX_ROWS = 4, VECS = 2;  // MAX_ROWS * VECS sums and their operands fit the 16 registers
}
}  // namespace foreword

#include "attention/attention_task.inc"

namespace foreword {

const AttentionKernels ATTENTION_PORTABLE = {attend_any<FloatProduct>, merge_task};

}  // namespace foreword
