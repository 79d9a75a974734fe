"""Scripted sessions of a coding agent: tool calls with recorded results, made from Foreword's own files.

A script is a function of its number: the agent searches, reads, edits, writes and tests in a copy of the
package's files, and the tools' results are what these files hold. Edits repeat lines that were read, as real
ones do. Of each answer, a sentence (a docstring from elsewhere), the line that an edit adds, and the text of
a new file occur nowhere in the session before. An answer has about 170 tokens on average: traces of coding
agents have medians from 180 to 250 (TraceLab, arXiv 2606.30560).
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import foreword
from foreword.chat_formats.tools import Tool

MIN_STEPS, MAX_STEPS = 8, 20
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 400, 2000  # context per step: a short one has few steps
NOTES_SHARE = 0.35  # share of the context before the first step: tools and notes on the project
TOOL_TOKENS = 450  # length of the tools' description
ANSWER_TOKENS, TURN_TOKENS = 160, 30  # mean answer; template around a step
MIN_RESULT_TOKENS = 30
LINE_TOKENS = 14  # mean line of code
MIN_FILE_LINES, MAX_FILE_LINES = 60, 700
MIN_FUNCTION_LINES, MAX_FUNCTION_LINES = 8, 24  # limits of a new file's text
MIN_NAME_LENGTH, MIN_SENTENCE_LENGTH = 8, 40
MAX_NEIGHBOUR_LINES = 8  # unchanged lines of an edit on either side
SHOWN_LINES = 3  # lines of an edited file around the edit
NUM_TEST_FILES = 4
WEIGHTS = {"read": 6, "edit": 5, "grep": 3, "test": 2, "write": 1}
SYSTEM = (
    "You are a coding agent in the repository of Foreword, an inference engine. Say in one or two sentences "
    "what you do next, then call one tool. Edits replace a text that occurs once in the file.\n\n"
    "# Notes on the project\n"
)


def _tool(name: str, description: str, **properties: str) -> Tool:
    types = {"offset": "integer", "limit": "integer"}
    schema = {
        key: {"type": types.get(key, "string"), "description": text} for key, text in properties.items()
    }
    return Tool(name, description, {"type": "object", "properties": schema, "required": list(properties)})


TOOLS = (
    _tool("grep", "Search all files.", pattern="regular expression", path="file or folder"),
    _tool("read", "Read lines of a file.", path="file", offset="first line", limit="number of lines"),
    _tool("edit", "Replace a text in a file.", path="file", old_string="old text", new_string="new text"),
    _tool("write", "Write a new file.", path="file", content="text of the file"),
    _tool("test", "Run tests.", command="command line"),
)


@dataclass(frozen=True, slots=True)
class AgentStep:
    """A text of the agent, its call, and the recorded result."""

    text: str
    tool: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class AgentScript:
    """One session."""

    system: str
    task: str
    steps: tuple[AgentStep, ...]
    summary: str  # the last answer, without a call


class Sources:
    """The files of the installed package, and texts from them."""

    def __init__(self) -> None:
        folder = Path(foreword.__file__).parent
        texts = {
            f"foreword/{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
            for path in sorted(folder.rglob("*.py"))
        }
        self.texts = texts
        trees = {path: ast.parse(text) for path, text in texts.items()}
        self.notes = "\n".join(
            f"- `{path}`: {doc}" for path, tree in trees.items() if (doc := ast.get_docstring(tree))
        )
        functions = [
            (path, node)
            for path, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        ]
        first_lines = ((ast.get_docstring(node) or "").partition("\n")[0] for _, node in functions)
        self.sentences = sorted({line for line in first_lines if len(line) >= MIN_SENTENCE_LENGTH})
        lines = {path: text.splitlines() for path, text in texts.items()}
        self.functions = [
            textwrap.dedent("\n".join(lines[path][node.lineno - 1 : node.end_lineno]))
            for path, node in functions
            if MIN_FUNCTION_LINES <= (node.end_lineno or 0) - node.lineno <= MAX_FUNCTION_LINES
        ]
        self.names: dict[str, list[str]] = {}  # file: functions that it defines and uses
        for path, node in functions:
            is_fit = (
                MIN_FILE_LINES <= len(lines[path]) <= MAX_FILE_LINES and len(node.name) >= MIN_NAME_LENGTH
            )
            if is_fit and texts[path].count(node.name) > 1:
                self.names.setdefault(path, []).append(node.name)


@dataclass(slots=True)
class _WorkingCopy:
    """The files as the session has changed them, and what it has seen."""

    rng: Random
    sources: Sources
    files: dict[str, str]
    path: str  # file of the function to rename
    old: str
    new: str
    count: Callable[[str], int]  # tokens of a text
    room: int  # tokens of the steps to come
    num_left: int  # steps to come
    seen: list[tuple[str, int, int]] = field(default_factory=list)  # file, first line, number of lines
    num_written: int = 0

    @property
    def result_tokens(self) -> int:
        """Longest next result; a short one leaves more to the others."""
        return max(self.room // self.num_left - ANSWER_TOKENS - TURN_TOKENS, MIN_RESULT_TOKENS)

    def read(self) -> AgentStep:
        path = (
            self.path
            if not self.seen or self.rng.random() < 0.4
            else self.rng.choice(list(self.sources.names))
        )
        lines = self.files[path].splitlines()
        uses = [number for number, line in enumerate(lines) if self.old in line] or [len(lines) // 2]
        start = min(
            self.rng.choice(uses) - self.rng.randint(5, 15), len(lines) - self.result_tokens // LINE_TOKENS
        )
        start = max(start, 0)
        count = sum(1 for _ in self._until(_numbered(lines, start)))
        self.seen.append((path, start, count))
        arguments = {"path": path, "offset": start + 1, "limit": count}
        return self._step(f"I read `{path}`.", "read", arguments, _numbered(lines, start))

    def grep(self) -> AgentStep:
        name = self.rng.choice((self.old, self.new, self.rng.choice(self.sources.names[self.path])))
        hits = (
            f"{path}:{number}:{line}"
            for path, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if name in line
        )
        return self._step(
            f"I search for uses of `{name}`.", "grep", {"pattern": name, "path": "foreword"}, hits
        )

    def edit(self) -> AgentStep:
        path, start, count = self.rng.choice(self.seen)
        lines = self.files[path].splitlines()
        shown = range(start, min(start + count, len(lines)))
        spot = self.rng.choice([n for n in shown if self.old in lines[n]] or list(shown))
        before, after = self.rng.randint(1, MAX_NEIGHBOUR_LINES), self.rng.randint(1, MAX_NEIGHBOUR_LINES)
        first, last = max(spot - before, 0), min(spot + after + 1, len(lines))
        indent = re.match(r" *", lines[spot])
        added = f"{indent.group() if indent else ''}# {self.rng.choice(self.sources.sentences)}"
        changed = [re.sub(rf"\b{self.old}\b", self.new, line) for line in lines[first:last]]
        changed.insert(spot - first, added)
        arguments = {
            "path": path,
            "old_string": "\n".join(lines[first:last]),
            "new_string": "\n".join(changed),
        }
        lines[first:last] = changed
        self.files[path] = "\n".join(lines) + "\n"
        shown_lines = [f"Edited {path}:", *_numbered(lines, max(first - SHOWN_LINES, 0), last + SHOWN_LINES)]
        return self._step(f"Now I change line {spot + 1} of `{path}`.", "edit", arguments, shown_lines)

    def write(self) -> AgentStep:
        self.num_written += 1
        path = f"tests/test_{self.new}_{self.num_written}.py"
        content = self.rng.choice(self.sources.functions) + "\n"
        result = [f"Wrote {content.count(chr(10))} lines to {path}."]
        return self._step(f"A test belongs in `{path}`.", "write", {"path": path, "content": content}, result)

    def test(self) -> AgentStep:
        names = [path.replace("foreword/", "tests/").replace("/", "/test_") for path in self.sources.names]
        files = self.rng.sample(names, NUM_TEST_FILES)
        counts = [self.rng.randint(3, 40) for _ in files]
        lines = [f"{path} {'.' * count}" for path, count in zip(files, counts, strict=True)]
        lines.append(f"{sum(counts)} passed in {self.rng.randint(2, 90)}.{self.rng.randint(10, 99)}s")
        command = f"python -m pytest -q {' '.join(files)}"
        return self._step("I run the tests.", "test", {"command": command}, lines)

    def _step(
        self, text: str, tool: str, arguments: Mapping[str, Any], lines: Iterator[str] | Sequence[str]
    ) -> AgentStep:
        said = f"{self.rng.choice(self.sources.sentences)} {text}"
        result = "\n".join(self._until(iter(lines)))
        written = " ".join([said, *map(str, arguments.values())])
        self.room -= self.count(written) + self.count(result) + TURN_TOKENS
        self.num_left -= 1
        return AgentStep(said, tool, arguments, result)

    def _until(self, lines: Iterator[str]) -> Iterator[str]:
        """The lines up to the tokens of a result, at least one."""
        room = self.result_tokens
        for line in lines:
            yield line
            room -= self.count(line) + 1
            if room <= 0:
                return


def make_script(
    number: int, sources: Sources, context_tokens: int, count: Callable[[str], int]
) -> AgentScript:
    """The script of this number, whose last prompt has about `context_tokens`, as `count` counts them."""
    rng = Random(number)
    fewest, most = (
        min(max(context_tokens // tokens, MIN_STEPS), MAX_STEPS)
        for tokens in (MAX_STEP_TOKENS, MIN_STEP_TOKENS)
    )
    num_steps = rng.randint(fewest, most)
    density = len(sources.notes) / count(sources.notes)
    notes = max(int(context_tokens * NOTES_SHARE) - TOOL_TOKENS, 0)
    path = rng.choice(list(sources.names))
    old = rng.choice(sources.names[path])
    copy = _WorkingCopy(
        rng,
        sources,
        dict(sources.texts),
        path,
        old,
        f"{old}_{rng.choice(('checked', 'cached', 'ordered', 'bounded'))}",
        count,
        context_tokens - notes - TOOL_TOKENS - count(SYSTEM),
        num_steps,
    )
    steps = [copy.grep(), copy.read()]
    while len(steps) < num_steps:
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        steps.append(getattr(copy, kind)())
    task = f"Rename the function {old} in {path} to {copy.new} wherever it is used, and test the change."
    summary = f"{rng.choice(sources.sentences)} {old} is now {copy.new}, and the tests pass."
    return AgentScript(SYSTEM + sources.notes[: int(notes * density)], task, tuple(steps), summary)


def _numbered(lines: Sequence[str], start: int, end: int | None = None) -> Iterator[str]:
    return (f"{number}\t{line}" for number, line in enumerate(lines[start:end], start + 1))
