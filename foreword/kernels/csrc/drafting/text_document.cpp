#include "drafting/text_document.h"

#include <algorithm>
#include <cstring>

#include "drafting/text_index.h"

namespace foreword {
namespace {

constexpr int32_t MIN_SEPARATOR = 5;  // signs of a line such as =======
constexpr int32_t MIN_VALUE = 12;     // bytes of a value that the next one may repeat
constexpr uint8_t ESCAPE = 0x1b;
constexpr uint32_t NO_CHARACTER = 0xFFFD;

bool is_digit(uint8_t c) { return c >= '0' && c <= '9'; }
bool is_space(uint8_t c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_path(uint8_t c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || std::strchr("_./+-@", c) != nullptr;
}

bool starts_with(const uint8_t* s, int32_t n, const char* text) {
    const auto size = static_cast<int32_t>(std::strlen(text));
    return n >= size && std::memcmp(s, text, size) == 0;
}

int64_t count_lexemes(const uint8_t* s, int32_t n) {
    int64_t count = 0;
    for (int32_t at = 0; at < n; at = lexeme_end(s, at, n)) count++;
    return count;
}

// What stands before a line's content.
struct Prefix {
    int32_t length = 0;
    int32_t number = 0;
    char mark = 0;
};

// One space after a sign, where the tool writes one: indentation is even.
int32_t odd_space(const uint8_t* s, int32_t n, int32_t at) {
    int32_t i = at;
    while (i < n && s[i] == ' ') i++;
    return (i - at) & 1;
}

// Bytes of the sign between a line's number and its content, with its space; 0: no sign.
int32_t separator_length(const uint8_t* s, int32_t n, int32_t at) {
    int32_t i = at;
    while (i < n && s[i] == ' ') i++;
    if (i < n && s[i] == '|') return i + 1 - at + odd_space(s, n, i + 1);
    if (i != at) return 0;
    if (at < n && s[at] == '\t') return 1;
    if (starts_with(s + at, n - at, "\xe2\x86\x92") || starts_with(s + at, n - at, "\xe2\x94\x82")) return 3;
    if (at < n && (s[at] == ':' || s[at] == ']')) return 1 + odd_space(s, n, at + 1);
    return at < n && s[at] == '-' ? 1 : 0;
}

// A line's number and its separator, after spaces, "L" or "[".
Prefix numbered(const uint8_t* s, int32_t n, int32_t at) {
    Prefix prefix;
    int32_t i = at, number = 0;
    while (i < n && s[i] == ' ') i++;
    if (i < n && (s[i] == 'L' || s[i] == '[')) i++;
    const int32_t first = i;
    while (i < n && i - first < 8 && is_digit(s[i])) number = number * 10 + (s[i++] - '0');
    if (i == first || i - first >= 8) return prefix;
    const int32_t separator = separator_length(s, n, i);
    if (separator) prefix = {i + separator, number, 0};
    return prefix;
}

// path:12: or path-12- of a search, or a number alone.
Prefix search_prefix(const uint8_t* s, int32_t n) {
    const Prefix alone = numbered(s, n, 0);
    if (alone.length) return alone;
    bool is_file = false;
    for (int32_t i = 0; i < n && (is_path(s[i]) || s[i] == ':'); i++) {
        is_file |= s[i] == '.' || s[i] == '/';
        const bool is_sign = s[i] == ':' || s[i] == '-';
        if (!is_sign || !is_file || i + 1 >= n || !is_digit(s[i + 1])) continue;
        int32_t j = i + 1, number = 0;
        while (j < n && j - i < 9 && is_digit(s[j])) number = number * 10 + (s[j++] - '0');
        if (j < n && s[j] == s[i]) return {j + 1, number, 0};
    }
    return {};
}

bool begins_diff(const uint8_t* s, int32_t n) {
    return starts_with(s, n, "@@") || starts_with(s, n, "*** Update File") || starts_with(s, n, "*** Add File") ||
           starts_with(s, n, "+++ ") || starts_with(s, n, "--- a/") || starts_with(s, n, "*** Begin Patch") || starts_with(s, n, "*** End");
}

Prefix line_prefix(const uint8_t* s, int32_t n, bool in_diff) {
    if (in_diff) {
        if (n && !begins_diff(s, n) && (s[0] == ' ' || s[0] == '+' || s[0] == '-')) return {1, 0, static_cast<char>(s[0])};
        return {};
    }
    if (starts_with(s, n, "\xe2\x94\x82")) return {3, 0, 0};
    if (n > 1 && s[0] == '>' && s[1] == ' ') return {1, 0, 0};
    return search_prefix(s, n);
}

int32_t indentation(const uint8_t* s, int32_t n, int32_t at) {
    int32_t i = at;
    while (i < n && (s[i] == ' ' || s[i] == '\t')) i++;
    return i - at;
}

}  // namespace

void Document::read_marker() {
    for (int k = depth_; k >= 0; k--) end_text(k);
    begin_text(0);
    in_diff_ = false;
    value_ = previous_ = {};
}

void Document::put(int k, uint8_t byte) {
    work_++;
    Level& level = levels_[k];
    if (!level.in_json) {
        put_text(k, byte);
    } else if (level.in_string) {
        put_string(k, byte);
    } else {
        put_structure(k, byte);
    }
}

void Document::put_text(int k, uint8_t byte) {
    Level& level = levels_[k];
    const bool may_begin = level.at_start && k < MAX_DEPTH && (level.held_length || byte == '{' || byte == '[');
    if (may_begin) return put_held(k, byte);
    level.at_start = (level.at_start && k > 0 && is_space(byte)) || (k == 0 && byte == '\n');
    add_byte(byte);
}

// JSON begins with { or [ and a string, a call in Python's notation with [name(. Code that does so is read like these
// too, which costs drafts only.
void Document::put_held(int k, uint8_t byte) {
    Level& level = levels_[k];
    const uint8_t before = level.held_length ? level.held[level.held_length - 1] : 0;
    level.held[level.held_length++] = byte;
    const bool in_name = is_word(before) || (before == '.' && level.held_length > 2);
    const bool is_open = byte == '{' || byte == '[' || is_space(byte);
    const bool goes_on = is_word(byte) ? in_name || before == '[' : in_name ? byte == '.' : is_open;
    if (goes_on && level.held_length < MAX_HELD) return;
    const auto held = level.held;
    const int count = level.held_length;
    level.held_length = 0;
    level.at_start = false;
    level.is_call = in_name && byte == '(';
    if (level.is_call || (byte == '"' && !in_name)) {
        finish_line(false);
        level.in_json = true;
        level.nesting = 0;
        for (int i = 0; i < count; i++) put_structure(k, held[i]);
        return;
    }
    for (int i = 0; i < count; i++) {
        if (k == 0 && held[i] == '\n') level.at_start = true;
        add_byte(held[i]);
    }
}

void Document::put_structure(int k, uint8_t byte) {
    Level& level = levels_[k];
    if (byte == '"' || (byte == '\'' && level.is_call)) {
        level.in_string = true;
        level.quote = byte;
        level.escape_length = 0;
        level.high = 0;
        level.is_key = level.expects_key;
        const bool repeats = !level.is_key && !value_.empty();
        begin_text(k + 1);
        begin_section(repeats);
    } else if (byte == '{' || byte == '[' || byte == '(') {
        level.objects = level.objects << 1 | (byte == '{');
        level.nesting++;
        level.expects_key = byte == '{';
        value_ = {};
    } else if (byte == '}' || byte == ']' || byte == ')') {
        level.objects >>= 1;
        if (--level.nesting <= 0) {
            level = Level{};
            level.at_start = false;
            begin_section(false);
        }
    } else if (byte == ',') {
        level.expects_key = level.objects & 1;
    } else if (byte == ':') {
        level.expects_key = false;
    }
}

void Document::put_string(int k, uint8_t byte) {
    Level& level = levels_[k];
    if (level.escape_length) return put_escape(k, byte);
    if (byte == '\\') {
        level.escape[level.escape_length++] = byte;
        return;
    }
    if (level.high) put_code(k, 0);
    if (byte != level.quote) return put(k + 1, byte);
    const int32_t first = section_first_;
    end_text(k + 1);
    depth_ = k;
    level.in_string = false;
    if (level.is_key) return;
    const LineRange value{first, static_cast<int32_t>(lines_.size())};
    if (!previous_.empty() && !value.empty()) repeats_.emplace_back(previous_, value);
    value_ = {};
    if (value.empty()) return;
    const int32_t length = lines_.back().end - lines_[first].begin;
    const uint8_t* begin = text_.data() + lines_[first].begin;
    if (length >= MIN_VALUE && std::any_of(begin, begin + length, is_space)) value_ = value;
}

void Document::put_escape(int k, uint8_t byte) {
    Level& level = levels_[k];
    level.escape[level.escape_length++] = byte;
    if (level.escape[1] != 'u') {
        level.escape_length = 0;
        if (level.high) put_code(k, 0);
        static constexpr char NAMES[] = "ntrbf", VALUES[] = "\n\t\r\b\f";
        const char* name = byte ? std::strchr(NAMES, byte) : nullptr;
        return put(k + 1, name ? static_cast<uint8_t>(VALUES[name - NAMES]) : byte);
    }
    if (level.escape_length < 6) return;
    uint32_t code = 0;
    for (int i = 2; i < 6; i++) {
        const uint8_t c = level.escape[i] | 0x20;
        const bool is_hex = is_digit(level.escape[i]) || (c >= 'a' && c <= 'f');
        code = code << 4 | (is_hex ? (is_digit(level.escape[i]) ? level.escape[i] - '0' : c - 'a' + 10) : 0);
    }
    level.escape_length = 0;
    put_code(k, code);
}

// One escaped UTF-16 unit as UTF-8; a surrogate alone is no character. code 0: no low surrogate has followed.
void Document::put_code(int k, uint32_t code) {
    Level& level = levels_[k];
    const uint32_t high = level.high;
    level.high = 0;
    if (code >= 0xDC00 && code < 0xE000 && high) {
        code = 0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00);
    } else if (high) {
        for (const uint8_t byte : {0xEF, 0xBF, 0xBD}) put(k + 1, byte);
        if (code == 0) return;
    }
    if (code >= 0xD800 && code < 0xDC00) {
        level.high = code;
        return;
    }
    if (code >= 0xDC00 && code < 0xE000) code = NO_CHARACTER;
    if (code < 0x80) return put(k + 1, static_cast<uint8_t>(code));
    const int extra = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static constexpr uint8_t HEADS[] = {0, 0xC0, 0xE0, 0xF0};
    put(k + 1, static_cast<uint8_t>(HEADS[extra] | code >> (6 * extra)));
    for (int i = extra - 1; i >= 0; i--) put(k + 1, static_cast<uint8_t>(0x80 | (code >> (6 * i) & 0x3F)));
}

void Document::begin_text(int k) {
    levels_[k] = Level{};
    depth_ = k;
    begin_section(false);
}

void Document::end_text(int k) {
    Level& level = levels_[k];
    const int held = level.held_length;
    level.held_length = 0;
    for (int i = 0; i < held; i++) add_byte(level.held[i]);
    finish_line(false);
    level = Level{};
    level.at_start = false;
}

void Document::begin_section(bool repeats) {
    finish_line(false);
    previous_ = repeats ? value_ : LineRange{};
    section_++;
    section_first_ = static_cast<int32_t>(lines_.size());
    if (text_.empty() || text_.back() != BARRIER) text_.push_back(BARRIER);
    in_diff_ = in_fence_ = false;
    continues_ = false;
}

void Document::add_byte(uint8_t byte) {
    if (colour_) {  // ESC [ parameters letter
        colour_ = colour_ == 1 ? (byte == '[' ? 2 : 0) : (byte >= 0x40 ? 0 : 2);
        if (byte != '\n') return;
        colour_ = 0;
    }
    if (byte == ESCAPE) {
        colour_ = 1;
    } else if (byte == '\n') {
        line_.push_back(byte);
        finish_line(false);
    } else if (byte != BARRIER) {
        line_.push_back(byte);
        if (static_cast<int32_t>(line_.size()) >= MAX_LINE) finish_line(true);
    }
}

// Add the current line to the text, if it holds anything. A line that a newline ends holds it.
void Document::finish_line(bool joined) {
    if (line_.empty()) return;
    const bool has_newline = line_.back() == '\n';
    auto n = static_cast<int32_t>(line_.size()) - has_newline;
    if (n && line_[n - 1] == '\r') n--;
    const uint8_t* s = line_.data();
    const Prefix prefix = continues_ ? Prefix{} : line_prefix(s, n, in_diff_);
    const int32_t indent = continues_ ? 0 : indentation(s, n, prefix.length);
    const int32_t at = std::min(prefix.length + indent, n);
    const auto begin = static_cast<int32_t>(text_.size());
    text_.insert(text_.end(), s + at, s + n);
    const bool has_tabs = indent && s[prefix.length] == '\t';
    const auto end = static_cast<int32_t>(text_.size());
    num_lexemes_ += count_lexemes(text_.data() + begin, end - begin);
    if (!joined) text_.push_back('\n');
    if (!continues_ && begins_diff(s, n)) {
        in_diff_ = true;
    } else if (in_diff_ && n && !prefix.mark) {
        in_diff_ = false;
    }
    lines_.push_back({begin, end, prefix.number, static_cast<int16_t>(indent), has_tabs, prefix.mark, joined, section_});
    continues_ = joined;
    line_.clear();
    if (starts_with(text_.data() + begin, end - begin, "```")) in_fence_ = !in_fence_;
    if (has_newline) note_separator(text_.data() + begin, end - begin);
}

// A line of signs, or a tag, begins a section: its text may repeat that of the section before.
void Document::note_separator(const uint8_t* s, int32_t n) {
    if (n < 3 || depth_ > MAX_DEPTH) return;
    const uint8_t sign = s[0];
    const bool is_tag = sign == '<' && s[n - 1] == '>' && !is_space(s[1]);
    int32_t run = 0;
    while (run < n && s[run] == sign) run++;
    const bool is_separator = run >= MIN_SEPARATOR && (sign == '<' || sign == '=' || sign == '>' || sign == '-');
    if (!is_tag && !is_separator) return;
    const LineRange value{section_first_, static_cast<int32_t>(lines_.size()) - 1};
    const bool is_end = is_tag ? s[1] == '/' : sign == '>';
    const bool opens = is_tag ? !is_end : sign == '<' || sign == '-';
    if (is_end || sign == '=') value_ = value;
    if (!is_tag && opens) value_ = {};
    const bool was_diff = in_diff_;
    begin_section(!is_end && !value_.empty());
    if (sign == '>' && !is_tag) value_ = {};
    in_diff_ = was_diff;
}

Place Document::place() const {
    Place place;
    for (int k = 0; k <= MAX_DEPTH; k++) {
        const Level& level = levels_[k];
        if (!level.in_json) {
            place.depth = k;
            place.is_text = level.held_length == 0 && !colour_;
            break;
        }
        if (!level.in_string || level.high) break;
        place.quotes[k] = level.quote;
        if (level.escape_length) {
            const bool is_last = k == depth_ - 1;
            place.depth = k + 1;
            place.is_text = is_last;
            place.escape = level.escape.data();
            place.escape_length = level.escape_length;
            break;
        }
    }
    place.is_diff = in_diff_;
    place.is_prose = place.depth == 0 && !in_fence_ && !in_diff_;
    return place;
}

Partial Document::partial() const {
    Partial partial;
    const auto n = static_cast<int32_t>(line_.size());
    const uint8_t* s = line_.data();
    const Prefix prefix = continues_ ? Prefix{} : line_prefix(s, n, in_diff_);
    const int32_t indent = continues_ ? 0 : indentation(s, n, prefix.length);
    const int32_t at = std::min(prefix.length + indent, n);
    partial.content = s + at;
    partial.length = n - at;
    partial.indent = static_cast<int16_t>(indent);
    partial.has_tabs = indent && s[prefix.length] == '\t';
    partial.mark = prefix.mark;
    partial.has_begun = n > 0;
    return partial;
}

int32_t Document::forget() {
    const int32_t half = static_cast<int32_t>(text_.size()) / 2;
    const auto kept = std::lower_bound(lines_.begin(), lines_.end(), half, [](const Line& line, int32_t at) { return line.begin < at; });
    const auto first = static_cast<int32_t>(kept - lines_.begin());
    const int32_t at = kept == lines_.end() ? static_cast<int32_t>(text_.size()) : kept->begin;
    text_.erase(text_.begin(), text_.begin() + at);
    text_.insert(text_.begin(), BARRIER);
    lines_.erase(lines_.begin(), kept);
    for (Line& line : lines_) {
        line.begin -= at - 1;
        line.end -= at - 1;
    }
    const auto shift = [&](LineRange& range) { range = {std::max(range.first - first, 0), std::max(range.last - first, 0)}; };
    shift(value_);
    shift(previous_);
    repeats_.clear();
    section_first_ = std::max(section_first_ - first, 0);
    num_lexemes_ = 0;
    for (const Line& line : lines_) num_lexemes_ += count_lexemes(text_.data() + line.begin, line.end - line.begin);
    return first;
}

}  // namespace foreword
