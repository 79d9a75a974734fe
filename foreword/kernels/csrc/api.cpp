// What Python sees (kernels/cpu/library.py). Callers have checked types, shapes and sizes.

#include <exception>

#include "draft.h"
#include "float_mode.h"
#include "packing.h"
#include "program.h"

using foreword::Isa;
using foreword::Kind;
using foreword::Machine;
using foreword::TILE;

extern "C" {

// Of the functions here, in filters.cpp, sampler.cpp and suffix.cpp, and of the structures they take.
int64_t foreword_native_version() { return 7; }

int32_t foreword_supported(int32_t isa) { return foreword::supported(static_cast<Isa>(isa)); }

// Null if the system grants no more threads.
Machine* foreword_machine_new(int32_t isa, int32_t num_threads) {
    try {
        return new Machine(static_cast<Isa>(isa), num_threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void foreword_machine_delete(Machine* machine) { delete machine; }

void foreword_run(Machine* machine, const foreword::Command* commands, int64_t count, const foreword::Inputs* inputs) {
    machine->run(commands, count, *inputs);
}

void foreword_draft(Machine* machine, const foreword::Command* commands, int64_t count, const foreword::Inputs* inputs,
                    const foreword::Draft* draft) {
    foreword::run_draft(*machine, {commands, count}, *inputs, *draft);
}

int64_t foreword_packed_bytes(int32_t kind, int64_t n, int64_t k) {
    return foreword::num_tiles(n) * foreword::tile_bytes(static_cast<Kind>(kind), k);
}

// rows: n pointers to rows of kind `source`.
void foreword_pack(Machine* machine, int32_t kind, int32_t source, const void* const* rows, int64_t n, int64_t k, uint8_t* tiles) {
    const auto to = static_cast<Kind>(kind), from = static_cast<Kind>(source);
    const auto pack = foreword::is_dense(to) ? foreword::pack_dense_tile : foreword::pack_quantized_tile;
    const int64_t size = foreword::tile_bytes(to, k);
    const foreword::FloatMode mode;
    machine->pool().run(foreword::num_tiles(n), [&](int64_t tile, int) {
        const int64_t first = tile * TILE;
        pack(to, from, rows + first, first + TILE <= n ? TILE : n - first, k, tiles + tile * size);
    });
}

// Rows [0, n) of a packed weight -> float32 [n, k].
void foreword_unpack(Machine* machine, const foreword::Weight* weight, float* out) {
    machine->pool().run(weight->n, [&](int64_t row, int) { foreword::unpack_row(*weight, row, out + row * weight->k); });
}
}
