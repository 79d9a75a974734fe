"""Terminal output of all commands: stderr, progress bars, log format, units."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from foreword.utils import logging as logs

__all__ = [
    "format_bytes",
    "format_count",
    "loading_bar",
    "progress_bar",
    "set_up_logging",
    "stderr_console",
    "track_progress",
]

T = TypeVar("T")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def stderr_console() -> Console:
    """stderr, for all output but the answer itself."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on stderr that vanishes at the end; disabled unless stderr is a terminal."""
    console = stderr_console()
    description = TextColumn("{task.description}")
    return Progress(
        description, BarColumn(), *columns, console=console, transient=True, disable=not console.is_terminal
    )


@contextmanager
def loading_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; yields a function of (done, total) bytes."""
    with progress_bar(SpinnerColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def track_progress(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """The items, with a progress bar."""
    with progress_bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task)


def set_up_logging(level: str) -> None:
    """Log to stderr; libraries only from warnings on, because the server logs requests itself.

    uvicorn logs only errors: operators can do nothing about clients that send no HTTP.
    """
    logs.set_up_logging(level, LOG_FORMAT)
    for name, minimum in (
        ("uvicorn", logging.ERROR),
        ("httpx", logging.WARNING),
        ("httpcore", logging.WARNING),
    ):
        logging.getLogger(name).setLevel(max(minimum, logging.getLogger().level))


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def format_count(count: float) -> str:
    """4820000 -> "4.8 M"."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return f"{count:.0f}"
