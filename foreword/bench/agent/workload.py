"""Scripted sessions of a coding agent: tool calls with recorded tool results, made from Foreword's own files.

A script is a function of its number and its set (styles.py): the agent searches, reads, edits, writes and
tests in a copy of the package's files, and the tools' results are what these files hold, numbered, coloured
or as a diff. An edit keeps up to four lines on either side and inserts, changes, renames, removes or indents
the others. Of each answer, a sentence (a docstring from elsewhere), what an edit adds (lines of another file)
and the text of a new file occur nowhere in the session before, unless by chance.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from foreword.bench.agent.sources import IDENTIFIER, Corpus, Sources
from foreword.bench.agent.styles import SETS, Action, AgentStyle
from foreword.chat_formats.tools import Tool

MIN_STEPS, MAX_STEPS = 8, 30
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 400, 2000  # context per step: a short one has few steps
NOTES_SHARE = 0.3  # share of the context before the first step: tools and notes on the project
TOOL_TOKENS = 450  # length of the tools' description
ANSWER_TOKENS, TURN_TOKENS = 160, 30  # mean answer; template around a step
MIN_RESULT_TOKENS = 60
LINE_TOKENS = 14  # mean line of code
MAX_NEW_LINES = 24  # lines of a new file
SHOWN_LINES = 4  # lines of an edited file around the edit
NUM_TEST_FILES = 3
EDIT_KINDS = {"insert": 4, "modify": 4, "rename": 2, "delete": 1, "wrap": 1}  # weights
MAX_INSERTED, MAX_CORE, MAX_NEIGHBOURS = 10, 8, 5  # lines: new ones, those that change, unchanged on a side
RENAME_SHARE = 0.5  # share of the edits at a line with the session's identifier
WRAPS = {
    "python": ("if {name} is not None:", None),
    "c++": ("if ({name}) {{", "}}"),
    "javascript": ("if ({name}) {{", "}}"),
}
SYSTEM = (
    "You are a coding agent in the repository of Foreword, an inference engine. Say in one or two sentences "
    "what you do next, then call one tool. Edits replace a text that occurs once in the file.\n\n"
    "# Notes on the project\n"
)
PATH_COLOUR, NUMBER_COLOUR, HIT_COLOUR, NO_COLOUR = "\x1b[35m", "\x1b[32m", "\x1b[01;31m", "\x1b[m"


@dataclass(frozen=True, slots=True)
class AgentStep:
    """A text of the agent, its call, and the recorded result."""

    text: str
    tool: str
    arguments: Mapping[str, Any]
    result: str
    places: Mapping[str, str] = field(default_factory=dict)  # what an argument holds, as in styles.PLACES


@dataclass(frozen=True, slots=True)
class AgentScript:
    """One session."""

    system: str
    task: str
    steps: tuple[AgentStep, ...]
    summary: str  # the last answer, without a call
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines first..first + len(old) - 1 of a file become `new`. Counted from 0."""

    first: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    before: int  # unchanged lines at the begin of both
    after: int  # and at the end

    def apply(self, lines: Sequence[str]) -> list[str]:
        return [*lines[: self.first], *self.new, *lines[self.first + len(self.old) :]]

    def marked(self) -> list[str]:
        """Lines with the marks of a diff: unchanged, removed, added, unchanged."""
        end = len(self.old) - self.after
        return [
            *(f" {line}" for line in self.old[: self.before]),
            *(f"-{line}" for line in self.old[self.before : end]),
            *(f"+{line}" for line in self.new[self.before : len(self.new) - self.after]),
            *(f" {line}" for line in self.old[end:]),
        ]

    def unified(self, path: str) -> str:
        spans = f"-{self.first + 1},{len(self.old)} +{self.first + 1},{len(self.new)}"
        return "\n".join([f"--- a/{path}", f"+++ b/{path}", f"@@ {spans} @@", *self.marked(), ""])

    def patch(self, path: str, lines: Sequence[str]) -> str:
        """As `apply_patch` takes it. The hunk is found by the last unindented line before it."""
        heads = [line for line in lines[: self.first] if line[:1].isalpha()]
        head = f"@@ {heads[-1]}" if heads else "@@"
        body = [f"*** Update File: {path}", head, *self.marked()]
        return "\n".join(["*** Begin Patch", *body, "*** End Patch"])

    def blocks(self) -> str:
        parts = ["<<<<<<< SEARCH", *self.old, "=======", *self.new, ">>>>>>> REPLACE"]
        return "\n".join(parts)


