// Follows one request's text: where it is copied from, and what comes next there.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "drafting/text_document.h"
#include "drafting/text_index.h"

namespace foreword {

// A proposed continuation as bytes of the model's output, and P(byte right | those before it right).
struct TextDraft {
    std::vector<uint8_t> bytes;
    std::vector<float> probability;
    void clear() {
        bytes.clear();
        probability.clear();
    }
};

class TextFollower {
public:
    // max_size: of the document; beyond, its older half is forgotten before it is indexed
    void read(const uint8_t* bytes, int64_t count, int64_t max_size) {
        document_.read(bytes, count);
        if (document_.size() > max_size) forget();
    }
    void read_marker() { document_.read_marker(); }
    // What most likely follows, at most max_bytes and a few more; empty where nothing is known.
    const TextDraft& propose(int32_t max_bytes);
    int64_t memory() const { return document_.memory() + index_.memory(); }
    int64_t work() const { return document_.work() + index_.work() + work_; }

private:
    // A place in the text that the output is copied from: the next byte is expected at `at`.
    struct Cursor {
        int32_t at = -1;
        int32_t run = 0;       // bytes that matched
        int32_t found = 0;     // of these when it was found
        int32_t line = 0;      // that `at` is in
        int32_t delta = 0;     // indentation of the output minus that of the source
        bool repeats = false;  // it is in the section before, which this one repeats
        bool is_begin = false;  // of a section that repeats another one
        float chance = 0;      // that the next lexeme is right; 0: by `run`
        bool known() const { return at >= 0; }
    };

    void follow();
    void begin_own_line(const Partial& partial, int32_t own);
    void begin_mark(char mark, int32_t own);
    void follow_bytes(const uint8_t* bytes, int32_t count);
    bool advance(uint8_t byte);
    void lose();
    void search(const Partial& partial);
    void resume(const Partial& partial);
    void resume_in_line(const Partial& partial);
    void resume_at_line(const Partial& partial);
    void begin_section(const Partial& partial);
    void set_cursor(int32_t at, int32_t run, float chance, const Partial& partial);
    int32_t line_of(int32_t at) const;
    int32_t next_line(int32_t line, char mark) const;
    float first_chance() const;
    void render(const Partial& partial, int32_t max_bytes);
    void render_indent(const Partial& partial);
    void render_line(int32_t max_bytes);
    bool render_renamed(int32_t end);
    bool render_newline();
    void emit(uint8_t byte, float probability);
    void emit_escaped(uint8_t byte, int depth, float probability);

    bool drop_escape(const Place& place);
    void learn_renames(const std::pair<LineRange, LineRange>& repeat);
    bool learn_rename(const Line& before, const Line& after);
    bool is_equal(const Line& a, const Line& b) const;
    char next_mark() const;
    float share_that_agrees(int best) const;
    void forget();

    Document document_;
    LexemeIndex index_;
    TextMatches matches_;
    Cursor cursor_, lost_;          // lost_: where the cursor was when the output left it
    Cursor old_;                    // in a diff: of unchanged and removed lines, while added ones are written
    int32_t own_lines_ = 0;         // complete lines that are followed
    int32_t own_bytes_ = 0;         // of the current one
    bool own_marked_ = false, own_begun_ = false;  // its mark, its indentation are known
    int32_t own_section_ = -1;
    int32_t num_own_lost_ = 0;      // lines of the output since the cursor was lost
    int32_t first_removed_ = -1;    // first line of the run of removed lines
    std::string renamed_, rename_;  // the last word that an edit replaced, and by what
    Place place_;
    TextDraft draft_;
    Cursor next_;                   // of the byte that is drafted next
    float chance_ = 0, total_ = 0;  // of that byte, and of the draft so far
    char mark_ = 0;                 // of the line that is drafted
    int64_t work_ = 0;
};

}  // namespace foreword
