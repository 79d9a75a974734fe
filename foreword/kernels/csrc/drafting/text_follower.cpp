#include "drafting/text_follower.h"

#include <algorithm>

namespace foreword {
namespace {

constexpr int32_t SURE_RUN = 16;     // bytes: the source is not looked for again
constexpr int32_t MIN_MATCH = 4;     // bytes
constexpr int32_t MIN_FOLLOWED = 12;  // bytes that prove a source: where the output leaves it, it may come back
constexpr int32_t RESUME_WINDOW = 200;  // bytes of the source in which the output may go on
constexpr int32_t NEAR_LINES = 12;   // a match so far behind the place where the cursor was lost is likely
constexpr int32_t MAX_SHIFT = 4;     // lines that an edit removes at a time, where words that it replaces are learned
constexpr size_t MAX_MARKED = 64;    // lines of a diff's other version that are passed over
constexpr size_t MAX_RENAME = 64;    // bytes
constexpr int32_t NEAR_BONUS = 24;   // bytes of match that this is worth
constexpr float SAME = 0.999F;       // P(next byte) within a lexeme
constexpr float MIN_CHANCE = 0.08F;  // of the whole draft so far
// P(first lexeme right) by bytes of the match.
constexpr float FIRST_CHANCES[] = {0.35F, 0.5F, 0.6F, 0.75F, 0.85F, 0.92F, 0.95F, 0.97F};
constexpr float PROSE_CHANCES[] = {0.05F, 0.12F, 0.2F, 0.25F, 0.4F, 0.6F, 0.8F, 0.9F};
constexpr int32_t FIRST_BYTES[] = {6, 9, 13, 20, 32, 48, 80};

}  // namespace

int32_t TextFollower::line_of(int32_t at) const {
    const auto& lines = document_.lines();
    const auto after = std::upper_bound(lines.begin(), lines.end(), at, [](int32_t position, const Line& line) { return position < line.begin; });
    return static_cast<int32_t>(after - lines.begin()) - 1;
}

// The line that follows `line` in its file, as far as the text tells, or -1. In a diff, that of the same version.
int32_t TextFollower::next_line(int32_t line, char mark) const {
    const auto& lines = document_.lines();
    const Line& here = lines[line];
    const char other = mark == '-' ? '+' : '-';
    auto next = static_cast<size_t>(line) + 1;
    const size_t end = std::min(lines.size(), next + MAX_MARKED);
    while (here.mark && next < end && lines[next].mark == other && lines[next].section == here.section) next++;
    if (next >= lines.size() || lines[next].section != here.section) return -1;
    const Line& there = lines[next];
    if ((here.number || there.number) && there.number != here.number + 1) return -1;
    if ((here.mark != 0) != (there.mark != 0)) return -1;
    return static_cast<int32_t>(next);
}

const TextDraft& TextFollower::propose(int32_t max_bytes) {
    draft_.clear();
    index_.extend(document_);
    for (const auto& repeat : document_.take_repeats()) learn_renames(repeat);
    follow();
    place_ = document_.place();
    if (!place_.is_text) return draft_;
    const Partial partial = document_.partial();
    if (cursor_.run < SURE_RUN) search(partial);
    if (!cursor_.known()) resume(partial);
    if (!cursor_.known()) return draft_;
    render(partial, max_bytes);
    if (place_.escape_length && !drop_escape(place_)) draft_.clear();
    return draft_;
}

void TextFollower::forget() {
    document_.forget();
    index_.clear();
    cursor_ = lost_ = old_ = Cursor{};
    own_lines_ = static_cast<int32_t>(document_.lines().size());
    own_bytes_ = 0;
    first_removed_ = -1;
}

// Compare what the output has added with the source.
void TextFollower::follow() {
    const auto& lines = document_.lines();
    const auto count = static_cast<int32_t>(lines.size());
    if (document_.section() != own_section_) {  // only the current section is followed
        own_section_ = document_.section();
        cursor_ = lost_ = old_ = Cursor{};
        own_lines_ = std::min(document_.first_line_of_section(), count);
        own_bytes_ = 0;
        own_marked_ = own_begun_ = false;
        first_removed_ = -1;
        num_own_lost_ = 0;
    }
    for (; own_lines_ < count; own_lines_++) {
        const Line& line = lines[own_lines_];
        const uint8_t* text = document_.text().data();
        begin_own_line({text + line.begin, line.end - line.begin, line.indent, line.has_tabs, line.mark, true}, own_lines_);
        follow_bytes(text + line.begin + own_bytes_, line.end - line.begin - own_bytes_);
        if (!line.joined) {
            const uint8_t newline = '\n';
            follow_bytes(&newline, 1);
            if (!cursor_.known() && lost_.known() && lost_.repeats && num_own_lost_ == 0) learn_rename(lines[lost_.line], line);
            if (!cursor_.known()) num_own_lost_++;
        }
        own_bytes_ = 0;
        own_marked_ = own_begun_ = false;
    }
    const Partial partial = document_.partial();
    begin_own_line(partial, count);
    if (partial.length >= own_bytes_) follow_bytes(partial.content + own_bytes_, partial.length - own_bytes_);
    own_bytes_ = partial.length;
}

// The first bytes of a line are known: its mark, and with its content its indentation.
void TextFollower::begin_own_line(const Partial& partial, int32_t own) {
    if (!own_marked_ && partial.has_begun) {
        own_marked_ = true;
        begin_mark(partial.mark, own);
    }
    if (own_begun_ || partial.length == 0) return;
    own_begun_ = true;
    if (!cursor_.known()) return;
    const Line& source = document_.lines()[cursor_.line];
    if (cursor_.at == source.begin) cursor_.delta = partial.indent - source.indent;
}

// A diff: added lines repeat the removed ones, and the source goes on behind these.
void TextFollower::begin_mark(char mark, int32_t own) {
    const auto& lines = document_.lines();
    const char before = own > document_.first_line_of_section() ? lines[own - 1].mark : 0;
    if (mark == '-' && before != '-') first_removed_ = own;
    if (mark == '+' && before == '-' && first_removed_ >= 0) {
        old_ = cursor_;
        set_cursor(lines[first_removed_].begin, 0, 0.8F, {});
        cursor_.delta = 0;
        cursor_.is_begin = true;
    } else if (mark && mark != '+' && before == '+' && old_.known()) {
        cursor_ = old_;
        old_ = Cursor{};
    }
}

void TextFollower::follow_bytes(const uint8_t* bytes, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        work_++;
        if (cursor_.known() && !advance(bytes[i])) lose();
    }
}

