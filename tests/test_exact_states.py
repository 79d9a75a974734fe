"""Layers with state: turns, branches, long prompts and repeated steps change no bit.

Each request is computed alone, with an unchunked prompt, no prefix cache and no speculation, and again in an
engine with random settings. Prompts begin with earlier prompts and answers, cut at and around anchors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import POOLING_TYPES, Request
from foreword.core.states import SEGMENT
from foreword.kernels.cpu.library import supported_isas
from tests.support.budget import examples, is_full, some_of
from tests.support.checkpoints import EOS, STATE_FAMILIES, write_checkpoint, write_related_drafter
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.engines import load_engine, make_request, run
from tests.support.fault_injection import Fault, FaultInjector
from tests.support.heads import write_random_head

MAX_MODEL_LEN = 640
EDGES = (-1, 0, 1, 17)  # tokens after a multiple of SEGMENT
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.0, "prompt_logprobs": 1},
)
QUICK_FAMILIES = ("lfm2", "qwen3_5_text", "granitemoehybrid")
PLAIN: dict[str, Any] = {
    "speculate": "off",
    "max_num_seqs": 1,
    "max_num_batched_tokens": 640,
    "kv_cache_memory": "2000tokens",
}
PRECISIONS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
)

Answer = list[Any]


def answer_of(events: Sequence[Event]) -> Answer:
    """Tokens, hashes, logprobs and vectors."""
    parts: Answer = []
    for event in events:
        if isinstance(event, TokenEvent):
            logprobs = event.logprobs or (None,) * len(event.token_ids)
            parts += zip(event.token_ids, event.logits_hashes, logprobs, strict=True)
            parts += [event.prompt_logprobs] if event.prompt_logprobs else []
        elif isinstance(event, EmbeddingEvent):
            parts.append(event.vector)
        else:
            parts.append(event)
    return parts


def tokens_of(answer: Answer) -> list[int]:
    return [part[0] for part in answer if isinstance(part, tuple) and isinstance(part[0], int)]


def cached_of(events: Sequence[Event]) -> int:
    return max(event.num_cached for event in events if isinstance(event, TokenEvent | EmbeddingEvent))


def random_prompt(chance: random.Random, known: Sequence[Sequence[int]]) -> list[int]:
    """The start of an earlier conversation, often cut near an anchor, and new tokens."""
    base = list(chance.choice(known)) if known else []
    if base and chance.random() < 0.6:
        base = base[: chance.randrange(len(base) // SEGMENT + 1) * SEGMENT + chance.choice(EDGES)]
    own = [chance.randrange(3, 250) for _ in range(chance.choice((1, 2, 30, 64, 90)))]
    return ([*base, *own] if base else [*own, *own, *own])[: MAX_MODEL_LEN - 120]


def random_wave(chance: random.Random, wave: int, known: Sequence[Sequence[int]]) -> list[Request]:
    requests = []
    for number in range(6):
        name, prompt = f"{wave}-{number}", random_prompt(chance, known)
        if chance.random() < 0.15:
            pooling = chance.choice(POOLING_TYPES)
            requests.append(Request(name, tuple(prompt), SamplingParams(), 0, (EOS,), pooling=pooling))
            continue
        options = {"max_tokens": chance.choice((1, 5, 70, 100)), **chance.choice(PARAMS)}
        request = make_request(name, prompt, chance.randrange(99), **options)
        places = {"priority": chance.choice((0, 0, 1)), "cache_salt": chance.choice(("", "", "salt"))}
        requests.append(replace(request, **places))
    return requests


def random_options(chance: random.Random, drafter: Path, head: Path) -> dict[str, Any]:
    method = chance.choice(
        ("off", "ngram", "suffix", "text", "suffix,draft", "draft", "eagle3", "suffix,eagle3")
    )
    draft_model = head if "eagle3" in method else drafter if "draft" in method else None
    return {
        "speculate": method,
        "draft_model": draft_model and str(draft_model),
        "num_speculative_tokens": chance.choice((1, 4, 16, 64)),
        "max_num_seqs": chance.choice((2, 6)),
        "max_num_batched_tokens": chance.choice((24, 100, 400)),
        "kv_cache_memory": chance.choice(("700tokens", "4000tokens")),
        "block_size": chance.choice((16, 64, 128)),
        "threads": chance.choice((1, 2)),
    }


def check_waves(model: Path, drafter: Path, seed: int, num_waves: int = 3) -> int:
    """Cached tokens of all requests."""
    chance = random.Random(seed)
    precision = chance.choice(PRECISIONS)
    isa = {"cpu_isa": chance.choice(supported_isas()) if is_full() else FORCED_ISA}
    options = random_options(chance, drafter, drafter.parent / "head") | precision | isa
    common: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, **precision, **isa}
    plain = load_engine(model, **PLAIN, **common, prefix_caching=False)
    engine = load_engine(model, **common | options)
    known: list[list[int]] = []
    num_cached = 0
    for wave in range(num_waves):
        requests = random_wave(chance, wave, known)
        events = run(engine, requests, apart=chance.choice((0, 0, 3)))
        for request in requests:
            expected = answer_of(run(plain, [request])[request.id])
            assert answer_of(events[request.id]) == expected, (request.id, options)
            known.append([*request.prompt_ids, *tokens_of(expected)])
            num_cached += cached_of(events[request.id])
    return num_cached


@pytest.fixture(scope="module", params=STATE_FAMILIES if is_full() else QUICK_FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a Llama that drafts for it."""
    path = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(path / "model", request.param, seed=6, max_position_embeddings=MAX_MODEL_LEN)
    write_random_head(path / "head", model)
    return model, write_related_drafter(path / "drafter", model)


