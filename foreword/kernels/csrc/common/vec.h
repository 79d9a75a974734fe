// The part that the vectors of all instruction sets share.
//
// A file of kernels includes everything else first, then vec_<instruction set>.h, which begins a region compiled for that
// set, then vec_math.h and .inc files, and finally isa_pop.h. All of that is in anonymous namespaces: no function of a
// common header is compiled for instructions that the machine may lack.
//
// Each vec_<set>.h has: Vec (LANES float32 values; + - * / are those of the compiler), splat, load, store, fma, min, max,
// nearest, times_power, pick_less, keep_lanes, max_magnitude, reduce_add, reduce_max, transpose.
#pragma once

#include <cstdint>
#include <cstring>

namespace foreword {

enum class Bf16 : uint16_t {};  // the upper half of a float32

}  // namespace foreword
