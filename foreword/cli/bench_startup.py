"""From process start to the first token, and where the time goes."""

from __future__ import annotations

import time
from contextlib import closing

from foreword.cli.answers import HTTPBackend
from foreword.cli.banner import EXAMPLE_PROMPT, parse_loading_line
from foreword.cli.server_process import ServerProcess
from foreword.config import Config
from foreword.core.params import SamplingParams

__all__ = ["measure_startup_s"]


def measure_startup_s(config: Config) -> dict[str, float]:
    """Seconds by stage, and in total, of a `foreword serve` of its own.

    The engine's own stages (import, weights, warmup) lie within `until ready`.
    """
    started = time.perf_counter()
    with ServerProcess(config) as server:
        ready = time.perf_counter()
        stages = next((found for line in server.banner_lines if (found := parse_loading_line(line))), {})
        with closing(HTTPBackend(server.url, None)) as remote:
            next(remote.stream([{"role": "user", "content": EXAMPLE_PROMPT}], SamplingParams(max_tokens=8)), None)
            first = time.perf_counter()
    engine = {f"engine: {stage}": seconds for stage, seconds in stages.items()}
    return {**engine, "until ready": ready - started, "first token": first - ready, "total": first - started}