bool TextFollower::advance(uint8_t byte) {
    const std::vector<uint8_t>& text = document_.text();
    const auto& lines = document_.lines();
    if (cursor_.at >= static_cast<int32_t>(text.size()) || text[cursor_.at] != byte) return false;
    cursor_.at++;
    cursor_.run++;
    if (cursor_.run - cursor_.found >= MIN_MATCH) cursor_.chance = 0;
    if (byte != '\n') {
        if (cursor_.at >= lines[cursor_.line].end && lines[cursor_.line].joined) {
            if (cursor_.line + 1 >= static_cast<int32_t>(lines.size())) return false;
            cursor_.line++;
        }
        return true;
    }
    const int32_t next = next_line(cursor_.line, lines[cursor_.line].mark);
    if (next < 0) return false;
    cursor_.line = next;
    cursor_.at = lines[next].begin;
    return true;
}

void TextFollower::lose() {
    if (cursor_.is_begin || cursor_.run - cursor_.found >= MIN_FOLLOWED) {
        lost_ = cursor_;
        num_own_lost_ = 0;
    }
    cursor_ = Cursor{};
}

void TextFollower::set_cursor(int32_t at, int32_t run, float chance, const Partial& partial) {
    const int32_t line = line_of(at);
    cursor_ = Cursor{};
    if (line < 0) return;
    const Line& source = document_.lines()[line];
    if (at < source.begin || at > source.end) return;
    cursor_.at = at;
    cursor_.run = cursor_.found = run;
    cursor_.line = line;
    cursor_.chance = chance;
    cursor_.delta = partial.length > 0 || partial.indent ? partial.indent - source.indent : lost_.delta;
    const LineRange previous = document_.previous_section();
    const bool is_removed = source.mark == '-' && source.section == document_.section();
    cursor_.repeats = is_removed || (line >= previous.first && line < previous.last);
}

// Share of the matches, by the square of their length, that go on as the best one does for a lexeme.
float TextFollower::share_that_agrees(int best) const {
    const std::vector<uint8_t>& text = document_.text();
    const auto size = static_cast<int32_t>(text.size());
    const int32_t at = matches_.of[best].at, end = std::min(lexeme_end(text.data(), at, size), at + MIN_MATCH);
    float all = 0, same = 0;
    for (int i = 0; i < matches_.count; i++) {
        const TextMatch& match = matches_.of[i];
        const auto weight = static_cast<float>(match.length * match.length);
        const bool agrees = match.at + end - at <= size && std::equal(text.data() + at, text.data() + end, text.data() + match.at);
        all += weight;
        if (agrees) same += weight;
    }
    return same / all;
}

