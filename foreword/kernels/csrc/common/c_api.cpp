// The C interface for kernels/cpu/library.py. Callers have checked types, shapes and sizes.

#include <algorithm>
#include <exception>

#include "drafting/draft_loop.h"
#include "common/float_mode.h"
#include "common/packing.h"
#include "common/forward_program.h"

using foreword::Isa;
using foreword::Format;
using foreword::CpuContext;
using foreword::TILE;

extern "C" {

// Version of the functions here, in logits_processors.cpp, sampler.cpp and suffix_index.cpp, and of their structures.
int64_t foreword_native_version() { return 9; }

int32_t foreword_supported(int32_t isa) { return foreword::supported(static_cast<Isa>(isa)); }

// Null if the system does not grant the threads.
CpuContext* foreword_machine_new(int32_t isa, int32_t num_threads) {
    try {
        return new CpuContext(static_cast<Isa>(isa), num_threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void foreword_machine_delete(CpuContext* cpu) { delete cpu; }

void foreword_run(CpuContext* cpu, const foreword::Instruction* instructions, int64_t count,
                  const foreword::ProgramInputs* inputs) {
    cpu->run(instructions, count, *inputs);
}

void foreword_draft(CpuContext* cpu, const foreword::Instruction* instructions, int64_t count,
                    const foreword::ProgramInputs* inputs, const foreword::DraftArgs* draft) {
    foreword::run_draft(*cpu, {instructions, count}, *inputs, *draft);
}

int64_t foreword_packed_bytes(int32_t format, int64_t n, int64_t k, int64_t group_size) {
    return foreword::num_tiles(n) * foreword::tile_bytes(static_cast<Format>(format), k, group_size);
}

// rows: n pointers to rows of format `source`, or to their GroupedRow.
void foreword_pack(CpuContext* cpu, int32_t format, int32_t source, const void* const* rows, int64_t n, int64_t k,
                   int64_t group_size, uint8_t* tiles) {
    const auto to = static_cast<Format>(format), from = static_cast<Format>(source);
    const int64_t size = foreword::tile_bytes(to, k, group_size);
    const foreword::FloatMode mode;
    cpu->pool().run(foreword::num_tiles(n), [&](int64_t tile, int) {
        const int64_t count = std::min(TILE, n - tile * TILE);
        foreword::pack_tile(to, from, rows + tile * TILE, count, k, group_size, tiles + tile * size);
    });
}

// Rows [0, n) of a packed weight -> float32 [n, k].
void foreword_unpack(CpuContext* cpu, const foreword::Weight* weight, float* out) {
    cpu->pool().run(weight->n, [&](int64_t row, int) { foreword::unpack_row(*weight, row, out + row * weight->k); });
}
}
