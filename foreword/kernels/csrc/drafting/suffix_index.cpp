// Drafts from the longest suffix match, with the bits of tests/support/suffix_index.py, which explains the method.
//
// Memory is zeroed and touched only as it fills: a zero is a separator, or no slot.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "common/input_error.h"

namespace foreword {
namespace {

constexpr int NUM_ORDERS = 4;
constexpr int ORDERS[NUM_ORDERS] = {1, 2, 4, 8};
constexpr int MAX_CHAIN = 16;
constexpr int MAX_MATCH_LEN = 32;
constexpr int MIN_MATCHES = 4;
constexpr int MAX_POSITIONS = 2 * (MIN_MATCHES - 1 + MAX_CHAIN);
constexpr double MIN_PREFIX_PROB = 0.05;
constexpr int64_t SELF_WEIGHT = 4;
constexpr int32_t INITIAL_SLOTS = 64;
constexpr int32_t MAX_SLOTS = 1 << 30;
constexpr uint64_t HASH_MULTIPLIER = 0x9E3779B97F4A7C15;
constexpr int32_t SEPARATOR = 0;
constexpr int32_t NULL_SLOT = 0;
constexpr int64_t QUERY_HEAD = 3;  // values of a query before its tokens

constexpr int64_t square(int64_t length) { return length * length; }

template <class T>
class Zeros {
public:
    explicit Zeros(int64_t count) : data_(static_cast<T*>(std::calloc(count, sizeof(T)))) {
        if (!data_) throw std::bad_alloc();
    }
    T& operator[](int64_t i) { return data_.get()[i]; }
    const T& operator[](int64_t i) const { return data_.get()[i]; }

private:
    struct Free {
        void operator()(T* data) const { std::free(data); }
    };
    std::unique_ptr<T, Free> data_;
};

// Hashes of the last n tokens, for the first `count` of ORDERS.
struct Keys {
    int count = 0;
    uint32_t of[NUM_ORDERS];
};

class TokenRing;

// The continuation of a match: the next token is at `slot`.
struct MatchPosition {
    const TokenRing* slots;
    int32_t slot;
    int32_t length;
    int64_t weight;
};

struct MatchPositions {
    int count = 0;
    std::array<MatchPosition, MAX_POSITIONS> of;
};

// TokenRing of suffix_index.py.
class TokenRing {
public:
    explicit TokenRing(int32_t capacity)
        : capacity_(capacity), tokens_(capacity), heads_(capacity * int64_t{NUM_ORDERS}), chains_(capacity) {}

    int32_t write() const { return write_; }
    int32_t capacity() const { return capacity_; }
    int32_t token(int32_t slot) const { return tokens_[slot]; }
    int32_t before(int32_t slot) const { return slot > 1 ? slot - 1 : capacity_ - 1; }
    int32_t after(int32_t slot) const { return slot + 1 < capacity_ ? slot + 1 : 1; }

    Keys keys(uint32_t owner) const {
        Keys keys;
        uint64_t key = owner;
        int32_t slot = write_;
        for (int length = 1; length <= ORDERS[NUM_ORDERS - 1]; length++) {
            slot = before(slot);
            if (tokens_[slot] == SEPARATOR) break;
            key = (key ^ static_cast<uint64_t>(tokens_[slot])) * HASH_MULTIPLIER;
            key ^= key >> 29;
            if (length == ORDERS[keys.count]) keys.of[keys.count++] = static_cast<uint32_t>(key >> 32);
        }
        return keys;
    }

    void append(int32_t token, uint32_t owner) {
        if (token != SEPARATOR) link(keys(owner));
        tokens_[write_] = token;
        chains_[write_].owner = owner;
        write_ = after(write_);
    }