// Look for the end of the output. A match just behind the place where the source was lost wins over longer ones.
void TextFollower::search(const Partial& partial) {
    if (partial.length == 0 && cursor_.known()) return;
    matches_ = index_.find(document_, partial);
    const auto& lines = document_.lines();
    int best = -1, best_score = cursor_.known() ? cursor_.run + NEAR_BONUS : MIN_MATCH - 1;
    for (int i = 0; i < matches_.count; i++) {
        int score = matches_.of[i].length;
        const int32_t line = line_of(matches_.of[i].at);
        if (line < 0 || (partial.length == 0 && line > 0 && next_line(line - 1, lines[line - 1].mark) != line)) continue;
        if (lost_.known() && line >= lost_.line && line <= lost_.line + NEAR_LINES) score += NEAR_BONUS - (line - lost_.line);
        if (score <= best_score) continue;
        best = i;
        best_score = score;
    }
    if (best < 0) return;
    const bool is_near = best_score > matches_.of[best].length;
    const float share = share_that_agrees(best);
    set_cursor(matches_.of[best].at, matches_.of[best].length, 0, partial);
    cursor_.chance = first_chance() * (is_near ? std::max(share, 0.8F) : share);
}

// The source is not found by the output's last lexemes.
void TextFollower::resume(const Partial& partial) {
    if (partial.length > 0) {
        if (lost_.known()) resume_in_line(partial);
    } else if (old_.known() && !lost_.known()) {
        cursor_ = old_;  // all lines that were removed are replaced
    } else if (lost_.known()) {
        resume_at_line(partial);
    } else {
        begin_section(partial);
    }
}

void TextFollower::begin_section(const Partial& partial) {
    const LineRange previous = document_.previous_section();
    if (previous.empty() || document_.first_line_of_section() != static_cast<int32_t>(document_.lines().size())) return;
    const Line& first = document_.lines()[previous.first];
    set_cursor(first.begin, 0, 0.6F, partial);
    if (!partial.has_begun) cursor_.delta = 0;
    cursor_.is_begin = true;
}

// A lexeme that differs is followed by the rest of the line: the source goes on behind the output's last lexeme.
void TextFollower::resume_in_line(const Partial& partial) {
    const std::vector<uint8_t>& text = document_.text();
    const Line& source = document_.lines()[lost_.line];
    int32_t begin = 0;
    for (int32_t end; (end = lexeme_end(partial.content, begin, partial.length)) < partial.length;) begin = end;
    while (begin < partial.length && partial.content[begin] == ' ') begin++;
    const int32_t size = partial.length - begin;
    if (size <= 0 || num_own_lost_ > 0) return;
    const int32_t end = std::min(source.end, lost_.at + RESUME_WINDOW);
    for (int32_t at = lost_.at; at + size <= end; at++) {
        work_ += 1;
        if (!std::equal(partial.content + begin, partial.content + partial.length, text.data() + at)) continue;
        if (is_word(text[at]) && at > 0 && is_word(text[at - 1])) continue;
        const bool is_near = at - lost_.at < 24;
        if (size == 1 && !is_near) return;
        set_cursor(at + size, 0, size > 2 ? (is_near ? 0.62F : 0.52F) : 0.42F, partial);
        cursor_.delta = lost_.delta;
        return;
    }
}

// Behind lines that differ: the line of the source after the one that was replaced, or that line itself.
void TextFollower::resume_at_line(const Partial& partial) {
    if (!lost_.known()) return;
    const auto& lines = document_.lines();
    const int32_t kept = lost_.at - lines[lost_.line].begin;
    const int32_t length = lines[lost_.line].end - lines[lost_.line].begin;
    const bool is_changed = num_own_lost_ <= 1 && 2 * kept >= length && length > 0;
    int32_t line = lost_.line;
    if (is_changed) line = next_line(line, lines[line].mark);
    if (line < 0) return;
    const int32_t delta = lost_.delta;
    set_cursor(lines[line].begin, 0, is_changed ? 0.72F : 0.32F, partial);
    if (!partial.has_begun) cursor_.delta = delta;
}

