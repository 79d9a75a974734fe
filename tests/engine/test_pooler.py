"""Embeddings: exact in any batch, and without effect on generation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foreword import SamplingParams
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, TokenEvent
from foreword.core.request import POOLING_TYPES, Request
from foreword.engine.engine import Engine, _prefill_load
from foreword.engine.pooler import PARTIAL_SUMS, accumulate, reduce_mean
from foreword.engine.scheduler import MIN_POOLING_ROWS, ScheduleOutput
from foreword.errors import ContextLengthExceeded, InvalidRequest
from foreword.speculation.draft_length.policy import PrefillLoad
from tests.support.budget import some_of
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.engines import load_engine, make_request, run, tokens_of

LONG = tuple(random.Random(1).choices(range(256), k=97))
# Of several norms, multipliers and states; tests/models/test_families.py has the logits of every family.
FAMILIES = ("llama", "gemma2", "granite", "cohere2", "phi", "deepseek_v3", "qwen3_5_text", "nemotron_h")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pooling") / "model", "llama", seed=5)


def engine_of(checkpoint: Path, **options: Any) -> Engine:
    return load_engine(checkpoint, **{"max_model_len": 128, "draft_length": "adaptive", **options})


def embedding(name: str, prompt: Sequence[int], pooling: str = "last", **options: object) -> Request:
    return Request(name, tuple(prompt), SamplingParams(), 0, pooling=pooling, **options)  # type: ignore[arg-type]


def generation(name: str, prompt: Sequence[int] = LONG[:5], **params: Any) -> Request:
    return make_request(name, prompt, **{"max_tokens": 40, **params})


def vector_of(events: Sequence[Event]) -> bytes:
    (event,) = events
    assert isinstance(event, EmbeddingEvent)
    return event.vector


@cache
def plain_engine(checkpoint: Path) -> Engine:
    return engine_of(checkpoint, prefix_caching=False, speculate="off")


def alone(checkpoint: Path, prompt: Sequence[int], pooling: str) -> bytes:
    return vector_of(run(plain_engine(checkpoint), [embedding("a", prompt, pooling)])["a"])


@pytest.mark.parametrize("family", some_of(FAMILIES, 2))
def test_vectors_match_transformers(family: str, tmp_path: Path) -> None:
    """Chunked, for each pooling type."""
    path = write_checkpoint(tmp_path / "model", family, seed=3)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        hidden = reference.base_model(torch.tensor([LONG])).last_hidden_state[0]
    expected = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}
    engine = engine_of(path, max_num_batched_tokens=40, max_num_seqs=8)
    for pooling in POOLING_TYPES:
        engine.submit(embedding(pooling, LONG, pooling))
    events = run(engine)
    for pooling, vector in expected.items():
        actual = torch.frombuffer(bytearray(vector_of(events[pooling])), dtype=torch.float32)
        torch.testing.assert_close(actual, vector, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("pooling", POOLING_TYPES)
@pytest.mark.parametrize("isa", ["auto", "reference"])
@pytest.mark.parametrize("budget", [8, 13, 64])
def test_vectors_do_not_depend_on_chunks_or_batch(
    checkpoint: Path, pooling: str, isa: str, budget: int
) -> None:
    expected = engine_of(checkpoint, cpu_isa=isa)
    expected.submit(embedding("a", LONG, pooling))
    vector = vector_of(run(expected)["a"])
    engine = engine_of(checkpoint, max_num_batched_tokens=budget, max_num_seqs=6, cpu_isa=isa)
    engine.submit(generation("before"))
    engine.submit(embedding("other", LONG[3:70], "mean"))
    engine.submit(embedding("a", LONG, pooling))
    engine.submit(generation("after", LONG[:40]))
    events = run(engine)
    assert vector_of(events["a"]) == vector
    assert len(tokens_of(events["before"])) == 40


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vector_is_exact_after_preemption(checkpoint: Path, pooling: str) -> None:
    engine = engine_of(checkpoint, kv_cache_memory="128tokens", max_num_batched_tokens=24, max_num_seqs=4)
    engine.submit(embedding("a", LONG, pooling))
    engine.step()
    engine.step()
    engine.submit(
        Request("first", LONG[7:67], SamplingParams(max_tokens=30, ignore_eos=True), 1, (EOS,), priority=-1)
    )
    vector = vector_of(run(engine)["a"])
    assert vector == alone(checkpoint, LONG, pooling)
    assert engine.scheduler.num_preemptions, "the embedding should be preempted"


def test_vector_is_exact_with_prefix_cache(checkpoint: Path) -> None:
    """A mean needs every row; the others use the cached prefix."""
    engine = engine_of(checkpoint)
    engine.submit(generation("warm", LONG[:90]))
    run(engine)
    for pooling, cached in (("last", 80), ("mean", 0), ("cls", 0)):
        engine.submit(embedding("a", LONG, pooling))
        (event,) = run(engine)["a"]
        assert isinstance(event, EmbeddingEvent) and event.num_cached == cached
        assert event.vector == alone(checkpoint, LONG, pooling)
    engine.submit(generation("after", LONG))
    other = engine_of(checkpoint, prefix_caching=False)
    other.submit(generation("after", LONG))
    events = run(engine)["after"]
    assert isinstance(events[0], TokenEvent) and events[0].num_cached == 96, "blocks of embeddings are shared"
    assert tokens_of(events) == tokens_of(run(other)["after"])


@pytest.mark.full
@pytest.mark.parametrize("draft_length", ["adaptive", "fixed"])
def test_drafters_skip_pooling_requests(checkpoint: Path, draft_length: str) -> None:
    """A generation has drafts meanwhile, and the same tokens as alone."""
    options = {"speculate": "suffix,draft", "draft_model": str(checkpoint), "draft_length": draft_length}
    reference_engine = engine_of(checkpoint, **options)
    reference_engine.submit(generation("g", max_tokens=100))
    expected = tokens_of(run(reference_engine)["g"])
    engine = engine_of(checkpoint, **options, max_num_batched_tokens=32, max_num_seqs=8)
    engine.submit(generation("g", max_tokens=100))
    events: dict[str, list[Event]] = {"g": []}
    drafted = number = 0
    while not engine.idle:
        if number < 60:
            engine.submit(embedding(f"e{number}", LONG[number % 7 :], POOLING_TYPES[number % 3]))
        number += 1
        for event in engine.step().events:
            events.setdefault(event.request_id, []).append(event)
            drafted += event.draft.num_drafted if isinstance(event, TokenEvent) and event.draft else 0
        assert set(engine.proposer._request_drafters) <= {"g"}
        engine.check()
    assert tokens_of(events["g"]) == expected
    assert not engine.proposer.errors
    assert drafted > 0 or draft_length == "adaptive"
    for number in range(60):
        assert vector_of(events[f"e{number}"]) == alone(
            checkpoint, LONG[number % 7 :], POOLING_TYPES[number % 3]
        )


def test_embeddings_take_few_rows_during_generation(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are verified in full and a later generation starts at once; alone, embeddings get all rows."""
    engine = engine_of(
        checkpoint, speculate="draft", draft_model=str(checkpoint), draft_length="fixed",
        num_speculative_tokens=4,
        max_num_batched_tokens=64, max_num_seqs=16,
    )  # fmt: skip
    schedules: list[ScheduleOutput] = []
    schedule = engine.scheduler.schedule
    monkeypatch.setattr(
        engine.scheduler, "schedule", lambda used_rows: schedules.append(schedule(used_rows)) or schedules[-1]
    )
    engine.submit(generation("g", temperature=0))
    for number in range(40):
        engine.submit(embedding(f"e{number}", [number, *LONG]))
    engine.submit(generation("h", LONG[:60], temperature=0))
    events = run(engine)
    assert [len(one.requests) for one in schedules[:3]] == [1, 2, 2], "a later generation starts at once"
    drafted = [
        event.draft.num_drafted for event in events["g"] if isinstance(event, TokenEvent) and event.draft
    ]
    assert drafted[:4] == [4] * 4
    rows = [(bool(one.requests), sum(work.num_tokens for work in one.pooling_requests)) for one in schedules]
    during_generation = [count for is_generating, count in rows if is_generating]
    assert max(count for is_generating, count in rows if not is_generating) == 64
    assert set(during_generation[1:]) == {MIN_POOLING_ROWS}, "each step has rows for embeddings"
    assert all(vector_of(events[f"e{number}"]) for number in range(40))


