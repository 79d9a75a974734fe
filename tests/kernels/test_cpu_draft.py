"""A draft in one call has the bits of its single passes and sampling steps."""

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
from foreword.speculation.drafters.draft_model import DraftState
from foreword.speculation.drafters.eager_draft_loop import EagerDraftLoop
from foreword.speculation.engine_drafter import DraftRequest
from tests.kernels.test_cpu_program import BLOCK_SIZE, NUM_BLOCKS, VOCAB, SmallModel
from tests.support.budget import examples
from tests.support.cpu_kernels import isas_under_test
from tests.support.fakes import extended

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")

NEVER_SAMPLED = (0, 17, VOCAB - 1)
MAX_JOBS = 5
MAX_TOKENS = 8
SLOTS = NUM_BLOCKS // MAX_JOBS  # blocks of one request


@functools.cache
def compiled(isa: str, threads: int) -> tuple[SmallModel, Program]:
    model = SmallModel(CpuOps(isa, threads), torch.float32, "float32")
    program = model.ops.compile(model)
    assert isinstance(program, Program) and isinstance(program, DraftLoop)
    return model, program


def one_by_one(program: Program) -> EagerDraftLoop:
    """Native passes with sampling in torch."""
    return EagerDraftLoop(
        program, ReferenceOps(row_tile=1), Sampler(ReferenceOps(), VOCAB, NEVER_SAMPLED), BLOCK_SIZE, "cpu"
    )


@st.composite
def asked(draw: st.DrawFn, number: int) -> tuple[DraftRequest, DraftJob]:
    """A request of a few tokens, the last ones not computed, in its own blocks."""
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
    draft_request = DraftRequest(extended(state, tokens[len(tokens) - run :]))
    start = draw(st.integers(0, len(tokens) - 1))
    track = DraftState.from_state(state, VOCAB)
    assert track.is_simple
    job = DraftJob(
        token_ids=tokens[start:],
        start_position=start,
        block_table=range(1 + number * SLOTS, 1 + (number + 1) * SLOTS),
        first_draft_index=draft_request.num_tokens,
        max_tokens=draw(st.integers(0, MAX_TOKENS)),
        min_logprob_sum=draw(st.sampled_from([-math.inf, -1.0, -5.0, 0.0])),
        sampling=track.sampling,
    )
    return draft_request, job


@st.composite
def drafts(draw: st.DrawFn) -> list[tuple[DraftRequest, DraftJob]]:
    return [draw(asked(number)) for number in range(draw(st.integers(1, MAX_JOBS)))]


@given(pairs=drafts(), isa=st.sampled_from(supported_isas()), threads=st.integers(1, 2))
@settings(max_examples=examples(150))
def test_draft_equals_single_passes(
    pairs: list[tuple[DraftRequest, DraftJob]], isa: str, threads: int
) -> None:
    model, program = compiled(isa, threads)
    requests, jobs = zip(*pairs, strict=True)
    caches = []
    found: list[list[DraftTokens]] = []
    for draft in (
        lambda: program.draft(jobs, BLOCK_SIZE, torch.tensor(NEVER_SAMPLED)),
        lambda: one_by_one(program).draft(requests, jobs),
    ):
        model.kv.k.zero_()
        model.kv.v.zero_()
        found.append(draft())
        caches.append((model.kv.k.clone(), model.kv.v.clone()))
    assert found[0] == found[1]
    assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1]), (
        "caches differ"
    )
    for job, draft in zip(jobs, found[0], strict=True):
        check_length(job, draft)


def check_length(job: DraftJob, draft: DraftTokens) -> None:
    """The draft has max_tokens, unless its last token reached the logprob floor."""
    assert len(draft.token_ids) == len(draft.logprobs) <= job.max_tokens
    assert not set(draft.token_ids) & set(NEVER_SAMPLED)
    total = 0.0
    for number, logprob in enumerate(draft.logprobs, start=1):
        assert logprob <= 0
        total += logprob
        assert (total < job.min_logprob_sum) <= (number == len(draft.logprobs))
    assert len(draft.logprobs) == job.max_tokens or total < job.min_logprob_sum


