// Ends the region that target_avx2.h, target_avx512.h or target_amx.h began.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
