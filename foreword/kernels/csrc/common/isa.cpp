#include "common/isa.h"

#if FOREWORD_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif FOREWORD_ARM && defined(__linux__)
#include <sys/auxv.h>
#elif FOREWORD_ARM && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace foreword {
namespace {

#if FOREWORD_X86
// Linux grants AMX tiles on request, for all threads: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool tiles_granted() {
#if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

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
#elif FOREWORD_ARM
bool has_dot_products() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#else
    return false;
#endif
}
#endif

}  // namespace

#if FOREWORD_X86
// CPUID leaf 7, sub-leaf 1: bit 4 of EAX.
bool has_avx_vnni() {
    unsigned a = 7, b = 0, c = 1, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (a & 1u << 4) != 0;
}
#endif

bool supported(Isa isa) {
#if FOREWORD_X86
    __builtin_cpu_init();
    if (isa == Isa::AVX2) return has_avx2();
    if (isa == Isa::AVX2_VNNI) return has_avx2() && (has_avx_vnni() || has_avx512());
    if (isa == Isa::AVX512) return has_avx512();
    if (isa == Isa::AMX) return has_amx();
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return has_dot_products();
#endif
    return isa == Isa::PORTABLE;
}

}  // namespace foreword
