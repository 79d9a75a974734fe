"""The start-up line on stderr: what a command waits for, from its first moment until it is ready.

On a terminal it is one line that updates itself and vanishes; elsewhere it is repeated while the wait lasts.
This module imports nothing that takes time, because the line precedes the imports that do.
"""

from __future__ import annotations

import os
import sys
import threading
import time

__all__ = ["StartupLine", "startup_line"]

REFRESH_S = 0.2  # of a terminal's line
REPEAT_S = 1.5  # elsewhere: no silence of 2 s
LONG_WAIT_S, LONG_REPEAT_S = 60.0, 10.0  # after a minute a log needs fewer lines
CLEAR = "\r\x1b[2K"
MIB, GIB = 1 << 20, 1 << 30


class StartupLine:
    """A thread repeats the line, because imports of native libraries keep the main thread busy.

    It writes to the file descriptor: a daemon thread that holds a lock of sys.stderr would block the exit.
    """

    def __init__(self, fd: int = 2) -> None:
        self.log_format = "text"  # "json": begin() does nothing, plain lines would disturb a reader
        self._fd = fd
        self._is_terminal = False
        self._text = self._stage = ""
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
        self._text, self._stage = text, ""
        self._started_s = self._shown_s = time.monotonic()
        self._done.clear()
        if at_once:
            self._show()
        self._thread = threading.Thread(target=self._repeat, name="start-up line", daemon=True)
        self._thread.start()

    def stage(self, text: str) -> None:
        """What the command waits for now; without effect after end()."""
        self._stage = text

    def on_load(self, stage: str, done: int, total: int) -> None:
        """A stage of loading, see OnLoadProgress."""
        if done < total and stage != "weights":
            verb = "compiling kernels" if stage == "kernels" else "capturing CUDA graphs"
            self.stage(f"{verb}, {done} of {total}")
        elif done < total:
            unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
            self.stage(f"weights, {done / unit:.1f} of {total / unit:.1f} {name}")
        else:
            self.stage("warm-up and calibration")

    def end(self) -> None:
        """Stop, and clear a terminal's line. Also without begin()."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
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
        stage = f": {self._stage}" if self._stage else ""
        line = f"{self._text}{stage}" + (f" ({elapsed_s:.0f} s)" if elapsed_s >= 1 else " ...")
        if self._is_terminal:
            # The cursor stays at the left, so that a log line overwrites this one.
            self._write(f"{CLEAR}{line[: _terminal_width(self._fd) - 1]}\r")
        else:
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        try:
            os.write(self._fd, text.encode(sys.getfilesystemencoding(), "replace"))
        except OSError:
            self._done.set()  # nobody reads it


def _terminal_width(fd: int) -> int:
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80


startup_line = StartupLine()
