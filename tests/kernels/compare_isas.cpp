// Every instruction set of this processor against the portable kernels, without Python: for processors under an emulator.
//
// For each operation: a row has the same bits alone and among others, and is close to the portable row; with quantized
// weights it equals it. Prints, for each instruction set, a digest of the quantized products, which is the same on all
// processors. Exits with 1 at the first difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "experts/experts.h"
#include "common/float_mode.h"
#include "common/packing.h"
#include "quantized/quantized.h"
#include "common/half_float.h"

using namespace foreword;

namespace {

constexpr const char* ISA_NAMES[] = {"portable", "avx2", "avx2-vnni", "avx512", "amx", "neon"};
constexpr Type FLOATS[] = {Type::F32, Type::BF16};
constexpr int64_t ROWS = 35, MANY_ROWS = 80;  // many: more than a quantized product takes at a time

// The same numbers on every machine.
std::mt19937 generator;
float uniform() { return static_cast<float>(static_cast<int32_t>(generator())) * 0x1p-31f; }
std::vector<float> uniforms(int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = uniform();
    return values;
}

// Rows of float32 and bfloat16.
struct Rows {
    Rows(int64_t rows, int64_t columns) : width(columns), wide(uniforms(rows * columns)) { narrow_all(); }

    // Rows of the largest and smallest values, zeros, and values that are not finite.
    static Rows extreme(int64_t columns, int64_t count = ROWS) {
        Rows rows(count, columns);
        const auto at = [&](int64_t row, int64_t i) -> float& { return rows.wide[row * columns + i]; };
        for (int64_t i = 0; i < columns; i++) {
            at(1, i) = 1.0f;
            at(2, i) = -1.0f;
            at(3, i) = 0.0f;
            at(4, i) *= 1e15f;
            at(5, i) *= 1e-32f;
            at(6, i) *= 1e-15f;
        }
        at(7, columns / 2) = NAN;
        at(8, columns - 1) = INFINITY;
        at(9, 0) = -INFINITY;
        rows.narrow_all();
        return rows;
    }

    void narrow_all() {
        narrow.clear();
        for (const float value : wide) narrow.push_back(float_to_bfloat(value));
    }

    RowView view(Type type, int64_t row) {
        char* data = type == Type::F32 ? reinterpret_cast<char*>(wide.data()) : reinterpret_cast<char*>(narrow.data());
        return {data + row * width * bytes_of(type), width * bytes_of(type)};
    }

