// All threads round alike: to nearest, with subnormal numbers, whatever the caller's library has set.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace foreword {

inline void set_float_mode() {
#if defined(__x86_64__)
    _mm_setcsr(0x1f80);
#endif
}

}  // namespace foreword
