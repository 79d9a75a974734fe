"""Terminal output of all commands: stderr, progress bars, log format, units."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.cells import get_character_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from foreword.cli.startup import startup_line
from foreword.core.readiness import OnLoadProgress
from foreword.utils import logging as logs

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TAB_CELLS = 8
FENCES = ("```", "~~~")  # marks of Markdown's code blocks
MAX_FENCE_COLUMN = 16
CONTROL_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"},
    ord("\r"): None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}

StyledText = tuple[str, bool]  # a text, and whether it was drafted


def stderr_console() -> Console:
    """stderr, for all output but the answer itself."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on stderr that vanishes at the end; disabled unless stderr is a terminal."""
    console = stderr_console()
    if console.is_terminal:
        startup_line.end()
    description = TextColumn("{task.description}")
    return Progress(
        description, BarColumn(), *columns, console=console, transient=True, disable=not console.is_terminal
    )


@contextmanager
def loading_bar(description: str) -> Iterator[OnLoadProgress]:
    """The start-up line, or a new one of this text, until the model is loaded.

    Yields the function that shows progress.
    """
    if not startup_line.is_shown:
        startup_line.begin(description)
    startup_line.stage("starting the engine")
    try:
        yield startup_line.on_load
    finally:
        startup_line.end()


def set_up_logging(level: str, log_format: str = "text") -> None:
    """Log to stderr; libraries only from warnings on, because the server logs requests itself.

    uvicorn logs only errors: operators can do nothing about clients that send no HTTP.
    """
    logs.set_up_logging(level, LOG_FORMAT, log_format)
    for name, minimum in (
        ("uvicorn", logging.ERROR),
        ("httpx", logging.WARNING),
        ("httpcore", logging.WARNING),
    ):
        logging.getLogger(name).setLevel(max(minimum, logging.getLogger().level))


def format_count(count: float) -> str:
    """4820000 -> "4.8 M"."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return f"{count:.0f}"


def replace_unknown_characters(*streams: TextIO) -> None:
    """Read and write replacements for characters that the locale's encoding lacks, and raise no error."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def show_controls(text: str) -> str:
    """The text with control characters as pictures, so that a terminal shows and does not obey them."""
    return text.translate(CONTROL_PICTURES)


class WordWrapper:
    """Breaks streamed lines before words that do not fit; the text is otherwise unchanged.

    A word is held back until it is complete, unless it begins the line. The last column is left for the space
    after a word. The terminal itself breaks fenced code and words longer than a line: they can be copied.
    """

    def __init__(self, get_width: Callable[[], int]) -> None:
        self._get_width = get_width  # columns of the terminal, which may change
        self._width = get_width()
        self._line_start = ""  # enough of the line to see a fence
        self._fence: str | None = None  # mark of the open code block
        self._column = 0  # cells of the line that are shown
        self._may_move = False  # the current word may go to the next line
        self._is_wide = False  # the current word is a wide character, before and after which a line may end
        self._word: list[StyledText] = []  # held back
        self._word_cells = 0

    def feed(self, text: str, is_drafted: bool = False) -> list[StyledText]:
        """Text that is ready to be shown."""
        self._width = self._get_width()
        shown: list[StyledText] = []
        for char in text:
            self._line_start = (self._line_start + char)[:MAX_FENCE_COLUMN]
            cells = get_character_cell_size(char)
            if char in " \t\n":
                shown += [*self.flush(), (char, is_drafted)]
                self._end_word(char)
                continue
            if cells > 1 or (cells and self._is_wide):
                shown += self.flush()
                self._may_move, self._is_wide = self._column > 0 and self._fence is None, cells > 1
            if not self._may_move:
                shown.append((char, is_drafted))
                self._advance(cells)
                continue
            self._word.append((char, is_drafted))
            self._word_cells += cells
            if self._column + self._word_cells >= self._width:
                self._column, self._may_move = 0, False
                shown += [("\n", False), *self.flush()]
        return shown

    def flush(self) -> list[StyledText]:
        """The part of a word that was held back."""
        word, self._word = self._word, []
        self._advance(self._word_cells)
        self._word_cells = 0
        return word

    def _end_word(self, space: str) -> None:
        self._is_wide = False
        if space != "\n":
            self._advance(TAB_CELLS - self._column % TAB_CELLS if space == "\t" else 1)
            self._may_move = self._fence is None
            return
        begun = self._line_start.lstrip()[:3]
        if begun in FENCES and self._fence in (None, begun):
            self._fence = begun if self._fence is None else None
        self._line_start, self._column, self._may_move = "", 0, False

    def _advance(self, cells: int) -> None:
        """Move right; the terminal itself goes on in the next line."""
        self._column += cells
        if self._column > self._width:
            self._column = cells