    int64_t width;
    std::vector<float> wide;
    std::vector<uint16_t> narrow;
};

// One operation on any of its rows. run() writes rows [first, first + count).
struct Case {
    std::string name;
    int64_t width;
    Type type;         // of the output
    double tolerance;  // of a row, relative to its largest value; 0: equal bits
    std::function<void(Isa, Context&, int64_t first, int64_t count, RowView y)> run;
    int64_t rows = ROWS;
};

Isa isa_under_test;
uint64_t digest;

bool same(float a, float b) { return bits_of_float(a) == bits_of_float(b) || (std::isnan(a) && std::isnan(b)); }

[[noreturn]] void fail(const Case& test, const char* what, int64_t row, int64_t i, float value, float expected) {
    std::printf("%s %s: row %ld, column %ld %s: %a instead of %a\n", ISA_NAMES[static_cast<int>(isa_under_test)], test.name.c_str(),
                static_cast<long>(row), static_cast<long>(i), what, static_cast<double>(value), static_cast<double>(expected));
    std::exit(1);
}

// Rows as float32 [count, width]. Ends the process if columns beyond `width` are written.
std::vector<float> values_of(const Case& test, Isa isa, int64_t first, int64_t count, int threads) {
    constexpr int64_t PAST = 5;
    const int64_t stride = (test.width + PAST) * bytes_of(test.type);
    ThreadPool pool(threads);
    Buffer shared;
    Context context{pool, shared};
    std::vector<char> y(count * stride, 'y');
    test.run(isa, context, first, count, {y.data(), stride});
    std::vector<float> values(count * test.width);
    for (int64_t row = 0; row < count; row++) {
        for (int64_t i = 0; i < test.width; i++) {
            const char* at = &y[row * stride + i * bytes_of(test.type)];
            float& value = values[row * test.width + i];
            if (test.type == Type::F32) std::memcpy(&value, at, sizeof value);
            if (test.type == Type::BF16) value = bfloat_to_float(read_half(reinterpret_cast<const uint8_t*>(at)));
        }
        for (int64_t i = test.width * bytes_of(test.type); i < stride; i++) {
            if (y[row * stride + i] != 'y') fail(test, "was written beyond the row", first + row, i, 0, 0);
        }
    }
    return values;
}

void check_close(const Case& test, int64_t row, const float* values, const float* expected) {
    float largest = 0.0f;
    for (int64_t i = 0; i < test.width; i++) largest = std::isfinite(expected[i]) ? std::max(largest, std::fabs(expected[i])) : largest;
    for (int64_t i = 0; i < test.width; i++) {
        if (same(values[i], expected[i])) continue;
        const double unit = test.type == Type::BF16 ? std::fabs(expected[i]) / 128 : 0;
        const double error = std::fabs(static_cast<double>(values[i]) - expected[i]);
        if (test.tolerance > 0 && error <= test.tolerance * largest + unit) continue;
        fail(test, "differs from portable", row, i, values[i], expected[i]);
    }
}

void check(const Case& test) {
    const std::vector<float> whole = values_of(test, isa_under_test, 0, test.rows, 2);
    const std::vector<float> portable = values_of(test, Isa::PORTABLE, 0, test.rows, 1);
    for (int64_t row = 0; row < test.rows; row++) check_close(test, row, &whole[row * test.width], &portable[row * test.width]);
    for (int64_t count = 1; count < 18; count++) {
        for (int64_t first = count == 1 ? 0 : 5 * count % 16; first + count <= test.rows; first += count == 1 ? 1 : test.rows) {
            const std::vector<float> part = values_of(test, isa_under_test, first, count, 1);
            for (size_t i = 0; i < part.size(); i++) {
                const int64_t row = first + static_cast<int64_t>(i) / test.width, column = static_cast<int64_t>(i) % test.width;
                const float expected = whole[row * test.width + column];
                if (!same(part[i], expected)) fail(test, "depends on other rows", row, column, part[i], expected);
            }
        }
    }
    if (test.tolerance > 0) return;
    for (const float value : whole) digest = (digest ^ (std::isnan(value) ? 0 : bits_of_float(value))) * 0x100000001b3;
}

// Random bytes, or `fill`.
std::vector<uint8_t> bytes_of_file(int64_t count, int fill) {
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(fill < 0 ? static_cast<int>(generator() >> 24) : fill);
    return bytes;
}

// Rows of a grouped format. Zeros of 4 bits are at most 16, and no float8 is NaN.
struct GroupedFile {
    GroupedFile(Format format, int64_t n, int64_t k, int64_t group_size, int fill)
        : groups((k + group_size - 1) / group_size),
          width(k * (format == Format::G4 ? 4 : 8) / 8),
          values(bytes_of_file(n * width, fill)),
          zeros(bytes_of_file(n * groups, -1)),
          scales(uniforms(n * groups)) {
        for (int64_t row = 0; row < n; row++) rows.push_back({&values[row * width], &scales[row * groups], &zeros[row * groups]});
        for (uint8_t& zero : zeros) zero = format == Format::G4 ? zero % 17 : zero;
        for (uint8_t& value : values) value ^= format == Format::F8 && (value & 0x7f) == 0x7f;
    }

    int64_t groups, width;
    std::vector<uint8_t> values, zeros;
    std::vector<float> scales;
    std::vector<GroupedRow> rows;
};

// A packed weight of random values, or with quantized values that all have the bits of `fill`.
struct Packed {
    Packed(Format format, int64_t n, int64_t k, int fill = -1) : bias(uniforms(n)) {
        is_grouped(format) ? pack_grouped(format, n, k, fill) : pack(format, n, k, fill);
    }

