// Begins a region compiled for AMX: see isa_push_avx512.h.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target( \
        "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16,amx-int8")
#endif
