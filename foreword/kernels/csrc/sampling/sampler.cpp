// Sampling on the CPU, with the bits of kernels/reference/sampling.py. Callers have checked shapes and types.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "sampling/logits_row.h"

namespace foreword {
namespace {

struct Best {
    float score;
    int64_t id;
};

// Merge the best of one chunk into `best`. Exact noise is computed only where its upper bound could win.
MULTIVERSION void sample_chunk(Row row, Key key, int64_t first, Best& best) {
    float values[CHUNK], bounds[CHUNK];
    uint32_t words[CHUNK];
    load_chunk(row, first, values);
    if (chunk_max(values) + NOISE_MAX < best.score) return;
    philox_chunk(key, first, words);
    for (int i = 0; i < CHUNK; i++) bounds[i] = values[i] + noise_bound(words[i]);
    if (chunk_max(bounds) < best.score) return;
    for (int i = 0; i < CHUNK; i++) {
        if (bounds[i] < best.score || values[i] == MASKED) continue;
        const Best found = {values[i] + noise(words[i]), first + i};
        if (found.score > best.score || (found.score == best.score && found.id < best.id)) best = found;
    }
}

int64_t find(Row row, float value) {
    return std::find(row.values, row.values + row.width, value) - row.values;
}

void top_ids_row(Row row, int64_t k, int64_t* ids) {
    const RowMax row_max = find_max(row.values, row.width);
    int64_t filled = 0;
    if (row_max.finite) {
        auto found = first_ids(row, row_max.value, k);
        std::sort(found.begin(), found.end(), ranks_before);
        for (const Entry& entry : found) ids[filled++] = entry.id;
    }
    for (int64_t id = 0; filled < k; id++)
        if (!row_max.finite || row.values[id] == MASKED) ids[filled++] = id;
}

}  // namespace

int64_t sample_row(Row row, Key key, bool greedy) {
    const RowMax row_max = find_max(row.values, row.width);
    if (!row_max.finite) return -1;
    const int64_t likeliest = find(row, row_max.value);
    if (greedy) return likeliest;
    Best best = {MASKED, row.width};
    sample_chunk(row, key, likeliest / CHUNK * CHUNK, best);  // an early high score lets others be skipped
    for (int64_t first = 0; first < row.width; first += CHUNK) sample_chunk(row, key, first, best);
    return best.id;
}

float log_sum_exp_row(Row row) {
    const RowMax row_max = find_max(row.values, row.width);
    if (!row_max.finite) return std::numeric_limits<float>::quiet_NaN();
    const double total = static_cast<double>(exp_weights(row, row_max.value, nullptr));
    return static_cast<float>(static_cast<double>(row_max.value) + portable_log(total * FIXED_POINT_UNIT));
}

}  // namespace foreword

using namespace foreword;

extern "C" {

void foreword_log_sum_exp(CpuContext* cpu, const float* logits, int64_t num_rows, int64_t width, float* out) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) { out[r] = log_sum_exp_row(row); });
}

InputError foreword_top_ids(CpuContext* cpu, const float* logits, int64_t num_rows, int64_t width, int64_t k, int64_t* ids) {
    if (k < 0 || k > width) return InputError::COUNT;
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) { top_ids_row(row, k, ids + r * k); });
    return InputError::NONE;
}

void foreword_sample(CpuContext* cpu, const float* logits, int64_t num_rows, int64_t width, const int64_t* seeds,
                     const int64_t* positions, const uint8_t* greedy, int64_t* out) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) {
        const Key key = {static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r])};
        out[r] = sample_row(row, key, greedy[r] != 0);
    });
}

// Noise and its upper bound of given words, for tests.
void foreword_noise(const uint32_t* words, int64_t count, float* exact, float* bound) {
    for (int64_t i = 0; i < count; i++) {
        exact[i] = noise(words[i]);
        bound[i] = noise_bound(words[i]);
    }
}

}  // extern "C"
