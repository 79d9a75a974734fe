"""Turns from pipes and terminals, and the history file."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from foreword.cli import chat_input
from foreword.cli.chat_input import MAX_ENTRIES, MAX_ENTRY_CHARS, History, history_path
from foreword.cli.chat_input import piped_turns as piped
from foreword.cli.chat_input import typed_turns as typed


@pytest.mark.parametrize(
    ("lines", "turns"),
    [
        (["one\n", "two"], ["one", "two"]),
        (["one\\\n", "two\\\n", "three\n", "four\n"], ["one\ntwo\nthree", "four"]),
        (['"""one\n', "two\\\n", '"""\n', "three\n"], ["one\ntwo\\", "three"]),
        (['"""one"""\n', "two\n"], ["one", "two"]),
        (['  """\n', '  one"""  \n'], ["  one"]),
        (["one\\\n"], ["one"]),  # the input ends within a turn
        (['"""one\n', "two\n"], ["one\ntwo"]),
        (["one\r\n", "\n"], ["one", ""]),
        ([], []),
    ],
)
def test_turns_of_one_and_several_lines(lines: list[str], turns: list[str]) -> None:
    assert list(piped(lines)) == turns


def typed_turns(
    monkeypatch: pytest.MonkeyPatch, keys: list[Any], history: History | None = None
) -> tuple[list[str], list[str]]:
    """Turns and what the user is told; a key that is an exception is raised by input()."""
    prompts: list[str] = []
    said: list[str] = []
    pressed: Iterator[Any] = iter([*keys, EOFError()])

    def press(prompt: str) -> str:
        prompts.append(prompt)
        key = next(pressed)
        if isinstance(key, BaseException):
            raise key
        return str(key)

    monkeypatch.setattr("builtins.input", press)
    turns = list(typed(said.append, history))
    assert all(prompt == "> " or index for index, prompt in enumerate(prompts))
    return turns, said


def test_first_interrupt_clears_the_turn_and_a_second_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = KeyboardInterrupt()
    turns, said = typed_turns(monkeypatch, ["one\\", stop, "two", stop, "three", stop, stop, "four"])
    assert turns == ["two", "three"]
    assert said == ["\nCtrl-C again, Ctrl-D or /quit leaves"] * 3 + [""]


def test_interrupt_of_a_line_with_text_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = KeyboardInterrupt()
    monkeypatch.setattr(chat_input, "readline", MagicMock(**{"get_line_buffer.return_value": "text"}))
    turns, said = typed_turns(monkeypatch, [stop, stop, stop, "one"])
    assert turns == ["one"] and said == ["\nCtrl-C again, Ctrl-D or /quit leaves"] * 3 + [""]


def test_line_between_interrupts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first of a turn's several lines."""
    stop = KeyboardInterrupt()
    turns, said = typed_turns(monkeypatch, [stop, "one\\", stop, "two"])
    assert turns == ["two"] and len(said) == 3


def test_typed_turns_are_kept_for_the_next_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    typed_turns(monkeypatch, ["one", "", "two\\", "three"], History(path))
    assert History(path).entries == ["one", "two\nthree"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    if chat_input.readline is not None:
        typed_turns(monkeypatch, [], History(path))
        length = chat_input.readline.get_current_history_length()
        assert [chat_input.readline.get_history_item(i + 1) for i in range(length)] == ["one", "two\nthree"]


def test_characters_that_the_locale_lacks_end_no_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half a surrogate pair in every locale, all but ASCII in that of LC_ALL=C."""
    path = tmp_path / "history"
    typed_turns(monkeypatch, ["\ud800", "one"], History(path))
    turns, _ = typed_turns(monkeypatch, ["two"], History(path))
    assert turns == ["two"] and History(path).entries == ["\ud800", "one", "two"]


def test_history_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("".join(f'"{index}"\n' for index in range(MAX_ENTRIES + 7)))
    assert History(path).entries == [str(index + 7) for index in range(MAX_ENTRIES)]
    assert len(path.read_text().splitlines()) == MAX_ENTRIES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    History(path).add("x" * (MAX_ENTRY_CHARS + 1))
    assert len(path.read_text().splitlines()) == MAX_ENTRIES


def test_history_leaves_out_secrets_and_repetitions(tmp_path: Path) -> None:
    (tmp_path / "history").touch(0o644)
    history = History(tmp_path / "history", ["sk-1"])
    assert stat.S_IMODE((tmp_path / "history").stat().st_mode) == 0o600
    for turn in ("one", "one", "my key is sk-1!", "one"):
        history.add(turn)
    assert json.loads((tmp_path / "history").read_text()) == "one"


def test_damaged_history_is_read_as_far_as_it_is_valid(tmp_path: Path) -> None:
    (tmp_path / "history").write_bytes(
        b'"one"\n{"no": "text"}\n\xff\xfe\n' + b"[" * 99_999 + b'\n"two"\n"cut'
    )
    history = History(tmp_path / "history")
    history.add("three")
    assert history.entries == History(tmp_path / "history").entries == ["one", "two", "three"]


def test_unwritable_history_is_reported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()
    turns, said = typed_turns(monkeypatch, ["one", "two"], history)
    assert turns == ["one", "two"]
    assert len(said) == 2 and said[0].startswith("the history is no longer kept: ") and said[1] == ""


def test_history_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    expected = "/home/somebody/.local/state/foreword/chat_history.jsonl"
    assert str(history_path({})) == str(history_path({"XDG_STATE_HOME": "relative"})) == expected
    assert str(history_path({"XDG_STATE_HOME": "/state"})) == "/state/foreword/chat_history.jsonl"


def test_chat_without_readline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chat_input, "readline", None)
    assert typed_turns(monkeypatch, ["one"], History(tmp_path / "history"))[0] == ["one"]
