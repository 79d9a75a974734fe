// One row of logits: the operations of reference_sampling.py, to the same bits. A row that is not sound (see scan.h)
// is left as it is.
#pragma once

#include <cstdint>

#include "float_mode.h"
#include "noise.h"
#include "program.h"

namespace foreword {

struct Row {
    float* values;
    int64_t width;
};

// Ids whose bit is clear, or that lie beyond the `num_words` words, are masked, in any row; NaN and +inf stay.
void keep_allowed_row(Row row, const uint32_t* words, int64_t num_words);
void divide_row(Row row, float by);
void keep_top_k_row(Row row, int64_t k);
void keep_top_p_row(Row row, double p, int64_t* weights);  // weights [width]: memory to work in
void keep_typical_p_row(Row row, double p, int64_t* weights, float* keys);  // keys [width]: the same
void keep_top_n_sigma_row(Row row, double n);
void exclude_top_row(Row row, Key key, double chance, double threshold);
void keep_min_p_row(Row row, double p);
int64_t sample_row(Row row, Key key, bool greedy);  // -1 if the row is not sound
float log_sum_exp_row(Row row);                     // NaN if the row is not sound

constexpr int64_t WORTH_SHARING = 1 << 15;  // values; with fewer, waking a thread takes longer than it would work

// body(row, number, thread) for every row, by several threads where it pays.
template <class Body>
void each_row(Machine* machine, const float* logits, int64_t num_rows, int64_t width, const Body& body) {
    const auto one = [&](int64_t r, int thread) { body(Row{const_cast<float*>(logits) + r * width, width}, r, thread); };
    const FloatMode mode;
    if (num_rows * width >= WORTH_SHARING) return machine->pool().run(num_rows, one);
    for (int64_t r = 0; r < num_rows; r++) one(r, 0);
}

}  // namespace foreword