    // Add the matches where the end of `text` occurs here too, longest orders first, until there are MIN_MATCHES.
    void find(const Keys& keys, const TokenRing& text, uint32_t owner, MatchPositions& matches) const {
        const int min_matches = matches.count + MIN_MATCHES;
        for (int order = keys.count - 1; order >= 0 && matches.count < min_matches; order--) {
            walk(order, heads_[bucket(order, keys.of[order])], text, owner, matches);
        }
    }

private:
    // Per slot: the namespace of its token, and the previous slot in the chain of each order.
    struct Chains {
        uint32_t owner;
        int32_t links[NUM_ORDERS];
    };

    int64_t bucket(int order, uint32_t key) const {
        return int64_t{order} * capacity_ + static_cast<int64_t>(uint64_t{key} * capacity_ >> 32);
    }

    void link(const Keys& keys) {
        Chains& chains = chains_[write_];
        for (int order = 0; order < keys.count; order++) {
            int32_t& head = heads_[bucket(order, keys.of[order])];
            chains.links[order] = head;
            head = write_;
        }
    }

    void walk(int order, int32_t slot, const TokenRing& text, uint32_t owner, MatchPositions& matches) const {
        int32_t youngest = 0;
        for (int visited = 0; visited < MAX_CHAIN && slot != NULL_SLOT; visited++) {
            const int32_t age = slot <= write_ ? write_ - slot : write_ - slot + capacity_ - 1;
            if (age <= youngest) return;
            const int32_t length = chains_[slot].owner == owner ? match_length(slot, text) : 0;
            if (length >= ORDERS[order] && (order == NUM_ORDERS - 1 || length < ORDERS[order + 1])) {
                matches.of[matches.count++] = {this, slot, length, square(length) * (this == &text ? SELF_WEIGHT : 1)};
            }
            youngest = age;
            slot = chains_[slot].links[order];
        }
    }

    // Number of tokens before `slot` that match the end of `text`.
    int32_t match_length(int32_t slot, const TokenRing& text) const {
        int32_t end = text.write_;
        for (int32_t length = 0; length < MAX_MATCH_LEN; length++) {
            slot = before(slot);
            end = text.before(end);
            if (tokens_[slot] == SEPARATOR || tokens_[slot] != text.tokens_[end]) return length;
        }
        return MAX_MATCH_LEN;
    }

    int32_t capacity_;
    int32_t write_ = 1;
    Zeros<int32_t> tokens_;
    Zeros<int32_t> heads_;
    Zeros<Chains> chains_;
};

struct Text {
    uint32_t owner;
    TokenRing slots{INITIAL_SLOTS};

    void make_room(int64_t count) {
        int64_t capacity = slots.capacity();
        while (slots.write() + count >= capacity) capacity *= 2;
        if (capacity > MAX_SLOTS) throw std::bad_alloc();
        if (capacity == slots.capacity()) return;
        TokenRing larger(static_cast<int32_t>(capacity));
        for (int32_t slot = 1; slot < slots.write(); slot++) larger.append(slots.token(slot), owner);
        slots = std::move(larger);
    }
};

// Votes for one token: the sum of weights, and the longest match.
struct Vote {
    int32_t token;
    int32_t length;
    int64_t weight;
};

class DraftBuilder {
public:
    DraftBuilder(const TokenRing& text, const std::vector<double>& doubts) : text_(text), doubts_(doubts) {}

    // Follow the matches while they continue and are likely correct; returns the number of tokens.
    int32_t draft(MatchPositions& matches, int32_t max_tokens, int32_t* token_ids, double* confidence) {
        double prefix_prob = 1.0;
        for (int32_t step = 0; step < max_tokens; step++) {
            count(matches, token_ids);
            if (num_votes_ == 0) return step;
            const Vote& best = winner();
            const double probability = static_cast<double>(best.weight) / (static_cast<double>(total_) + doubt(best.length, step));
            prefix_prob *= probability;
            if (prefix_prob < MIN_PREFIX_PROB) return step;
            token_ids[step] = best.token - 1;
            confidence[step] = probability;
            keep(matches, best.token);
        }
        return max_tokens;
    }

private:
    // Votes for the next token of each match, in the order found.
    void count(const MatchPositions& matches, const int32_t* token_ids) {
        num_votes_ = 0;
        total_ = 0;
        for (int i = 0; i < matches.count; i++) {
            const MatchPosition& match = matches.of[i];
            tokens_[i] = next(match, token_ids);
            if (tokens_[i] == SEPARATOR) continue;
            Vote& vote = vote_for(tokens_[i]);
            vote.weight += match.weight;
            vote.length = std::max(vote.length, match.length);
            total_ += match.weight;
        }
    }

