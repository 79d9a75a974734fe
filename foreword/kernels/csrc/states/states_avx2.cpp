#include "states/states.h"

#if FOREWORD_X86

#include <cmath>

#include "common/vec_avx2.h"
#include "common/vec_math.h"

namespace foreword {
namespace {
constexpr int ROW_TILE = 2, VECS = 2;  // 2 * ROW_TILE * VECS sums and their operands fit the registers
}
}  // namespace foreword

#include "states/causal_conv.inc"
#include "states/delta_rule.inc"

namespace foreword {
const StateKernels STATES_AVX2 = {gate, causal_conv, delta_rule, ssm_scan};
}
#include "common/isa_pop.h"

#endif