@pytest.mark.parametrize("seed", some_of(range(examples(4)), 3))
def test_random_conversations_are_exact(pair: tuple[Path, Path], seed: int) -> None:
    assert check_waves(*pair, seed) > 0


def long_requests(tag: str) -> list[Request]:
    """Prompts longer than a ring and answers across anchors; two share a prefix."""
    chance = random.Random(3)
    common = [chance.randrange(3, 250) for _ in range(2 * SEGMENT)]
    own = [[chance.randrange(3, 250) for _ in range(size)] * 3 for size in (100, 7, 60, 21)]
    prompts = [[*common, *own[0]], own[1], [*common, *own[2]], own[3]]
    return [
        make_request(f"{tag}{i}", prompt, seed=i, max_tokens=80, temperature=i % 2, logprobs=0)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("chunk", some_of([24, 400], 2))
def test_steps_repeated_in_parts_are_exact(pair: tuple[Path, Path], chunk: int) -> None:
    """Every third pass is computed, lost and repeated in halves."""
    model, _ = pair
    plain = load_engine(model, **PLAIN, max_model_len=MAX_MODEL_LEN, prefix_caching=False)
    engine = load_engine(
        model,
        speculate="ngram",
        num_speculative_tokens=4,
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory="3000tokens",
    )
    faults = FaultInjector(engine, *(Fault("run", "too few", call=call) for call in range(2, 2000, 3)))
    events = run(engine, long_requests("a"), apart=2)
    for request in long_requests("a"):
        assert answer_of(events[request.id]) == answer_of(run(plain, [request])[request.id])
    assert len(faults.steps) > 30


def test_a_failure_beside_an_embedding_fails_its_request_only(pair: tuple[Path, Path]) -> None:
    """The check after a failure comes before the pass of the embedding, which has its next anchor."""
    prompt = tuple(range(30, 230))
    embedding = Request("last", prompt, SamplingParams(), 0, (EOS,), pooling="last")
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "speculate": "off"}
    expected = answer_of(run(load_engine(pair[0], **options), [embedding])["last"])
    engine = load_engine(pair[0], **options)
    requests = [make_request(f"fails{i}", (5, 6, 7 + i), max_tokens=60) for i in range(5)]
    FaultInjector(engine, *(Fault("commit", request=request.id, call=7) for request in requests))
    events = run(engine, [*requests, embedding], apart=1)
    assert answer_of(events.pop("last")) == expected
    assert all(isinstance(each[-1], ErrorEvent) for each in events.values())


def test_anchors_of_a_failed_request_are_not_found(pair: tuple[Path, Path]) -> None:
    """Its state may be wrong: the same prompt is computed again."""
    engine = load_engine(pair[0], max_model_len=MAX_MODEL_LEN, kv_cache_memory="3000tokens")
    request = long_requests("a")[0]
    expected = answer_of(run(engine, [request])[request.id])
    FaultInjector(engine, Fault("run", "too few", request="b0"))
    (failed,) = run(engine, long_requests("b")[:1])["b0"]
    assert isinstance(failed, ErrorEvent)
    events = run(engine, long_requests("c")[:1])["c0"]
    assert cached_of(events) == 0 and answer_of(events) == expected


def test_a_repeated_prompt_is_found_up_to_its_last_anchor(pair: tuple[Path, Path]) -> None:
    """Prompts that end at an anchor, before it and after it."""
    engine = load_engine(pair[0], max_model_len=MAX_MODEL_LEN, kv_cache_memory="3000tokens")
    chance = random.Random(2)
    for count, edge in itertools.product((1, 3), EDGES):
        prompt = [chance.randrange(3, 250) for _ in range(count * SEGMENT + edge)]
        first, again = (
            run(engine, [make_request(name, prompt, max_tokens=3)])[name] for name in ("first", "again")
        )
        assert answer_of(first) == answer_of(again)
        assert (cached_of(first), cached_of(again)) == (0, (len(prompt) - 1) // SEGMENT * SEGMENT)
