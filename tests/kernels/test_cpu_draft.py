"""A draft as one call gives the bits of its passes and of the sampler's steps one by one."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.batch import Chunk, build_batch
from foreword.core.images import MRopePositions, PromptImage
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.cpu.program import Program
from foreword.kernels.ops import DraftJob, DraftLoop, DraftTokens, MRopeSections
from foreword.kernels.reference.backend import ReferenceOps
from foreword.sampling.sampler import Sampler
from foreword.speculation.base import DraftRequest
from foreword.speculation.drafters.draft_model import DraftState, EagerDraftLoop
from tests.kernels.test_cpu_recording import BLOCK_SIZE, NUM_BLOCKS, VOCAB, Small
from tests.support.fakes import extended

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")

UNUSED = (0, 17, VOCAB - 1)
MAX_LANES = 5
MAX_TOKENS = 8
SLOTS = NUM_BLOCKS // MAX_LANES  # blocks of one request


@functools.cache
def compiled(isa: str, threads: int) -> tuple[Small, Program]:
    model = Small(CpuOps(isa, threads), torch.float32, "float32")
    program = model.ops.compile(model)
    assert isinstance(program, Program) and isinstance(program, DraftLoop)
    return model, program


def one_by_one(program: Program) -> EagerDraftLoop:
    """Native passes, sampled in torch."""
    return EagerDraftLoop(
        program, ReferenceOps(row_tile=1), Sampler(ReferenceOps(), VOCAB, UNUSED), BLOCK_SIZE, "cpu"
    )


@st.composite
def asked(draw: st.DrawFn, number: int) -> tuple[DraftRequest, DraftJob]:
    """A request of a few tokens, of which the last ones are not computed, in blocks of its own."""
    temperature = draw(st.sampled_from([0.0, 1.0, 0.7, 3.0]))
    filters = {
        "top_k": draw(st.sampled_from([0, -1, 1, 5, VOCAB, 10**30])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.2])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 1.0])),
    }
    seed = draw(st.integers(0, 2**64 - 1))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=SLOTS * BLOCK_SIZE - MAX_TOKENS))
    run = draw(st.integers(0, len(tokens) - 1))
    request = Request(
        f"{number}",
        tuple(tokens[: len(tokens) - run]),
        SamplingParams(temperature=temperature, **filters),
        seed,
    )
    state = RequestState(request, number, 4096)
    ask = DraftRequest(extended(state, tokens[len(tokens) - run :]))
    start = draw(st.integers(0, len(tokens) - 1))
    track = DraftState.from_state(state, VOCAB)
    assert track.is_simple
    lane = DraftJob(
        token_ids=tokens[start:],
        start_position=start,
        block_table=range(1 + number * SLOTS, 1 + (number + 1) * SLOTS),
        first_draft_index=ask.num_tokens,
        max_tokens=draw(st.integers(0, MAX_TOKENS)),
        min_logprob_sum=draw(st.sampled_from([-math.inf, -1.0, -5.0, 0.0])),
        sampling=track.sampling,
    )
    return ask, lane


@st.composite
def drafts(draw: st.DrawFn) -> list[tuple[DraftRequest, DraftJob]]:
    return [draw(asked(number)) for number in range(draw(st.integers(1, MAX_LANES)))]


@given(pairs=drafts(), isa=st.sampled_from(supported_isas()), threads=st.integers(1, 2))
@settings(max_examples=150, deadline=None)
def test_equals_its_passes_one_by_one(
    pairs: list[tuple[DraftRequest, DraftJob]], isa: str, threads: int
) -> None:
    model, program = compiled(isa, threads)
    asks, lanes = zip(*pairs, strict=True)
    caches = []
    found: list[list[DraftTokens]] = []
    for draft in (
        lambda: program.draft(lanes, BLOCK_SIZE, torch.tensor(UNUSED)),
        lambda: one_by_one(program).draft(asks, lanes),
    ):
        model.kv.k.zero_()
        model.kv.v.zero_()
        found.append(draft())
        caches.append((model.kv.k.clone(), model.kv.v.clone()))
    assert found[0] == found[1]
    assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1]), (
        "the same tokens were computed"
    )
    for lane, guess in zip(lanes, found[0], strict=True):
        assert_as_asked(lane, guess)


def assert_as_asked(lane: DraftJob, guess: DraftTokens) -> None:
    """As long as wanted, unless the floor was reached, by the last guess."""
    assert len(guess.token_ids) == len(guess.logprobs) <= lane.max_tokens
    assert not set(guess.token_ids) & set(UNUSED)
    total = 0.0
    for number, logprob in enumerate(guess.logprobs, start=1):
        assert logprob <= 0
        total += logprob
        assert (total < lane.min_logprob_sum) <= (number == len(guess.logprobs))
    assert len(guess.logprobs) == lane.max_tokens or total < lane.min_logprob_sum


def lane_of(number: int, **changes: object) -> DraftJob:
    state = RequestState(Request(f"{number}", (5, 6, 7), SamplingParams(temperature=0), 0), 0, 4096)
    sampling = DraftState.from_state(state, VOCAB).sampling
    lane = DraftJob(
        [5, 6, 7 + number], 0, range(1 + number * SLOTS, 1 + (number + 1) * SLOTS), 3, 6, -math.inf, sampling
    )
    return replace(lane, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", supported_isas())
def test_neighbours_change_nothing(isa: str) -> None:
    """Some of them done sooner, one that only computes, one whose row no token can be sampled from."""
    _, program = compiled(isa, 2)
    unused = torch.tensor(UNUSED)
    alone = [program.draft([lane_of(number)], BLOCK_SIZE, unused)[0] for number in range(4)]
    lengths = (6, 2, 0, 4)
    lanes = [lane_of(number, max_tokens=length) for number, length in enumerate(lengths)]
    together = program.draft(lanes, BLOCK_SIZE, unused)
    assert [guess.token_ids for guess in together] == [
        guess.token_ids[:length] for guess, length in zip(alone, lengths, strict=True)
    ]


@pytest.mark.parametrize("isa", supported_isas())
def test_text_behind_pictures_stands_where_the_shift_says(isa: str) -> None:
    """Each pass as an ordinary batch whose positions lag behind by as much."""
    model = Small(CpuOps(isa, 2), torch.float32, "float32", MRopeSections((1, 1, 1)))
    program = model.ops.compile(model)
    assert isinstance(program, Program)
    pictures = [
        PromptImage(b"", count, (1, 2, count // 2), (28, 28), (1, 3, 28, 28), None) for count in (4, 10, 16)
    ]
    lanes = [
        lane_of(n, start=picture.end, shift=MRopePositions((picture,)).offset)
        for n, picture in enumerate(pictures)
    ]
    guesses = program.draft(lanes, BLOCK_SIZE, torch.tensor(UNUSED))
    model.kv.k.zero_()
    model.kv.v.zero_()
    chosen = [list(lane.token_ids) for lane in lanes]
    done = [0] * len(lanes)
    for _ in range(lanes[0].max_tokens):
        chunks = [
            Chunk(ids[old:], lane.start_position + old, list(lane.block_table), 1, MRopePositions((picture,)))
            for ids, old, lane, picture in zip(chosen, done, lanes, pictures, strict=True)
        ]
        logits = program(build_batch(chunks, BLOCK_SIZE, 1, "cpu", mrope=True))
        done = [len(ids) for ids in chosen]
        logits[:, list(UNUSED)] = -math.inf
        for ids, row in zip(chosen, logits, strict=True):
            ids.append(int(row.argmax()))
    assert [list(guess.token_ids) for guess in guesses] == [ids[3:] for ids in chosen]


def test_nothing_legal_ends_the_draft() -> None:
    _, program = compiled(supported_isas()[-1], 1)
    assert program.draft([lane_of(0)], BLOCK_SIZE, torch.arange(VOCAB)) == [DraftTokens((), ())]
    few = program.draft([lane_of(0), lane_of(1, max_tokens=0)], BLOCK_SIZE, torch.arange(1, VOCAB))
    assert few == [DraftTokens((0,) * 6, (0.0,) * 6), DraftTokens((), ())], "one token is left, and certain"


def test_a_row_without_a_slot_is_our_own_bug() -> None:
    _, program = compiled(supported_isas()[-1], 1)
    with pytest.raises(AssertionError, match="without a slot"):
        program.draft([lane_of(0, blocks=[1], max_tokens=2 * BLOCK_SIZE)], BLOCK_SIZE, torch.tensor(UNUSED))
