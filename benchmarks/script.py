"""The frame of every script in benchmarks/: progress, one JSON line, and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from foreword.bench.regime import RegimeError, require, require_native_kernels
from foreword.bench.result_file import without_nan
from foreword.bench.session import describe_host
from foreword.bench.statistics import geometric_mean_ratio
from foreword.cli.terminal import progress_bar

T = TypeVar("T")


def run_script(main: Callable[[], int | None]) -> int:
    """Exit code of a script: 1 and a line on stderr where a claim did not hold."""
    try:
        require_native_kernels()
        return main() or 0
    except RegimeError as error:
        print(error, file=sys.stderr)
        return 1


def print_json(result: Mapping[str, Any]) -> None:
    """Print a result and its machine as one JSON line."""
    print(json.dumps(without_nan({**describe_host(), **result}), allow_nan=False), flush=True)


def require_concurrency(spans: Sequence[tuple[float, float]], wanted: int) -> None:
    """Raise RegimeError unless `wanted` requests ran at once.

    `spans` are the start and end of each request, in seconds of one clock.
    """
    moments = [(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    require("requests at once", most, wanted)


def track_progress(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """The items, with a progress bar."""
    with progress_bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task)


def speed_ratio(plain_s: Sequence[float], other_s: Sequence[float]) -> dict[str, float]:
    """Speed relative to plain over rounds measured next to each other; {} of no rounds."""
    ratio = geometric_mean_ratio([plain / other for plain, other in zip(plain_s, other_s, strict=True)])
    return {} if ratio is None else ratio.as_dict()
