// The row-wise operations of each instruction set.
#pragma once

#include "common/kernels.h"

namespace foreword {

extern const RowKernels ROWS_PORTABLE;
#if FOREWORD_X86
extern const RowKernels ROWS_AVX2;
extern const RowKernels ROWS_AVX512;
#elif FOREWORD_ARM
extern const RowKernels ROWS_NEON;
#endif

}  // namespace foreword
