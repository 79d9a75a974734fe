// Masks, penalties and filters of logits, with the bits of kernels/reference/sampling.py. Callers have checked shapes and
// types.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sampling/logits_row.h"

namespace foreword {
namespace {

constexpr int WORD_BITS = 32;
constexpr double SIGMA_UNITS = 1024;  // deviations are rounded to 1 / 1024, so that their sums are exact
constexpr double SIGMA_MAX_DISTANCE = 1024;

// Integers below 2^51, exactly, without instructions of newer processors only.
inline int64_t to_int(double x) { return bits<int64_t>(x + ROUND_MAGIC) - bits<int64_t>(ROUND_MAGIC); }
inline double to_double(int64_t x) { return bits<double>(x + bits<int64_t>(ROUND_MAGIC)) - ROUND_MAGIC; }

inline double below(float value, float top) { return static_cast<double>(value) - static_cast<double>(top); }

// The least weight that is a share p of `total`.
inline int64_t share_of(int64_t total, double p) {
    return std::min(static_cast<int64_t>(std::ceil(static_cast<double>(total) * p)), total);
}

// Sum of weight times (value - maximum), rounded for each id.
MULTIVERSION int64_t weighted_distance(Row row, float top, const int64_t* weights) {
    int64_t sum = 0;
    for (int64_t i = 0; i < row.width; i++) {
        const double distance = weights[i] > 0 ? below(row.values[i], top) : 0.0;
        sum += to_int(to_double(weights[i]) * distance);
    }
    return sum;
}

// Keys that rank ids by the distance of (value - maximum) from `mean`.
MULTIVERSION void typical_keys(Row row, float top, double mean, float* keys) {
    for (int64_t i = 0; i < row.width; i++) keys[i] = -static_cast<float>(std::fabs(below(row.values[i], top) - mean));
}

// Moments of (value - maximum) in units of 1 / SIGMA_UNITS.
struct Moments {
    int64_t count, sum, squares;
};

MULTIVERSION Moments moments(Row row, float top) {
    Moments found = {0, 0, 0};
    for (int64_t i = 0; i < row.width; i++) {
        const double distance = std::max(below(row.values[i], top), -SIGMA_MAX_DISTANCE);
        const double steps = row.values[i] > MASKED ? distance * SIGMA_UNITS + ROUND_MAGIC - ROUND_MAGIC : 0.0;
        found.count += row.values[i] > MASKED;
        found.sum += to_int(steps);
        found.squares += to_int(steps * steps);
    }
    return found;
}

double deviation(const Moments& found) {
    const double count = static_cast<double>(found.count), mean = static_cast<double>(found.sum) / count;
    const double variance = static_cast<double>(found.squares) / count - mean * mean;
    return std::sqrt(std::max(variance, 0.0)) / SIGMA_UNITS;
}

void keep(Row row, const std::vector<Entry>& kept) {
    std::fill(row.values, row.values + row.width, MASKED);
    for (const Entry& entry : kept) row.values[entry.id] = entry.value;
}

MULTIVERSION void mask_below(Row row, float top, double floor) {
    for (int64_t i = 0; i < row.width; i++) {
        row.values[i] = below(row.values[i], top) >= floor ? row.values[i] : MASKED;
    }
}

}  // namespace

MULTIVERSION void apply_mask_row(Row row, const uint32_t* words, int64_t num_words) {
    for (int64_t first = 0; first < row.width; first += WORD_BITS) {
        const uint32_t word = first / WORD_BITS < num_words ? words[first / WORD_BITS] : 0;
        if (word == ~uint32_t{0}) continue;
        const int count = static_cast<int>(std::min<int64_t>(WORD_BITS, row.width - first));
        float* values = row.values + first;
        if (count == WORD_BITS)  // a constant count is vectorized
            for (int i = 0; i < WORD_BITS; i++) values[i] = (word >> i & 1) || !(values[i] < INFINITY) ? values[i] : MASKED;
        else
            for (int i = 0; i < count; i++) values[i] = (word >> i & 1) || !(values[i] < INFINITY) ? values[i] : MASKED;
    }
}

MULTIVERSION void apply_temperature_row(Row row, float by) {
    for (int64_t i = 0; i < row.width; i++) row.values[i] /= by;
}

void apply_top_k_row(Row row, int64_t k) {
    const RowMax row_max = find_max(row.values, row.width);
    if (row_max.finite && k < row.width) keep(row, first_ids(row, row_max.value, k));
}

void apply_top_p_row(Row row, double p, int64_t* weights) {
    const RowMax row_max = find_max(row.values, row.width);
    if (!row_max.finite || p >= 1) return;
    const int64_t total = exp_weights(row, row_max.value, weights);
    const int64_t need = share_of(total, p);
    auto kept = candidates(row, row_max.value, need, [&](float floor) { return weight_above(row, floor, weights); });
    kept.resize(partition_prefix(kept, need, [&](const Entry& entry) { return weights[entry.id]; }));
    keep(row, kept);
}

// The distance of -log(probability) from its mean is that of the logit from its mean: normalization cancels.
void apply_typical_p_row(Row row, double p, int64_t* weights, float* keys) {
    const RowMax row_max = find_max(row.values, row.width);
    if (!row_max.finite || p >= 1) return;
    const int64_t total = exp_weights(row, row_max.value, weights), need = share_of(total, p);
    const double mean = static_cast<double>(weighted_distance(row, row_max.value, weights)) / static_cast<double>(total);
    typical_keys(row, row_max.value, mean, keys);
    const Row ranked = {keys, row.width};
    auto kept = candidates(ranked, 0, need, [&](float floor) { return weight_above(ranked, floor, weights); });
    kept.resize(partition_prefix(kept, need, [&](const Entry& entry) { return weights[entry.id]; }));
    for (Entry& entry : kept) entry.value = row.values[entry.id];
    keep(row, kept);
}

void apply_top_n_sigma_row(Row row, double n) {
    const RowMax row_max = find_max(row.values, row.width);
    if (row_max.finite) mask_below(row, row_max.value, -(n * deviation(moments(row, row_max.value))));
}

void apply_xtc_row(Row row, Key key, double probability, double threshold) {
    if ((philox_word(key, XTC_COIN) + 0.5) * 0x1p-32 >= probability) return;
    const RowMax row_max = find_max(row.values, row.width);
    if (!row_max.finite) return;
    const double bound = threshold * static_cast<double>(exp_weights(row, row_max.value, nullptr));
    const double nearest = portable_log(std::max(threshold, DBL_MIN)) - 1;  // the sum is at least the weight of the maximum
    std::vector<Entry> reaching;
    for (int64_t id = 0; id < row.width; id++) {
        const double distance = below(row.values[id], row_max.value);
        if (row.values[id] == MASKED || (threshold > 0 && distance < nearest)) continue;
        if (static_cast<double>(exp_fixed_point(distance)) >= bound) reaching.push_back({row.values[id], static_cast<int32_t>(id)});
    }
    if (reaching.empty()) return;
    const auto last = std::max_element(reaching.begin(), reaching.end(), ranks_before);
    for (const Entry& entry : reaching)
        if (entry.id != last->id) row.values[entry.id] = MASKED;
}

void apply_min_p_row(Row row, double p) {
    const RowMax row_max = find_max(row.values, row.width);
    if (row_max.finite && p > 0) mask_below(row, row_max.value, portable_log(std::max(p, DBL_MIN)));
}

// body(row, r, first, end) for the ids of each row, of num_ids in all; starts[r] is the first id of row r.
template <class Body>
InputError each_row_of_ids(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const int64_t* starts, int64_t num_ids,
                           const Body& body) {
    const bool ascending = std::is_sorted(starts, starts + num_rows + 1);
    if (!ascending || starts[0] < 0 || starts[num_rows] > num_ids) return InputError::ID_STARTS;
    const auto one = [&](int64_t r, int) { body(Row{logits + r * width, width}, r, starts[r], starts[r + 1]); };
    const FloatMode mode;
    if (starts[num_rows] >= MIN_PARALLEL_VALUES) {
        cpu->pool().run(num_rows, one);
    } else {
        for (int64_t r = 0; r < num_rows; r++) one(r, 0);
    }
    return InputError::NONE;
}

}  // namespace foreword

