// Instruction sets of the kernels, and whether this processor supports them.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define FOREWORD_X86 1
#else
#define FOREWORD_X86 0
#endif

namespace foreword {

// Ascending in preference.
//   PORTABLE  any processor
//   AVX2      with FMA and F16C
//   AVX512    with BW, DQ, VL, VNNI and BF16
//   AMX       all of AVX512, and tiles of bfloat16 and int8
enum class Isa : int32_t { PORTABLE, AVX2, AVX512, AMX };

bool supported(Isa isa);

}  // namespace foreword
