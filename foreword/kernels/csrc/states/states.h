// Layers with state: causal convolution, the gated delta rule and Mamba-2's scan. kernels/ops.py defines both, core/states.py the memory.
//
// A row reads the anchor of its segment and the rows since then, in order of position, and writes its own place in the
// ring: a step can be repeated, and its bits do not depend on how a prompt was cut.
#pragma once

#include "common/kernels.h"

namespace foreword {

constexpr int64_t SEGMENT = 64;   // tokens between anchors
constexpr int64_t NO_ANCHOR = -1; // entry of an anchor table: zeros, or not kept

// Fields of StateLayer in core/batch.py; `type` is that of inputs, tails, keys and updates.
struct StateLayer {
    Type type;
    int32_t reserved;
    int64_t channels, kernel_size, key_heads, value_heads, key_dim, value_dim;
    int64_t ring, num_slots, num_anchors;
    char* inputs;     // [slots, ring, channels]
    char* tails;      // [anchors, kernel_size - 1, channels]
    char* keys;       // [slots, ring, key_heads, key_dim]
    char* updates;    // [slots, ring, value_heads, value_dim]
    float* decays;    // [slots, ring, value_heads]
    float* matrices;  // [anchors, value_heads, key_dim, value_dim]
};

// The rows of a batch, by request: see core/batch.py.
struct StateRows {
    const int64_t* positions;
    const int64_t* query_start_loc;
    const int64_t* slots;
    const int64_t* anchor_tables;
    int64_t num_requests, table_width;
};

enum class Gate : int32_t { NONE, SILU, SIGMOID, GELU_TANH };

// y = x * gate(g)
struct GateArgs {
    Gate gate;
    Type type;
    RowView x, g, y;
    int64_t width, rows;
};

// weight [kernel_size, channels], bias [channels] or null
struct CausalConvArgs {
    const StateLayer& layer;
    const StateRows& rows;
    const float* weight;
    const float* bias;
    Gate gate;  // y = sum * gate(sum); NONE: the sum
    RowView x, y;
};

// The gated delta rule, or a scan: qkv is then C, B and x, and alpha the time step. rates, offsets, skips [value_heads]
struct StateRuleArgs {
    const StateLayer& layer;
    const StateRows& rows;
    const float* rates;
    const float* offsets;
    const float* skips;                    // of a scan
    float min_time_step, max_time_step;    // of a scan
    RowView qkv, alpha, beta, y;           // beta: of the delta rule
};

struct StateKernels {
    void (*gate)(Context&, const GateArgs&);
    void (*causal_conv)(Context&, const CausalConvArgs&);
    void (*delta_rule)(Context&, const StateRuleArgs&);
    void (*ssm_scan)(Context&, const StateRuleArgs&);
};

extern const StateKernels STATES_PORTABLE;
#if FOREWORD_X86
extern const StateKernels STATES_AVX2;
extern const StateKernels STATES_AVX512;
#elif FOREWORD_ARM
extern const StateKernels STATES_NEON;
#endif

const StateKernels& state_kernels(Isa isa);

}  // namespace foreword
