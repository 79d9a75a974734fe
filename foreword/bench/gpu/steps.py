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
from types import MappingProxyType
from typing import Any

import torch

from foreword.bench.gpu.config import BenchConfig, write_model
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
from foreword.bench.statistics import percentile, rotate
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput

NUM_DRAFTED = 3  # tokens of a draft in the section "steps"
FIXED_DRAFTS = MappingProxyType({"draft_length": "fixed", "num_speculative_tokens": NUM_DRAFTED})
CONTEXT_ANSWER = 16  # tokens decoded at a long context
MIN_PROMPT_RATE = 12_000  # tokens/s, below which long contexts do not fit into their budget
ARRIVAL_STEPS = 12  # between two arrivals
MAX_REPLAYED = 5  # tokens of a replayed draft
HOST_DRAFTERS = ("ngram", "suffix", "grammar")
ANY_TEXT = StructuredOutput.regex("(.|\n)*")  # costs masks and allows everything
RATES = (0.8, 0.6, 0.0)  # acceptance of replayed drafts
SEED_STRIDE = 10_000  # between the seeds of two rates
WARM_ROUNDS = 2  # of transformers: the first compiles, the second captures

Runs = Mapping[str, Callable[[], BenchResult]]


def decode(config: BenchConfig, report: Report, role: str) -> None:
    """Exact kernels, and beside them ordinary torch."""
    options = {"max_num_seqs": max(config.fast_streams)}
    with open_engine(config, report, f"{role} exact engine", role, options) as exact:
        report.measure(f"{role} decode", partial(_decode, config, exact, role), 4)
        report.measure(f"{role} idle", partial(_idle, config, exact, role, "off"))
        report.measure(f"{role} prompt", partial(_prompt, config, exact, role))
        report.measure(f"{role} arrivals", partial(_arrivals, config, exact, role))
        fast_options = {**options, "fast_math": True}
        with open_engine(config, report, f"{role} fast engine", role, fast_options) as fast:
            report.measure(f"{role} fast-math", partial(_fast_math, config, exact, fast, role), 6)


def contexts(config: BenchConfig, report: Report) -> None:
    """Decoding at long contexts, within a limit for which attention is planned."""
    most = max(count * tokens for count, tokens in config.long_contexts)
    options = {
        "max_model_len": config.max_context,
        "max_num_seqs": max(count for count, _ in config.long_contexts),
        "kv_cache_memory": f"{most + (1 << 13)}tokens",
    }
    with open_engine(config, report, "contexts engine", "large", options) as engine:
        for count, tokens in ((1, config.prompt + CONTEXT_ANSWER), *config.long_contexts):
            run = partial(_long_decode, config, engine, count, tokens)
            report.measure(f"{count} at {tokens}", run, count * tokens / MIN_PROMPT_RATE)


def weight_format(config: BenchConfig, report: Report, name: str, field: str, value: str) -> None:
    """Decoding and a prompt with weights or KV of another format."""
    if config.is_dry_run and value == "fp8":  # for GPUs alone
        value = "int8"
    with open_engine(config, report, f"{name} engine", "large", {field: value}) as engine:
        ends = (config.streams[0], config.streams[-1])
        report.measure(f"{name} decode", partial(_decode_streams, config, engine, "large", ends))
        report.measure(f"{name} prompt", partial(_prompt, config, engine, "large"))


def draft_model(config: BenchConfig, report: Report) -> None:
    options = {"speculate": "draft", **FIXED_DRAFTS}
    with open_engine(config, report, "draft model engine", "large", options, draft=True) as engine:
        idle = partial(_idle, config, engine, "large", "draft")
        report.measure("large idle with a draft model", idle)


def host_drafters(config: BenchConfig, report: Report) -> None:
    names = [name for name in HOST_DRAFTERS if name != "grammar" or importlib.util.find_spec("llguidance")]
    options = {"speculate": ",".join(names), **FIXED_DRAFTS}
    with open_engine(config, report, "host drafters engine", "large", options) as engine:
        report.measure("large host drafters", partial(_host_drafters, config, engine, names), 4)