using namespace foreword;

extern "C" {

void foreword_keep_allowed(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const uint32_t* masks,
                           int64_t num_words) {
    each_row(cpu, logits, num_rows, width,
             [&](Row row, int64_t r, int) { apply_mask_row(row, masks + r * num_words, num_words); });
}

void foreword_mask_ids(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const int64_t* ids, int64_t count) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t, int) {
        for (int64_t i = 0; i < count; i++)
            if (has_id(row, ids[i])) row.values[ids[i]] = MASKED;
    });
}

void foreword_apply_temperature(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const float* by) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) { apply_temperature_row(row, by[r]); });
}

void foreword_keep_top_k(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const int64_t* k) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) { apply_top_k_row(row, k[r]); });
}

void foreword_keep_top_p(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const double* p) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int thread) {
        apply_top_p_row(row, p[r], reinterpret_cast<int64_t*>(cpu->pool().scratch(thread, width * 8)));
    });
}

void foreword_keep_min_p(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const double* p) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) { apply_min_p_row(row, p[r]); });
}

void foreword_keep_typical_p(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const double* p) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int thread) {
        auto* weights = reinterpret_cast<int64_t*>(cpu->pool().scratch(thread, width * 12));
        apply_typical_p_row(row, p[r], weights, reinterpret_cast<float*>(weights + width));
    });
}

void foreword_keep_top_n_sigma(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const double* n) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) { apply_top_n_sigma_row(row, n[r]); });
}

void foreword_exclude_top(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const int64_t* seeds,
                          const int64_t* positions, const double* probabilities, const double* thresholds) {
    each_row(cpu, logits, num_rows, width, [&](Row row, int64_t r, int) {
        const Key key = {static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r])};
        apply_xtc_row(row, key, probabilities[r], thresholds[r]);
    });
}

InputError foreword_add_at(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const int64_t* starts,
                           const int64_t* ids, int64_t num_ids, const float* biases) {
    return each_row_of_ids(cpu, logits, num_rows, width, starts, num_ids, [&](Row row, int64_t, int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++)
            if (has_id(row, ids[i])) row.values[ids[i]] += biases[i];
    });
}

InputError foreword_penalize(CpuContext* cpu, float* logits, int64_t num_rows, int64_t width, const int64_t* starts,
                             const int64_t* ids, int64_t num_ids, const float* penalties) {
    return each_row_of_ids(cpu, logits, num_rows, width, starts, num_ids, [&](Row row, int64_t r, int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) {
            if (!has_id(row, ids[i])) continue;
            float& value = row.values[ids[i]];
            value = value < 0 ? value * penalties[r] : value / penalties[r];
        }
    });
}

}  // extern "C"