    // At the end of its own text, a match continues into the draft.
    int32_t next(const MatchPosition& match, const int32_t* token_ids) const {
        if (match.slots == &text_ && match.slot >= text_.write()) return token_ids[match.slot - text_.write()] + 1;
        return match.slots->token(match.slot);
    }

    Vote& vote_for(int32_t token) {
        for (int i = 0; i < num_votes_; i++) {
            if (votes_[i].token == token) return votes_[i];
        }
        votes_[num_votes_] = {token, 0, 0};
        return votes_[num_votes_++];
    }

    // The token with the largest weight, first found on a tie.
    const Vote& winner() const {
        return *std::max_element(
            votes_.begin(), votes_.begin() + num_votes_, [](const Vote& a, const Vote& b) { return a.weight < b.weight; }
        );
    }

    // The match grows with the draft.
    double doubt(int32_t length, int32_t step) const {
        const size_t grown = static_cast<size_t>(length) + step;
        return doubts_[std::min(grown, doubts_.size() - 1)] * static_cast<double>(SELF_WEIGHT * square(length));
    }

    // Keep the matches that continue with `token`, advanced by one.
    void keep(MatchPositions& matches, int32_t token) {
        int kept = 0;
        for (int i = 0; i < matches.count; i++) {
            if (tokens_[i] != token) continue;
            MatchPosition& match = matches.of[kept++] = matches.of[i];
            match.slot = match.slots == &text_ ? match.slot + 1 : match.slots->after(match.slot);
        }
        matches.count = kept;
    }

    const TokenRing& text_;
    const std::vector<double>& doubts_;
    std::array<int32_t, MAX_POSITIONS> tokens_;
    std::array<Vote, MAX_POSITIONS> votes_;
    int num_votes_ = 0;
    int64_t total_ = 0;
};

class SuffixIndex {
public:
    SuffixIndex(int32_t corpus_slots, std::vector<double> doubts, std::vector<uint8_t> never)
        : doubts_(std::move(doubts)), never_(std::move(never)) {
        if (corpus_slots > 1) corpus_ = std::make_unique<TokenRing>(corpus_slots);
    }

    int32_t start(uint32_t owner) {
        if (free_.empty()) {
            free_.reserve(texts_.size() + 1);  // finish() must not fail
            texts_.emplace_back();
            free_.push_back(static_cast<int32_t>(texts_.size()) - 1);
        }
        const int32_t text = free_.back();
        texts_[text] = std::make_unique<Text>(Text{owner});
        free_.pop_back();
        return text;
    }

    void finish(int32_t text, const int32_t* output, int64_t count) {
        const uint32_t owner = texts_[text]->owner;
        texts_[text].reset();
        free_.push_back(text);
        if (!corpus_ || count == 0) return;
        const int64_t first = count > corpus_->capacity() ? count - corpus_->capacity() : 0;
        for (int64_t i = first; i < count; i++) corpus_->append(token(output[i]), owner);
        corpus_->append(SEPARATOR, owner);
    }

    int32_t propose(int32_t id, int32_t max_tokens, const int32_t* added, int32_t count, int32_t* token_ids, double* confidence) {
        Text& text = *texts_[id];
        text.make_room(count);
        for (int32_t i = 0; i < count; i++) text.slots.append(token(added[i]), text.owner);
        const Keys keys = text.slots.keys(text.owner);
        MatchPositions matches;
        text.slots.find(keys, text.slots, text.owner, matches);
        if (corpus_) corpus_->find(keys, text.slots, text.owner, matches);
        return DraftBuilder(text.slots, doubts_).draft(matches, max_tokens, token_ids, confidence);
    }

