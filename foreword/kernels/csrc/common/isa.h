// Instruction sets of the kernels, and whether this processor supports them.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define FOREWORD_X86 1
#else
#define FOREWORD_X86 0
#endif

// Clang before 16 has intrinsics of an extension only where all code is compiled for it.
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define FOREWORD_ARM 1
#else
#define FOREWORD_ARM 0
#endif

namespace foreword {

// Ascending in preference among those of one processor.
//   PORTABLE  any processor
//   AVX2      with FMA and F16C
//   AVX2_VNNI AVX2, with AVX-VNNI or all of AVX512
//   AVX512    with BW, DQ, VL, VNNI and BF16
//   AMX       all of AVX512, and tiles of bfloat16 and int8
//   NEON      64-bit ARM with dot products of int8 (ARMv8.2)
enum class Isa : int32_t { PORTABLE, AVX2, AVX2_VNNI, AVX512, AMX, NEON };

bool supported(Isa isa);
#if FOREWORD_X86
bool has_avx_vnni();
#endif

}  // namespace foreword
