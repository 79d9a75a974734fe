"""Steps of whole engines under `foreword bench gpu`.

Tokens a second, shares of bandwidth and of the product rate, idle time of the device, what --fast-math would gain, and what
drafters on the host cost.

Regime: random weights; requests that decode greedily, none arriving or ending but for the last step; prompts are not counted but
where a prompt is what is measured. Everything that is compared is measured in turn, round after round, on engines that are
loaded side by side; figures are medians over rounds, ratios medians over rounds of what was measured next to each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from foreword.bench.common import rotate
from foreword.bench.gpu.config import ROLES
from foreword.bench.gpu.engines import BenchEngine, BenchRequest, BenchResult, EngineFactory, make_requests
from foreword.bench.gpu.report import Measurement
from foreword.bench.gpu.roofline import Roofline
from foreword.bench.shapes import ModelShape
from foreword.core.structured import StructuredOutput

__all__ = ["StepTimings", "count_weight_values", "prompt_flops", "ratio", "run_paired"]

DRAFTED = 3  # tokens of a draft model's drafts where only idle time is asked for
ANYTHING = "(.|\n)*"  # a grammar that allows every text: its cost is all there is of it
GRAMMAR, NGRAM, SUFFIX = "grammar", "ngram", "suffix"


class StepTimings:
    def __init__(self, yard: EngineFactory, ceilings: Roofline) -> None:
        self.yard = yard
        self.scale = yard.scale
        self.ceilings = ceilings

    def parts(self) -> Iterator[Measurement]:
        for role in ROLES:
            with self.yard.bed(role) as exact:
                yield Measurement(f"{role} decode", partial(self._decode, exact, role), 4)
                yield Measurement(f"{role} idle", partial(self._idle, exact, role, "off"))
                yield Measurement(f"{role} prompt", partial(self._prompt, exact, role))
                with self.yard.bed(role, fast_math=True) as fast:
                    yield Measurement(f"{role} fast-math", partial(self._fast_math, exact, fast, role), 6)
            drafts = {"speculate": "draft", "draft_model": self.yard.drafter(role), "draft_length": "fixed"}
            with self.yard.bed(role, **drafts, num_speculative_tokens=DRAFTED) as drafting:
                yield Measurement(
                    f"{role} idle with a draft model", partial(self._idle, drafting, role, "draft")
                )
            lookups = {
                "speculate": f"{GRAMMAR},{SUFFIX},{NGRAM}",
                "draft_length": "fixed",
                "num_speculative_tokens": DRAFTED,
            }
            with self.yard.bed(role, **lookups) as looking:
                yield Measurement(f"{role} host drafters", partial(self._host_drafters, looking, role), 4)

    def _asked(self, role: str, count: int, **options: Any) -> list[BenchRequest]:
        scale = self.scale
        return make_requests(count, scale.prompt, scale.answer, scale.shape(role).vocab, **options)

    def _decode(self, bed: BenchEngine, role: str) -> Mapping[str, Any]:
        """The same first requests in every crowd: their tokens must be the same."""
        most = self._asked(role, max(self.scale.streams))
        runs = {str(count): partial(bed.answer, most[:count]) for count in self.scale.streams}
        rounds = run_paired(runs, self.scale.rounds)
        one = str(self.scale.streams[0])
        alike = {answered.tokens[0] for crowd in rounds.values() for answered in crowd}
        found: dict[str, Any] = {"ok": len(alike) == 1}
        for name, answered in rounds.items():
            found[f"{name} tok/s"] = statistics.median(each.rate for each in answered)
            found[f"{name} step ms"] = statistics.median(each.step_s for each in answered) * 1e3
            found[f"{name} step over 1"] = ratio(answered, rounds[one], lambda each: each.step_s)
        shape = self.scale.shape(role)
        value_bytes = 4 if self.scale.dtype == "float32" else 2
        context = self.scale.prompt + self.scale.answer / 2
        read = value_bytes * (
            count_weight_values(shape) + 2 * shape.layers * shape.kv_heads * shape.head_dim * context
        )
        found["1 of bandwidth"] = read / (found[f"{one} step ms"] / 1e3) / self.ceilings.bandwidth
        return found

    def _idle(self, bed: BenchEngine, role: str, method: str) -> Mapping[str, Any]:
        """Answers are long enough that none ends while the profiler looks."""
        found: dict[str, Any] = {}
        steps = self.scale.idle_steps
        for count in (self.scale.streams[0], self.scale.streams[-1]):
            asked = [
                replace(question, max_tokens=(steps + 16) * (DRAFTED + 1))
                for question in self._asked(role, count, method=method)
            ]
            idle = bed.idle(asked, steps)
            if idle is None:
                found[f"{count} note"] = "the profiler saw no kernel"
                continue
            found[f"{count} between steps"] = idle.between
            found[f"{count} in all gaps"] = idle.all
            found[f"{count} kernels a step"] = idle.kernels / steps
            found[f"{count} step ms"] = idle.span_us / steps / 1e3
        return found

    def _prompt(self, bed: BenchEngine, role: str) -> Mapping[str, Any]:
        length, shape = self.scale.long_prompt, self.scale.shape(role)
        asked = make_requests(self.scale.rounds + 1, length, 2, shape.vocab)
        spans = [bed.first_token_s(question) for question in asked][1:]
        span = statistics.median(spans)
        share = prompt_flops(shape, length) / span / self.ceilings.product
        return {"tokens": length, "s": span, "tok/s": length / span, "of product": share}

    def _fast_math(self, exact: BenchEngine, fast: BenchEngine, role: str) -> Mapping[str, Any]:
        """How many times as long exactness takes."""
        found: dict[str, Any] = {}
        for count in self.scale.fast_streams:
            asked = self._asked(role, count)
            runs = {"exact": partial(exact.answer, asked), "fast": partial(fast.answer, asked)}
            rounds = run_paired(runs, max(2, self.scale.rounds - 2))
            found[f"{count} exact over fast"] = ratio(
                rounds["exact"], rounds["fast"], lambda each: each.step_s
            )
            found[f"{count} fast tok/s"] = statistics.median(each.rate for each in rounds["fast"])
        return found

    def _host_drafters(self, bed: BenchEngine, role: str) -> Mapping[str, Any]:
        """Texts at random, in which there is nothing to find: what is measured is the search, and a step that waits for the host.

        A grammar that allows all texts is held against none; it makes its masks, and drafts nothing.
        """
        found: dict[str, Any] = {}
        for count in (self.scale.streams[0], self.scale.streams[-1]):
            plain = self._asked(role, count, temperature=1.0)
            runs: dict[str, Callable[[], BenchResult]] = {"off": partial(bed.answer, plain)}
            for name in (NGRAM, SUFFIX, GRAMMAR):
                structured = StructuredOutput.regex(ANYTHING) if name == GRAMMAR else None
                asked = [replace(question, method=name, structured=structured) for question in plain]
                runs[name] = partial(bed.answer, asked)
            rounds = run_paired(runs, max(2, self.scale.rounds - 2))
            for name in (NGRAM, SUFFIX, GRAMMAR):
                more = [
                    (one.step_s - off.step_s) * 1e6
                    for one, off in zip(rounds[name], rounds["off"], strict=True)
                ]
                found[f"{count} {name} us a step"] = statistics.median(more)
                found[f"{count} {name} drafting us"] = statistics.median(
                    one.stage_us("draft") for one in rounds[name]
                )
        return found


def run_paired(runs: Mapping[str, Callable[[], BenchResult]], rounds: int) -> dict[str, list[BenchResult]]:
    """Every run once a round, in another order each; a first round warms up and is not counted."""
    found: dict[str, list[BenchResult]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in rotate(tuple(runs), number):
            answered = runs[name]()
            if number:
                found[name].append(answered)
    return found


def ratio(
    mine: Sequence[BenchResult], its: Sequence[BenchResult], value: Callable[[BenchResult], float]
) -> float:
    """Median over rounds of what was measured next to each other."""
    return statistics.median(
        value(one) / max(value(other), 1e-12) for one, other in zip(mine, its, strict=True)
    )


def count_weight_values(shape: ModelShape) -> int:
    """Weights that a step reads: all matrices with the head; of the embedding one row a token."""
    return sum(matrix.n * matrix.k * matrix.copies for matrix in shape.matrices)


def prompt_flops(shape: ModelShape, length: int) -> float:
    """Of a prompt whose last row is sampled; a multiply-add is two."""
    layers = (
        sum(2.0 * matrix.n * matrix.k * matrix.copies for matrix in shape.matrices if matrix.name != "head")
        * length
    )
    attention = 2.0 * shape.layers * shape.heads * shape.head_dim * length * (length + 1)
    return layers + attention + 2.0 * shape.vocab * shape.hidden