class Editor:
    """Makes the edits of one session."""

    def __init__(self, rng: Random, corpus: Corpus, old: str, new: str) -> None:
        """old, new: the identifier that the session renames"""
        self._rng = rng
        self._corpus = corpus
        self._old, self._new = old, new

    def edit(self, lines: Sequence[str], spot: int, shown: range) -> Edit:
        """An edit around line `spot`, of the lines `shown` alone."""
        rng = self._rng
        (kind,) = rng.choices(list(EDIT_KINDS), list(EDIT_KINDS.values()))
        if self._old in lines[spot] and rng.random() < RENAME_SHARE:
            kind = "rename"
        before, after = rng.randint(0, MAX_NEIGHBOURS), rng.randint(0, MAX_NEIGHBOURS)
        num_core = 0 if kind == "insert" else rng.randint(1, MAX_CORE)
        if kind == "insert":
            before, after = max(before, 1), max(after, 1)
        begin, end = spot, min(spot + num_core, shown.stop)
        first, last = max(begin - before, shown.start), min(end + after, shown.stop)
        core = list(lines[begin:end])
        changed = getattr(self, f"_{kind}")(core, lines[begin])
        old = tuple(lines[first:last])
        new = (*lines[first:begin], *changed, *lines[end:last])
        return Edit(first, old, new, begin - first, last - end)

    def fresh_lines(self, count: int) -> list[str]:
        """Lines of another file, without their indentation."""
        text = self._corpus.texts[self._rng.choice(list(self._corpus.texts))].splitlines()
        start = self._rng.randrange(max(len(text) - count, 1))
        lines = text[start : start + count]
        indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
        return [line[min(indents, default=0) :] for line in lines]

    def _insert(self, core: list[str], at: str) -> list[str]:
        indent = at[: len(at) - len(at.lstrip())]
        fresh = self.fresh_lines(self._rng.randint(1, MAX_INSERTED))
        return [*core, *(f"{indent}{line}" if line.strip() else "" for line in fresh)]

    def _modify(self, core: list[str], at: str) -> list[str]:
        """One line in two gets another identifier, or more at its end."""
        rng = self._rng
        changed = [line if rng.random() < 0.5 else self._modify_line(line) for line in core]
        changed[0] = self._modify_line(core[0])
        return changed

    def _modify_line(self, line: str) -> str:
        names = list(IDENTIFIER.finditer(line))
        (other,) = self.fresh_lines(1) or ("",)
        fresh = IDENTIFIER.findall(other) or ["value"]
        if not names or self._rng.random() < 0.3:
            return f"{line}  {other.strip()}"
        match = self._rng.choice(names)
        other = self._rng.choice(fresh)
        return f"{line[: match.start()]}{other}{line[match.end() :]}"

    def _rename(self, core: list[str], at: str) -> list[str]:
        changed = [re.sub(rf"\b{self._old}\b", self._new, line) for line in core]
        return changed if changed != core else self._modify(core, at)

    def _delete(self, core: list[str], at: str) -> list[str]:
        return []

    def _wrap(self, core: list[str], at: str) -> list[str]:
        """The lines in a condition, indented by one step more."""
        indent = at[: len(at) - len(at.lstrip())]
        step = "    " if self._corpus.language != "javascript" else "  "
        name = self._rng.choice(IDENTIFIER.findall(" ".join(core)) or ["value"])
        begin, end = (part and part.format(name=name) for part in WRAPS[self._corpus.language])
        inner = [f"{step}{line}" if line.strip() else line for line in core]
        return [f"{indent}{begin}", *inner, *([f"{indent}{end}"] if end else [])]


