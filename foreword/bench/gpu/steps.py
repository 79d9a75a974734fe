"""Sections "steps", "speculation" and "peers" of `foreword bench gpu`: speed of whole engines.

Regime: random weights; requests decode greedily and none arrives or ends before the last step. Compared
engines are loaded side by side and take turns. Figures are medians over rounds, ratios medians over rounds of
values measured next to each other.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foreword.bench.common import rotate
from foreword.bench.gpu.config import ROLES, BenchConfig, write_model
from foreword.bench.gpu.device import BenchDevice, roofline
from foreword.bench.gpu.engines import (
    BenchEngine,
    BenchResult,
    make_requests,
    open_engine,
    replay_lines,
    with_method,
)
from foreword.bench.gpu.report import Report
from foreword.bench.regime import require
from foreword.bench.shapes import ModelShape
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput

__all__ = ["count_weights", "peers", "prompt_flops", "speculation", "steps"]

NUM_DRAFTED = 3  # tokens of a draft in the section "steps"
MAX_REPLAYED = 5  # tokens of a replayed draft
HOST_DRAFTERS = ("ngram", "suffix", "grammar")
ANY_TEXT = StructuredOutput.regex("(.|\n)*")  # costs masks and allows everything
RATES = (0.8, 0.6, 0.0)  # acceptance of replayed drafts
SEED_STRIDE = 10_000  # between the seeds of two rates
WARM_ROUNDS = 2  # of transformers: the first compiles, the second captures

Runs = Mapping[str, Callable[[], BenchResult]]


def steps(config: BenchConfig, report: Report) -> None:
    """The section "steps"."""
    fixed = {"draft_length": "fixed", "num_speculative_tokens": NUM_DRAFTED}
    for role in ROLES:
        with report.guard(f"{role} exact"), open_engine(config, role) as exact:
            report.measure(f"{role} decode", partial(_decode, config, exact, role), 4)
            report.measure(f"{role} idle", partial(_idle, config, exact, role, "off"))
            report.measure(f"{role} prompt", partial(_prompt, config, exact, role))
            with report.guard(f"{role} fast"), open_engine(config, role, {"fast_math": True}) as fast:
                report.measure(f"{role} fast-math", partial(_fast_math, config, exact, fast, role), 6)
        options = {"speculate": "draft", **fixed}
        with report.guard(f"{role} draft model"), open_engine(config, role, options, draft=True) as engine:
            report.measure(f"{role} idle with a draft model", partial(_idle, config, engine, role, "draft"))
        options = {"speculate": "grammar,suffix,ngram", **fixed}
        with report.guard(f"{role} lookup"), open_engine(config, role, options) as engine:
            report.measure(f"{role} host drafters", partial(_host_drafters, config, engine, role), 4)


def _requests(config: BenchConfig, role: str, count: int, **params: Any) -> list[Request]:
    return make_requests(count, config.prompt, config.answer, config.shape(role).vocab, **params)


def _decode(config: BenchConfig, engine: BenchEngine, role: str) -> Mapping[str, Any]:
    """Tokens/s by stream count; the first request must get the same tokens in every batch."""
    requests = _requests(config, role, max(config.streams))
    runs = {str(count): partial(engine.run, requests[:count]) for count in config.streams}
    rounds = _run_paired(runs, config.rounds)
    first = str(config.streams[0])
    outputs = {tuple(result.tokens[0]) for results in rounds.values() for result in results}
    figures: dict[str, Any] = {"ok": len(outputs) == 1}
    for name, results in rounds.items():
        figures[f"{name} tok/s"] = statistics.median(result.rate for result in results)
        figures[f"{name} step ms"] = statistics.median(result.step_s for result in results) * 1e3
        figures[f"{name} step over 1"] = _ratio(results, rounds[first], lambda result: result.step_s)
    shape, context = config.shape(role), config.prompt + config.answer / 2
    kv_values = 2 * shape.layers * shape.kv_heads * shape.head_dim * context
    read = (4 if config.dtype == "float32" else 2) * (count_weights(shape) + kv_values)
    figures["1 of bandwidth"] = read / (figures[f"{first} step ms"] / 1e3) / roofline(config).bandwidth
    return figures


def _idle(config: BenchConfig, engine: BenchEngine, role: str, method: str) -> Mapping[str, Any]:
    figures: dict[str, Any] = {}
    num_steps = config.idle_steps
    max_tokens = (num_steps + 16) * (NUM_DRAFTED + 1)  # no request ends while the profiler runs
    for count in (config.streams[0], config.streams[-1]):
        requests = make_requests(count, config.prompt, max_tokens, config.shape(role).vocab)
        idle = engine.idle(with_method(requests, method), num_steps)
        if idle is None:
            figures[f"{count} note"] = "the profiler saw no kernel"
            continue
        figures[f"{count} between steps"] = idle.between
        figures[f"{count} in all gaps"] = idle.all
        figures[f"{count} kernels a step"] = idle.kernels / num_steps
        figures[f"{count} step ms"] = idle.span_us / num_steps / 1e3
    return figures


def _prompt(config: BenchConfig, engine: BenchEngine, role: str) -> Mapping[str, Any]:
    length, shape = config.long_prompt, config.shape(role)
    requests = make_requests(config.rounds + 1, length, 2, shape.vocab)
    seconds = statistics.median([engine.first_token_s(request) for request in requests][1:])
    share = prompt_flops(shape, length) / seconds / roofline(config).product
    return {"tokens": length, "s": seconds, "tok/s": length / seconds, "of product": share}


def _fast_math(config: BenchConfig, exact: BenchEngine, fast: BenchEngine, role: str) -> Mapping[str, Any]:
    """Step time of exact kernels over that of ordinary torch."""
    figures: dict[str, Any] = {}
    for count in config.fast_streams:
        requests = _requests(config, role, count)
        runs = {"exact": partial(exact.run, requests), "fast": partial(fast.run, requests)}
        rounds = _run_paired(runs, max(2, config.rounds - 2))
        over = _ratio(rounds["exact"], rounds["fast"], lambda result: result.step_s)
        figures[f"{count} exact over fast"] = over
        figures[f"{count} fast tok/s"] = statistics.median(result.rate for result in rounds["fast"])
    return figures


def _host_drafters(config: BenchConfig, engine: BenchEngine, role: str) -> Mapping[str, Any]:
    """Added step time of drafters on the host: in random text few drafts are found, as the figures say."""
    figures: dict[str, Any] = {}
    for count in (config.streams[0], config.streams[-1]):
        plain = _requests(config, role, count, temperature=1.0)
        masked = _requests(config, role, count, temperature=1.0, structured=ANY_TEXT)
        runs: dict[str, Callable[[], BenchResult]] = {"off": partial(engine.run, plain)}
        for name in HOST_DRAFTERS:
            requests = with_method(masked if name == "grammar" else plain, name)
            runs[name] = partial(engine.run, requests)
        rounds = _run_paired(runs, max(2, config.rounds - 2))
        for name in HOST_DRAFTERS:
            pairs = zip(rounds[name], rounds["off"], strict=True)
            figures[f"{count} {name} us a step"] = statistics.median(
                (result.step_s - off.step_s) * 1e6 for result, off in pairs
            )
            drafting = statistics.median(result.stage_us("draft") for result in rounds[name])
            figures[f"{count} {name} drafting us"] = drafting
            tokens = [result.drafted / result.steps for result in rounds[name]]
            figures[f"{count} {name} draft tokens a step"] = statistics.median(tokens)
    return figures


def speculation(config: BenchConfig, report: Report) -> None:
    """The section "speculation": replayed drafts of set acceptance, against an engine without speculation."""
    role, batch = ROLES[0], config.streams[-1]
    requests = make_requests(batch, config.prompt, config.replayed, config.shape(role).vocab)

    def measure(name: str, off: BenchEngine, on: BenchEngine, rate: float, count: int) -> None:
        report.measure(name, partial(_compare, config, off, on, requests[:count], rate), 4)

    def open_replay(options: Mapping[str, Any], draft: bool = False) -> Any:
        fields = {"speculate": "replay", "num_speculative_tokens": MAX_REPLAYED, **options}
        return open_engine(config, role, fields, lines, draft)

    with open_engine(config, role) as off:
        outputs = off.run(requests).tokens
        lines = [
            line for rate in RATES for line in replay_lines(_seeded(requests, rate), outputs, 1.0 - rate)
        ]
        with report.guard("adaptive"), open_replay({}) as adaptive:
            for rate in (0.8, 0.0):
                measure(f"replay {rate:g}, 1 stream", off, adaptive, rate, 1)
            measure(f"replay 0, {batch} streams", off, adaptive, 0.0, batch)
        with report.guard("fixed"), open_replay({"draft_length": "fixed"}) as fixed:
            measure(f"replay 0.8, always {MAX_REPLAYED}, 1 stream", off, fixed, 0.8, 1)
        with report.guard("draft model"), open_replay({"replay_cost": True}, draft=True) as paid:
            for count in (1, batch):
                measure(f"draft model paid, 0.6, {count} streams", off, paid, 0.6, count)


def _seeded(requests: Sequence[Request], rate: float) -> list[Request]:
    """The requests under seeds of this rate: a recording is found by prompt and seed."""
    offset = SEED_STRIDE * (1 + RATES.index(rate))
    return [
        replace(
            request, seed=request.seed + offset, params=replace(request.params, seed=request.seed + offset)
        )
        for request in requests
    ]


def _compare(
    config: BenchConfig, off: BenchEngine, on: BenchEngine, requests: Sequence[Request], rate: float
) -> Mapping[str, Any]:
    """Throughput over that without speculation, and equality of the tokens."""
    drafted = with_method(_seeded(requests, rate), "replay")
    runs: Runs = {"off": lambda: off.run(requests), "on": lambda: on.run(drafted)}
    rounds = _run_paired(runs, config.rounds)
    tokens_per_step = statistics.median(result.counted / max(result.steps, 1) for result in rounds["on"])
    figures = {
        "ok": [result.tokens for result in rounds["on"]] == [result.tokens for result in rounds["off"]],
        "times off": _ratio(rounds["on"], rounds["off"], lambda result: result.rate),
        "off tok/s": statistics.median(result.rate for result in rounds["off"]),
        "tok/s": statistics.median(result.rate for result in rounds["on"]),
        "tokens a step": tokens_per_step / len(requests),
    }
    require("draft tokens verified without speculation", sum(one.drafted for one in rounds["off"]), 0)
    num_drafted = sum(result.drafted for result in rounds["on"])
    accepted = sum(result.accepted for result in rounds["on"])
    return {**figures, "acceptance": accepted / num_drafted} if num_drafted else figures


def peers(config: BenchConfig, report: Report) -> None:
    """The section "peers": transformers with a static cache, compiled, in turn with Foreword; one request."""
    for role in reversed(ROLES):
        report.measure(f"transformers {role}", partial(_compare_transformers, config, role), 40)
        BenchDevice(config.device).free()


def _compare_transformers(config: BenchConfig, role: str) -> Mapping[str, Any]:
    """Time of a token after the first, by either."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    transformers = importlib.import_module("transformers")
    with TemporaryDirectory() as folder:
        text = (write_model(Path(folder), config.shape(role), config.dtype) / "config.json").read_text()
    options = json.loads(text)
    model_config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device(config.device):
        model = transformers.AutoModelForCausalLM.from_config(model_config)
        model = model.to(getattr(torch, config.dtype)).eval()
    (request,) = make_requests(1, config.prompt, config.peer_tokens, config.shape(role).vocab)
    with open_engine(config, role) as engine:
        runs: dict[str, Callable[[], float]] = {
            "foreword": lambda: 1 / max(engine.run([request]).rate, 1e-9),
            "transformers": lambda: _transformers_token_s(config, model, request),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(WARM_ROUNDS + config.rounds):
            for name in rotate(tuple(runs), number):
                value = runs[name]()
                if number >= WARM_ROUNDS:
                    seconds[name].append(value)
    pairs = zip(seconds["foreword"], seconds["transformers"], strict=True)
    return {
        "times transformers": statistics.median(theirs / ours for ours, theirs in pairs),
        **{f"{name} tok/s": 1 / statistics.median(values) for name, values in seconds.items()},
        "version": transformers.__version__,
        "compiled": getattr(model, "_compiled_call", None) is not None,
    }


def _transformers_token_s(config: BenchConfig, model: Any, request: Request) -> float:
    """Time of a long output less that of a short one, by token."""
    ids = torch.tensor([request.prompt_ids], device=config.device)
    few, many = 2, request.params.max_tokens
    assert many is not None
    seconds = []
    for count in (few, many):
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
            )
        BenchDevice(config.device).wait()
        seconds.append(time.perf_counter() - started)
    return max(seconds[1] - seconds[0], 1e-9) / (many - few)


