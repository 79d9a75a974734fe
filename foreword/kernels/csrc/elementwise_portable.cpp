#include "elementwise.h"

#include <cmath>

#include "packing.h"
#include "vec_portable.h"
#include "vec_math.h"

#include "elementwise.inc"
#include "lora.inc"

namespace foreword {
const RowKernels ROWS_PORTABLE = {rms_norm, rope, gated_act, gated_act_alone, embedding, add, softcap,
                                  scale_by_sigmoid, weighted_sum, write_kv,
                                  lora_shrink, lora_expand};
}
