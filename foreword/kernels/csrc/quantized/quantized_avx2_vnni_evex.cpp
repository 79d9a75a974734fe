// VPDPBUSD as processors with AVX-512 encode it. All of these prefer AVX-512.
#define VNNI_PREFIX "%{evex%}"
#include "quantized/quantized_avx2_vnni.inc"

#if FOREWORD_X86
const foreword::QuantizedKernels& foreword::quantized_avx2_vnni_evex() { return KERNELS; }
#endif
