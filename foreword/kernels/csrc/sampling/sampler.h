// Operations on one row of logits, with the bits of kernels/reference/sampling.py. A row that is not finite (see
// logits_row.h) stays unchanged.
#pragma once

#include <cstdint>

#include "common/float_mode.h"
#include "sampling/philox.h"
#include "common/forward_program.h"

namespace foreword {

struct Row {
    float* values;
    int64_t width;
};

// Ids come from configs and requests: those outside of the vocabulary are ignored.
inline bool has_id(Row row, int64_t id) { return 0 <= id && id < row.width; }

// Mask ids whose bit is clear or beyond `num_words` words, in any row; NaN and +inf stay.
void apply_mask_row(Row row, const uint32_t* words, int64_t num_words);
void apply_temperature_row(Row row, float by);
void apply_top_k_row(Row row, int64_t k);
void apply_top_p_row(Row row, double p, int64_t* weights);  // weights [width]: scratch
void apply_typical_p_row(Row row, double p, int64_t* weights, float* keys);  // keys [width]: scratch
void apply_top_n_sigma_row(Row row, double n);
void apply_xtc_row(Row row, Key key, double probability, double threshold);
void apply_min_p_row(Row row, double p);
int64_t sample_row(Row row, Key key, bool greedy);  // -1 if the row is not finite
float log_sum_exp_row(Row row);                     // NaN if the row is not finite

constexpr int64_t MIN_PARALLEL_VALUES = 1 << 15;  // values; fewer are done sooner than a thread wakes

// body(row, index, thread) for every row, by several threads where it pays.
template <class Body>
void each_row(CpuContext* cpu, const float* logits, int64_t num_rows, int64_t width, const Body& body) {
    const auto process = [&](int64_t r, int thread) { body(Row{const_cast<float*>(logits) + r * width, width}, r, thread); };
    const FloatMode mode;
    if (num_rows * width >= MIN_PARALLEL_VALUES) return cpu->pool().run(num_rows, process);
    for (int64_t r = 0; r < num_rows; r++) process(r, 0);
}

}  // namespace foreword