def test_generation_does_not_wait_for_a_shared_embedding_prefix(checkpoint: Path) -> None:
    """The embedding of the same prompt is computed in small chunks."""
    engine = engine_of(checkpoint, max_num_batched_tokens=64, max_num_seqs=8)
    engine.submit(generation("busy", max_tokens=60))
    engine.step()
    engine.submit(embedding("slow", LONG))
    engine.step()
    engine.submit(generation("g", LONG, max_tokens=2))
    steps = 0
    while "g" in engine.scheduler.states:
        engine.step()
        engine.check()
        steps += 1
    assert steps <= 4 and "slow" in engine.scheduler.states
    assert vector_of(run(engine)["slow"]) == alone(checkpoint, LONG, "last")


def test_prefill_load_excludes_pooling_requests(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_num_batched_tokens=16, max_num_seqs=4)
    engine.submit(embedding("a", LONG))
    engine.step()
    assert _prefill_load(engine.scheduler) == PrefillLoad() and engine.scheduler.running
    engine.submit(generation("g", LONG[5:80]))
    engine.step()
    assert _prefill_load(engine.scheduler).num_rows > 0


def test_prefill_load_of_a_waiting_prompt_is_what_the_cache_lacks(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_num_batched_tokens=256, max_num_seqs=4)
    cached = 80 // engine.scheduler.block_size * engine.scheduler.block_size
    for name, prompt, start in (("a", LONG[:80], 0), ("b", (*LONG[:80], *LONG[5:9]), cached)):
        engine.submit(generation(name, prompt))
        rows = len(prompt) - start
        assert _prefill_load(engine.scheduler) == PrefillLoad(rows, rows * start)
        while not engine.idle:
            engine.step()
    assert cached > 0


