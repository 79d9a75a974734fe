#include "rows.h"

#include <cmath>

#include "packing.h"
#include "vec_portable.h"
#include "vec_math.h"

#include "rows.inc"

namespace foreword {
const RowKernels ROWS_PORTABLE = {norm, rope, gated, embedding, add, softcap, write_kv};
}
