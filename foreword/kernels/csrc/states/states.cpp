#include "states/states.h"

namespace foreword {

const StateKernels& state_kernels(Isa isa) {
#if FOREWORD_X86
    if (isa >= Isa::AVX512) return STATES_AVX512;
    if (isa >= Isa::AVX2) return STATES_AVX2;
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return STATES_NEON;
#endif
    static_cast<void>(isa);
    return STATES_PORTABLE;
}

}  // namespace foreword
