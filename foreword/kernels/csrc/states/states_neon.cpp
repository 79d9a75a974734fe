#include "states/states.h"

#if FOREWORD_ARM

#include <cmath>

#include "common/vec_neon.h"
#include "common/vec_math.h"

namespace foreword {
namespace {
constexpr int ROW_TILE = 3, VECS = 4;  // 2 * ROW_TILE * VECS sums and their operands fit the registers
}
}  // namespace foreword

#include "states/causal_conv.inc"
#include "states/delta_rule.inc"

namespace foreword {
const StateKernels STATES_NEON = {gate, causal_conv, delta_rule, ssm_scan};
}

#endif
