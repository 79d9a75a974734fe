// Ends the region that vec_avx2.h or vec_avx512.h began.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
