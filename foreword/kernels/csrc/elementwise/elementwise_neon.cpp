#include "elementwise/elementwise.h"

#if FOREWORD_ARM

#include <cmath>

#include "common/packing.h"
#include "common/vec_neon.h"
#include "common/vec_math.h"

#include "elementwise/elementwise.inc"
#include "lora/lora_products.inc"

namespace foreword {
const RowKernels ROWS_NEON = {rms_norm, layer_norm, rope, gated_act, gated_act_alone, embedding, add, softcap,
                              scale_by_sigmoid, weighted_sum, write_kv,
                              lora_shrink, lora_expand};
}

#endif
