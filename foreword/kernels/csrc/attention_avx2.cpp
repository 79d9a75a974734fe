#include "attention.h"

#if FOREWORD_X86

#include <cfloat>
#include <cmath>

#include "vec_avx2.h"
#include "vec_math.h"

namespace foreword {
namespace {
constexpr int MAX_ROWS = 6, VECS = 2;  // MAX_ROWS * VECS sums, and what they are made of, fit the 16 registers
}
}  // namespace foreword

#include "attention.inc"

namespace foreword {
namespace {

void attend_any(Pool& pool, int thread, const AttentionArgs& args, const Piece& piece, float* states) {
    switch (args.kv.type) {
        case Type::F32: return attend_piece<Wide, float>(pool, thread, args, piece, states);
        case Type::BF16: return attend_piece<Wide, Bf16>(pool, thread, args, piece, states);
        case Type::I8: return attend_piece<Wide, int8_t>(pool, thread, args, piece, states);
    }
}

}  // namespace

const AttentionKernels ATTENTION_AVX2 = {attend_any, merge_piece};

}  // namespace foreword
#include "target_end.h"

#endif
