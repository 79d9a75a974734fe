#include "isa.h"

#if FOREWORD_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace foreword {
namespace {

// Linux grants AMX tiles on request, for all threads: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool tiles_granted() {
#if FOREWORD_X86 && defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

#if FOREWORD_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// CPUID leaf 7: AMX-BF16 is bit 22, AMX-TILE bit 24, AMX-INT8 bit 25 of EDX.
bool has_amx() {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned all = 1u << 22 | 1u << 24 | 1u << 25;
    return has_avx512() && (d & all) == all && tiles_granted();
}
#endif

}  // namespace

bool supported(Isa isa) {
#if FOREWORD_X86
    __builtin_cpu_init();
    switch (isa) {
        case Isa::PORTABLE: return true;
        case Isa::AVX2: return has_avx2();
        case Isa::AVX512: return has_avx512();
        case Isa::AMX: return has_amx();
    }
#endif
    return isa == Isa::PORTABLE;
}

}  // namespace foreword
