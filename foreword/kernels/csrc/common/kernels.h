// The CPU operations: their arguments, and the kernel tables that each instruction set fills.
//
// Every operation is row-invariant: the bits of a row depend only on that row (docs: exactness). Results may differ
// between instruction sets, never between row counts, thread counts or neighbouring rows. Shapes use the letters of
// core/batch.py. Callers have checked shapes and types.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/thread_pool.h"

namespace foreword {

// Types of activations and of the KV cache.
enum class Type : int32_t { F32, BF16, I8 };

constexpr int64_t bytes_of(Type type) { return type == Type::F32 ? 4 : type == Type::BF16 ? 2 : 1; }

// Formats of packed weights and of files; files have neither I8 nor I4. G4, G8 (grouped integers) and F8 (blocks of
// float8_e4m3) come from safetensors, the formats after I4 from GGUF; those from Q4_K on have blocks of 256.
enum class Format : int32_t {
    F32, BF16, F16, I8, I4, Q8_0, Q5_0, Q4_0, Q4_1, Q5_1, IQ4_NL, MXFP4, G4, G8, F8, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_XS
};
constexpr int NUM_FORMATS = static_cast<int>(Format::IQ4_XS) + 1;

// Scales come apart from the values, one for each `group_size` values of a row.
constexpr bool is_grouped(Format format) { return format == Format::G4 || format == Format::G8 || format == Format::F8; }

// Multiplied as floats.
constexpr bool is_dense(Format format) { return format <= Format::F16 || format == Format::F8; }

// A matrix: row r is at data + r * stride bytes; the values of a row are contiguous.
struct RowView {
    char* data;
    int64_t stride;
};

constexpr int64_t TILE = 16;  // output columns packed together

// A packed weight [n, k]: y = x W^T + bias. `tiles` holds TILE rows of W each (the last one zero-padded), in the
// layout of packing.h. Of grouped formats, group_size values of k share a scale; others have 0. bias [n] is float32 or null.
struct Weight {
    Format format;
    int32_t group_size;
    int64_t n, k;
    const uint8_t* tiles;
    const float* bias;
};

// x [rows, k] -> y [rows, n]. y may be a range of columns of a wider matrix.
struct LinearArgs {
    const Weight& weight;
    Type x_type, y_type;
    RowView x, y;
    int64_t rows;
};

using Linear = void (*)(Context&, const LinearArgs&);
Linear dense_linear(Isa isa);      // F32, BF16, F16, F8
Linear quantized_linear(Isa isa);  // all other formats; activations are quantized to int8 by row

// The same product in parts of one thread, for callers that share out the work of several: lay_out() writes x to a panel
// of panel_bytes(), then multiply() computes the columns of tiles [tile, tile + count) for all rows, at most PANEL_ROWS.
struct LinearParts {
    int64_t (*panel_bytes)(const LinearArgs&);
    void (*lay_out)(const LinearArgs&, char* panel, ThreadPool&, int thread);
    void (*multiply)(const LinearArgs&, char* panel, int64_t tile, int64_t count, ThreadPool&, int thread);
};

constexpr int64_t PANEL_ROWS = 64;
constexpr int64_t PART_TILES = 4;  // `tile` and `count` are multiples, but for the last tiles

LinearParts dense_parts(Isa isa, Format format);
LinearParts quantized_parts(Isa isa);

// Rotates the first `rotary` values of each of `heads` vectors [dim] a row, in halves. Values beyond `rotary` are copied.
//   cos_sin     float32 [positions, rotary]: cosines of rotary / 2 angles, then their sines
//   angle_axes  int32 [rotary / 2]: the M-RoPE axis of each angle; null: one position per row
//   positions   int64, one per row, or one for each axis
struct RopeArgs {
    const float* cos_sin;
    const int32_t* angle_axes;
    RowView positions;
    Type type;
    RowView x, y;
    int64_t heads, dim, rotary, rows;
};

// y = x / sqrt(mean(x^2) + eps) * weight for each of `heads` vectors [width] a row, in float32; weight float32 [width].
struct RmsNormArgs {
    const float* weight;
    float eps;
    Type type;
    RowView x, y;
    int64_t heads, width, rows;
    int64_t weight_stride = 0;  // between the weights of two heads; 0: one for all
};

// y = (x - mean) / sqrt(variance + eps) * weight + bias, else as RmsNormArgs; bias float32 [width] or null.
struct LayerNormArgs {
    const float* weight;
    const float* bias;
    float eps;
    Type type;
    RowView x, y;
    int64_t heads, width, rows;
    int64_t weight_stride = 0;
};

enum class Activation : int32_t { SILU, GELU, GELU_TANH, GPT_OSS, RELU2, XIELU };

// x [rows, 2 * width] -> y [rows, width] = activation(x[:, :width]) * x[:, width:], in float32, rounded once.
// GPT_OSS: g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = up within -7 and 7. RELU2: max(g, 0)^2.
// XIELU: g / 2 + alphas[0] g^2 for g > 0, else g / 2 + alphas[1] (e^g - 1 - g). y may be the gates.
//   has_up  false: x is [rows, width], and there is no second factor
struct GatedActArgs {
    Activation activation;
    Type type;
    RowView x, y;
    int64_t width, rows;
    bool has_up = true;
    float alphas[2] = {};
};

// y [rows, k] = rows `ids` of the weight, times scale, rounded once.
struct EmbeddingArgs {
    const Weight& weight;
    const int64_t* ids;
    float scale;
    Type type;
    RowView y;
    int64_t rows;
};

// y = (a + b) * scale, in float32, rounded once
struct AddArgs {
    float scale;
    Type type;
    RowView a, b, y;
    int64_t width, rows;
};

// x = cap * tanh(x / cap), float32, in place
struct SoftcapArgs {
    float cap;
    RowView x;
    int64_t width, rows;
};

// y = x * sigmoid(gate), gate [rows] of gate_type, in float32, rounded once
struct ScaleBySigmoidArgs {
    Type type, gate_type;
    RowView x, gate, y;
    int64_t width, rows;
};

// y = the sum over j < terms of factors[row * terms + j] * x[places[row * terms + j]], in order, plus add_to unless it is
// null: in float32 without fused operations, rounded once. x float32; add_to and y of `type`.
struct WeightedSumArgs {
    const int64_t* places;
    const float* factors;
    int64_t terms;
    Type type;
    RowView x, add_to, y;
    int64_t width, rows;
};

// K [S, heads, dim] and V [S, heads, value_dim] of one layer. With type I8, float32 scales [S, heads]: the largest magnitude
// of the vector / 127, written with the vector. Latent attention (is_latent) has one head, and V is the first value_dim
// values of each K, in the same memory: v_scale is theirs, and k_scale that of K's other values.
struct KV {
    Type type;
    int32_t is_latent;
    char* k;
    char* v;
    float* k_scale;
    float* v_scale;
    int64_t heads, dim, value_dim;

