#include "drafting/draft_loop.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "sampling/sampler.h"

namespace foreword {
namespace {

constexpr int64_t NUM_AXES = 3;  // time, row, column
constexpr float MASKED = -std::numeric_limits<float>::infinity();

// A job that drafts.
//   computed  tokens whose K and V are cached: the position of the next one
//   sampled   rows sampled by this pass, each for the next draft token
//   sum       of the log-probabilities so far
struct JobState {
    const DraftJob* job;
    const int64_t* blocks;
    int64_t* draft_ids;
    double* logprobs;
    int64_t* length;
    int64_t computed, sampled;
    double sum;
    bool ended;
};

// The batch of one pass, as in core/batch.py.
class Batch {
public:
    Batch(const ProgramInputs& inputs, int64_t table_width) : inputs_(inputs) { inputs_.table_width = table_width; }

    int64_t block_size() const { return inputs_.block_size; }

    void clear() {
        for (auto* values : {&token_ids_, &positions_, &slots_, &tables_, &sample_rows_, &mrope_positions_, &prev_slots_}) values->clear();
        query_start_loc_.assign(1, 0);
    }

    // Append the next tokens of one request.
    void add(const JobState& request, const int64_t* token_ids, int64_t count) {
        const int64_t* blocks = request.blocks;
        const int64_t mask_slot = request.job->mask_slot;
        token_ids_.insert(token_ids_.end(), token_ids, token_ids + count);
        for (int64_t position = request.computed; position < request.computed + count; position++) {
            positions_.push_back(request.job->fixed_position < 0 ? position : request.job->fixed_position);
            mrope_positions_.insert(mrope_positions_.end(), NUM_AXES, position + request.job->mrope_offset);
            slots_.push_back(slot(blocks, position));
            const bool is_mask = mask_slot >= 0 && position > request.computed;
            prev_slots_.push_back(is_mask ? mask_slot : position > 0 ? slot(blocks, position - 1) : 0);
        }
        tables_.insert(tables_.end(), blocks, blocks + request.job->num_blocks);
        tables_.resize(query_start_loc_.size() * inputs_.table_width);
        query_start_loc_.push_back(static_cast<int64_t>(token_ids_.size()));
        for (int64_t i = request.sampled; i > 0; i--) sample_rows_.push_back(query_start_loc_.back() - i);
    }

    const ProgramInputs& inputs() {
        inputs_.num_rows = static_cast<int64_t>(token_ids_.size());
        inputs_.num_sampled = static_cast<int64_t>(sample_rows_.size());
        inputs_.num_requests = static_cast<int64_t>(query_start_loc_.size()) - 1;
        set(AddressSpace::TOKEN_IDS, token_ids_);
        set(AddressSpace::POSITIONS, positions_);
        set(AddressSpace::SLOTS, slots_);
        set(AddressSpace::BLOCK_TABLES, tables_);
        set(AddressSpace::QUERY_START_LOC, query_start_loc_);
        set(AddressSpace::SAMPLE_ROWS, sample_rows_);
        set(AddressSpace::MROPE_POSITIONS, mrope_positions_);
        set(AddressSpace::PREV_SLOTS, prev_slots_);
        return inputs_;
    }

private:
    int64_t slot(const int64_t* blocks, int64_t position) const {
        return blocks[position / inputs_.block_size] * inputs_.block_size + position % inputs_.block_size;
    }

    void set(AddressSpace space, std::vector<int64_t>& values) {
        inputs_.spaces[static_cast<int>(space)] = reinterpret_cast<char*>(values.data());
    }

    ProgramInputs inputs_;
    std::vector<int64_t> token_ids_, positions_, slots_, tables_, query_start_loc_, sample_rows_, mrope_positions_, prev_slots_;
};

// The forward passes of one draft.
class DraftRun {
public:
    DraftRun(CpuContext& cpu, const Program& program, const ProgramInputs& inputs, const DraftArgs& draft)
        : cpu_(cpu), program_(program), draft_(draft), batch_(inputs, widest_table(draft)) {
        batch_.clear();
    }

    // Compute the known tokens of all jobs, and sample the first draft tokens.
    InputError first() {
        for (int64_t i = 0; i < draft_.num_jobs; i++) {
            if (!fits(draft_.jobs[i])) return InputError::DRAFT_JOB;
        }
        const int64_t* token_ids = draft_.token_ids;
        const int64_t* blocks = draft_.block_tables;
        for (int64_t i = 0; i < draft_.num_jobs; i++) {
            const DraftJob& job = draft_.jobs[i];
            const int64_t row = i * draft_.max_tokens;
            JobState request = {&job, blocks, draft_.draft_ids + row, draft_.draft_logprobs + row,
                                draft_.draft_lengths + i, job.start_position, 0, 0, false};
            *request.length = 0;
            request.sampled = job.in_one_pass != 0 ? job.max_tokens : job.max_tokens > 0;
            add(request, token_ids, job.num_tokens);
            if (job.max_tokens > 0) active_.push_back(request);
            token_ids += job.num_tokens;
            blocks += job.num_blocks;
        }
        return run();
    }

