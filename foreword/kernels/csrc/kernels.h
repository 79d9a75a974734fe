// The operations of the engine on the CPU: what they take, and the tables that each instruction set fills.
//
// Every operation is row-invariant: the bits of one row depend on nothing but that row (docs: exactness). Its result may
// differ between instruction sets, never between row counts, thread counts or neighbours. Shapes use the letters of
// core/batch.py. Callers have checked shapes and types.
#pragma once

#include <cstdint>

#include "isa.h"
#include "pool.h"

namespace foreword {

// Types of activations and of the KV cache.
enum class Type : int32_t { F32, BF16, I8 };

constexpr int64_t bytes_of(Type type) { return type == Type::F32 ? 4 : type == Type::BF16 ? 2 : 1; }

// How a weight lies in memory once it is packed, and how it stands in files. Files know neither I8 nor I4.
enum class Kind : int32_t { F32, BF16, F16, I8, I4, Q8_0, Q5_0, Q4_0, Q4_K, Q5_K, Q6_K };

constexpr bool is_dense(Kind kind) { return kind <= Kind::F16; }

// Row r of a matrix begins `r * stride` bytes after `data`; the values of one row are consecutive.
struct Rows {
    char* data;
    int64_t stride;
};

constexpr int64_t TILE = 16;  // output columns that are packed together

// A packed weight [n, k]: y = x W^T + bias. `tiles` is one run of bytes for each TILE rows of W (the last one filled up
// with zeros), one after the other; packing.h says how they look inside. bias [n] is float32 or null.
struct Weight {
    Kind kind;
    int32_t reserved;
    int64_t n, k;
    const uint8_t* tiles;
    const float* bias;
};

// x [rows, k] -> y [rows, n]. y may be a range of columns of a wider matrix.
struct LinearArgs {
    const Weight& weight;
    Type x_type, y_type;
    Rows x, y;
    int64_t rows;
};

using Linear = void (*)(Context&, const LinearArgs&);
Linear dense_linear(Isa isa);      // F32, BF16, F16
Linear quantized_linear(Isa isa);  // all other kinds; activations are rounded to int8 row by row

// Rotates the first `rotary` values of each of `heads` vectors [dim] a row, in halves. Values beyond `rotary` are copied.
//   table       float32 [positions, rotary]: cosines of rotary / 2 angles, then their sines
//   directions  int32 [rotary / 2]: which of a row's positions an angle turns by; null: all by the first
//   positions   int64, one a row, or one for each direction
struct RopeArgs {
    const float* table;
    const int32_t* directions;
    Rows positions;
    Type type;
    Rows x, y;
    int64_t heads, dim, rotary, rows;
};

// y = x / sqrt(mean(x^2) + eps) * weight for each of `heads` vectors [width] a row, in float32; weight float32 [width].
struct NormArgs {
    const float* weight;
    float eps;
    Type type;
    Rows x, y;
    int64_t heads, width, rows;
};

enum class Activation : int32_t { SILU, GELU, GELU_TANH };

// x [rows, 2 * width] -> y [rows, width] = activation(x[:, :width]) * x[:, width:], in float32, rounded once.
struct GatedArgs {
    Activation activation;
    Type type;
    Rows x, y;
    int64_t width, rows;
};

// y [rows, k] = rows `ids` of the weight, times scale, rounded once.
struct EmbeddingArgs {
    const Weight& weight;
    const int64_t* ids;
    float scale;
    Type type;
    Rows y;
    int64_t rows;
};

// y = a + b
struct AddArgs {
    Type type;
    Rows a, b, y;
    int64_t width, rows;
};

// x = cap * tanh(x / cap), float32, in place
struct SoftcapArgs {
    float cap;
    Rows x;
    int64_t width, rows;
};

// K and V of one layer [S, heads, dim]. With type I8, a float32 scale for each slot and head [S, heads]:
// the largest magnitude of that vector / 127, written once with the vector.
struct KV {
    Type type;
    int32_t reserved;
    char* k;
    char* v;
    float* k_scale;
    float* v_scale;
    int64_t heads, dim;
};

// k, v [rows, heads * dim] of `type` go to the slots.
struct WriteKVArgs {
    const KV& kv;
    const int64_t* slots;
    Type type;
    Rows k, v;
    int64_t rows;
};

struct RowKernels {
    void (*norm)(Context&, const NormArgs&);
    void (*rope)(Context&, const RopeArgs&);
    void (*gated)(Context&, const GatedArgs&);
    void (*embedding)(Context&, const EmbeddingArgs&);
    void (*add)(Context&, const AddArgs&);
    void (*softcap)(Context&, const SoftcapArgs&);
    void (*write_kv)(Context&, const WriteKVArgs&);
};

const RowKernels& row_kernels(Isa isa);

// q [rows, heads * dim] of `type` -> out, the same. Row t of request b (row_starts[b] <= t < row_starts[b + 1]) attends to
// the positions p of b with positions[t] - window < p <= positions[t], which lie in slot
// block_tables[b * table_width + p / block_size] * block_size + p % block_size. window 0: to the beginning.
// Scores are (q . k) * scale, capped to softcap * tanh(s / softcap) unless softcap is 0. Query head h reads the
// KV head h / (heads / kv.heads). What a row must not see is selected away, never multiplied: it may be NaN.
struct AttentionArgs {
    const KV& kv;
    const int64_t* positions;
    const int64_t* block_tables;
    const int64_t* row_starts;
    int64_t num_requests, table_width, block_size;
    Type type;
    Rows q, out;
    int64_t heads, window;
    float scale, softcap;
};

using Attention = void (*)(Context&, const AttentionArgs&);
Attention attention(Isa isa);

}  // namespace foreword
