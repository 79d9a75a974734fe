"""Messages and commands of `foreword chat`, from a terminal or a pipe: line editing and history."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

readline = importlib.import_module("readline") if importlib.util.find_spec("readline") else None

MAX_ENTRIES = 1000
MAX_ENTRY_CHARS = 4000
QUOTES = '"""'
CONTINUED = "\\"


def history_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file in the user's state directory of the XDG specification. Raises RuntimeError without a home."""
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "foreword" / "chat_history.jsonl"


class History:
    """Turns of all sessions, in a file that only its owner may read: one JSON string per line.

    It keeps the last MAX_ENTRIES turns, cut to that at the start, and none of more than MAX_ENTRY_CHARS
    characters or with one of the secrets. All methods raise OSError.
    """

    def __init__(self, path: Path, secrets: Sequence[str] = ()) -> None:
        self._path = path
        self._secrets = secrets
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT, 0o600))
        path.chmod(0o600)
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        self.entries = list(_parse_entries(lines))[-MAX_ENTRIES:]  # oldest first
        if len(lines) > len(self.entries) + 1 or lines[-1]:
            self._rewrite()

    def add(self, turn: str) -> None:
        """Append a turn at once, so that several sessions may share the file and none is lost in a crash."""
        is_secret = any(secret in turn for secret in self._secrets)
        if is_secret or len(turn) > MAX_ENTRY_CHARS or self.entries[-1:] == [turn]:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(turn) + "\n")
        self.entries.append(turn)

    def _rewrite(self) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False, encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self.entries)
        os.replace(file.name, self._path)  # made with mode 600


def _parse_entries(lines: Iterable[str]) -> Iterator[str]:
    """The valid entries: a crash may have cut one short."""
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, str):
            yield entry


def typed_turns(say: Callable[[str], None], history: History | None) -> Iterator[str]:
    """Turns from the terminal, with a prompt, until Ctrl-D or a second Ctrl-C in a row on an empty line.

    say      shows a line to the user
    history  None: nothing is kept after this session
    """
    _set_up_readline(() if history is None else history.entries)
    may_leave = False

    def read_line(prompt: str) -> str:
        nonlocal may_leave
        line = input(prompt)
        may_leave = False
        return line

    while True:
        try:
            turn = _read_turn(read_line)
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            # Without readline nobody knows what was typed.
            has_text = readline is not None and readline.get_line_buffer() != ""
            if may_leave and not has_text:
                say("")
                return
            say("\nCtrl-C again, Ctrl-D or /quit leaves")
            may_leave = True
            continue
        if turn.strip():
            _recall_by_keys(turn)
        if turn.strip() and history is not None:
            try:
                history.add(turn)
            except OSError as error:
                say(f"the history is no longer kept: {error}")
                history = None
        yield turn


def piped_turns(lines: Iterable[str]) -> Iterator[str]:
    """Turns from a pipe or a file, without a prompt."""
    rest = iter(lines)

    def read_line(prompt: str) -> str:
        try:
            return next(rest).rstrip("\r\n")
        except StopIteration:
            raise EOFError from None

    while True:
        try:
            yield _read_turn(read_line)
        except EOFError:
            return


def _set_up_readline(entries: Iterable[str]) -> None:
    """Keep whole turns, and read a paste of several lines as one turn where the terminal marks it."""
    if readline is None:
        return
    readline.set_auto_history(False)
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.clear_history()
    for entry in entries:
        _recall_by_keys(entry)


def _recall_by_keys(turn: str) -> None:
    """Offer a turn to the arrow keys, unless it has characters that the locale cannot write (LC_ALL=C)."""
    if readline is not None:
        with contextlib.suppress(ValueError):
            readline.add_history(turn)


def _read_turn(read_line: Callable[[str], str]) -> str:
    """One line, or several: after a backslash at the end of a line, or between triple quotes.

    read_line  called with the prompt; raises EOFError at the end of the input
    Raises EOFError if there is no line.
    """
    lines = [read_line("> ")]
    is_quoted = lines[0].lstrip().startswith(QUOTES)
    if is_quoted:
        lines[0] = lines[0].lstrip().removeprefix(QUOTES)
    try:
        while not lines[-1].rstrip().endswith(QUOTES) if is_quoted else lines[-1].endswith(CONTINUED):
            if not is_quoted:
                lines[-1] = lines[-1].removesuffix(CONTINUED)
            lines.append(read_line("... "))
    except EOFError:
        pass
    turn = "\n".join(lines)
    return turn.rstrip().removesuffix(QUOTES).strip("\n") if is_quoted else turn
