#include "states/states.h"

#include <cmath>

#include "common/vec_portable.h"
#include "common/vec_math.h"

namespace foreword {
namespace {
constexpr int ROW_TILE = 2, VECS = 2;  // 2 * ROW_TILE * VECS sums and their operands fit the registers
}
}  // namespace foreword

#include "states/causal_conv.inc"
#include "states/delta_rule.inc"

namespace foreword {
const StateKernels STATES_PORTABLE = {gate, causal_conv, delta_rule, ssm_scan};
}