def _requests(config: BenchConfig, role: str, count: int, **params: Any) -> list[Request]:
    return make_requests(count, config.prompt, config.answer, config.shape(role).vocab, **params)


def _decode(config: BenchConfig, engine: BenchEngine, role: str) -> Mapping[str, Any]:
    figures = _decode_streams(config, engine, role, config.streams)
    first = config.streams[0]
    read = _bytes_read(config, config.shape(role), config.prompt + config.answer / 2)
    figures["1 of bandwidth"] = read / (figures[f"{first} step ms"] / 1e3) / roofline(config).bandwidth
    return figures


def _decode_streams(
    config: BenchConfig, engine: BenchEngine, role: str, streams: Sequence[int]
) -> dict[str, Any]:
    """Tokens/s by stream count; the first request must get the same tokens in every batch."""
    requests = _requests(config, role, max(streams))
    runs = {str(count): partial(engine.run, requests[:count]) for count in streams}
    rounds = _run_paired(runs, config.rounds)
    first = str(streams[0])
    outputs = {tuple(result.tokens[0]) for results in rounds.values() for result in results}
    figures: dict[str, Any] = {"ok": len(outputs) == 1}
    for name, results in rounds.items():
        figures[f"{name} tok/s"] = statistics.median(result.rate for result in results)
        figures[f"{name} step ms"] = statistics.median(result.step_s for result in results) * 1e3
        figures[f"{name} step over 1"] = _ratio(results, rounds[first], lambda result: result.step_s)
    return figures


def _bytes_read(config: BenchConfig, shape: ModelShape, tokens: float) -> float:
    """Bytes of a step that must be read: all weights, and K and V of `tokens` positions."""
    kv_values = 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens
    return (4 if config.dtype == "float32" else 2) * (count_weights(shape) + kv_values)


def _long_decode(config: BenchConfig, engine: BenchEngine, count: int, tokens: int) -> Mapping[str, Any]:
    """Steps after prompts that fill all but the answer of `tokens`; one run, since prompts take its time."""
    result = engine.run(make_requests(count, tokens - CONTEXT_ANSWER, CONTEXT_ANSWER, config.large.vocab))
    result.check()
    read = _bytes_read(config, config.large, count * (tokens - CONTEXT_ANSWER / 2))
    share = read / result.step_s / roofline(config).bandwidth
    return {"step ms": result.step_s * 1e3, "tok/s": result.rate, "of bandwidth": share}


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


def _arrivals(config: BenchConfig, engine: BenchEngine, role: str) -> Mapping[str, Any]:
    """Milliseconds between the tokens of decoding requests, alone and while others arrive."""
    vocab, steps = config.shape(role).vocab, (config.arrivals + 1) * ARRIVAL_STEPS
    decoding = make_requests(config.arrival_streams, config.prompt, steps + ARRIVAL_STEPS, vocab)
    arriving = make_requests(config.arrivals, config.arrival_prompt, 2, vocab)
    alone = engine.token_gaps_s(decoding, (), ARRIVAL_STEPS, steps)
    gaps = engine.token_gaps_s(decoding, arriving, ARRIVAL_STEPS, steps)
    return {
        "alone p50 ms": statistics.median(alone) * 1e3,
        "alone p99 ms": (percentile(alone, 99) or 0.0) * 1e3,
        "p50 ms": statistics.median(gaps) * 1e3,
        "p99 ms": (percentile(gaps, 99) or 0.0) * 1e3,
    }


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