    void pack(Format format, int64_t n, int64_t k, int fill) {
        const bool from_floats = format <= Format::I4;
        const Format source = from_floats ? Format::F32 : format;
        const int64_t block = is_super(format) ? SUPER : SMALL, row_bytes = from_floats ? 4 * k : k / block * file_block_bytes(format);
        std::vector<uint8_t> file = bytes_of_file(n * row_bytes, fill);
        const std::vector<float> values = uniforms(n * k);
        if (from_floats) std::memcpy(file.data(), values.data(), file.size());
        for (int64_t at = 0; !from_floats && at < n * row_bytes; at += file_block_bytes(format)) set_scales(format, &file[at]);
        const int64_t bytes = tile_bytes(format, k, 0);
        auto* tiles = reinterpret_cast<uint8_t*>(memory.get(num_tiles(n) * bytes));
        for (int64_t tile = 0; tile < num_tiles(n); tile++) {
            const void* rows[TILE];
            const int64_t count = std::min(TILE, n - tile * TILE);
            for (int64_t row = 0; row < count; row++) rows[row] = &file[(tile * TILE + row) * row_bytes];
            (is_dense(format) ? pack_dense_tile : pack_quantized_tile)(format, source, rows, count, k, tiles + tile * bytes);
        }
        weight = {format, 0, n, k, tiles, n % 2 ? bias.data() : nullptr};
    }

    void pack_grouped(Format format, int64_t n, int64_t k, int fill) {
        constexpr int64_t GROUP_SIZE = 128;
        const GroupedFile file(format, n, k, GROUP_SIZE, fill);
        const int64_t bytes = tile_bytes(format, k, GROUP_SIZE);
        auto* tiles = reinterpret_cast<uint8_t*>(memory.get(num_tiles(n) * bytes));
        for (int64_t tile = 0; tile < num_tiles(n); tile++) {
            const GroupedRow* rows[TILE];
            const int64_t count = std::min(TILE, n - tile * TILE);
            for (int64_t row = 0; row < count; row++) rows[row] = &file.rows[tile * TILE + row];
            pack_grouped_tile(format, rows, count, k, GROUP_SIZE, tiles + tile * bytes);
        }
        weight = {format, GROUP_SIZE, n, k, tiles, n % 2 ? bias.data() : nullptr};
    }

    // Finite float16 scales of both signs, of which the smallest is subnormal; exponents 0 to 15 and 128 to 143.
    static void set_scales(Format format, uint8_t* block) {
        if (format == Format::MXFP4) {
            *block = static_cast<uint8_t>(generator() & 0x8f);
            return;
        }
        for (int i = 0; i < (has_minimum(format) ? 2 : 1); i++) {
            const auto half = static_cast<uint16_t>(generator() & 0xafff);
            std::memcpy(block + halves_at(format) + 2 * i, &half, sizeof half);
        }
    }

    Buffer memory;
    std::vector<float> bias;
    Weight weight;
};

void check_linear(Format format, int64_t n, int64_t k, int fill = -1, int64_t rows = ROWS) {
    const Packed packed(format, n, k, fill);
    Rows x = Rows::extreme(k, rows);
    const auto linear = is_dense(format) ? dense_linear : quantized_linear;
    const std::string shape = std::to_string(n) + " x " + std::to_string(k);
    const std::string name = "linear of format " + std::to_string(static_cast<int>(format)) + ", " + shape;
    for (const Type x_type : FLOATS) {
        for (const Type y_type : FLOATS) {
            check({name, n, y_type, is_dense(format) ? 1e-5 : 0, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
                linear(isa)(context, {packed.weight, x_type, y_type, x.view(x_type, first), y, count});
            }, rows});
        }
    }
}

