#include "rows.h"

#if FOREWORD_X86

#include <cmath>

#include "packing.h"
#include "vec_avx512.h"
#include "vec_math.h"

#include "rows.inc"

namespace foreword {
const RowKernels ROWS_AVX512 = {norm, rope, gated, embedding, add, softcap, write_kv};
}
#include "target_end.h"

#endif
