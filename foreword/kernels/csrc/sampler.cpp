// Sampling on the CPU: the operations of reference_sampling.py on rows of logits, to the same bits.
//
// Rows are float32 [num_rows, width], contiguous. A row is sound if it holds a finite value and neither NaN
// nor +inf; filters leave other rows as they are. Callers have checked shapes and types.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "noise.h"
#include "portable_math.h"
#include "sampler.h"
#include "selection.h"

// One binary for every x86-64: the loader picks the widest version that the processor runs.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDEST
#endif

namespace foreword {
namespace {

constexpr int WORD_BITS = 32;
constexpr float MASKED = -std::numeric_limits<float>::infinity();

// A float as a whole number of the same order: unlike a float's, its maximum may be taken in any order, so in vectors.
inline int32_t ordered(float value) {
    const int32_t raw = bits<int32_t>(value);
    return raw ^ ((raw >> 31) & 0x7fffffff);
}

inline float from_ordered(int32_t value) { return bits<float>(value ^ ((value >> 31) & 0x7fffffff)); }

struct Peak {
    float value;
    bool sound;
};

WIDEST Peak find_peak(const float* values, int64_t width) {
    int32_t top = ordered(MASKED), nans = 0;
    for (int64_t i = 0; i < width; i++) {
        top = std::max(top, ordered(values[i]));
        nans |= values[i] != values[i];
    }
    const float value = from_ordered(top);
    return {value, nans == 0 && std::isfinite(value)};
}

// The first CHUNK values from `first`, -inf beyond the row.
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

struct Best {
    float score;
    int64_t id;
};

// Takes the best of one chunk into `best`. Exact noise is computed only where a bound of it could win.
WIDEST void sample_chunk(Row row, Key key, int64_t first, Best& best) {
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

// exp(value - top) of each value, in units of 2^-42; returns the sum.
WIDEST int64_t masses(Row row, float top, int64_t* weights) {
    int64_t sum = 0;
    for (int64_t first = 0; first < row.width; first += CHUNK) {
        float values[CHUNK];
        int64_t found[CHUNK] = {};
        load_chunk(row, first, values);
        if (chunk_max(values) != MASKED)
            for (int i = 0; i < CHUNK; i++) found[i] = mass(static_cast<double>(values[i]) - static_cast<double>(top));
        for (int64_t weight : found) sum += weight;
        if (weights) std::memcpy(weights + first, found, std::min<int64_t>(CHUNK, row.width - first) * sizeof *found);
    }
    return sum;
}

WIDEST int64_t weight_above(Row row, float floor, const int64_t* weights) {
    int64_t sum = 0;
    for (int64_t i = 0; i < row.width; i++) sum += row.values[i] >= floor ? weights[i] : 0;
    return sum;
}

WIDEST int64_t count_above(Row row, float floor) {
    int32_t count = 0;
    for (int64_t i = 0; i < row.width; i++) count += row.values[i] >= floor;
    return count;
}

// The ids not further below the peak than it takes to reach `need`; all finite ones if nothing less does.
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

// The first k ids of a sound row, in no order; fewer if fewer are finite.
std::vector<Entry> first_ids(Row row, float top, int64_t k) {
    auto found = candidates(row, top, k, [&](float floor) { return count_above(row, floor); });
    found.resize(partition_run(found, k, [](const Entry&) { return int64_t{1}; }));
    return found;
}

void keep(Row row, const std::vector<Entry>& kept) {
    std::fill(row.values, row.values + row.width, MASKED);
    for (const Entry& entry : kept) row.values[entry.id] = entry.value;
}

WIDEST void keep_above(Row row, float top, double floor) {
    for (int64_t i = 0; i < row.width; i++) {
        const double distance = static_cast<double>(row.values[i]) - static_cast<double>(top);
        row.values[i] = distance >= floor ? row.values[i] : MASKED;
    }
}

void top_ids_row(Row row, int64_t k, int64_t* ids) {
    const Peak peak = find_peak(row.values, row.width);
    int64_t filled = 0;
    if (peak.sound) {
        auto found = first_ids(row, peak.value, k);
        std::sort(found.begin(), found.end(), before);
        for (const Entry& entry : found) ids[filled++] = entry.id;
    }
    for (int64_t id = 0; filled < k; id++)
        if (!peak.sound || row.values[id] == MASKED) ids[filled++] = id;
}

}  // namespace

WIDEST void keep_allowed_row(Row row, const uint32_t* words, int64_t num_words) {
    for (int64_t first = 0; first < row.width; first += WORD_BITS) {
        const uint32_t word = first / WORD_BITS < num_words ? words[first / WORD_BITS] : 0;
        if (word == ~uint32_t{0}) continue;
        const int count = static_cast<int>(std::min<int64_t>(WORD_BITS, row.width - first));
        float* values = row.values + first;
        if (count == WORD_BITS)
            for (int i = 0; i < WORD_BITS; i++) values[i] = (word >> i & 1) || !(values[i] < INFINITY) ? values[i] : MASKED;
        else
            for (int i = 0; i < count; i++) values[i] = (word >> i & 1) || !(values[i] < INFINITY) ? values[i] : MASKED;
    }
}

WIDEST void divide_row(Row row, float by) {
    for (int64_t i = 0; i < row.width; i++) row.values[i] /= by;
}

void keep_top_k_row(Row row, int64_t k) {
    const Peak peak = find_peak(row.values, row.width);
    if (peak.sound && k < row.width) keep(row, first_ids(row, peak.value, k));
}

void keep_top_p_row(Row row, double p, int64_t* weights) {
    const Peak peak = find_peak(row.values, row.width);
    if (!peak.sound || p >= 1) return;
    const int64_t total = masses(row, peak.value, weights);
    const int64_t need = std::min(static_cast<int64_t>(std::ceil(static_cast<double>(total) * p)), total);
    auto kept = candidates(row, peak.value, need, [&](float floor) { return weight_above(row, floor, weights); });
    kept.resize(partition_run(kept, need, [&](const Entry& entry) { return weights[entry.id]; }));
    keep(row, kept);
}

void keep_min_p_row(Row row, double p) {
    const Peak peak = find_peak(row.values, row.width);
    if (peak.sound && p > 0) keep_above(row, peak.value, portable_log(std::max(p, DBL_MIN)));
}

int64_t sample_row(Row row, Key key, bool greedy) {
    const Peak peak = find_peak(row.values, row.width);
    if (!peak.sound) return -1;
    const int64_t likeliest = find(row, peak.value);
    if (greedy) return likeliest;
    Best best = {MASKED, row.width};
    sample_chunk(row, key, likeliest / CHUNK * CHUNK, best);  // a high score early lets the others be skipped
    for (int64_t first = 0; first < row.width; first += CHUNK) sample_chunk(row, key, first, best);
    return best.id;
}

float log_sum_exp_row(Row row) {
    const Peak peak = find_peak(row.values, row.width);
    if (!peak.sound) return std::numeric_limits<float>::quiet_NaN();
    const double total = static_cast<double>(masses(row, peak.value, nullptr));
    return static_cast<float>(static_cast<double>(peak.value) + portable_log(total * FRACTION));
}

}  // namespace foreword

using namespace foreword;

extern "C" {

void foreword_log_sum_exp(Machine* machine, const float* logits, int64_t num_rows, int64_t width, float* out) {
    each_row(machine, logits, num_rows, width, [&](Row row, int64_t r, int) { out[r] = log_sum_exp_row(row); });
}

void foreword_top_ids(Machine* machine, const float* logits, int64_t num_rows, int64_t width, int64_t k, int64_t* ids) {
    each_row(machine, logits, num_rows, width, [&](Row row, int64_t r, int) { top_ids_row(row, k, ids + r * k); });
}

void foreword_keep_allowed(Machine* machine, float* logits, int64_t num_rows, int64_t width, const uint32_t* masks,
                           int64_t num_words) {
    each_row(machine, logits, num_rows, width,
             [&](Row row, int64_t r, int) { keep_allowed_row(row, masks + r * num_words, num_words); });
}

void foreword_keep_top_k(Machine* machine, float* logits, int64_t num_rows, int64_t width, const int64_t* k) {
    each_row(machine, logits, num_rows, width, [&](Row row, int64_t r, int) { keep_top_k_row(row, k[r]); });
}

void foreword_keep_top_p(Machine* machine, float* logits, int64_t num_rows, int64_t width, const double* p) {
    each_row(machine, logits, num_rows, width, [&](Row row, int64_t r, int thread) {
        keep_top_p_row(row, p[r], reinterpret_cast<int64_t*>(machine->pool().scratch(thread, width * 8)));
    });
}

void foreword_keep_min_p(Machine* machine, float* logits, int64_t num_rows, int64_t width, const double* p) {
    each_row(machine, logits, num_rows, width, [&](Row row, int64_t r, int) { keep_min_p_row(row, p[r]); });
}

void foreword_sample(Machine* machine, const float* logits, int64_t num_rows, int64_t width, const int64_t* seeds,
                     const int64_t* positions, const uint8_t* greedy, int64_t* out) {
    each_row(machine, logits, num_rows, width, [&](Row row, int64_t r, int) {
        const Key key = {static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r])};
        out[r] = sample_row(row, key, greedy[r] != 0);
    });
}

// Noise of given words, and the bound that sampling skips by: for the tests.
void foreword_noise(const uint32_t* words, int64_t count, float* exact, float* bound) {
    for (int64_t i = 0; i < count; i++) {
        exact[i] = noise(words[i]);
        bound[i] = noise_bound(words[i]);
    }
}

}  // extern "C"
