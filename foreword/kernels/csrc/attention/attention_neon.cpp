#include "attention/attention.h"

#if FOREWORD_ARM

#include <cfloat>
#include <cmath>

#include "common/vec_neon.h"
#include "common/vec_math.h"

namespace foreword {
namespace {
constexpr int MAX_ROWS = 5, VECS = 4;  // 20 sums and their operands: 32 registers
}
}  // namespace foreword

#include "attention/attention_task.inc"

namespace foreword {

const AttentionKernels ATTENTION_NEON = {attend_any<FloatProduct>, merge_task};

}  // namespace foreword

#endif