def make_job(number: int, **changes: object) -> DraftJob:
    state = RequestState(Request(f"{number}", (5, 6, 7), SamplingParams(temperature=0), 0), 0, 4096)
    sampling = DraftState.from_state(state, VOCAB).sampling
    job = DraftJob(
        [5, 6, 7 + number], 0, range(1 + number * SLOTS, 1 + (number + 1) * SLOTS), 3, 6, -math.inf, sampling
    )
    return replace(job, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", isas_under_test())
def test_neighbours_change_no_draft(isa: str) -> None:
    """Some jobs end sooner, and one only computes its known tokens."""
    _, program = compiled(isa, 2)
    unused = torch.tensor(NEVER_SAMPLED)
    alone = [program.draft([make_job(number)], BLOCK_SIZE, unused)[0] for number in range(4)]
    lengths = (6, 2, 0, 4)
    jobs = [make_job(number, max_tokens=length) for number, length in enumerate(lengths)]
    together = program.draft(jobs, BLOCK_SIZE, unused)
    assert [draft.token_ids for draft in together] == [
        draft.token_ids[:length] for draft, length in zip(alone, lengths, strict=True)
    ]


@pytest.mark.parametrize("isa", isas_under_test())
def test_text_after_images_uses_the_mrope_offset(isa: str) -> None:
    """Each pass equals an ordinary batch with the same M-RoPE offset."""
    model = SmallModel(CpuOps(isa, 2), torch.float32, "float32", MRopeSections((1, 1, 1)))
    program = model.ops.compile(model)
    assert isinstance(program, Program)
    images = [
        PromptImage(b"", count, (1, 2, count // 2), (28, 28), (1, 3, 28, 28), None) for count in (4, 10, 16)
    ]
    jobs = [
        make_job(n, start_position=image.end, mrope_offset=MRopePositions((image,)).offset)
        for n, image in enumerate(images)
    ]
    drafts = program.draft(jobs, BLOCK_SIZE, torch.tensor(NEVER_SAMPLED))
    model.kv.k.zero_()
    model.kv.v.zero_()
    chosen = [list(job.token_ids) for job in jobs]
    done = [0] * len(jobs)
    for _ in range(jobs[0].max_tokens):
        chunks = [
            Chunk(ids[old:], job.start_position + old, list(job.block_table), 1, MRopePositions((image,)))
            for ids, old, job, image in zip(chosen, done, jobs, images, strict=True)
        ]
        logits = program(build_batch(chunks, BLOCK_SIZE, 1, "cpu", mrope=True))
        done = [len(ids) for ids in chosen]
        logits[:, list(NEVER_SAMPLED)] = -math.inf
        for ids, row in zip(chosen, logits, strict=True):
            ids.append(int(row.argmax()))
    assert [list(draft.token_ids) for draft in drafts] == [ids[3:] for ids in chosen]


def test_draft_ends_without_a_legal_token() -> None:
    _, program = compiled(supported_isas()[-1], 1)
    assert program.draft([make_job(0)], BLOCK_SIZE, torch.arange(VOCAB)) == [DraftTokens((), ())]
    few = program.draft([make_job(0), make_job(1, max_tokens=0)], BLOCK_SIZE, torch.arange(1, VOCAB))
    assert few == [DraftTokens((0,) * 6, (0.0,) * 6), DraftTokens((), ())], (
        "one token is left, with probability 1"
    )


def test_row_without_a_slot_is_an_assertion() -> None:
    _, program = compiled(supported_isas()[-1], 1)
    with pytest.raises(AssertionError, match="without a slot"):
        program.draft(
            [make_job(0, block_table=[1], max_tokens=2 * BLOCK_SIZE)], BLOCK_SIZE, torch.tensor(NEVER_SAMPLED)
        )
