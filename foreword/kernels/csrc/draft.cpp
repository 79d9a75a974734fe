#include "draft.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "sampler.h"

namespace foreword {
namespace {

constexpr int64_t DIRECTIONS = 3;  // time, row, column
constexpr float MASKED = -std::numeric_limits<float>::infinity();

// A lane that drafts.
//   computed  tokens whose K and V are in the cache: the position of the next one
//   sum       of the log-probabilities so far
struct Drafting {
    const Lane* lane;
    const int64_t* blocks;
    int64_t* guesses;
    double* logprobs;
    int64_t* count;
    int64_t computed;
    double sum;
    bool ended;
};

// The batch of one pass, as core/batch.py lays it out.
class Batch {
public:
    Batch(const Inputs& inputs, int64_t table_width) : inputs_(inputs) { inputs_.table_width = table_width; }

    void clear() {
        for (auto* values : {&token_ids_, &positions_, &slots_, &tables_, &sample_rows_, &rope_positions_}) values->clear();
        row_starts_.assign(1, 0);
    }

    // The next tokens of one request; `sampled`: its last row is.
    void add(const Drafting& request, const int64_t* token_ids, int64_t count, bool sampled) {
        const int64_t* blocks = request.blocks;
        token_ids_.insert(token_ids_.end(), token_ids, token_ids + count);
        for (int64_t position = request.computed; position < request.computed + count; position++) {
            positions_.push_back(position);
            rope_positions_.insert(rope_positions_.end(), DIRECTIONS, position + request.lane->shift);
            slots_.push_back(blocks[position / inputs_.block_size] * inputs_.block_size + position % inputs_.block_size);
        }
        tables_.insert(tables_.end(), blocks, blocks + request.lane->num_blocks);
        tables_.resize(row_starts_.size() * inputs_.table_width);
        row_starts_.push_back(static_cast<int64_t>(token_ids_.size()));
        if (sampled) sample_rows_.push_back(row_starts_.back() - 1);
    }

    const Inputs& inputs() {
        inputs_.num_rows = static_cast<int64_t>(token_ids_.size());
        inputs_.num_sampled = static_cast<int64_t>(sample_rows_.size());
        inputs_.num_requests = static_cast<int64_t>(row_starts_.size()) - 1;
        set(Space::TOKEN_IDS, token_ids_);
        set(Space::POSITIONS, positions_);
        set(Space::SLOTS, slots_);
        set(Space::BLOCK_TABLES, tables_);
        set(Space::ROW_STARTS, row_starts_);
        set(Space::SAMPLE_ROWS, sample_rows_);
        set(Space::ROPE_POSITIONS, rope_positions_);
        return inputs_;
    }

private:
    void set(Space space, std::vector<int64_t>& values) {
        inputs_.spaces[static_cast<int>(space)] = reinterpret_cast<char*>(values.data());
    }

    Inputs inputs_;
    std::vector<int64_t> token_ids_, positions_, slots_, tables_, row_starts_, sample_rows_, rope_positions_;
};

// The passes of one draft.
class Passes {
public:
    Passes(Machine& machine, const Program& program, const Inputs& inputs, const Draft& draft)
        : machine_(machine), program_(program), draft_(draft), batch_(inputs, widest_table(draft)) {
        batch_.clear();
    }

    // The known tokens of all lanes, and the first guess of those that want one.
    void first() {
        const int64_t* token_ids = draft_.token_ids;
        const int64_t* blocks = draft_.blocks;
        for (int64_t i = 0; i < draft_.num_lanes; i++) {
            const Lane& lane = draft_.lanes[i];
            const int64_t line = i * draft_.columns;
            Drafting request = {&lane, blocks, draft_.guesses + line, draft_.logprobs + line, draft_.counts + i, lane.start, 0, false};
            *request.count = 0;
            add(request, token_ids, lane.num_tokens);
            if (lane.max_tokens > 0) active_.push_back(request);
            token_ids += lane.num_tokens;
            blocks += lane.num_blocks;
        }
        run();
    }

    bool done() const { return active_.empty(); }

    // The last guess of each lane that goes on, and one guess more.
    void next() {
        batch_.clear();
        for (Drafting& request : active_) add(request, request.guesses + *request.count - 1, 1);
        run();
    }

private:
    static int64_t widest_table(const Draft& draft) {
        int64_t width = 1;
        for (int64_t i = 0; i < draft.num_lanes; i++) width = std::max(width, draft.lanes[i].num_blocks);
        return width;
    }

    void add(Drafting& request, const int64_t* token_ids, int64_t count) {
        batch_.add(request, token_ids, count, request.lane->max_tokens > 0);
        request.computed += count;
    }

    void run() {
        const Inputs& inputs = batch_.inputs();
        machine_.run(program_.commands, program_.count, inputs);
        const auto* logits = reinterpret_cast<const float*>(inputs.spaces[static_cast<int>(Space::OUTPUT)]);
        each_row(&machine_, logits, inputs.num_sampled, draft_.width,
                 [&](Row row, int64_t r, int thread) { extend(active_[r], row, thread); });
        const auto ended = [](const Drafting& request) { return request.ended; };
        active_.erase(std::remove_if(active_.begin(), active_.end(), ended), active_.end());
    }

    void extend(Drafting& request, Row row, int thread) const {
        const Lane& lane = *request.lane;
        process(lane, row, thread);
        const Key key = {lane.seed, static_cast<uint32_t>(lane.first + *request.count)};
        const int64_t token_id = sample_row(row, key, lane.greedy != 0);
        request.ended = token_id < 0;
        if (request.ended) return;
        const double logprob = static_cast<double>(row.values[token_id]) - static_cast<double>(log_sum_exp_row(row));
        request.guesses[*request.count] = token_id;
        request.logprobs[*request.count] = logprob;
        request.sum += logprob;
        request.ended = ++*request.count == lane.max_tokens || request.sum < lane.floor;
    }

    // The steps of sampling/logits_processors.py that a lane can ask for, in their order.
    void process(const Lane& lane, Row row, int thread) const {
        for (int64_t i = 0; i < draft_.num_unused; i++) row.values[draft_.unused[i]] = MASKED;
        if (lane.greedy) return;
        if (lane.temperature != 1) divide_row(row, static_cast<float>(lane.temperature));
        if (lane.top_k > 0) keep_top_k_row(row, lane.top_k);
        if (lane.top_p < 1) keep_top_p_row(row, lane.top_p, weights(row, thread));
        if (lane.min_p > 0) keep_min_p_row(row, lane.min_p);
    }

    int64_t* weights(Row row, int thread) const {
        return reinterpret_cast<int64_t*>(machine_.pool().scratch(thread, row.width * static_cast<int64_t>(sizeof(int64_t))));
    }

    Machine& machine_;
    const Program& program_;
    const Draft& draft_;
    Batch batch_;
    std::vector<Drafting> active_;
};

}  // namespace

void run_draft(Machine& machine, const Program& program, const Inputs& inputs, const Draft& draft) {
    Passes passes(machine, program, inputs, draft);
    passes.first();
    while (!passes.done()) passes.next();
}

}  // namespace foreword
