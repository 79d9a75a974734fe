"""Edits of code as agents make them, and their notations: patches, blocks, unified diffs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from foreword.bench.agent.sources import IDENTIFIER, Corpus

KINDS = {"insert": 4, "modify": 4, "rename": 2, "delete": 1, "wrap": 1}  # weights
MAX_INSERTED, MAX_CORE, MAX_NEIGHBOURS = 10, 8, 5  # lines: new ones, those that change, unchanged on a side
RENAME_SHARE = 0.5  # of the edits at a line with the session's identifier
WRAPS = {
    "python": ("if {name} is not None:", None),
    "c++": ("if ({name}) {{", "}}"),
    "javascript": ("if ({name}) {{", "}}"),
}


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
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
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