void check_linears() {
    for (const Format format : {Format::F32, Format::BF16, Format::F16, Format::F8}) {
        for (const int64_t k : {1, 31, 257, 770}) check_linear(format, k % 2 ? 37 : 130, k);
    }
    for (int number = static_cast<int>(Format::I8); number < NUM_FORMATS; number++) {
        const auto format = static_cast<Format>(number);
        if (quantized_portable().round_rows[index_of(format)] == nullptr) continue;
        for (const int64_t n : {1, 16, 75}) check_linear(format, n, is_super(format) ? 768 : format <= Format::I4 ? 333 : 352);
        check_linear(format, 18, is_super(format) ? SUPER : SMALL, -1, MANY_ROWS);
        for (const int fill : {0x00, 0x7f, 0x80, 0xff}) check_linear(format, 5, 2 * SUPER, fill);
    }
}

void check_rows(Type type) {
    constexpr int64_t HEADS = 3, DIM = 70;
    Rows x = Rows::extreme(HEADS * DIM), other(ROWS, HEADS * DIM);
    const std::vector<float> weight = uniforms(DIM), angles = uniforms(ROWS * DIM);
    std::vector<int64_t> places(ROWS);
    for (int64_t row = 0; row < ROWS; row++) places[row] = 11 * row % ROWS;
    const auto positions = [&](int64_t first) { return RowView{reinterpret_cast<char*>(&places[first]), 8}; };
    check({"rms_norm", HEADS * DIM, type, 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        row_kernels(isa).rms_norm(context, {weight.data(), 1e-6f, type, x.view(type, first), y, HEADS, DIM, count});
    }});
    check({"layer_norm", HEADS * DIM, type, 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        const LayerNormArgs args{weight.data(), weight.data(), 1e-6f, type, x.view(type, first), y, HEADS, DIM, count};
        row_kernels(isa).layer_norm(context, args);
    }});
    check({"rope", HEADS * DIM, type, 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        const RowView rows = x.view(type, first);
        row_kernels(isa).rope(context, {angles.data(), nullptr, positions(first), type, rows, y, HEADS, DIM, DIM - 4, count});
    }});
    for (const Activation act : {Activation::SILU, Activation::GELU, Activation::GELU_TANH, Activation::GPT_OSS, Activation::RELU2}) {
        check({"gated_act", HEADS * DIM / 2, type, 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
            row_kernels(isa).gated_act(context, {act, type, x.view(type, first), y, HEADS * DIM / 2, count});
        }});
    }
    check({"xielu", HEADS * DIM, type, 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        const GatedActArgs args{Activation::XIELU, type, x.view(type, first), y, HEADS * DIM, count, false, {0.8f, 0.6f}};
        row_kernels(isa).gated_act(context, args);
    }});
    check({"scale_by_sigmoid", HEADS * DIM, type, 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        const RowView rows = x.view(type, first), gate = other.view(Type::BF16, first);
        row_kernels(isa).scale_by_sigmoid(context, {type, Type::BF16, rows, gate, y, HEADS * DIM, count});
    }});
    check({"add", HEADS * DIM, type, 1e-7, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        row_kernels(isa).add(context, {0.75f, type, x.view(type, first), other.view(type, first), y, HEADS * DIM, count});
    }});
    const Packed packed(Format::Q4_0, ROWS, 96);
    check({"embedding", 96, type, 1e-7, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        row_kernels(isa).embedding(context, {packed.weight, &places[first], 1.5f, type, y, count});
    }});
    if (type == Type::BF16) return;
    check({"softcap", HEADS * DIM, type, 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        for (int64_t row = 0; row < count; row++) std::memcpy(y.data + row * y.stride, x.view(type, first + row).data, 4 * x.width);
        row_kernels(isa).softcap(context, {30.0f, y, HEADS * DIM, count});
    }});
}

// A KV cache in which only written slots are finite.
struct Cache {
    Cache(Type type, int64_t slots, int64_t heads, int64_t dim)
        : k(slots * heads * dim * bytes_of(type), '\xff'), v(k), k_scale(slots * heads, NAN), v_scale(k_scale),
          kv{type, 0, k.data(), v.data(), k_scale.data(), v_scale.data(), heads, dim, dim} {}

