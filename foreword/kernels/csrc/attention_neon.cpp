#include "attention.h"

#if FOREWORD_ARM

#include <cfloat>
#include <cmath>

#include "vec_neon.h"
#include "vec_math.h"

namespace foreword {
namespace {
constexpr int MAX_ROWS = 5, VECS = 4;  // 20 sums and their operands: 32 registers
}
}  // namespace foreword

#include "attention.inc"

namespace foreword {
namespace {

void attend_any(ThreadPool& pool, int thread, const AttentionArgs& args, const AttnTask& task, float* states) {
    switch (args.kv.type) {
        case Type::F32: return attend_task<FloatProduct, float>(pool, thread, args, task, states);
        case Type::BF16: return attend_task<FloatProduct, Bf16>(pool, thread, args, task, states);
        case Type::I8: return attend_task<FloatProduct, int8_t>(pool, thread, args, task, states);
    }
}

}  // namespace

const AttentionKernels ATTENTION_NEON = {attend_any, merge_task};

}  // namespace foreword

#endif
