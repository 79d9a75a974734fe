// Where the end of a text occurs in it before, by lexemes: a word or a sign, with the spaces before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafting/text_document.h"

namespace foreword {

constexpr int NUM_TEXT_ORDERS = 3;
constexpr int TEXT_ORDERS[NUM_TEXT_ORDERS] = {1, 3, 7};  // lexemes before the one that a match is in
constexpr int MAX_TEXT_CHAIN = 16;
constexpr int MAX_TEXT_MATCHES = 8;
constexpr int32_t MAX_MATCH_BYTES = 96;
constexpr int32_t MAX_LEXEME = 48;  // bytes; a longer word is several

// The end of the text occurs before `at`, for `length` bytes.
struct TextMatch {
    int32_t at, length;
};

struct TextMatches {
    int count = 0;
    std::array<TextMatch, MAX_TEXT_MATCHES> of;
};

bool is_word(uint8_t c);
// End of the lexeme that begins at `at`, at most `end`.
int32_t lexeme_end(const uint8_t* text, int32_t at, int32_t end);

class LexemeIndex {
public:
    // Index the lines from `first` on, of sections that begin with them or before.
    void extend(const Document& document);
    void clear();
    // The best matches of the end of `document`, longest first; the latest of equal ones first.
    TextMatches find(const Document& document, const Partial& partial);
    int64_t work() const { return work_; }
    int64_t memory() const;  // bytes

private:
    struct Entry {
        int32_t at;
        std::array<int32_t, NUM_TEXT_ORDERS> links;
    };

    void add(int32_t at, uint32_t hash);
    void grow();
    void link(int32_t entry);
    std::array<uint64_t, NUM_TEXT_ORDERS> keys(int32_t count, const uint32_t* more, int32_t num_more) const;
    size_t bucket(int order, uint64_t key) const { return (key >> 20 & (heads_[order].size() - 1)); }

    std::vector<Entry> entries_;
    std::vector<uint32_t> hashes_;  // of each entry's lexeme; 0: a section begins
    std::array<std::vector<int32_t>, NUM_TEXT_ORDERS> heads_;
    int32_t num_lines_ = 0;   // indexed
    int32_t section_ = -1;
    int64_t work_ = 0;
};

}  // namespace foreword
