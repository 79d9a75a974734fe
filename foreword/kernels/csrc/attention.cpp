#include "attention.h"

#include <algorithm>
#include <vector>

namespace foreword {
namespace {

constexpr int64_t ALONE = 1 << 16;  // products of pairs and KV values that are not worth waking another thread for

// The pieces of one call. A request with few rows is spread over its splits, whose states meet in shared memory.
class Plan {
public:
    explicit Plan(const AttentionArgs& args) : args_(args), group_(args.heads / args.kv.heads) {
        for (int64_t request = 0; request < args.num_requests; request++) add_request(request);
    }

    // Floats between the states of a piece's splits.
    int64_t stride(const Piece& piece) const { return piece.rows * group_ * state_size(args_); }

    std::vector<Piece> pieces;  // to attend
    std::vector<Piece> spread;  // to merge afterwards
    int64_t states = 0;         // floats of shared memory
    int64_t work = 0;           // see ALONE

private:
    void add_request(int64_t request) {
        const int64_t begin = args_.row_starts[request], end = args_.row_starts[request + 1];
        const int64_t most = std::max<int64_t>(MAX_PAIRS / group_, 1);
        for (int64_t row = begin; row < end; row += most) {
            for (int64_t head = 0; head < args_.kv.heads; head++) add(request, head, row, std::min(most, end - row), end - begin);
        }
    }

    void add(int64_t request, int64_t head, int64_t row, int64_t rows, int64_t rows_of_request) {
        Piece piece = {request, head, row, rows, 0, 0, -1};
        const Span span = seen(row, rows);
        piece.first = span.begin / SPLIT;
        piece.last = (span.end + SPLIT - 1) / SPLIT;
        work += rows * group_ * (span.end - span.begin) * args_.kv.dim;
        if (rows < rows_of_request || piece.last - piece.first < 2) {
            pieces.push_back(piece);
        } else {
            spread_out(piece);
        }
    }

    void spread_out(Piece piece) {
        piece.states = states;
        spread.push_back(piece);
        for (Piece part = piece; part.first < piece.last; part.first++) {
            part.last = part.first + 1;
            part.states = states;
            pieces.push_back(part);
            states += stride(piece);
        }
    }

    Span seen(int64_t row, int64_t rows) const {
        Span span = seen_by(args_, row);
        for (int64_t other = row + 1; other < row + rows; other++) {
            const Span more = seen_by(args_, other);
            span = {std::min(span.begin, more.begin), std::max(span.end, more.end)};
        }
        return span;
    }

    const AttentionArgs& args_;
    const int64_t group_;
};

// body(piece, thread) for all pieces, by this thread alone if that is little work.
template <class Body>
void for_each(Pool& pool, const std::vector<Piece>& pieces, bool alone, const Body& body) {
    const auto count = static_cast<int64_t>(pieces.size());
    if (!alone) return pool.run(count, [&](int64_t index, int thread) { body(pieces[index], thread); });
    for (const Piece& piece : pieces) body(piece, 0);
}

void attend(Context& context, const AttentionArgs& args, const AttentionKernels& kernels) {
    const Plan plan(args);
    Pool& pool = context.pool;
    auto* shared = reinterpret_cast<float*>(context.shared.get(plan.states * bytes_of(Type::F32)));
    for_each(pool, plan.pieces, plan.work < ALONE, [&](const Piece& piece, int thread) {
        kernels.attend(pool, thread, args, piece, piece.states < 0 ? nullptr : shared + piece.states);
    });
    for_each(pool, plan.spread, plan.states < ALONE, [&](const Piece& piece, int thread) {
        kernels.merge(pool, thread, args, piece, shared + piece.states, plan.stride(piece));
    });
}

}  // namespace

Attention attention(Isa isa) {
#if FOREWORD_X86
    if (isa >= Isa::AVX512) return [](Context& context, const AttentionArgs& args) { attend(context, args, ATTENTION_AVX512); };
    if (isa == Isa::AVX2) return [](Context& context, const AttentionArgs& args) { attend(context, args, ATTENTION_AVX2); };
#endif
    static_cast<void>(isa);
    return [](Context& context, const AttentionArgs& args) { attend(context, args, ATTENTION_PORTABLE); };
}

}  // namespace foreword