    // K of a slot as float32.
    float value(int64_t slot, int64_t i) const {
        const int64_t at = slot * kv.heads * kv.dim + i;
        const float scale = kv.k_scale[slot * kv.heads + i / kv.dim];
        if (kv.type == Type::I8) return static_cast<float>(reinterpret_cast<const int8_t*>(kv.k)[at]) * scale;
        if (kv.type == Type::BF16) return bfloat_to_float(reinterpret_cast<const uint16_t*>(kv.k)[at]);
        return reinterpret_cast<const float*>(kv.k)[at];
    }

    std::vector<char> k, v;
    std::vector<float> k_scale, v_scale;
    KV kv;
};

void check_write_kv(Type kv_type, Type type) {
    constexpr int64_t HEADS = 2, DIM = 37;
    Rows x = Rows::extreme(HEADS * DIM);
    check({"write_kv", HEADS * DIM, Type::F32, 1e-7, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        Cache cache(kv_type, ROWS, HEADS, DIM);
        std::vector<int64_t> slots(count);
        for (int64_t row = 0; row < count; row++) slots[row] = (11 * row + first) % ROWS;
        row_kernels(isa).write_kv(context, {cache.kv, slots.data(), type, x.view(type, first), x.view(type, first), count});
        for (int64_t row = 0; row < count; row++) {
            auto* values = reinterpret_cast<float*>(y.data + row * y.stride);
            for (int64_t i = 0; i < HEADS * DIM; i++) values[i] = cache.value(slots[row], i);
        }
    }});
}

// Seven experts of which a row chooses three; most rows choose the first. Between the two products rows are rounded, to bfloat16 or
// to integers: sums in another order may round to the neighbour.
void check_experts(Format format, Type type) {
    constexpr int64_t COUNT = 7, HIDDEN = 2 * SUPER, INNER = SUPER, TOP_K = 3;
    std::vector<std::unique_ptr<Packed>> gate_up, down;
    std::vector<Weight> gate_up_blocks, down_blocks;
    std::vector<int64_t> starts = {0};
    for (int64_t expert = 0; expert < COUNT; expert++) {
        gate_up.push_back(std::make_unique<Packed>(format, 2 * INNER, HIDDEN));
        down.push_back(std::make_unique<Packed>(format, HIDDEN, INNER));
        gate_up_blocks.push_back(gate_up.back()->weight);
        down_blocks.push_back(down.back()->weight);
        starts.push_back(expert + 1);
    }
    const Experts experts{COUNT, HIDDEN, INNER, {gate_up_blocks.data(), starts.data()}, {down_blocks.data(), starts.data()}, nullptr, nullptr};
    Rows x = Rows::extreme(HIDDEN), logits(ROWS, COUNT), add_to(ROWS, HIDDEN);
    for (int64_t row = 0; row < ROWS; row++) logits.wide[row * COUNT] += 1.0f;
    logits.wide[11 * COUNT + 3] = NAN;
    const std::string name = "experts of format " + std::to_string(static_cast<int>(format));
    const bool reorders = format == Format::BF16 && (isa_under_test == Isa::AVX512 || isa_under_test == Isa::AMX);
    const double tolerance = reorders ? 1e-3 : is_dense(format) ? 2e-5 : 0.05;
    check({name, HIDDEN, type, tolerance, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        run_experts(context, isa, {experts, TOP_K, true, Scoring::SOFTMAX, 1, 1, 1.0f, 0.0f, Activation::SILU, type, x.view(type, first),
                                   logits.view(Type::F32, first), add_to.view(type, first), y, count});
    }});
}

