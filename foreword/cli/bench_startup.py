"""From process start to the first token, and where the time goes."""

from __future__ import annotations

import time
from contextlib import closing

from foreword.cli.answers import Remote
from foreword.cli.banner import QUESTION, parse_loading_line
from foreword.cli.server_process import ServerProcess
from foreword.config import Config
from foreword.core.params import SamplingParams

__all__ = ["start_up_seconds"]


def start_up_seconds(config: Config) -> dict[str, float]:
    """Seconds by stage, and in total, of a `foreword serve` of its own.

    The engine's own stages (import, weights, warmup) lie within `until ready`.
    """
    started = time.perf_counter()
    with ServerProcess(config) as server:
        ready = time.perf_counter()
        stages = next((found for line in server.lines if (found := parse_loading_line(line))), {})
        with closing(Remote(server.url, None)) as remote:
            next(remote.stream([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=8)), None)
            first = time.perf_counter()
    engine = {f"engine: {stage}": seconds for stage, seconds in stages.items()}
    return {**engine, "until ready": ready - started, "first token": first - ready, "total": first - started}