// P(next lexeme right) of the cursor.
float TextFollower::first_chance() const {
    if (cursor_.chance > 0) return cursor_.chance;
    int i = 0;
    while (i < 7 && cursor_.run >= FIRST_BYTES[i]) i++;
    return place_.is_prose ? PROSE_CHANCES[i] : FIRST_CHANCES[i];
}

void TextFollower::emit(uint8_t byte, float probability) {
    draft_.bytes.push_back(byte);
    draft_.probability.push_back(probability);
}

// The byte as the strings around it write it.
void TextFollower::emit_escaped(uint8_t byte, int depth, float probability) {
    if (depth == 0) return emit(byte, probability);
    static constexpr char HEX[] = "0123456789abcdef";
    if (byte == place_.quotes[depth - 1] || byte == '\\') {
        emit_escaped('\\', depth - 1, probability);
        return emit_escaped(byte, depth - 1, 1);
    }
    switch (byte) {
        case '\n':
        case '\t':
        case '\r':
            emit_escaped('\\', depth - 1, probability);
            return emit_escaped(byte == '\n' ? 'n' : byte == '\t' ? 't' : 'r', depth - 1, 1);
        default:
            if (byte >= 0x20) return emit_escaped(byte, depth - 1, probability);
            emit_escaped('\\', depth - 1, probability);
            for (const char c : {'u', '0', '0', HEX[byte >> 4], HEX[byte & 15]}) emit_escaped(c, depth - 1, 1);
    }
}

void TextFollower::render(const Partial& partial, int32_t max_bytes) {
    next_ = cursor_;
    chance_ = first_chance();
    total_ = 1;
    mark_ = partial.mark;
    if (place_.is_diff && !partial.has_begun) {
        mark_ = next_mark();
        emit_escaped(static_cast<uint8_t>(mark_), place_.depth, 0.75F);
    }
    if (partial.length == 0) render_indent(partial);
    while (static_cast<int32_t>(draft_.bytes.size()) < max_bytes && total_ > MIN_CHANCE) {
        const auto& lines = document_.lines();
        render_line(max_bytes);
        if (next_.at < lines[next_.line].end) return;
        if (!lines[next_.line].joined) {
            if (!render_newline()) return;
        } else if (next_.line + 1 < static_cast<int32_t>(lines.size())) {
            next_.at = lines[++next_.line].begin;
        } else {
            return;
        }
    }
}

// Indentation that is still to come in the output's current line.
void TextFollower::render_indent(const Partial& partial) {
    const Line& source = document_.lines()[next_.line];
    if (next_.at != source.begin) return;
    const int32_t indent = source.end > source.begin ? source.indent + next_.delta : 0;
    if (partial.has_begun && partial.indent > indent) next_.delta += partial.indent - indent;
    for (int32_t i = partial.has_begun ? partial.indent : 0; i < indent; i++) {
        emit_escaped(source.has_tabs ? '\t' : ' ', place_.depth, chance_);
        total_ *= chance_;
        chance_ = SAME;
    }
}

// The rest of the source's line, lexeme by lexeme.
void TextFollower::render_line(int32_t max_bytes) {
    const std::vector<uint8_t>& text = document_.text();
    const int32_t last = document_.lines()[next_.line].end;
    while (next_.at < last && static_cast<int32_t>(draft_.bytes.size()) < max_bytes && total_ > MIN_CHANCE) {
        const int32_t end = lexeme_end(text.data(), next_.at, last);
        if (next_.repeats && render_renamed(end)) continue;
        for (; next_.at < end; next_.at++) {
            emit_escaped(text[next_.at], place_.depth, chance_);
            total_ *= chance_;
            chance_ = SAME;
            work_++;
        }
        chance_ = 0.993F;
    }
}

// A word that the edits of this session replace, as they replace it.
bool TextFollower::render_renamed(int32_t end) {
    const std::vector<uint8_t>& text = document_.text();
    int32_t word = next_.at;
    while (word < end && text[word] == ' ') word++;
    const bool is_renamed = !renamed_.empty() && end - word == static_cast<int32_t>(renamed_.size()) &&
                            std::equal(renamed_.begin(), renamed_.end(), text.begin() + word);
    if (!is_renamed || (next_.at > 0 && word == next_.at && is_word(text[word - 1]))) return false;
    for (int32_t i = next_.at; i < word; i++) emit_escaped(' ', place_.depth, SAME);
    for (const char c : rename_) emit_escaped(static_cast<uint8_t>(c), place_.depth, SAME);
    total_ *= chance_;
    draft_.probability[draft_.probability.size() - rename_.size()] = chance_;
    chance_ = 0.993F;
    next_.at = end;
    return true;
}

