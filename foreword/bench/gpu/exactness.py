"""Equality of whole engines under `foreword bench gpu`: the same requests under every setting, tokens and hashes of logits.

The first answers are those of an engine that launches kernel by kernel, plans each step when the one before is done, and serves
one request at a time without speculation. Every other setting must give the same, and ordinary torch (--fast-math) must not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.engines import FIRST_ID, BenchEngine, BenchRequest, BenchResult, EngineFactory
from foreword.bench.gpu.report import Measurement

__all__ = ["ExactnessChecks", "ExpectedOutputs", "make_population"]

ROLE = "small"
ERROR_RATE = 0.3  # of the replayed drafts
SMALL_SHARE = 3  # so many of a crowd fit a small cache


def make_population(scale: BenchConfig) -> list[BenchRequest]:
    """Different in length, half of them greedy, the others sampled with filters; some share a beginning."""
    chance = Random(5)
    last = min(scale.shape(ROLE).vocab, 1 << 16)
    common = [chance.randrange(FIRST_ID, last) for _ in range(scale.prompt)]
    found = []
    for number in range(scale.num_requests):
        own = [chance.randrange(FIRST_ID, last) for _ in range(chance.randint(2, scale.prompt))]
        prompt = tuple(common[: chance.choice((0, 0, len(common) // 2))] + own)[: scale.prompt]
        options = ({}, {"temperature": 1.0}, {}, {"temperature": 0.7, "top_k": 40, "top_p": 0.9})[number % 4]
        found.append(BenchRequest(prompt, 1000 + number, scale.check_tokens, **options))  # type: ignore[arg-type]
    return found


@dataclass(slots=True)
class ExpectedOutputs:
    """What was answered first, by the question's number; everything later is compared with that."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    hashes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def compare(self, answered: BenchResult) -> dict[str, Any]:
        """Of questions 0, 1, ...; what is new is kept."""
        tokens_differ, bits_differ, compared = [], [], 0
        for number, (tokens, hashes) in enumerate(zip(answered.tokens, answered.hashes, strict=True)):
            if number in self.tokens:
                compared += 1
                if tokens != self.tokens[number]:
                    tokens_differ.append(number)
                if hashes != self.hashes[number]:
                    bits_differ.append(number)
            else:
                self.tokens[number], self.hashes[number] = tokens, hashes
        told = {
            "answers": len(answered.tokens),
            "compared": compared,
            "tokens_differ": tokens_differ,
            "bits_differ": bits_differ,
        }
        return {"ok": not tokens_differ and not bits_differ, **told, "preemptions": answered.preemptions}


class ExactnessChecks:
    def __init__(self, yard: EngineFactory) -> None:
        self.yard = yard
        self.scale = yard.scale
        self.asked = make_population(yard.scale)
        self.told = ExpectedOutputs()

    def parts(self) -> Iterator[Measurement]:
        crowd, crowds = self.scale.batch_sizes[0], self.scale.batch_sizes
        with self.bed(enforce_eager=True, overlap=False) as plain:
            yield Measurement(
                "one at a time",
                lambda: self.told.compare(plain.one_by_one(self.asked[: self.scale.num_single])),
                5,
            )
            yield self._part(plain, f"{crowd} at once, eager", crowd)
        with self.bed() as graphs:
            yield Measurement(
                "graphs, one at a time",
                lambda: self.told.compare(graphs.one_by_one(self.asked[: self.scale.num_single])),
            )
            for count in crowds:
                yield self._part(graphs, f"graphs, {count} at once", count)
        with self.bed(overlap=False) as waiting:
            yield self._part(waiting, f"graphs without overlap, {crowd} at once", crowd)
        replayed = {
            "speculate": "suffix,ngram,replay",
            "replay_file": self._recording(),
            "draft_length": "fixed",
        }
        with self.bed(**replayed, num_speculative_tokens=5) as replays:
            for method in ("off", "replay", "suffix", "ngram"):
                yield self._part(replays, f"{method} drafts, {crowd} at once", crowd, method)
            yield self._part(replays, "replay drafts, one at a time", 1, "replay")
        with self.bed(
            speculate="draft",
            draft_model=self.yard.drafter(ROLE),
            draft_length="fixed",
            num_speculative_tokens=3,
        ) as drafts:
            yield self._part(drafts, f"a draft model, {crowd} at once", crowd, "draft")
            yield self._part(drafts, "a draft model, one at a time", 1, "draft")
        longest = max(len(question.prompt_ids) + question.max_tokens for question in self.asked)
        small = max(crowd // SMALL_SHARE, 1) * (longest + 16) + 16
        cramped = {"kv_cache_memory": f"{small}tokens", "max_model_len": longest + 8, "prefix_caching": True}
        chunks = {"max_num_seqs": crowd, "max_num_batched_tokens": max(crowd, 48)}
        with self.bed(**replayed, **cramped, **chunks, num_speculative_tokens=5) as narrow:
            yield self._part(narrow, f"preemption and small chunks, {crowd} at once", crowd)
            yield self._part(narrow, f"preemption and replay drafts, {crowd} at once", crowd, "replay")
        with self.bed(fast_math=True) as fast:
            yield Measurement("--fast-math, negative control", lambda: self._control(fast, crowd))

    def bed(self, **options: Any) -> Any:
        """An engine that tells hashes."""
        return self.yard.bed(ROLE, test_mode=True, **{"max_num_seqs": max(self.scale.batch_sizes), **options})

    def _part(self, bed: BenchEngine, name: str, count: int, method: str = "off") -> Measurement:
        asked = [replace(question, method=method) for question in self.asked[:count]]
        return Measurement(name, lambda: self.told.compare(bed.answer(asked)))

    def _recording(self) -> str:
        """What was answered so far, for drafts of it that are right most of the time."""
        path = self.yard.folder / "population.jsonl"
        lines = [_recorded(self.asked[number], tokens) for number, tokens in self.told.tokens.items()]
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        return str(path)

    def _control(self, bed: BenchEngine, crowd: int) -> Mapping[str, Any]:
        """Alone and in a crowd, compared with itself."""
        own = ExpectedOutputs()
        own.compare(bed.one_by_one(self.asked[: self.scale.num_single]))
        found = own.compare(bed.answer(self.asked[:crowd]))
        return {"caught": not found["ok"], "compared": found["compared"], "bits_differ": found["bits_differ"]}


def _recorded(question: BenchRequest, tokens: Sequence[int]) -> dict[str, Any]:
    prompt = list(question.prompt_ids)
    return {
        "prompt_token_ids": prompt,
        "token_ids": list(tokens),
        "seed": question.seed,
        "error_rate": ERROR_RATE,
    }