    bool has_text(int32_t id) const {
        return 0 <= id && static_cast<size_t>(id) < texts_.size() && texts_[id] != nullptr;
    }

    int64_t num_texts() const { return static_cast<int64_t>(texts_.size() - free_.size()); }

private:
    // Ids that no vocabulary has match nothing.
    int32_t token(int32_t id) const {
        if (id < 0 || id == INT32_MAX) return SEPARATOR;
        return static_cast<size_t>(id) < never_.size() && never_[id] ? SEPARATOR : id + 1;
    }

    std::vector<double> doubts_;
    std::vector<uint8_t> never_;
    std::unique_ptr<TokenRing> corpus_;
    std::vector<std::unique_ptr<Text>> texts_;
    std::vector<int32_t> free_;
};

// Whether all queries are of texts, end within num_values, and draft at most `room` tokens together.
bool are_valid(const SuffixIndex& index, const int32_t* queries, int64_t num_values, int64_t count, int64_t room) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        if (at + QUERY_HEAD > num_values) return false;
        const int32_t text = queries[at], max_tokens = queries[at + 1], num_tokens = queries[at + 2];
        at += QUERY_HEAD + num_tokens;
        room -= max_tokens;
        if (!index.has_text(text) || max_tokens < 0 || num_tokens < 0 || at > num_values || room < 0) return false;
    }
    return true;
}

}  // namespace
}  // namespace foreword

using foreword::InputError;
using foreword::QUERY_HEAD;
using foreword::SuffixIndex;

extern "C" {

// never: a byte for each id, 1 for ids that are neither matched nor drafted. Null if memory is short, or without doubts.
SuffixIndex* foreword_suffix_new(
    int32_t corpus_slots, const double* doubts, int64_t num_doubts, const uint8_t* never, int64_t num_never
) {
    if (num_doubts < 1 || num_never < 0 || corpus_slots > foreword::MAX_SLOTS) return nullptr;
    try {
        const std::vector<uint8_t> flags(never, never + num_never);
        return new SuffixIndex(corpus_slots, {doubts, doubts + num_doubts}, flags);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void foreword_suffix_delete(SuffixIndex* index) { delete index; }

// A handle, or -1 if memory is short.
int32_t foreword_suffix_start(SuffixIndex* index, uint32_t owner) {
    try {
        return index->start(owner);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

InputError foreword_suffix_finish(SuffixIndex* index, int32_t text, const int32_t* output, int64_t count) {
    if (!index->has_text(text) || count < 0) return InputError::TEXT;
    index->finish(text, output, count);
    return InputError::NONE;
}

int64_t foreword_suffix_num_texts(const SuffixIndex* index) { return index->num_texts(); }

// Each query is [text, max_tokens, count, count tokens], num_values in all. Drafts are concatenated in token_ids and
// confidence, which have `room` entries, enough for the sum of max_tokens; lengths has one entry per query. Returns the number
// of queries answered: fewer than all if memory is short, -1 if one of them is not valid.
int64_t foreword_suffix_propose(
    SuffixIndex* index, const int32_t* queries, int64_t num_values, int64_t count, int32_t* lengths, int64_t room,
    int32_t* token_ids, double* confidence
) {
    if (!foreword::are_valid(*index, queries, num_values, count, room)) return -1;
    for (int64_t i = 0; i < count; i++) {
        try {
            lengths[i] = index->propose(queries[0], queries[1], queries + QUERY_HEAD, queries[2], token_ids, confidence);
        } catch (const std::bad_alloc&) {
            return i;
        }
        queries += QUERY_HEAD + queries[2];
        token_ids += lengths[i];
        confidence += lengths[i];
    }
    return count;
}
}
