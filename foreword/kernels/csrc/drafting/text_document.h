// A request's text as a document of lines: unescaped, and without line numbers, marks of diffs and colour codes.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace foreword {

constexpr int MAX_DEPTH = 4;              // of strings in strings
constexpr int32_t MAX_LINE = 1024;        // bytes; a longer line is several, joined
constexpr int64_t MAX_SIZE = 3 << 19;     // of a document; beyond, its older half is forgotten
constexpr int64_t LEXEME_SIZE = 8;        // added for each word or sign, and twice for each line: the index has an entry for each
constexpr int32_t MAX_HELD = 72;          // bytes that decide whether JSON or a call begins: a bracket and a function's name
constexpr uint8_t BARRIER = 0;            // in the text, before each section: nothing matches across it

struct Line {
    int32_t begin, end;  // content in the text, without indentation; a newline follows unless joined
    int32_t number;      // that a tool printed before the line, or 0
    int16_t indent;      // characters
    bool has_tabs;       // the indentation is tabs
    char mark;           // of a diff: ' ', '+' or '-'; 0 outside
    bool joined;         // the next line goes on where this one ends
    int32_t section;     // lines of one section follow each other
};

// Lines first..last - 1.
struct LineRange {
    int32_t first = 0, last = 0;
    bool empty() const { return first >= last; }
};

// Where the text ends: what a draft has to continue.
struct Place {
    int depth = 0;            // strings around it
    std::array<uint8_t, MAX_DEPTH> quotes{};  // of these, outermost first
    bool is_text = false;     // false: JSON structure, or undecided
    bool is_diff = false;     // each line begins with a mark
    bool is_prose = false;    // in no call and no fenced code
    const uint8_t* escape = nullptr;  // begin of an escape that is not complete
    int escape_length = 0;
};

// The line that is not complete.
struct Partial {
    const uint8_t* content = nullptr;
    int32_t length = 0;
    int16_t indent = 0;
    bool has_tabs = false;
    char mark = 0;
    bool has_begun = false;  // its mark is known, if it has one
};

// Reads bytes once. Each byte costs the same, whatever the text is.
class Document {
public:
    Document() { begin_text(0); }

    void read(const uint8_t* bytes, int64_t count) {
        for (int64_t i = 0; i < count; i++) put(0, bytes[i]);
    }
    // A marker or special token: what was open is closed, and JSON may begin.
    void read_marker();

    const std::vector<uint8_t>& text() const { return text_; }
    const std::vector<Line>& lines() const { return lines_; }
    int32_t section() const { return section_; }
    int32_t first_line_of_section() const { return section_first_; }
    // The text that the current section most likely repeats: the value before it in the same call, if that has words.
    LineRange previous_section() const { return previous_; }
    // Values of calls, each with the one before it that it may repeat, since the last call.
    std::vector<std::pair<LineRange, LineRange>> take_repeats() { return std::exchange(repeats_, {}); }
    Place place() const;
    Partial partial() const;
    int64_t work() const { return work_; }
    int64_t memory() const { return static_cast<int64_t>(text_.capacity() + sizeof(Line) * lines_.capacity() + line_.capacity()); }
    // Bytes, and as many more as stand for the entries of words, signs and lines in the index.
    int64_t size() const { return static_cast<int64_t>(text_.size()) + LEXEME_SIZE * (num_lexemes_ + 2 * static_cast<int64_t>(lines_.size())); }
    // Forget the older half. Returns the first line that is kept.
    int32_t forget();

private:
    struct Level {
        bool in_json = false, in_string = false, is_key = false, expects_key = false, at_start = true;
        bool is_call = false;  // [name(argument='text')]: strings as Python writes them
        uint8_t quote = '"';   // of the string
        int nesting = 0;
        uint64_t objects = 0;  // a bit for each container around: 1 for an object
        std::array<uint8_t, 8> escape{};
        int escape_length = 0;
        uint32_t high = 0;  // a high surrogate that waits for its low one
        std::array<uint8_t, MAX_HELD> held{};
        int held_length = 0;
    };

    void put(int k, uint8_t byte);
    void put_text(int k, uint8_t byte);
    void put_held(int k, uint8_t byte);
    void put_structure(int k, uint8_t byte);
    void put_string(int k, uint8_t byte);
    void put_escape(int k, uint8_t byte);
    void put_code(int k, uint32_t code);
    void begin_text(int k);
    void end_text(int k);
    void begin_section(bool repeats);
    void add_byte(uint8_t byte);
    void finish_line(bool joined);
    void note_separator(const uint8_t* content, int32_t length);

    std::vector<uint8_t> text_;
    std::vector<Line> lines_;
    std::array<Level, MAX_DEPTH + 1> levels_;
    int depth_ = 0;                // level that reads text now
    std::vector<uint8_t> line_;    // current line, raw
    int colour_ = 0;               // state of a colour code: none, after ESC, within
    bool in_diff_ = false, in_fence_ = false, continues_ = false;
    int32_t section_ = 0, section_first_ = 0;
    std::vector<std::pair<LineRange, LineRange>> repeats_;
    LineRange value_, previous_;   // the last complete value, and the one before this section
    int64_t num_lexemes_ = 0;      // words and signs of the text
    int64_t work_ = 0;             // bytes handled, at all levels
};

}  // namespace foreword
