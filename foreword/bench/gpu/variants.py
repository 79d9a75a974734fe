"""Section "variants" of `foreword bench gpu`: each variant of the kernels between two runs of the default.

A variant must have the default's bits; its time over the mean of both neighbours says what it is worth.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from foreword.bench.gpu.config import BenchConfig, Job
from foreword.bench.gpu.engines import BenchEngine, make_requests, open_engine
from foreword.bench.gpu.kernels import KernelTimings
from foreword.bench.gpu.report import RAW_PART, Report
from foreword.bench.gpu.start import compile_in_threads
from foreword.bench.shapes import ModelShape, model_shape
from foreword.kernels.triton.variants import VARIANTS, VARIANTS_ENV

SECTION = "variants"
DEFAULT = "default"  # the kernels without variants
SHOWN_CHANGE = 0.03  # of a case's time, from which the case is listed
ROWS = (1, 64, 256, 8192)  # of linear layers
MATRICES = ("qkv", "gate_up", "down")


def with_variants(jobs: Sequence[Job]) -> Iterator[Job]:
    """The job of this section becomes one for each variant, before and after one of the default."""
    names = [DEFAULT, *(name for variant in VARIANTS for name in (variant, DEFAULT))]
    for job in jobs:
        if job.section != SECTION:
            yield job
        elif VARIANTS:
            for number, name in enumerate(names):
                budget_s = job.budget_s / len(names)
                yield replace(job, name=f"{number} {name}", args=(number, name), budget_s=budget_s)


def measure_variant(config: BenchConfig, report: Report, number: int, name: str) -> None:
    """Times and hashes of kernels, and of an engine of few layers, in the run `number`."""
    os.environ[VARIANTS_ENV] = "" if name == DEFAULT else name
    shape = _with_layers(config.large, config.variant_layers)
    matrices = tuple(matrix for matrix in shape.matrices if matrix.name in MATRICES)
    rows, rounds = (config.kernel_rows[:1] if config.is_dry_run else ROWS), min(config.rounds, 3)
    config = replace(config, large=shape, kernel_roles=("large",), kernel_rows=rows, rounds=rounds)
    part = f"{RAW_PART}{number} {name}"
    kernels = replace(config, large=replace(shape, matrices=matrices))
    if not config.is_dry_run:
        launch = KernelTimings(kernels, only_launch=True).launch_all
        report.measure(f"{part} compile", partial(compile_in_threads, launch))
    timings = KernelTimings(kernels, with_bits=True)
    kinds = [timings.attention_parts()]
    if not config.is_dry_run:  # its section "kernels" has run the same code
        kinds += [timings.linear_parts(), timings.row_parts()]
    for parts in kinds:
        timings.measure(report, ((f"{part} {case}", run) for case, run in parts))
    report.require_time(4)
    options = {"test_mode": True}
    with open_engine(config, report, f"{part} load", "large", options) as engine:
        report.measure(f"{part} engine", partial(_steps, config, engine))


def _with_layers(shape: ModelShape, layers: int) -> ModelShape:
    sizes = (layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.vocab)
    return model_shape(shape.name, *sizes, shape.head_dim, shape.tie_word_embeddings)


def _steps(config: BenchConfig, engine: BenchEngine) -> Mapping[str, Any]:
    figures: dict[str, Any] = {}
    for count in (config.streams[0], config.streams[-1]):
        requests = make_requests(count, config.prompt, config.answer, config.large.vocab)
        results = [engine.run(requests) for _ in range(1 + config.rounds)][1:]
        figures[f"{count} us"] = statistics.median(result.step_s for result in results) * 1e6
        outputs = repr((results[0].tokens, results[0].hashes)).encode()
        figures[f"{count} bits"] = hashlib.blake2b(outputs, digest_size=8).hexdigest()
    return figures


def compare_variants(report: Report) -> None:
    """Add a part for each variant that ran between two runs of the default."""
    runs: dict[int, dict[str, Any]] = {}
    names: dict[int, str] = {}
    for part, figures in report.figures.get(SECTION, {}).items():
        if part.startswith(RAW_PART):
            place, name, case = part.removeprefix(RAW_PART).split(" ", 2)
            runs.setdefault(int(place), {}).update(
                {f"{case}, {key}": value for key, value in figures.items()}
            )
            names[int(place)] = name
    for before, number, after in ((n - 1, n, n + 1) for n in sorted(runs)):
        if names[number] != DEFAULT and before in runs and after in runs:
            report.figures[SECTION][names[number]] = _compare(runs[before], runs[number], runs[after])


def _compare(
    before: Mapping[str, Any], variant: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Ratios below 1 are faster."""
    common = [key for key in variant if key in before and key in after]
    differ = [
        key.removesuffix(" bits") for key in common if key.endswith(" bits") and variant[key] != before[key]
    ]
    ratios = {
        key.removesuffix(" us"): 2 * variant[key] / (before[key] + after[key])
        for key in common
        if key.endswith(" us") and before[key] + after[key] > 0
    }
    noise = [after[key] / before[key] for key in common if key.endswith(" us") and before[key] > 0]
    changed = {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > SHOWN_CHANGE}
    return {
        "ok": not differ,
        "differ": differ,
        "geometric mean": math.exp(statistics.fmean(map(math.log, ratios.values()))) if ratios else math.nan,
        "default again": math.exp(statistics.fmean(map(math.log, noise))) if noise else math.nan,
        **dict(sorted(changed.items(), key=lambda item: item[1])),
    }