def test_embedding_may_fill_the_context(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_model_len=97, kv_cache_memory="112tokens")
    engine.submit(embedding("fits", LONG))
    engine.submit(embedding("beyond", (*LONG, 1)))
    engine.submit(embedding("magic", LONG[:3], "magic"))
    engine.submit(embedding("one", LONG[:1], "mean"))
    events = run(engine)
    assert vector_of(events["fits"]) == alone(checkpoint, LONG, "last")
    assert vector_of(events["one"]) == alone(checkpoint, LONG[:1], "cls")
    for name, error in (("beyond", ContextLengthExceeded), ("magic", InvalidRequest)):
        (event,) = events[name]
        assert isinstance(event, ErrorEvent) and type(event.error) is error


def test_removed_embeddings_free_all_blocks(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, max_num_batched_tokens=16, max_num_seqs=2)
    for number, pooling in enumerate(POOLING_TYPES):
        engine.submit(embedding(str(number), LONG, pooling))
    engine.step()
    for number in range(3):
        engine.remove(str(number))
        engine.check()
    assert engine.idle and engine.scheduler.pool.num_used == 0


def test_nonfinite_hidden_state_fails_its_request_only(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(checkpoint)
    pooler = engine.model_runner.pooler
    hidden = pooler._forward

    def with_nan(batch):  # type: ignore[no-untyped-def]
        rows = hidden(batch)
        rows[0, 3] = torch.nan
        return rows

    monkeypatch.setitem(pooler.__dict__, "_forward", with_nan)
    engine.submit(embedding("bad", LONG))
    engine.submit(embedding("good", LONG[1:]))
    events = run(engine)
    (failed,) = events["bad"]
    assert isinstance(failed, ErrorEvent) and "not finite" in failed.error.message
    assert vector_of(events["good"]) == alone(checkpoint, LONG[1:], "last")


def test_partial_sums_do_not_depend_on_chunks() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5 * PARTIAL_SUMS + 3, 48, generator=generator) * torch.logspace(-6, 6, 48)
    expected = _sum(rows, [len(rows)])
    torch.testing.assert_close(expected, rows.double().mean(0).float())
    chooser = random.Random(1)
    for _ in range(20):
        ends = sorted(chooser.sample(range(1, len(rows)), 6))
        assert torch.equal(_sum(rows, [*ends, len(rows)]), expected)
    assert not torch.equal(rows.mean(0), expected), "torch's mean has another order: the test can fail"


def _sum(rows: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    partials = torch.zeros(PARTIAL_SUMS, rows.shape[1])
    start = 0
    for end in ends:
        accumulate(partials, start, rows[start:end])
        start = end
    return reduce_mean(partials, len(rows))
