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
        const int32_t text = free_.back();
        texts_[text] = std::make_unique<TextFollower>();
        free_.pop_back();
        return text;
    }

    void finish(int32_t text) {
        texts_[text].reset();
        free_.push_back(text);
    }

    bool has_text(int32_t id) const { return 0 <= id && static_cast<size_t>(id) < texts_.size() && texts_[id] != nullptr; }
    int64_t num_texts() const { return static_cast<int64_t>(texts_.size() - free_.size()); }
    TextFollower& text(int32_t id) { return *texts_[id]; }

    // Ids that no vocabulary has are markers.
    void read(int32_t id, const int32_t* token_ids, int64_t count) {
        TextFollower& text = *texts_[id];
        for (int64_t i = 0; i < count; i++) {
            const int64_t token = token_ids[i];
            if (token < 0 || token >= static_cast<int64_t>(markers_.size()) || markers_[token]) {
                text.read_marker();
            } else {
                text.read(bytes_.data() + starts_[token], starts_[token + 1] - starts_[token]);
            }
        }
    }

private:
    std::vector<uint8_t> bytes_;
    std::vector<int64_t> starts_;  // of each token's bytes, and their end
    std::vector<uint8_t> markers_;
    std::vector<std::unique_ptr<TextFollower>> texts_;
    std::vector<int32_t> free_;
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

// Steps of work on a text so far: a measure of its cost that no clock disturbs. -1 without such a text.
int64_t foreword_text_work(TextDrafts* drafts, int32_t text) { return drafts->has_text(text) ? drafts->text(text).work() : -1; }

// Extend a text by tokens, then draft its continuation: at most `room` bytes, and the probability that all
// up to each are right. Returns their number; -1 if there is no such text or a count is negative, -2 if memory is short.
int64_t foreword_text_propose(
    TextDrafts* drafts, int32_t text, const int32_t* token_ids, int64_t count, int64_t room, uint8_t* bytes, float* probability
) {
    if (!drafts->has_text(text) || count < 0 || room < 0) return -1;
    try {
        drafts->read(text, token_ids, count);
        const foreword::TextDraft& draft = drafts->text(text).propose(static_cast<int32_t>(std::min<int64_t>(room, 1 << 16)));
        const int64_t length = std::min<int64_t>(room, static_cast<int64_t>(draft.bytes.size()));
        std::copy_n(draft.bytes.data(), length, bytes);
        float product = 1;
        for (int64_t i = 0; i < length; i++) probability[i] = product *= draft.probability[i];
        return length;
    } catch (const std::bad_alloc&) {
        return -2;
    }
}
}
