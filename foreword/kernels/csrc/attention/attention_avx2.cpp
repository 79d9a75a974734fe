#include "attention/attention.h"

#if FOREWORD_X86

#include <cfloat>
#include <cmath>

#include "common/vec_avx2.h"
#include "common/vec_math.h"

namespace foreword {
namespace {
constexpr int MAX_ROWS = 6, VECS = 2;  // MAX_ROWS * VECS sums and their operands fit the 16 registers
}
}  // namespace foreword

#include "attention/attention_task.inc"

namespace foreword {

const AttentionKernels ATTENTION_AVX2 = {attend_any<FloatProduct>, merge_task};

}  // namespace foreword
#include "common/isa_pop.h"

#endif