def _run_paired(runs: Runs, rounds: int) -> dict[str, list[BenchResult]]:
    """Each run once a round, in rotated order; an uncounted first round warms up. Raises RegimeError."""
    results: dict[str, list[BenchResult]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in rotate(tuple(runs), number):
            result = runs[name]()
            if number:
                result.check()
                results[name].append(result)
    return results


def _ratio(
    results: Sequence[BenchResult], base: Sequence[BenchResult], value: Callable[[BenchResult], float]
) -> float:
    pairs = zip(results, base, strict=True)
    return statistics.median(value(result) / max(value(other), 1e-12) for result, other in pairs)


def count_weights(shape: ModelShape) -> int:
    """Weights that a step reads: all matrices with the head, without the embedding."""
    return sum(matrix.n * matrix.k * matrix.copies for matrix in shape.matrices)


def prompt_flops(shape: ModelShape, length: int) -> float:
    """Operations of a prompt whose last row is sampled; a multiply-add is two."""
    layers = [matrix for matrix in shape.matrices if matrix.name != "head"]
    products = sum(2.0 * matrix.n * matrix.k * matrix.copies for matrix in layers) * length
    attention = 2.0 * shape.layers * shape.heads * shape.head_dim * length * (length + 1)
    return products + attention + 2.0 * shape.vocab * shape.hidden
