#include "attention/attention.h"

#include <algorithm>
#include <vector>

namespace foreword {
namespace {

constexpr int64_t MIN_PARALLEL_WORK = 1 << 16;  // products of pairs and KV values; fewer are done sooner than a thread wakes
constexpr int64_t TASKS_PER_THREAD = 4;         // of a long prompt

// The tasks of one call. A request with few rows has a task for each split; their states are merged from shared memory.
class Plan {
public:
    Plan(const AttentionArgs& args, int threads) : args_(args), group_(args.heads / args.kv.heads) {
        const int64_t fair = args.query_start_loc[args.num_requests] * args.heads / (threads * TASKS_PER_THREAD);
        max_rows_ = std::max<int64_t>(std::clamp(fair, MIN_PAIRS, MAX_PAIRS) / group_, 1);
        for (int64_t request = 0; request < args.num_requests; request++) add_request(request);
    }

    // Floats between the states of a task's splits.
    int64_t stride(const AttnTask& task) const { return task.rows * group_ * state_size(args_); }

    std::vector<AttnTask> tasks;  // to attend
    std::vector<AttnTask> split_tasks;  // to merge afterwards
    int64_t states = 0;         // floats of shared memory
    int64_t work = 0;           // see MIN_PARALLEL_WORK

private:
    void add_request(int64_t request) {
        const int64_t begin = args_.query_start_loc[request], end = args_.query_start_loc[request + 1];
        for (int64_t row = begin; row < end; row += max_rows_) {
            const int64_t rows = std::min(max_rows_, end - row);
            for (int64_t head = 0; head < args_.kv.heads; head++) add(request, head, row, rows, end - begin);
        }
    }

    void add(int64_t request, int64_t head, int64_t row, int64_t rows, int64_t rows_of_request) {
        AttnTask task = {request, head, row, rows, 0, 0, -1};
        const Span span = visible(row, rows);
        task.first = span.begin / SPLIT;
        task.last = (span.end + SPLIT - 1) / SPLIT;
        work += rows * group_ * (span.end - span.begin) * args_.kv.dim;
        if (rows < rows_of_request || task.last - task.first < 2) {
            tasks.push_back(task);
        } else {
            add_split_task(task);
        }
    }

    void add_split_task(AttnTask task) {
        task.states = states;
        split_tasks.push_back(task);
        for (AttnTask part = task; part.first < task.last; part.first++) {
            part.last = part.first + 1;
            part.states = states;
            tasks.push_back(part);
            states += stride(task);
        }
    }

    Span visible(int64_t row, int64_t rows) const {
        Span span = visible_positions(args_, row);
        for (int64_t other = row + 1; other < row + rows; other++) {
            const Span more = visible_positions(args_, other);
            span = {std::min(span.begin, more.begin), std::max(span.end, more.end)};
        }
        return span;
    }

    const AttentionArgs& args_;
    const int64_t group_;
    int64_t max_rows_;  // of a task
};

// body(task, thread) for all tasks, by this thread alone for little work.
template <class Body>
void for_each(ThreadPool& pool, const std::vector<AttnTask>& tasks, bool alone, const Body& body) {
    const auto count = static_cast<int64_t>(tasks.size());
    if (!alone) return pool.run(count, [&](int64_t index, int thread) { body(tasks[index], thread); });
    for (const AttnTask& task : tasks) body(task, 0);
}

void attend(Context& context, const AttentionArgs& args, const AttentionKernels& kernels) {
    ThreadPool& pool = context.pool;
    const Plan plan(args, pool.size());
    auto* shared = reinterpret_cast<float*>(context.shared.get(plan.states * bytes_of(Type::F32)));
    for_each(pool, plan.tasks, plan.work < MIN_PARALLEL_WORK, [&](const AttnTask& task, int thread) {
        kernels.attend(pool, thread, args, task, task.states < 0 ? nullptr : shared + task.states);
    });
    for_each(pool, plan.split_tasks, plan.states < MIN_PARALLEL_WORK, [&](const AttnTask& task, int thread) {
        kernels.merge(pool, thread, args, task, shared + task.states, plan.stride(task));
    });
}

}  // namespace

Attention attention(Isa isa) {
#if FOREWORD_X86
    if (isa >= Isa::AVX512) return [](Context& context, const AttentionArgs& args) { attend(context, args, ATTENTION_AVX512); };
    if (isa >= Isa::AVX2) return [](Context& context, const AttentionArgs& args) { attend(context, args, ATTENTION_AVX2); };
#elif FOREWORD_ARM
    if (isa == Isa::NEON) return [](Context& context, const AttentionArgs& args) { attend(context, args, ATTENTION_NEON); };
#endif
    static_cast<void>(isa);
    return [](Context& context, const AttentionArgs& args) { attend(context, args, ATTENTION_PORTABLE); };
}

}  // namespace foreword