def _host_drafters(config: BenchConfig, engine: BenchEngine, names: Sequence[str]) -> Mapping[str, Any]:
    """Added step time of drafters on the host: in random text few drafts are found, as the figures say."""
    figures: dict[str, Any] = {}
    for count in (config.streams[0], config.streams[-1]):
        plain = _requests(config, "large", count, temperature=1.0)
        masked = _requests(config, "large", count, temperature=1.0, structured=ANY_TEXT)
        runs: dict[str, Callable[[], BenchResult]] = {"off": partial(engine.run, plain)}
        for name in names:
            requests = with_method(masked if name == "grammar" else plain, name)
            runs[name] = partial(engine.run, requests)
        rounds = _run_paired(runs, max(2, config.rounds - 2))
        for name in names:
            pairs = zip(rounds[name], rounds["off"], strict=True)
            figures[f"{count} {name} us a step"] = statistics.median(
                (result.step_s - off.step_s) * 1e6 for result, off in pairs
            )
            drafting = statistics.median(result.stage_us("draft") for result in rounds[name])
            figures[f"{count} {name} drafting us"] = drafting
            tokens = [result.drafted / result.steps for result in rounds[name]]
            figures[f"{count} {name} draft tokens a step"] = statistics.median(tokens)
    return figures


def adaptive_drafts(config: BenchConfig, report: Report) -> None:
    """Replayed drafts of set acceptance, against an engine without speculation."""
    batch = config.streams[-1]
    cases = [(f"replay {rate:g}, 1 stream", rate, 1) for rate in (0.8, 0.0)]
    cases.append((f"replay 0, {batch} streams", 0.0, batch))
    _compare_replay(config, report, "adaptive", {}, cases)


def fixed_drafts(config: BenchConfig, report: Report) -> None:
    """With many streams, a step verifies more rows than requests run."""
    cases = [(f"replay 0.8, always {MAX_REPLAYED}, {n} streams", 0.8, n) for n in (1, config.streams[-1])]
    _compare_replay(config, report, "fixed", {"draft_length": "fixed"}, cases)


def paid_drafts(config: BenchConfig, report: Report) -> None:
    """Replayed drafts beside the draft model, whose cost counts."""
    cases = [(f"draft model paid, 0.6, {n} streams", 0.6, n) for n in (1, config.streams[-1])]
    _compare_replay(config, report, "paid", {"replay_cost": True}, cases, draft=True)


def _compare_replay(
    config: BenchConfig,
    report: Report,
    name: str,
    options: Mapping[str, Any],
    cases: Sequence[tuple[str, float, int]],
    draft: bool = False,
) -> None:
    """`cases` have a part's name, an acceptance rate, and a number of requests."""
    requests = make_requests(config.streams[-1], config.prompt, config.replayed, config.large.vocab)
    fields = {"speculate": "replay", "num_speculative_tokens": MAX_REPLAYED, **options}
    with open_engine(config, report, f"{name}: engine without drafts", "large") as off:
        outputs = off.run(requests).tokens
        lines = [
            line for rate in RATES for line in replay_lines(_seeded(requests, rate), outputs, 1.0 - rate)
        ]
        with open_engine(config, report, f"{name}: engine", "large", fields, lines, draft) as on:
            for part, rate, count in cases:
                report.measure(part, partial(_compare, config, off, on, requests[:count], rate))


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


def peer(config: BenchConfig, report: Report, role: str) -> None:
    """transformers with a static cache, compiled, in turn with Foreword; one request."""
    report.measure(f"transformers {role}", partial(_compare_transformers, config, report, role), 30)


def _compare_transformers(config: BenchConfig, report: Report, role: str) -> Mapping[str, Any]:
    """Time of a token after the first, by either."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    transformers = importlib.import_module("transformers")
    with TemporaryDirectory() as folder:
        text = (write_model(Path(folder), config.shape(role), config.dtype) / "config.json").read_text()
    options = json.loads(text)
    model_config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device(config.device):
        dtype = getattr(torch, config.dtype)
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=dtype).eval()
    (request,) = make_requests(1, config.prompt, config.peer_tokens, config.shape(role).vocab)
    with open_engine(config, report, f"{role} engine", role) as engine:
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
