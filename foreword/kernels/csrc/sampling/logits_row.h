// Passes over a row of logits that filters and sampling share.
//
// Rows are float32 [num_rows, width], contiguous. A row is finite if it holds a finite value and neither NaN nor +inf;
// filters leave other rows unchanged.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "sampling/philox.h"
#include "common/portable_math.h"
#include "sampling/sampler.h"
#include "sampling/topk.h"

// One binary for every x86-64: the loader picks the best version for the processor.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define MULTIVERSION __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define MULTIVERSION [[maybe_unused]]
#endif

namespace foreword {
namespace {

constexpr float MASKED = -std::numeric_limits<float>::infinity();

// A float as an integer of the same order: its maximum is order-independent, so it vectorizes.
inline int32_t ordered(float value) {
    const int32_t raw = bits<int32_t>(value);
    return raw ^ ((raw >> 31) & 0x7fffffff);
}

inline float from_ordered(int32_t value) { return bits<float>(value ^ ((value >> 31) & 0x7fffffff)); }

struct RowMax {
    float value;
    bool finite;
};

MULTIVERSION RowMax find_max(const float* values, int64_t width) {
    int32_t top = ordered(MASKED), nans = 0;
    for (int64_t i = 0; i < width; i++) {
        top = std::max(top, ordered(values[i]));
        nans |= values[i] != values[i];
    }
    const float value = from_ordered(top);
    return {value, nans == 0 && std::isfinite(value)};
}

// CHUNK values from `first`, -inf beyond the row.
inline void load_chunk(Row row, int64_t first, float (&values)[CHUNK]) {
    if (row.width - first >= CHUNK) {
        std::memcpy(values, row.values + first, sizeof values);
        return;
    }
    for (int i = 0; i < CHUNK; i++) values[i] = first + i < row.width ? row.values[first + i] : MASKED;
}

inline float chunk_max(const float (&values)[CHUNK]) {
    int32_t top = ordered(MASKED);
    for (float value : values) top = std::max(top, ordered(value));
    return from_ordered(top);
}

// exp(value - top) of each value in units of 2^-42; returns the sum.
MULTIVERSION int64_t exp_weights(Row row, float top, int64_t* weights) {
    int64_t sum = 0;
    for (int64_t first = 0; first < row.width; first += CHUNK) {
        float values[CHUNK];
        int64_t found[CHUNK] = {};
        load_chunk(row, first, values);
        if (chunk_max(values) != MASKED)
            for (int i = 0; i < CHUNK; i++) found[i] = exp_fixed_point(static_cast<double>(values[i]) - static_cast<double>(top));
        for (int64_t weight : found) sum += weight;
        if (weights) std::memcpy(weights + first, found, std::min<int64_t>(CHUNK, row.width - first) * sizeof *found);
    }
    return sum;
}

MULTIVERSION int64_t weight_above(Row row, float floor, const int64_t* weights) {
    int64_t sum = 0;
    for (int64_t i = 0; i < row.width; i++) sum += row.values[i] >= floor ? weights[i] : 0;
    return sum;
}

MULTIVERSION int64_t count_above(Row row, float floor) {
    int32_t count = 0;
    for (int64_t i = 0; i < row.width; i++) count += row.values[i] >= floor;
    return count;
}

// The ids within a power-of-two distance of the maximum that reaches `need`; all finite ids if none does.
template <class Above>
std::vector<Entry> candidates(Row row, float top, int64_t need, Above above) {
    float floor = std::numeric_limits<float>::lowest();
    for (float distance = 1; distance <= 64; distance *= 2) {
        if (above(top - distance) < need) continue;
        floor = top - distance;
        break;
    }
    std::vector<Entry> found;
    for (int64_t id = 0; id < row.width; id++)
        if (row.values[id] >= floor) found.push_back({row.values[id], static_cast<int32_t>(id)});
    return found;
}

// The first k ids of a finite row, unordered; fewer if fewer are finite.
std::vector<Entry> first_ids(Row row, float top, int64_t k) {
    auto found = candidates(row, top, k, [&](float floor) { return count_above(row, floor); });
    found.resize(partition_prefix(found, k, [](const Entry&) { return int64_t{1}; }));
    return found;
}

}  // namespace
}  // namespace foreword
