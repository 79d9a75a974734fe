"""The start-up line on stderr: the stages that a command waits for until it is ready.

On a terminal it is one line that updates itself and vanishes; elsewhere it is repeated while the wait lasts.
Bytes that are loaded or fetched are shown with their rate and the time left, on a terminal also as a bar.
This module imports nothing that takes time, because the line precedes the imports that do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import unicodedata
from collections import deque

from foreword.planning.memory import format_bytes

REFRESH_S = 0.2  # interval on a terminal
REPEAT_S = 1.5  # interval elsewhere: no silence of 2 s
LONG_WAIT_S, LONG_REPEAT_S = 60.0, 10.0  # a log needs fewer lines after a minute
CLEAR = "\r\x1b[2K"
BYTE_STAGES = ("weights", "download")
RATE_WINDOW_S, MIN_RATE_S = 5.0, 0.3  # times between the samples of a rate
BAR_CELLS = 20
MIB, GIB = 1 << 20, 1 << 30


class _Rate:
    """Bytes a second over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (time, bytes done)
        self._total = 0

    def update(self, done: int, total: int) -> float:
        """The rate, or 0 as long as it is not known. Fewer bytes than before are those of the next model."""
        now = time.monotonic()
        if total != self._total or (self._samples and done < self._samples[-1][1]):
            self._samples.clear()
        self._total = total
        self._samples.append((now, done))
        while now - self._samples[0][0] > RATE_WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()
        began, first = self._samples[0]
        return (done - first) / (now - began) if now - began >= MIN_RATE_S else 0.0


class StartupLine:
    """A thread repeats the line, because imports of native libraries keep the main thread busy.

    It writes to the file descriptor: a daemon thread that holds a lock of sys.stderr would block the exit.
    """

    def __init__(self, fd: int = 2) -> None:
        self.log_format = "text"  # "json": begin() does nothing, plain lines would disturb a reader
        self._fd = fd
        self._is_terminal = False
        self._text = self._stage = ""
        self._bar = ""  # precedes the stage on terminals
        self._rate = _Rate()
        self._started_s = self._shown_s = 0.0
        self._done = threading.Event()
        self._done.set()
        self._thread: threading.Thread | None = None

    @property
    def is_shown(self) -> bool:
        return not self._done.is_set()

    def begin(self, text: str, at_once: bool = True) -> None:
        """Show `text` at once, or after a moment, and again with the current stage until end()."""
        self.end()
        if self.log_format == "json":
            return
        self._is_terminal = os.isatty(self._fd)
        self._text, self._stage, self._bar = text, "", ""
        self._started_s = self._shown_s = time.monotonic()
        self._done.clear()
        if at_once:
            self._show()
        self._thread = threading.Thread(target=self._repeat, name="start-up line", daemon=True)
        self._thread.start()

    def stage(self, text: str) -> None:
        """Set the current stage; without effect after end()."""
        self._stage, self._bar = text, ""

    def on_load(self, stage: str, done: int, total: int) -> None:
        """A stage of loading, see OnLoadProgress; "download" too has bytes."""
        if done >= total:
            self.stage("" if stage == "download" else "warm-up and calibration")
        elif stage not in BYTE_STAGES:
            verb = "compiling kernels" if stage == "kernels" else "capturing CUDA graphs"
            self.stage(f"{verb}, {done} of {total}")
        else:
            unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
            rate = self._rate.update(done, total)
            left = f", {format_bytes(rate)}/s, {format_seconds((total - done) / rate)} left" if rate else ""
            self._stage = f"{stage}, {done / unit:.1f} of {total / unit:.1f} {name}{left}"
            filled = BAR_CELLS * done // total
            self._bar = f"[{'=' * filled}{' ' * (BAR_CELLS - filled)}] "

    def end(self) -> None:
        """Stop, and clear a terminal's line. Also without begin()."""
        self._done.set()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            with contextlib.suppress(
                RuntimeError
            ):  # interrupted in begin(): it has not started, and ends at once
                thread.join()
            self._write(CLEAR if self._is_terminal else "")

    def exit(self, message: str, code: int) -> None:
        """End the process at once with a last line; for signal handlers, so it waits for no thread."""
        self._write((CLEAR if self.is_shown and self._is_terminal else "") + message)
        os._exit(code)

    def _repeat(self) -> None:
        while not self._done.wait(REFRESH_S):
            now = time.monotonic()
            repeat_s = LONG_REPEAT_S if now - self._started_s > LONG_WAIT_S else REPEAT_S
            if self._is_terminal or now - self._shown_s >= repeat_s:
                self._show()

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        elapsed_s = self._shown_s - self._started_s
        text, stage = self._text, f": {self._stage}" if self._stage else ""
        end = f" ({elapsed_s:.0f} s)" if elapsed_s >= 1 else " ..."
        if not self._is_terminal:
            self._write(f"{text}{stage}{end}\n")
            return
        room = _terminal_width(self._fd) - 1
        bar = self._bar if _num_cells(f"{text}{stage}{end}{self._bar}") <= room else ""
        text = _cut(text, room - _num_cells(f"{stage}{end}{bar}"))  # the progress is news, the text is not
        # The cursor stays at the left, so that a log line overwrites this one.
        self._write(f"{CLEAR}{_cut(text + stage.replace(': ', f': {bar}', 1) + end, room)}\r")

    def _write(self, text: str) -> None:
        try:
            os.write(self._fd, text.encode(sys.getfilesystemencoding(), "replace"))
        except OSError:
            self._done.set()  # nobody reads it


def format_seconds(seconds: float) -> str:
    """75 -> "75 s", 300 -> "5 min", 6000 -> "1 h 40 min"."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _num_cells(text: str) -> int:
    """Columns of a terminal."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _cut(text: str, num_cells: int) -> str:
    """The text, or as much of it as fits, with an ellipsis."""
    if _num_cells(text) <= num_cells:
        return text
    while text and _num_cells(text) > num_cells - 3:
        text = text[:-1]
    return f"{text}..."[: max(num_cells, 0)]


def _terminal_width(fd: int) -> int:
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80


startup_line = StartupLine()
