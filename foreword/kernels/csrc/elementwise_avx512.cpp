#include "elementwise.h"

#if FOREWORD_X86

#include <cmath>

#include "packing.h"
#include "vec_avx512.h"
#include "vec_math.h"

#include "elementwise.inc"
#include "lora.inc"

namespace foreword {
const RowKernels ROWS_AVX512 = {rms_norm, rope, gated_act, gated_act_alone, embedding, add, softcap,
                                scale_by_sigmoid, weighted_sum, write_kv,
                                lora_shrink, lora_expand};
}
#include "isa_pop.h"

#endif
