// The C interface for kernels/cpu/library.py. Callers have checked types, shapes and sizes.

#include <algorithm>
#include <exception>

#include "drafting/draft_loop.h"
#include "common/float_mode.h"
#include "common/packing.h"
#include "common/forward_program.h"
#include "quantized/gguf_blocks.h"

using foreword::Isa;
using foreword::Format;
using foreword::CpuContext;
using foreword::InputError;
using foreword::TILE;

namespace {

constexpr int64_t MAX_SIZE = int64_t{1} << 40;  // products of two sizes are far from an overflow

constexpr bool is_format(Format format) { return format >= Format::F32 && static_cast<int32_t>(format) < foreword::NUM_FORMATS; }

// Values of a row that are packed together.
constexpr int64_t block_of(Format format) {
    if (format <= Format::I4 || foreword::is_grouped(format)) return 1;
    return foreword::is_super(format) ? foreword::SUPER : foreword::SMALL;
}

bool is_packable(Format format, int64_t k, int64_t group_size) {
    if (!is_format(format) || k < 1 || k > MAX_SIZE || k % block_of(format) != 0) return false;
    if (!foreword::is_grouped(format)) return true;
    const int64_t multiple = format == Format::F8 ? foreword::F8_CHAIN : foreword::SMALL;
    return group_size >= multiple && group_size <= MAX_SIZE && group_size % multiple == 0;
}

// See pack_tile(); files have neither I8 nor I4.
bool is_conversion(Format source, Format format) {
    if (foreword::is_grouped(source)) return format == source || (source == Format::G8 && format == Format::I8);
    if (source <= Format::F16) return is_format(source) && format <= Format::I4;
    return is_format(source) && source > Format::I4 && (format == source || format <= Format::F16);
}

// Bytes of k values in a file.
int64_t source_bytes(Format format, int64_t k) {
    if (format == Format::F32) return 4 * k;
    if (format == Format::BF16 || format == Format::F16) return 2 * k;
    if (format == Format::G4) return k / 2;
    if (format == Format::G8 || format == Format::F8) return k;
    return k / block_of(format) * foreword::file_block_bytes(format);
}

}  // namespace

extern "C" {

// Version of the functions here, in logits_processors.cpp, sampler.cpp, suffix_index.cpp and text_drafts.cpp, and of their
// structures.
int64_t foreword_native_version() { return 23; }

int32_t foreword_supported(int32_t isa) { return foreword::supported(static_cast<Isa>(isa)); }

// Null if the system does not grant the threads, or the processor lacks the instruction set.
CpuContext* foreword_machine_new(int32_t isa, int32_t num_threads) {
    if (num_threads < 1 || !foreword::supported(static_cast<Isa>(isa))) return nullptr;
    try {
        return new CpuContext(static_cast<Isa>(isa), num_threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void foreword_machine_delete(CpuContext* cpu) { delete cpu; }

InputError foreword_run(CpuContext* cpu, const foreword::Instruction* instructions, int64_t count,
                        const foreword::ProgramInputs* inputs) {
    return cpu->run(instructions, count, *inputs);
}

InputError foreword_draft(CpuContext* cpu, const foreword::Instruction* instructions, int64_t count,
                          const foreword::ProgramInputs* inputs, const foreword::DraftArgs* draft) {
    return foreword::run_draft(*cpu, {instructions, count}, *inputs, *draft);
}

// -1 for a format or a shape that there is not.
int64_t foreword_packed_bytes(int32_t format, int64_t n, int64_t k, int64_t group_size) {
    const auto to = static_cast<Format>(format);
    if (n < 0 || n > MAX_SIZE || !is_packable(to, k, group_size)) return -1;
    return foreword::num_tiles(n) * foreword::tile_bytes(to, k, group_size);
}

// rows: n pointers to rows of format `source`, or to their GroupedRow; row_bytes: of each, or of its values.
InputError foreword_pack(CpuContext* cpu, int32_t format, int32_t source, const void* const* rows, int64_t row_bytes, int64_t n,
                         int64_t k, int64_t group_size, uint8_t* tiles) {
    const auto to = static_cast<Format>(format), from = static_cast<Format>(source);
    const bool fits = is_packable(to, k, group_size) && is_conversion(from, to) && k % block_of(from) == 0;
    if (n < 0 || !fits || row_bytes < source_bytes(from, k)) return InputError::FORMAT;
    const int64_t size = foreword::tile_bytes(to, k, group_size);
    const foreword::FloatMode mode;
    cpu->pool().run(foreword::num_tiles(n), [&](int64_t tile, int) {
        const int64_t count = std::min(TILE, n - tile * TILE);
        foreword::pack_tile(to, from, rows + tile * TILE, count, k, group_size, tiles + tile * size);
    });
    return InputError::NONE;
}

// Rows [0, n) of a packed weight -> float32 [n, k].
void foreword_unpack(CpuContext* cpu, const foreword::Weight* weight, float* out) {
    cpu->pool().run(weight->n, [&](int64_t row, int) { foreword::unpack_row(*weight, row, out + row * weight->k); });
}
}
