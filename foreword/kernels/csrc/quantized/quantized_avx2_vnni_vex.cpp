// VPDPBUSD as processors with AVX-VNNI encode it.
#define VNNI_PREFIX "%{vex%}"
#include "quantized/quantized_avx2_vnni.inc"

#if FOREWORD_X86
const foreword::QuantizedKernels& foreword::quantized_avx2_vnni_vex() { return KERNELS; }
#endif
