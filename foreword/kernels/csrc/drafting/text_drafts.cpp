// The texts of live requests, for speculation/drafters/text.py.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "common/input_error.h"
#include "drafting/text_follower.h"

namespace foreword {
namespace {

constexpr int64_t MAX_TOTAL_SIZE = 32 * MAX_SIZE;  // of all texts

class TextDrafts {
public:
    TextDrafts(std::vector<uint8_t> bytes, std::vector<int64_t> starts, std::vector<uint8_t> markers)
        : bytes_(std::move(bytes)), starts_(std::move(starts)), markers_(std::move(markers)) {}

    int32_t start() {
        if (free_.empty()) {
            free_.reserve(texts_.size() + 1);  // finish() must not fail
            texts_.emplace_back();
            free_.push_back(static_cast<int32_t>(texts_.size()) - 1);
        }
        const int32_t id = free_.back();
        texts_[id].follower = std::make_unique<TextFollower>();
        texts_[id].is_live = true;
        free_.pop_back();
        return id;
    }

    void finish(int32_t id) {
        drop(id);
        texts_[id].is_live = false;
        free_.push_back(id);
    }

    // Forget a live text: it has no drafts any more.
    void drop(int32_t id) noexcept {
        num_read_ -= texts_[id].is_read;
        texts_[id].is_read = false;
        texts_[id].follower.reset();
    }

    bool has_text(int32_t id) const { return 0 <= id && static_cast<size_t>(id) < texts_.size() && texts_[id].is_live; }
    int64_t num_texts() const { return static_cast<int64_t>(texts_.size() - free_.size()); }
    int64_t memory() const {
        int64_t bytes = 0;
        for (const Text& text : texts_) bytes += text.follower == nullptr ? 0 : text.follower->memory();
        return bytes;
    }
    int64_t work(int32_t id) const { return texts_[id].follower == nullptr ? 0 : texts_[id].follower->work(); }

    // Ids that no vocabulary has are markers.
    const TextDraft* propose(int32_t id, const int32_t* token_ids, int64_t count, int32_t max_bytes) {
        Text& text = texts_[id];
        if (text.follower == nullptr) return nullptr;
        if (count > 0 && !text.is_read) {
            text.is_read = true;
            num_read_++;
        }
        const int64_t max_size = std::min(MAX_SIZE, MAX_TOTAL_SIZE / std::max<int64_t>(num_read_, 1));
        for (int64_t i = 0; i < count; i++) {
            const int64_t token = token_ids[i];
            if (token < 0 || token >= static_cast<int64_t>(markers_.size()) || markers_[token]) {
                text.follower->read_marker();
            } else {
                text.follower->read(bytes_.data() + starts_[token], starts_[token + 1] - starts_[token], max_size);
            }
        }
        return &text.follower->propose(max_bytes);
    }

private:
    struct Text {
        std::unique_ptr<TextFollower> follower;  // null: none, or dropped
        bool is_live = false, is_read = false;
    };

    std::vector<uint8_t> bytes_;
    std::vector<int64_t> starts_;  // of each token's bytes, and their end
    std::vector<uint8_t> markers_;
    std::vector<Text> texts_;
    std::vector<int32_t> free_;
    int64_t num_read_ = 0;  // texts that have been read
};

}  // namespace
}  // namespace foreword

using foreword::InputError;
using foreword::TextDrafts;

extern "C" {

// lengths: bytes of each token, which are concatenated in `bytes`; markers: 1 for tokens that are no text. Null if memory is
// short or a length is negative.
TextDrafts* foreword_text_new(const uint8_t* bytes, const int32_t* lengths, const uint8_t* markers, int64_t num_tokens) {
    try {
        std::vector<int64_t> starts(1, 0);
        for (int64_t i = 0; i < num_tokens; i++) {
            if (lengths[i] < 0) return nullptr;
            starts.push_back(starts.back() + lengths[i]);
        }
        const std::vector<uint8_t> all(bytes, bytes + starts.back()), flags(markers, markers + num_tokens);
        return new TextDrafts(all, starts, flags);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void foreword_text_delete(TextDrafts* drafts) { delete drafts; }

// A handle, or -1 if memory is short.
int32_t foreword_text_start(TextDrafts* drafts) {
    try {
        return drafts->start();
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

InputError foreword_text_finish(TextDrafts* drafts, int32_t text) {
    if (!drafts->has_text(text)) return InputError::TEXT;
    drafts->finish(text);
    return InputError::NONE;
}

int64_t foreword_text_num_texts(const TextDrafts* drafts) { return drafts->num_texts(); }

int64_t foreword_text_memory(const TextDrafts* drafts) { return drafts->memory(); }

// Steps of work on a text so far: a measure of its cost that no clock disturbs. -1 without such a text.
int64_t foreword_text_work(TextDrafts* drafts, int32_t text) { return drafts->has_text(text) ? drafts->work(text) : -1; }

// Extend a text by tokens, then draft its continuation: at most `room` bytes, and the probability that all
// up to each are right. Returns their number; -1 if there is no such text or a count is negative, -2 if memory is short: the text
// is empty from then on.
int64_t foreword_text_propose(
    TextDrafts* drafts, int32_t text, const int32_t* token_ids, int64_t count, int64_t room, uint8_t* bytes, float* probability
) {
    if (!drafts->has_text(text) || count < 0 || room < 0) return -1;
    try {
        const auto* found = drafts->propose(text, token_ids, count, static_cast<int32_t>(std::min<int64_t>(room, 1 << 16)));
        if (found == nullptr) return 0;
        const foreword::TextDraft& draft = *found;
        const int64_t length = std::min<int64_t>(room, static_cast<int64_t>(draft.bytes.size()));
        std::copy_n(draft.bytes.data(), length, bytes);
        float product = 1;
        for (int64_t i = 0; i < length; i++) probability[i] = product *= draft.probability[i];
        return length;
    } catch (const std::bad_alloc&) {
        drafts->drop(text);  // it may have been changed in part
        return -2;
    }
}
}
