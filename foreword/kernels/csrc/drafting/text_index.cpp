#include "drafting/text_index.h"

#include <algorithm>

namespace foreword {
namespace {

constexpr uint64_t MULTIPLIER = 0x9E3779B97F4A7C15;
constexpr uint32_t NEWLINE_HASH = 0x0A0A0A0B, NO_LEXEME = 0;
constexpr int32_t NO_ENTRY = -1;
constexpr size_t MIN_HEADS = 256;
constexpr int MAX_CONTEXT = TEXT_ORDERS[NUM_TEXT_ORDERS - 1];

uint32_t hash_of(const uint8_t* text, int32_t begin, int32_t end) {
    while (begin < end && text[begin] == ' ') begin++;  // spaces beside signs vary
    uint64_t hash = 1;
    for (int32_t i = begin; i < end; i++) hash = (hash ^ text[i]) * MULTIPLIER;
    return static_cast<uint32_t>(hash >> 32) | 1;
}

}  // namespace

bool is_word(uint8_t c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c >= 0x80; }

int32_t lexeme_end(const uint8_t* text, int32_t at, int32_t end) {
    end = std::min(end, at + MAX_LEXEME);
    while (at < end && text[at] == ' ') at++;
    if (at >= end) return end;
    if (!is_word(text[at])) return at + 1;
    while (at < end && is_word(text[at])) at++;
    return at;
}

void LexemeIndex::clear() {
    entries_.clear();
    hashes_.clear();
    for (auto& heads : heads_) heads.clear();
    num_lines_ = 0;
    section_ = -1;
}

int64_t LexemeIndex::memory() const {
    size_t bytes = sizeof(Entry) * entries_.capacity() + sizeof(uint32_t) * hashes_.capacity();
    for (const auto& heads : heads_) bytes += sizeof(int32_t) * heads.capacity();
    return static_cast<int64_t>(bytes);
}

void LexemeIndex::extend(const Document& document) {
    const uint8_t* text = document.text().data();
    const auto& lines = document.lines();
    for (; num_lines_ < static_cast<int32_t>(lines.size()); num_lines_++) {
        const Line& line = lines[num_lines_];
        if (line.section != section_) {
            section_ = line.section;
            add(line.begin, NO_LEXEME);
            add(line.begin, NEWLINE_HASH);
        }
        for (int32_t at = line.begin; at < line.end;) {
            const int32_t end = lexeme_end(text, at, line.end);
            add(at, hash_of(text, at, end));
            work_ += end - at;
            at = end;
        }
        if (!line.joined) add(line.end, NEWLINE_HASH);
    }
}

// An entry: its position continues the lexemes before it.
void LexemeIndex::add(int32_t at, uint32_t hash) {
    if (entries_.size() >= heads_[0].size()) grow();
    entries_.push_back({at, {}});
    link(static_cast<int32_t>(entries_.size()) - 1);
    hashes_.push_back(hash);
    work_++;
}

void LexemeIndex::grow() {
    const size_t size = std::max(MIN_HEADS, heads_[0].size() * 2);
    for (auto& heads : heads_) heads.assign(size, NO_ENTRY);
    for (size_t i = 0; i < entries_.size(); i++) link(static_cast<int32_t>(i));
    work_ += static_cast<int64_t>(entries_.size());
}

void LexemeIndex::link(int32_t entry) {
    const auto of = keys(entry, nullptr, 0);
    for (int order = 0; order < NUM_TEXT_ORDERS; order++) {
        entries_[entry].links[order] = NO_ENTRY;
        if (!of[order]) continue;
        int32_t& head = heads_[order][bucket(order, of[order])];
        entries_[entry].links[order] = head;
        head = entry;
    }
}

// Hashes of the last lexemes of the first `count` entries, and `more` behind them; 0 where a section begins.
std::array<uint64_t, NUM_TEXT_ORDERS> LexemeIndex::keys(int32_t count, const uint32_t* more, int32_t num_more) const {
    std::array<uint64_t, NUM_TEXT_ORDERS> of{};
    uint64_t key = 0x51ED270B;
    for (int back = 1, order = 0; back <= MAX_CONTEXT; back++) {
        const int32_t index = num_more - back;
        if (index < 0 && count + index < 0) return of;
        const uint32_t hash = index >= 0 ? more[index] : hashes_[count + index];
        if (hash == NO_LEXEME) return of;
        key = (key ^ hash) * MULTIPLIER;
        key ^= key >> 29;
        if (back == TEXT_ORDERS[order]) of[order++] = key | 1;
    }
    return of;
}

TextMatches LexemeIndex::find(const Document& document, const Partial& partial) {
    TextMatches matches;
    if (entries_.empty()) return matches;
    const std::vector<uint8_t>& text = document.text();
    std::array<uint32_t, MAX_CONTEXT> last{};  // of the partial line's complete lexemes
    int32_t count = 0, at = 0;
    for (int32_t end; at < partial.length && (end = lexeme_end(partial.content, at, partial.length)) < partial.length; at = end) {
        if (count == MAX_CONTEXT) std::move(last.begin() + 1, last.end(), last.begin());
        last[std::min(count, MAX_CONTEXT - 1)] = hash_of(partial.content, at, end);
        count = std::min(count + 1, MAX_CONTEXT);
    }
    const bool is_new = document.first_line_of_section() == static_cast<int32_t>(document.lines().size());
    const uint32_t first[] = {NO_LEXEME, NEWLINE_HASH};
    std::array<uint32_t, MAX_CONTEXT + 2> more{};
    int32_t num_more = 0;
    if (is_new) for (const uint32_t hash : first) more[num_more++] = hash;
    for (int32_t i = 0; i < count; i++) more[num_more++] = last[i];
    const auto of = keys(static_cast<int32_t>(entries_.size()), more.data(), num_more);
    work_ += partial.length;
    const uint8_t* tail = partial.content + at;
    const int32_t tail_length = partial.length - at;
    const auto size = static_cast<int32_t>(text.size());
    for (int order = NUM_TEXT_ORDERS - 1; order >= 0 && matches.count < 4; order--) {
        if (!of[order] || (order == 0 && tail_length < 2 && !count)) continue;
        int32_t entry = heads_[order][bucket(order, of[order])];
        for (int visited = 0; visited < MAX_TEXT_CHAIN && entry != NO_ENTRY; visited++, entry = entries_[entry].links[order]) {
            const int32_t begin = entries_[entry].at;
            if (begin + tail_length >= size || !std::equal(tail, tail + tail_length, text.data() + begin)) continue;
            int32_t length = tail_length, i = begin - 1, own = at - 1, whole = size - 1;
            for (; length < MAX_MATCH_BYTES && i >= 0; length++, i--, own--) {
                const uint8_t byte = own >= 0 ? partial.content[own] : whole >= 0 ? text[whole--] : BARRIER;
                if (byte == BARRIER || byte != text[i]) break;
            }
            work_ += length + 1;
            if (length < TEXT_ORDERS[order] + tail_length) continue;  // another key of the same bucket
            const int32_t from = begin + tail_length;
            const auto end = matches.of.begin() + matches.count;
            if (std::any_of(matches.of.begin(), end, [&](const TextMatch& m) { return m.at == from; })) continue;
            if (matches.count == MAX_TEXT_MATCHES) break;
            matches.of[matches.count++] = {from, length};
        }
    }
    std::stable_sort(matches.of.begin(), matches.of.begin() + matches.count, [](const TextMatch& a, const TextMatch& b) { return a.length > b.length; });
    return matches;
}

}  // namespace foreword
