"""How agents call tools, and how tools answer: the styles of two sets of sessions.

A style follows what agents in use do, in its own words: names of tools and arguments, how lines of a file are
numbered, how an edit is written. `TUNING` is for work on drafters. `HELD_OUT` was written before the drafter
`text` was, and has other tools, other numbers, other kinds of edits and other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from foreword.chat_formats.tools import Tool

# Arguments by template: "{first}" alone is a number. Values: path, first, last, count, pattern, folder,
# old, new, patch, blocks, content, files.
Arguments = Mapping[str, str]
NUMBERS: Final = ("{first}", "{last}", "{count}")
# What an argument holds, by a part of its template.
PLACES: Final = {
    "{old}": "old text",
    "{new}": "new text",
    "{content}": "file",
    "{plus}": "file",
    "{patch}": "patch",
    "{unified}": "patch",
    "{blocks}": "patch",
}


@dataclass(frozen=True, slots=True)
class Action:
    """A call, and what the agent says before it."""

    tool: str
    arguments: Arguments
    said: str = ""

    def places(self) -> dict[str, str]:
        """Content of each argument."""
        return {
            key: next((place for part, place in PLACES.items() if part in text), "other")
            for key, text in self.arguments.items()
        }

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: values[text[1:-1]] if text in NUMBERS else text.format(**values)
            for key, text in self.arguments.items()
        }


@dataclass(frozen=True, slots=True)
class AgentStyle:
    """Actions and the form of their results."""

    name: str
    read: Action
    grep: Action
    edit: Action
    write: Action
    test: Action
    line: str = "{line}"  # a line of a file in a result
    hit: str = "{path}:{n}:{line}"  # a line of a search
    heading: str = ""  # line above the hits of one file
    edit_result: str = "done"  # or "numbered", or "diff"
    has_colours: bool = False
    is_whole: bool = False  # files are read from the start, and an edit writes what was read
    weights: Mapping[str, int] = field(
        default_factory=lambda: {"read": 6, "edit": 6, "grep": 3, "test": 2, "write": 1}
    )

    def tools(self) -> tuple[Tool, ...]:
        """The tools of all actions, each once."""
        properties: dict[str, dict[str, Any]] = {}
        for action in (self.read, self.grep, self.edit, self.write, self.test):
            of_tool = properties.setdefault(action.tool, {})
            for key, text in action.arguments.items():
                kind = "integer" if text in NUMBERS else "string"
                of_tool[key] = {"type": kind, "description": f"{key.replace('_', ' ')} of {action.tool}"}
        return tuple(
            Tool(name, f"{name.replace('_', ' ')}.", {"type": "object", "properties": of, "required": []})
            for name, of in properties.items()
        )


SAID_READ, SAID_GREP, SAID_EDIT = "I read `{path}`.", "I search for `{pattern}`.", "I edit `{path}`."
SAID_WRITE, SAID_TEST = "A test belongs in `{path}`.", "I run the tests."


def _shell(tool: str, command: str, said: str, key: str = "command") -> Action:
    return Action(tool, {key: command}, said)


TUNING: Final = (
    AgentStyle(
        "edit",
        Action("Read", {"file_path": "/repo/{path}", "offset": "{first}", "limit": "{count}"}, SAID_READ),
        Action(
            "Grep", {"pattern": "{pattern}", "path": "/repo/{folder}", "output_mode": "content"}, SAID_GREP
        ),
        Action(
            "Edit", {"file_path": "/repo/{path}", "old_string": "{old}", "new_string": "{new}"}, SAID_EDIT
        ),
        Action("Write", {"file_path": "/repo/{path}", "content": "{content}"}, SAID_WRITE),
        Action("Bash", {"command": "python -m pytest -q {files}", "description": "Run tests"}, SAID_TEST),
        line="{n:6d}→{line}",
        edit_result="numbered",
    ),
    AgentStyle(
        "str_replace",
        Action("str_replace_editor", {"command": "view", "path": "/workspace/{path}"}, SAID_READ),
        _shell("execute_bash", 'cd /workspace && grep -rn "{pattern}" {folder}', SAID_GREP),
        Action(
            "str_replace_editor",
            {"command": "str_replace", "path": "/workspace/{path}", "old_str": "{old}", "new_str": "{new}"},
            SAID_EDIT,
        ),
        Action(
            "str_replace_editor",
            {"command": "create", "path": "/workspace/{path}", "file_text": "{content}"},
            SAID_WRITE,
        ),
        _shell("execute_bash", "cd /workspace && python -m pytest {files}", SAID_TEST),
        line="{n:6d}\t{line}",
        edit_result="numbered",
        has_colours=True,
    ),
    AgentStyle(
        "patch",
        _shell("shell", "sed -n '{first},{last}p' {path}", SAID_READ),
        _shell("shell", 'rg -n "{pattern}" {folder}', SAID_GREP),
        Action("apply_patch", {"input": "{patch}"}, SAID_EDIT),
        Action(
            "apply_patch", {"input": "*** Begin Patch\n*** Add File: {path}\n{plus}*** End Patch"}, SAID_WRITE
        ),
        _shell("shell", "pytest -q {files}", SAID_TEST),
        edit_result="diff",
    ),
    AgentStyle(
        "rewrite",
        Action("read_file", {"path": "{path}"}, SAID_READ),
        Action("search_files", {"path": "{folder}", "regex": "{pattern}"}, SAID_GREP),
        Action("write_to_file", {"path": "{path}", "content": "{content}"}, SAID_EDIT),
        Action("write_to_file", {"path": "{path}", "content": "{content}"}, SAID_WRITE),
        _shell("execute_command", "python -m pytest {files}", SAID_TEST),
        line="{n:3d} | {line}",
        hit="│{line}",
        heading="# {path}\n│----",
        is_whole=True,
        weights={"read": 6, "edit": 4, "grep": 2, "test": 3, "write": 1},
    ),
)

HELD_OUT: Final = (
    AgentStyle(
        "replace",
        Action("read_lines", {"absolute_path": "/home/me/{path}", "offset": "{first}"}, "Next is `{path}`."),
        Action("find_text", {"pattern": "{pattern}", "include": "{folder}/**"}, "Where is `{pattern}` used?"),
        Action(
            "replace",
            {
                "file_path": "/home/me/{path}",
                "instruction": "Change the lines around line {first}.",
                "old_string": "{old}",
                "new_string": "{new}",
            },
            "The change in `{path}`:",
        ),
        Action(
            "write_file", {"file_path": "/home/me/{path}", "content": "{content}"}, "A new file, `{path}`."
        ),
        _shell("run_shell", "python -m pytest {files}", "Do the tests pass?"),
        hit="L{n}: {line}",
        heading="File: {path}",
        edit_result="diff",
        has_colours=True,
    ),
    AgentStyle(
        "search_replace",
        Action("open_file", {"path": "{path}", "start": "{first}", "end": "{last}"}, "Next is `{path}`."),
        Action("search_code", {"query": "{pattern}", "where": "{folder}"}, "Where is `{pattern}` used?"),
        Action("replace_in_file", {"path": "{path}", "diff": "{blocks}"}, "The change in `{path}`:"),
        Action("new_file", {"path": "{path}", "text": "{content}"}, "A new file, `{path}`."),
        _shell("run_tests", "{files}", "Do the tests pass?", "targets"),
        line="L{n}: {line}",
        hit="{n:>5}:  {line}",
        heading="{path}",
        edit_result="numbered",
    ),
    AgentStyle(
        "line_range",
        _shell("terminal", "nl -ba {path} | sed -n '{first},{last}p'", "Next is `{path}`."),
        _shell("terminal", "git grep -n --heading {pattern} -- {folder}", "Where is `{pattern}` used?"),
        Action(
            "edit_lines",
            {"filename": "{path}", "start_line": "{first}", "end_line": "{last}", "replacement": "{new}"},
            "The change in `{path}`:",
        ),
        Action("save", {"filename": "{path}", "body": "{content}"}, "A new file, `{path}`."),
        _shell("terminal", "pytest -x {files}", "Do the tests pass?"),
        line="{n:6d}\t{line}",
        hit="{n}:{line}",
        heading="{path}",
        edit_result="numbered",
    ),
    AgentStyle(
        "unified_diff",
        Action("view", {"file": "{path}", "from": "{first}", "lines": "{count}"}, "Next is `{path}`."),
        Action("grep_code", {"expr": "{pattern}", "dir": "{folder}"}, "Where is `{pattern}` used?"),
        Action("apply_diff", {"diff": "{unified}"}, "The change in `{path}`:"),
        Action("write_whole", {"file": "{path}", "code": "{content}"}, "A new file, `{path}`."),
        _shell("sh", "python -m pytest -q {files}", "Do the tests pass?", "script"),
        line="[{n}] {line}",
        hit="{path}-{n}-{line}",
        edit_result="done",
    ),
)

SETS: Final = {"tuning": TUNING, "held-out": HELD_OUT}
ALL_TOOLS: Final = tuple(
    {tool.name: tool for styles in SETS.values() for style in styles for tool in style.tools()}.values()
)
