"""The end of every script in benchmarks/: one JSON line, and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreword.bench.regime import RegimeError, require, require_native_kernels
from foreword.bench.result_file import without_nan
from foreword.bench.session import describe_host


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