    bool done() const { return active_.empty(); }

    // Compute the last draft token of each active job, and sample the next one.
    InputError next() {
        batch_.clear();
        for (JobState& request : active_) add(request, request.draft_ids + *request.length - 1, 1);
        return run();
    }

private:
    static int64_t widest_table(const DraftArgs& draft) {
        int64_t width = 1;
        for (int64_t i = 0; i < draft.num_jobs; i++) width = std::max(width, draft.jobs[i].num_blocks);
        return width;
    }

    // Each row has a slot in the block table, and each draft token a place in the results.
    bool fits(const DraftJob& job) const {
        if (job.num_tokens < 1 || job.max_tokens < 0 || job.max_tokens > draft_.max_tokens || job.num_blocks < 0) return false;
        if (job.in_one_pass != 0 && job.max_tokens > job.num_tokens) return false;
        const int64_t later = job.in_one_pass != 0 ? 0 : std::max<int64_t>(job.max_tokens - 1, 0);
        const int64_t slots = job.num_blocks * batch_.block_size(), rows = job.num_tokens + later;
        return 0 <= job.start_position && job.start_position <= slots - rows && -1 <= job.fixed_position && job.fixed_position < slots;
    }

    void add(JobState& request, const int64_t* token_ids, int64_t count) {
        batch_.add(request, token_ids, count);
        request.computed += count;
    }

    InputError run() {
        const ProgramInputs& inputs = batch_.inputs();
        if (const InputError error = cpu_.run(program_.instructions, program_.count, inputs); error != InputError::NONE) return error;
        const auto* logits = reinterpret_cast<const float*>(inputs.spaces[static_cast<int>(AddressSpace::OUTPUT)]);
        std::vector<std::pair<const JobState*, int64_t>> rows;  // and the index of the row's draft token
        for (const JobState& request : active_)
            for (int64_t i = 0; i < request.sampled; i++) rows.emplace_back(&request, *request.length + i);
        each_row(&cpu_, logits, inputs.num_sampled, draft_.vocab_size,
                 [&](Row row, int64_t r, int thread) { sample(*rows[r].first, rows[r].second, row, thread); });
        for (JobState& request : active_) accept(request);
        const auto ended = [](const JobState& request) { return request.ended; };
        active_.erase(std::remove_if(active_.begin(), active_.end(), ended), active_.end());
        return InputError::NONE;
    }

    void sample(const JobState& request, int64_t index, Row row, int thread) const {
        const DraftJob& job = *request.job;
        process(job, row, thread);
        const Key key = {job.seed, static_cast<uint32_t>(job.first_index + index)};
        const int64_t token_id = sample_row(row, key, job.greedy != 0);
        request.draft_ids[index] = token_id;
        if (token_id < 0) return;
        request.logprobs[index] = static_cast<double>(row.values[token_id]) - static_cast<double>(log_sum_exp_row(row));
    }

    // The draft grows by the tokens of this pass, up to its end.
    static void accept(JobState& request) {
        const DraftJob& job = *request.job;
        for (int64_t i = 0; i < request.sampled && !request.ended; i++) {
            const int64_t index = *request.length;
            request.ended = request.draft_ids[index] < 0;
            if (request.ended) return;
            request.sum += request.logprobs[index];
            request.ended = ++*request.length == job.max_tokens || request.sum < job.min_logprob_sum;
        }
    }

    // The steps of sampling/logits_processors.py that a draft supports, in their order.
    void process(const DraftJob& job, Row row, int thread) const {
        for (int64_t i = 0; i < draft_.num_never_sampled; i++)
            if (has_id(row, draft_.never_sampled_ids[i])) row.values[draft_.never_sampled_ids[i]] = MASKED;
        if (job.greedy) return;
        if (job.temperature != 1) apply_temperature_row(row, static_cast<float>(job.temperature));
        if (job.top_k > 0) apply_top_k_row(row, job.top_k);
        if (job.top_p < 1) apply_top_p_row(row, job.top_p, weights(row, thread));
        if (job.min_p > 0) apply_min_p_row(row, job.min_p);
    }

    int64_t* weights(Row row, int thread) const {
        return reinterpret_cast<int64_t*>(cpu_.pool().scratch(thread, row.width * static_cast<int64_t>(sizeof(int64_t))));
    }

    CpuContext& cpu_;
    const Program& program_;
    const DraftArgs& draft_;
    Batch batch_;
    std::vector<JobState> active_;
};

}  // namespace

InputError run_draft(CpuContext& cpu, const Program& program, const ProgramInputs& inputs, const DraftArgs& draft) {
    DraftRun run(cpu, program, inputs, draft);
    InputError error = run.first();
    while (error == InputError::NONE && !run.done()) error = run.next();
    return error;
}

}  // namespace foreword
