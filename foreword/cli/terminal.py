"""What every command needs of the terminal: consoles, progress, units, logging."""

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
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from foreword.utils import logging as logs

__all__ = [
    "format_bytes",
    "format_count",
    "loading_bar",
    "set_up_logging",
    "stderr_console",
    "track_progress",
]

T = TypeVar("T")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def stderr_console() -> Console:
    """stderr: everything that is not the answer itself."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


@contextmanager
def loading_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, silent elsewhere; yields what to call with (done, total) bytes."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = stderr_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def track_progress(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, with a progress bar on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task)


def set_up_logging(level: str) -> None:
    """Log lines on stderr; those of libraries only from warnings on, because requests have lines of ours.

    uvicorn's only from errors on: what clients send that is no HTTP is nothing that an operator could mend.
    """
    logs.set_up_logging(level, LOG_FORMAT)
    for name, least in (
        ("uvicorn", logging.ERROR),
        ("httpx", logging.WARNING),
        ("httpcore", logging.WARNING),
    ):
        logging.getLogger(name).setLevel(max(least, logging.getLogger().level))


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
