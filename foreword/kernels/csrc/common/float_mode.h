// One rounding mode for all threads while they compute: to nearest, with subnormals, whatever the caller has set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace foreword {

// Sets the mode of this thread, and restores the caller's at the end of the scope.
class FloatMode {
public:
    FloatMode() : before_(get()) { set(STANDARD); }
    ~FloatMode() { set(before_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
#if defined(__x86_64__)
    static constexpr uint64_t STANDARD = 0x1f80;
    static uint64_t get() { return _mm_getcsr(); }
    static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
    static constexpr uint64_t STANDARD = 0;
    static uint64_t get() {
        uint64_t mode;
        __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
    static constexpr uint64_t STANDARD = 0;
    static uint64_t get() { return 0; }
    static void set(uint64_t) {}
#endif

    uint64_t before_;
};

}  // namespace foreword