@dataclass(slots=True)
class _WorkingCopy:
    """The files as the session has changed them, and what it has seen."""

    rng: Random
    sources: Sources
    corpus: Corpus
    style: AgentStyle
    editor: Editor
    path: str  # file of the identifier to rename
    old: str
    new: str
    count: Callable[[str], int]  # tokens of a text
    room: int  # tokens of the steps to come
    num_left: int  # steps to come
    files: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[str, int, int]] = field(default_factory=list)  # file, first line, number of lines
    num_written: int = 0

    @property
    def result_tokens(self) -> int:
        """Longest next result; a short one leaves more to the others."""
        return max(self.room // self.num_left - ANSWER_TOKENS - TURN_TOKENS, MIN_RESULT_TOKENS)

    def read(self) -> AgentStep:
        is_new = self.seen and self.rng.random() < 0.6
        path = self.rng.choice(self.corpus.paths) if is_new else self.path
        lines = self.files[path].splitlines()
        uses = [number for number, line in enumerate(lines) if self.old in line] or [len(lines) // 2]
        start = min(
            self.rng.choice(uses) - self.rng.randint(5, 15), len(lines) - self.result_tokens // LINE_TOKENS
        )
        start = 0 if self.style.is_whole else max(start, 0)
        count = sum(1 for _ in self._until(self._numbered(lines, start)))
        self.seen.append((path, start, count))
        values = {"path": path, "first": start + 1, "count": count, "last": start + count}
        return self._step(self.style.read, values, self._numbered(lines, start))

    def grep(self) -> AgentStep:
        names = [self.old, self.rng.choice(self.corpus.names[self.path])]
        name = self.rng.choice(names + [self.new] * (self.new in self.files[self.path]))
        return self._step(
            self.style.grep, {"path": self.path, "pattern": name, "folder": "foreword"}, self._hits(name)
        )

    def edit(self) -> AgentStep:
        path, start, count = self.rng.choice(self.seen)
        lines = self.files[path].splitlines()
        shown = range(start, min(start + count, len(lines)))
        if not shown:
            return self.read()
        spot = self.rng.choice([n for n in shown if self.old in lines[n]] or list(shown))
        edit = self.editor.edit(lines, spot, shown)
        changed = edit.apply(lines)
        self.files[path] = "\n".join(changed) + "\n"
        values = {
            "path": path,
            "first": edit.first + 1,
            "last": edit.first + len(edit.old),
            "old": "\n".join(edit.old),
            "new": "\n".join(edit.new),
            "patch": edit.patch(path, lines),
            "unified": edit.unified(path),
            "blocks": edit.blocks(),
            "content": "\n".join(changed[: len(changed) - len(lines) + start + count]) + "\n",
        }
        return self._step(self.style.edit, values, self._edited(path, edit, changed))

    def write(self) -> AgentStep:
        self.num_written += 1
        path = f"tests/test_{self.new}_{self.num_written}{self.path[self.path.rindex('.') :]}"
        lines = self.editor.fresh_lines(self.rng.randint(6, MAX_NEW_LINES))
        values = {
            "path": path,
            "content": "\n".join(lines) + "\n",
            "plus": "".join(f"+{line}\n" for line in lines),
        }
        return self._step(self.style.write, values, [f"Wrote {len(lines)} lines to {path}."])

    def test(self) -> AgentStep:
        rng = self.rng
        names = [path.replace("foreword/", "tests/").replace("/", "/test_") for path in self.corpus.paths]
        files = rng.sample(names, min(NUM_TEST_FILES, len(names)))
        counts = [rng.randint(3, 40) for _ in files]
        lines = [f"{path} {'.' * count}" for path, count in zip(files, counts, strict=True)]
        if self.seen and rng.random() < 0.5:
            lines += self._failure()
        lines.append(f"{sum(counts)} passed in {rng.randint(2, 90)}.{rng.randint(10, 99)}s")
        return self._step(self.style.test, {"path": self.path, "files": " ".join(files)}, lines)

    def _failure(self) -> list[str]:
        """A traceback through lines that the session has read."""
        path, start, count = self.rng.choice(self.seen)
        lines = self.files[path].splitlines()
        at = min(start + self.rng.randrange(max(count, 1)), len(lines) - 1)
        shown = lines[max(at - SHOWN_LINES, 0) : at + 1]
        name = self.rng.choice(self.corpus.names[self.path])
        quoted = [*(f"    {line}" for line in shown[:-1]), f">   {shown[-1]}", f"E   ValueError: {name}"]
        if self.style.has_colours:
            quoted[-2:] = [f"\x1b[1m\x1b[31m{line}{NO_COLOUR}" for line in quoted[-2:]]
        return ["=" * 20 + " FAILURES " + "=" * 20, *quoted, "", f"{path}:{at + 1}: ValueError"]

    def _hits(self, name: str) -> Iterator[str]:
        style = self.style
        for path, text in self.files.items():
            is_first = True
            for number, line in enumerate(text.splitlines(), 1):
                if name not in line:
                    continue
                if is_first and style.heading:
                    yield style.heading.format(path=path)
                is_first = False
                shown, n = path, str(number)
                if style.has_colours:
                    shown, n = f"{PATH_COLOUR}{path}{NO_COLOUR}", f"{NUMBER_COLOUR}{number}{NO_COLOUR}"
                    line = line.replace(name, f"{HIT_COLOUR}{name}{NO_COLOUR}")
                yield style.hit.format(path=shown, n=n, line=line)

    def _edited(self, path: str, edit: Edit, lines: Sequence[str]) -> list[str]:
        """The tool's answer to an edit."""
        if self.style.edit_result == "diff":
            text = edit.unified(path).splitlines()
            colours = {"+": "\x1b[32m", "-": "\x1b[31m"} if self.style.has_colours else {}
            return [f"{colours[line[0]]}{line}{NO_COLOUR}" if line[:1] in colours else line for line in text]
        if self.style.edit_result == "numbered":
            first, last = max(edit.first - SHOWN_LINES, 0), edit.first + len(edit.new) + SHOWN_LINES
            return [f"The file {path} has been edited:", *self._numbered(lines, first, last)]
        return [f"Saved {path}."]

    def _numbered(self, lines: Sequence[str], start: int, end: int | None = None) -> Iterator[str]:
        form = self.style.line
        return (form.format(n=number, line=line) for number, line in enumerate(lines[start:end], start + 1))

    def _step(
        self, action: Action, values: Mapping[str, Any], lines: Iterator[str] | Sequence[str]
    ) -> AgentStep:
        said = f"{self.rng.choice(self.sources.sentences)} {action.said.format(**values)}"
        arguments = action.fill(values)
        result = "\n".join(self._until(iter(lines)))
        written = " ".join([said, *map(str, arguments.values())])
        self.room -= self.count(written) + self.count(result) + TURN_TOKENS
        self.num_left = max(self.num_left - 1, 1)
        return AgentStep(said, action.tool, arguments, result, action.places())

    def _until(self, lines: Iterator[str]) -> Iterator[str]:
        """The lines up to the tokens of a result, at least one."""
        room = self.result_tokens
        for line in lines:
            yield line
            room -= self.count(line) + 1
            if room <= 0:
                return


def make_script(
    number: int, sources: Sources, context_tokens: int, count: Callable[[str], int], of_set: str = "tuning"
) -> AgentScript:
    """The script of this number, whose last prompt has about `context_tokens`, as `count` counts them.

    Styles and languages take turns. of_set: one of styles.SETS
    """
    styles = SETS[of_set]
    rng = Random(number * len(SETS) + zlib.crc32(of_set.encode()))
    corpus = sources.corpus(rng.choice(sources.languages), list(SETS).index(of_set))
    fewest, most = (
        min(max(context_tokens // tokens, MIN_STEPS), MAX_STEPS)
        for tokens in (MAX_STEP_TOKENS, MIN_STEP_TOKENS)
    )
    num_steps = rng.randint(fewest, most)
    density = len(sources.notes) / count(sources.notes)
    notes = max(int(context_tokens * NOTES_SHARE) - TOOL_TOKENS, 0)
    path = rng.choice(corpus.paths)
    old = rng.choice(corpus.names[path])
    new = f"{old}_{rng.choice(('checked', 'cached', 'ordered', 'bounded'))}"
    copy = _WorkingCopy(
        rng,
        sources,
        corpus,
        style := styles[number % len(styles)],
        Editor(rng, corpus, old, new),
        path,
        old,
        new,
        count,
        context_tokens - notes - TOOL_TOKENS - count(SYSTEM),
        num_steps,
        dict(corpus.texts),
    )
    steps = [copy.grep(), copy.read()]
    while len(steps) < num_steps:
        (kind,) = rng.choices(list(style.weights), list(style.weights.values()))
        steps.append(getattr(copy, kind)())
    task = f"Rename {old} in {path} to {new} wherever it is used, make the changes below, and test them."
    summary = f"{rng.choice(sources.sentences)} {old} is now {new}, and the tests pass."
    return AgentScript(
        SYSTEM + sources.notes[: int(notes * density)], task, tuple(steps), summary, style.tools()
    )
