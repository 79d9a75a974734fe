"""The cost of a step beside the model's forward pass.

Regime: requests that decode greedily, none arriving or ending, speculation off; the first steps
(prompts, warming) are not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from foreword.cli.bench_common import PromptExample
from foreword.config import Config
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine.local import LocalClient
from foreword.prepare import CheckpointInfo, prepare_checkpoint
from foreword.text.prepare import SamplingDefaults, make_requests

__all__ = ["measure_step_overhead"]

STEPS = 48  # measured
WARM_STEPS = 4


def measure_step_overhead(config: Config, examples: Sequence[PromptExample], num_requests: int) -> dict[str, float]:
    """Median microseconds of a step while `num_requests` decode: by stage, and `total` without the forward pass."""
    prepared = prepare_checkpoint(replace(config, speculate="off", draft_model=None, max_num_seqs=num_requests))
    client = LocalClient(prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
    for request in _requests(prepared, client.info.resolved.max_model_len, examples, num_requests):
        client.submit(request)
    waiting = num_requests
    while waiting:
        waiting -= sum(1 for event in client.step().events if getattr(event, "index", None) == 0)
    steps = [_step_us(client) for _ in range(WARM_STEPS + STEPS)][WARM_STEPS:]
    return {stage: statistics.median(step[stage] for step in steps) for stage in steps[0]}


def _step_us(client: LocalClient) -> dict[str, float]:
    started = time.perf_counter()
    report = client.step()
    seconds = time.perf_counter() - started
    stages = dict(report.stats.stage_seconds)
    total = seconds - stages.pop("forward", 0.0)
    return {name: value * 1e6 for name, value in {"total": total, **stages}.items()}


def _requests(prepared: CheckpointInfo, max_model_len: int, examples: Sequence[PromptExample], count: int) -> list[Request]:
    """Short prompts and answers that go on: every step of the measurement has all of them."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4 * (WARM_STEPS + STEPS) + count)
    found = []
    for number in range(count):
        ids = prepared.tokenizer.encode(examples[number % len(examples)].prompt)[:32]
        found += make_requests(ids, params, prepared.tokenizer, f"bench-{number}", max_model_len, SamplingDefaults(number))
    return found
