// Begins a region compiled for AVX-512; isa_pop.h ends it. Other headers are included before it: the linker shares their
// inline functions with the rest of the program, so none may be compiled for AVX-512.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")
#endif