    int64_t value_stride() const { return is_latent ? dim : heads * value_dim; }  // values from one slot to the next
};

// Write k [rows, heads * dim] and v [rows, heads * value_dim] of `type` to the slots; with latent attention, k [rows, dim -
// value_dim] has the values of K that are none of V.
struct WriteKVArgs {
    const KV& kv;
    const int64_t* slots;
    Type type;
    RowView k, v;
    int64_t rows;
};

// out [num_rows, num_ranks] = scale * x A^T, for the rows `rows` of x; A [num_ranks, k] of `type`.
struct LoraShrinkArgs {
    Type type;
    RowView x;
    const int64_t* rows;
    int64_t num_rows;
    const char* a;
    int64_t num_ranks, k;
    float scale;
    float* out;
    int64_t out_stride;  // values
};

// The rows `rows` of y += hidden B, in float32, rounded once; B [rank, num_columns] of `type`, b_stride values apart.
//   hidden  [num_rows, rank], hidden_stride values apart
//   sums    num_rows * num_columns values, where rows are rounded up to whole vectors
struct LoraExpandArgs {
    Type type;
    RowView y;
    const int64_t* rows;
    int64_t num_rows;
    const char* b;
    int64_t b_stride, num_columns, rank;
    const float* hidden;
    int64_t hidden_stride;
    float* sums;
};

struct RowKernels {
    void (*rms_norm)(Context&, const RmsNormArgs&);
    void (*layer_norm)(Context&, const LayerNormArgs&);
    void (*rope)(Context&, const RopeArgs&);
    void (*gated_act)(Context&, const GatedActArgs&);
    void (*gated_act_alone)(const GatedActArgs&);  // by the calling thread
    void (*embedding)(Context&, const EmbeddingArgs&);
    void (*add)(Context&, const AddArgs&);
    void (*softcap)(Context&, const SoftcapArgs&);
    void (*scale_by_sigmoid)(Context&, const ScaleBySigmoidArgs&);
    void (*weighted_sum)(Context&, const WeightedSumArgs&);
    void (*write_kv)(Context&, const WriteKVArgs&);
    void (*lora_shrink)(const LoraShrinkArgs&);
    void (*lora_expand)(const LoraExpandArgs&);
};

const RowKernels& row_kernels(Isa isa);

// q [rows, heads * dim] of `type` -> out [rows, heads * value_dim]. Row t of request b (query_start_loc[b] <= t < query_start_loc[b + 1])
// attends to the positions p of b with positions[t] - window < p <= positions[t], which lie in slot
// block_tables[b * table_width + p / block_size] * block_size + p % block_size. window 0: unlimited.
// Scores are (q . k) * scale, capped to softcap * tanh(s / softcap) unless softcap is 0. sinks [heads] or null: a further
// score of each head, without a value. Query head h reads the KV head h / (heads / kv.heads). Masked values are selected away, never multiplied: they may be NaN.
struct AttentionArgs {
    const KV& kv;
    const int64_t* positions;
    const int64_t* block_tables;
    const int64_t* query_start_loc;
    int64_t num_requests, table_width, block_size;
    Type type;
    RowView q, out;
    int64_t heads, window, first;  // first position that is seen
    float scale, softcap;
    const float* sinks;
};

using Attention = void (*)(Context&, const AttentionArgs&);
Attention attention(Isa isa);

}  // namespace foreword
