#include "elementwise/elementwise.h"

namespace foreword {

const RowKernels& row_kernels(Isa isa) {
#if FOREWORD_X86
    if (isa >= Isa::AVX512) return ROWS_AVX512;
    if (isa >= Isa::AVX2) return ROWS_AVX2;
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return ROWS_NEON;
#endif
    static_cast<void>(isa);
    return ROWS_PORTABLE;
}

}  // namespace foreword