// The end of a line, and the mark and indentation of the next. False where the source ends.
bool TextFollower::render_newline() {
    const auto& lines = document_.lines();
    const int32_t next = next_line(next_.line, lines[next_.line].mark);
    if (next < 0) {
        if (next_.repeats && place_.depth > 0) emit_escaped(place_.quotes[place_.depth - 1], place_.depth - 1, 0.8F);  // so does the value end
        return false;
    }
    float chance = next_.repeats ? 0.93F : 0.85F;
    emit_escaped('\n', place_.depth, chance);
    if (mark_) {
        emit_escaped(static_cast<uint8_t>(mark_), place_.depth, 0.75F);
        chance *= 0.75F;
    }
    total_ *= chance;
    const Line& line = lines[next];
    const int32_t indent = line.end > line.begin ? std::max(line.indent + next_.delta, 0) : 0;
    for (int32_t i = 0; i < indent; i++) emit_escaped(line.has_tabs ? '\t' : ' ', place_.depth, SAME);
    next_.line = next;
    next_.at = line.begin;
    chance_ = 0.98F;
    return true;
}

// The mark of the next line of a diff: mostly that of the last one. Added lines end with those that they replace.
char TextFollower::next_mark() const {
    const auto& lines = document_.lines();
    const char last = lines.empty() || lines.back().section != document_.section() ? 0 : lines.back().mark;
    if (last == '+') return next_.repeats ? '+' : ' ';
    return last ? last : ' ';
}

// The output ends within an escape: what there is of it is not proposed again. False if another one is expected.
bool TextFollower::drop_escape(const Place& place) {
    const auto size = static_cast<size_t>(place.escape_length);
    if (draft_.bytes.size() <= size || !std::equal(place.escape, place.escape + size, draft_.bytes.begin())) return false;
    float chance = 1;
    for (size_t i = 0; i < size; i++) chance *= draft_.probability[i];
    draft_.bytes.erase(draft_.bytes.begin(), draft_.bytes.begin() + static_cast<std::ptrdiff_t>(size));
    draft_.probability.erase(draft_.probability.begin(), draft_.probability.begin() + static_cast<std::ptrdiff_t>(size));
    draft_.probability[0] *= chance;
    return true;
}

bool TextFollower::is_equal(const Line& a, const Line& b) const {
    const uint8_t* text = document_.text().data();
    return std::equal(text + a.begin, text + a.end, text + b.begin, text + b.end);
}

// A value that repeats another one: lines are aligned, as far as a few lines tell.
void TextFollower::learn_renames(const std::pair<LineRange, LineRange>& repeat) {
    const auto& lines = document_.lines();
    int32_t before = repeat.first.first;
    for (int32_t i = repeat.second.first; i < repeat.second.last && before < repeat.first.last; i++) {
        const int32_t end = std::min(before + MAX_SHIFT, repeat.first.last);
        int32_t same = before;
        while (same < end && !is_equal(lines[same], lines[i])) same++;
        if (same < end) {
            before = same + 1;
        } else if (learn_rename(lines[before], lines[i])) {
            before++;
        }
    }
}

// Two lines that differ in words alone, all of them the same: an edit renames it.
bool TextFollower::learn_rename(const Line& before, const Line& after) {
    const uint8_t* text = document_.text().data();
    std::string renamed, rename;
    int32_t a = before.begin, b = after.begin;
    while (a < before.end && b < after.end) {
        const int32_t a_end = lexeme_end(text, a, before.end), b_end = lexeme_end(text, b, after.end);
        work_ += a_end - a + b_end - b;
        if (!std::equal(text + a, text + a_end, text + b, text + b_end)) {
            if (!is_word(text[a_end - 1]) || !is_word(text[b_end - 1])) return false;
            while (text[a] == ' ') a++;
            while (text[b] == ' ') b++;
            const std::string from(text + a, text + a_end), to(text + b, text + b_end);
            if (!renamed.empty() && (renamed != from || rename != to)) return false;
            renamed = from;
            rename = to;
        }
        a = a_end;
        b = b_end;
    }
    if (renamed.empty() || a < before.end || b < after.end || rename.size() > MAX_RENAME) return false;
    renamed_ = renamed;
    rename_ = rename;
    return true;
}

}  // namespace foreword
