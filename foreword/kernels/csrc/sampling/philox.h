// Keyed Gumbel noise from Philox 4x32-10 (Salmon et al. 2011).
#pragma once

#include <cmath>
#include <cstdint>

#include "common/portable_math.h"

namespace foreword {

constexpr int LANES = 4;  // words of one Philox block
constexpr int BLOCKS = 64;  // computed together; the compiler unrolls fewer instead of vectorizing them
constexpr int CHUNK = LANES * BLOCKS;
constexpr int ROUNDS = 10;
constexpr uint32_t TOKEN_NOISE = 0, XTC_COIN = 1;  // third counter word: purpose of the noise
constexpr float NOISE_MAX = 22.88f;  // above 33 ln 2, the noise of the largest word

struct Key {
    uint64_t seed;
    uint32_t position;
};

// The words of COUNT blocks from `block`.
template <int COUNT>
inline void philox(Key key, uint32_t purpose, uint32_t block, uint32_t (&words)[LANES * COUNT]) {
    uint32_t c0[COUNT], c1[COUNT], c2[COUNT], c3[COUNT];
    for (int i = 0; i < COUNT; i++) {
        c0[i] = block + i;
        c1[i] = key.position;
        c2[i] = purpose;
        c3[i] = 0;
    }
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < COUNT; i++) {
            const uint64_t product0 = uint64_t{0xD2511F53} * c0[i];
            const uint64_t product1 = uint64_t{0xCD9E8D57} * c2[i];
            c0[i] = static_cast<uint32_t>(product1 >> 32) ^ c1[i] ^ k0;
            c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ k1;
            c1[i] = static_cast<uint32_t>(product1);
            c3[i] = static_cast<uint32_t>(product0);
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (int i = 0; i < COUNT; i++) {
        words[LANES * i] = c0[i];
        words[LANES * i + 1] = c1[i];
        words[LANES * i + 2] = c2[i];
        words[LANES * i + 3] = c3[i];
    }
}

// Noise words of ids first .. first + CHUNK - 1; first is a multiple of LANES.
inline void philox_chunk(Key key, int64_t first, uint32_t (&words)[CHUNK]) {
    philox<BLOCKS>(key, TOKEN_NOISE, static_cast<uint32_t>(first / LANES), words);
}

// The first word of a purpose.
inline uint32_t philox_word(Key key, uint32_t purpose) {
    uint32_t words[LANES];
    philox<1>(key, purpose, 0, words);
    return words[0];
}

// -log(-log u) of u = (x + 1/2) 2^-32. u and 1 - u are exact: they need 33 bits.
inline float noise(uint32_t x) {
    const double u = (x + 0.5) * 0x1p-32;
    return static_cast<float>(-portable_log(-portable_log(u)));
}

// Upper bound of noise(x) without logarithms, within 0.1 for large x: noise <= -log(1 - u), and the exponent and
// mantissa of a float, read as one number, are at most its log2 (which is concave).
inline float noise_bound(uint32_t x) {
    const float rest = static_cast<float>(static_cast<double>(~x) + 0.5);
    const float log2 = static_cast<float>(bits<int32_t>(rest)) * 0x1p-23f - 127.0f;
    return (32.0f - log2) * 0.69314718f + 1e-3f;
}

}  // namespace foreword