// Three requests with 1, 13 and 21 rows and up to 1100 positions; unwritten slots hold NaN.
void check_attention(Type kv_type, Type type, int64_t dim, int64_t window, float softcap, bool sunk = false) {
    constexpr int64_t KV_HEADS = 2, HEADS = 2 * 7, BLOCK = 16, TABLE = 70, SLOTS = 3 * TABLE * BLOCK;
    const int64_t starts[] = {0, 1, 14, ROWS}, first_positions[] = {1099, 500, 0};
    Cache cache(kv_type, SLOTS, KV_HEADS, dim);
    std::vector<int64_t> tables(3 * TABLE), positions;
    for (int64_t i = 0; i < 3 * TABLE; i++) tables[i] = 11 * i % (3 * TABLE);
    std::vector<int64_t> slots;
    for (int64_t request = 0; request < 3; request++) {
        const int64_t end = first_positions[request] + starts[request + 1] - starts[request];
        for (int64_t p = first_positions[request]; p < end; p++) positions.push_back(p);
        for (int64_t p = 0; p < end; p++) slots.push_back(tables[request * TABLE + p / BLOCK] * BLOCK + p % BLOCK);
    }
    const auto written = static_cast<int64_t>(slots.size());
    Rows k(written, KV_HEADS * dim), v(written, KV_HEADS * dim), q = Rows::extreme(HEADS * dim);
    ThreadPool pool(1);
    Buffer shared;
    Context alone{pool, shared};
    row_kernels(Isa::PORTABLE).write_kv(alone, {cache.kv, slots.data(), Type::F32, k.view(Type::F32, 0), v.view(Type::F32, 0), written});
    const std::vector<float> sinks = uniforms(HEADS);
    const std::string name = "attention, cache " + std::to_string(static_cast<int>(kv_type)) + ", dim " + std::to_string(dim);
    const bool rounds_operands = kv_type != Type::F32 && (isa_under_test == Isa::AVX512 || isa_under_test == Isa::AMX);
    // Rounded operands may choose the other of two scores of 1e15 that are nearly equal.
    for (int64_t i = 0; rounds_operands && i < q.width; i++) q.wide[4 * q.width + i] *= 1e-15f;
    q.narrow_all();
    check({name, HEADS * dim, type, rounds_operands ? 0.02 : 1e-5, [&](Isa isa, Context& context, int64_t first, int64_t count, RowView y) {
        int64_t clipped[4];
        for (int i = 0; i < 4; i++) clipped[i] = std::min(std::max<int64_t>(starts[i] - first, 0), count);
        attention(isa)(context, {cache.kv, &positions[first], tables.data(), clipped, 3, TABLE, BLOCK, type, q.view(type, first), y,
                                 HEADS, window, 0, 0.3f, softcap, sunk ? sinks.data() : nullptr});
    }});
}

void check_all() {
    check_linears();
    for (const Type type : FLOATS) {
        check_rows(type);
        for (const Type kv_type : {Type::F32, Type::BF16, Type::I8}) {
            check_write_kv(kv_type, type);
            check_attention(kv_type, type, 33, 0, 0.0f);
            check_attention(kv_type, type, 64, 40, 20.0f);
            check_attention(kv_type, type, 64, 0, 0.0f, true);
        }
        for (const Format format : {Format::F32, Format::BF16, Format::I8, Format::Q4_0, Format::G4, Format::F8, Format::Q4_K}) check_experts(format, type);
    }
}

}  // namespace

// Arguments: names of instruction sets; all without arguments.
int main(int count, char** names) {
    const FloatMode mode;
    for (int number = 0; number < static_cast<int>(std::size(ISA_NAMES)); number++) {
        const char* name = ISA_NAMES[number];
        isa_under_test = static_cast<Isa>(number);
        const bool chosen = std::any_of(names + 1, names + count, [&](const char* other) { return std::strcmp(other, name) == 0; });
        if (count > 1 && !chosen) continue;
        if (!supported(isa_under_test)) {
            std::printf("%s unsupported\n", name);
            continue;
        }
        generator.seed(1);
        digest = 0xcbf29ce484222325;  // FNV-1a, by values of 32 bits
        check_all();
        std::printf("%s %016llx\n", name, static_cast<unsigned long long>(digest));
    }
}
