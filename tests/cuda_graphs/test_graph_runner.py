"""Captured passes and drafts have the bits of the eager ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import Batch, Chunk, ImageFeatures, build_batch
from foreword.core.images import MRopePositions, PromptImage
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.cuda_graphs import graph_runner as recorded
from foreword.cuda_graphs.capture import capture_sizes, pick_size
from foreword.cuda_graphs.decode_loop import SupportsDecodeLoop
from foreword.cuda_graphs.draft_loop import INITIAL_DRAFT_CAPACITY
from foreword.cuda_graphs.graph_runner import MAX_PROMPT_LEN, MAX_ROWS_PER_REQUEST, GraphRunner
from foreword.kernels.ops import DraftJob, DraftLoop, DraftTokens
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.draft_model import DraftState
from foreword.speculation.drafters.eager_draft_loop import EagerDraftLoop
from foreword.speculation.engine_drafter import DraftRequest
from tests.support.budget import examples
from tests.support.checkpoints import VOCAB_SIZE, write_drafter
from tests.support.fakes import extended
from tests.support.graph_capture_fake import (
    BLOCK_SIZE,
    CONTEXT_LEN,
    MAX_BLOCKS,
    GraphCapturableOps,
    GraphTestBed,
    TapedGraphPool,
)
from tests.support.host_decode_loop import NEVER_SAMPLED_IDS, blocks_of

ROWS = 24
NUM_REQUESTS = 5
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def beds(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphTestBed, GraphTestBed]:
    """The same model captured and eager."""
    path = write_drafter(tmp_path_factory.mktemp("recorded") / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
        captured, plain = GraphTestBed(path), GraphTestBed(path)
        captured.reserve(ROWS)
    return captured, plain


@torch.inference_mode()
def poison(forward: GraphRunner) -> None:
    """Buffers between two calls may hold anything."""
    for bucket in forward._captured.values():
        bucket.inputs.fill_(1 << 40)
        assert bucket.batch.request_index is not None
        bucket.batch.request_index.fill_(1 << 40)
    forward._block_tables.fill_(1 << 40)
    forward._output.fill_(torch.nan)


@st.composite
def steps(draw: st.DrawFn) -> list[Batch]:
    """Batches of requests that advance by some rows a step."""
    token_ids = st.integers(0, VOCAB_SIZE - 1)
    starts = [0] * NUM_REQUESTS
    found = []
    for _ in range(draw(st.integers(1, 4))):
        chunks = []
        for number in draw(
            st.lists(st.integers(0, NUM_REQUESTS - 1), min_size=1, max_size=NUM_REQUESTS, unique=True)
        ):
            rows = draw(st.sampled_from([1, 1, 2, 4, 7, MAX_ROWS_PER_REQUEST + 1]))
            if starts[number] + rows <= CONTEXT_LEN:
                ids = draw(st.lists(token_ids, min_size=rows, max_size=rows))
                held = -(-(starts[number] + rows) // BLOCK_SIZE)
                chunks.append(
                    Chunk(ids, starts[number], blocks_of(number)[:held], draw(st.integers(0, rows)))
                )
                starts[number] += rows
        if chunks:
            found.append(
                build_batch(
                    chunks,
                    BLOCK_SIZE,
                    draw(st.sampled_from([1, 4])),
                    "cpu",
                    with_request_index=draw(st.booleans()),
                )
            )
    return found


@given(batches=steps())
@settings(max_examples=examples(25))
def test_captured_pass_equals_eager_pass(
    beds: tuple[GraphTestBed, GraphTestBed], batches: list[Batch]
) -> None:
    captured, plain = beds
    for bed in beds:
        bed.clear_cache()
    for batch in batches:
        poison(captured.forward)
        assert torch.equal(captured.forward(batch), plain.forward(batch))
    for found, wanted in zip(captured.copy_cache(), plain.copy_cache(), strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), "the same slots were written"


@pytest.mark.parametrize("rows", range(1, ROWS + 2))
def test_captured_pass_of_every_size(beds: tuple[GraphTestBed, GraphTestBed], rows: int) -> None:
    """Up to one row beyond the largest captured size."""
    captured, plain = beds
    for bed in beds:
        bed.clear_cache()
    chunks = [Chunk([40 + row], 0, blocks_of(0)[row % MAX_BLOCKS :][:1], 1) for row in range(rows)]
    batch = build_batch(chunks, BLOCK_SIZE, 1, "cpu")
    poison(captured.forward)
    assert torch.equal(captured.forward(batch), plain.forward(batch))


def test_capture_is_once_and_largest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    bed = GraphTestBed(write_drafter(tmp_path))
    bed.reserve(ROWS)
    progress: list[tuple[int, int]] = []
    bed.forward.capture_graphs(lambda done, total: progress.append((done, total)))
    assert list(bed.forward._captured) == sorted(capture_sizes(ROWS), reverse=True)
    assert progress == [
        (number, len(capture_sizes(ROWS))) for number in range(1, len(capture_sizes(ROWS)) + 1)
    ]
    bed.forward.capture_graphs()
    bed.forward(build_batch([Chunk([1, 2, 3], 0, [1], 3)], BLOCK_SIZE, 1, "cpu"))
    assert bed.forward.num_graphs == len(capture_sizes(ROWS))


def test_prompt_beside_decodes_is_one_graph(
    beds: tuple[GraphTestBed, GraphTestBed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than requests have block tables; the prompt's bits are those of the eager pass."""
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    captured, plain = beds
    forward = GraphRunner(captured.ops, captured.forward._forward)
    forward.reserve(48, NUM_REQUESTS, MAX_BLOCKS, False, "cpu", BLOCK_SIZE)
    for bed in beds:
        bed.clear_cache()
    decodes = [Chunk([40 + n], 0, blocks_of(n), 1) for n in range(NUM_REQUESTS - 1)]
    for start, rows in ((0, 30), (30, 20)):
        prompt = Chunk([41 + row % 7 for row in range(rows)], start, blocks_of(NUM_REQUESTS - 1), 1)
        batch = build_batch([*decodes, prompt], BLOCK_SIZE, 1, "cpu")
        assert torch.equal(forward(batch), plain.forward(batch))
    assert list(forward._captured) == [40, 24] and forward._block_tables.shape[0] == NUM_REQUESTS + 1
    for found, wanted in zip(captured.copy_cache(), plain.copy_cache(), strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), "the same slots were written"


@pytest.mark.parametrize(
    ("start", "rows", "is_captured"),
    [
        (0, 200, True),
        (MAX_PROMPT_LEN - 200, 200, True),
        (MAX_PROMPT_LEN - 199, 200, False),
        (5000, MAX_ROWS_PER_REQUEST, True),
        (5000, MAX_ROWS_PER_REQUEST + 1, False),
        (0, 225, False),
    ],
)
def test_chunks_in_graphs_are_drafts_or_short_prompts(start: int, rows: int, is_captured: bool) -> None:
    """Beside 32 decodes after a long context, within 256 rows."""
    batches: list[Batch] = []

    def forward(batch: Batch) -> Tensor:
        batches.append(batch)
        return torch.zeros(len(batch.sample_rows), 3)

    runner = GraphRunner(GraphCapturableOps(), forward)
    runner.reserve(256, 40, 400, False, "cpu", 16)
    chunks = [Chunk([1], 6000, [1] * 400, 1)] * 32 + [Chunk([1] * rows, start, [1] * 400, 1)]
    runner(build_batch(chunks, 16, 1, "cpu"))
    size = pick_size(32 + rows, capture_sizes(256)) if is_captured else 32 + rows
    assert (len(batches[-1].token_ids), batches[-1].seq_lens == ()) == (size, is_captured)


def test_unsupported_batches_run_eagerly() -> None:
    """Images, long block tables, other block sizes, many requests or rows; and all before reserve()."""
    batches: list[Batch] = []

    def forward(batch: Batch) -> Tensor:
        assert batch.request_index is not None
        batches.append(batch)
        return torch.zeros(len(batch.sample_rows), 3)

    runner = GraphRunner(GraphCapturableOps(), forward)
    assert isinstance(runner, DraftLoop) and isinstance(runner, SupportsDecodeLoop)
    one = build_batch([Chunk([1], 0, [1], 1)], BLOCK_SIZE, 1, "cpu")
    runner(one)
    runner.reserve(ROWS, 4, 2, False, "cpu", BLOCK_SIZE)
    images = replace(one, image_features=ImageFeatures(torch.tensor([0]), torch.zeros(1, 8)))
    wide = build_batch([Chunk([1], 0, [1, 2, 3], 1)], BLOCK_SIZE, 1, "cpu")
    other = build_batch([Chunk([1], 0, [1], 1)], 2 * BLOCK_SIZE, 1, "cpu")
    many = build_batch([Chunk([1], 0, [1], 1)] * 5, BLOCK_SIZE, 1, "cpu")
    long = build_batch([Chunk([1] * 8, 0, [1] * 2, 1)] * 4, BLOCK_SIZE, 1, "cpu")
    del batches[:]
    for batch in (images, wide, other, many, long):
        runner(batch)
    assert [len(batch.seq_lens) for batch in batches] == [1, 1, 1, 5, 4], "unmodified"
    runner(one)
    assert batches[-1].seq_lens == (), "captured: lengths are not in the batch"


def eager_loop(bed: GraphTestBed) -> EagerDraftLoop:
    return EagerDraftLoop(
        bed.forward, bed.ops, Sampler(bed.ops, VOCAB_SIZE, NEVER_SAMPLED_IDS), BLOCK_SIZE, "cpu"
    )


@st.composite
def asked(draw: st.DrawFn, number: int) -> tuple[DraftRequest, DraftJob]:
    """A request of a few tokens without KV."""
    filters = {
        "top_k": draw(st.sampled_from([0, -1, 1, 5, 10**30])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.2])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 1.0])),
    }
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0, 0.7, 3.0])), **draw(st.sampled_from([{}, filters]))
    )
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9))
    state = RequestState(
        Request(f"{number}", tuple(tokens), params, draw(st.integers(0, 2**64 - 1))), number, 4096
    )
    ahead = draw(st.integers(0, 3))  # tokens in flight
    ask = DraftRequest(extended(state, [41] * ahead) if ahead else state)
    job = DraftJob(
        token_ids=tokens,
        start_position=0,
        block_table=blocks_of(number)[: draw(st.sampled_from([4, MAX_BLOCKS]))],
        first_draft_index=ask.num_tokens,
        max_tokens=draw(st.integers(0, MAX_TOKENS)),
        min_logprob_sum=draw(st.sampled_from([-math.inf, -1.0, -9.0, 0.0])),
        sampling=DraftState.from_state(state, VOCAB_SIZE).sampling,
    )
    return ask, job


@st.composite
def drafts(draw: st.DrawFn) -> list[tuple[DraftRequest, DraftJob]]:
    return [draw(asked(number)) for number in range(draw(st.integers(1, NUM_REQUESTS)))]


@given(pairs=drafts())
@settings(max_examples=examples(25))
def test_captured_draft_equals_eager_draft(
    beds: tuple[GraphTestBed, GraphTestBed], pairs: list[tuple[DraftRequest, DraftJob]]
) -> None:
    captured, plain = beds
    for bed in beds:
        bed.clear_cache()
    asks, jobs = zip(*pairs, strict=True)
    found = captured.forward.draft(jobs, BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS))
    with torch.inference_mode():
        assert found == eager_loop(plain).draft(asks, jobs)
    for cached, wanted in zip(captured.copy_cache(), plain.copy_cache(), strict=True):
        assert torch.equal(cached.nan_to_num(7.0), wanted.nan_to_num(7.0)), "the same KV was written"


def job_of(number: int, **changes: object) -> DraftJob:
    state = RequestState(Request(f"{number}", (5, 6, 7), SamplingParams(temperature=0), 0), 0, 4096)
    sampling = DraftState.from_state(state, VOCAB_SIZE).sampling
    job = DraftJob([5, 6, 7 + number], 0, blocks_of(number), 3, 4, -math.inf, sampling)
    return replace(job, **changes)  # type: ignore[arg-type]


def test_draft_ends_without_a_legal_token(beds: tuple[GraphTestBed, GraphTestBed]) -> None:
    forward = beds[0].forward
    assert forward.draft([job_of(0)], BLOCK_SIZE, torch.arange(VOCAB_SIZE)) == [DraftTokens((), ())]
    few = forward.draft([job_of(0), job_of(1, max_tokens=0)], BLOCK_SIZE, torch.arange(1, VOCAB_SIZE))
    assert few == [DraftTokens((0,) * 4, (0.0,) * 4), DraftTokens((), ())], "the only legal token is certain"


def test_draft_beyond_captured_sizes_and_capacity(beds: tuple[GraphTestBed, GraphTestBed]) -> None:
    forward, unused = beds[0].forward, torch.tensor(NEVER_SAMPLED_IDS)
    job = job_of(1, max_tokens=3)
    alone = forward.draft([job], BLOCK_SIZE, unused)[0]
    assert forward.draft([job] * (ROWS + 3), BLOCK_SIZE, unused) == [alone] * (ROWS + 3)
    long = forward.draft([replace(job, max_tokens=INITIAL_DRAFT_CAPACITY + 5)], BLOCK_SIZE, unused)[0]
    assert len(long.token_ids) == INITIAL_DRAFT_CAPACITY + 5 and long.token_ids[:3] == alone.token_ids
    assert forward.draft([job], BLOCK_SIZE, unused) == [alone]


def test_draft_positions_follow_the_mrope_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake model returns the positions it gets."""
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    seen: list[tuple[Tensor, Tensor]] = []

    def forward(batch: Batch) -> Tensor:
        assert batch.mrope_positions is not None
        seen.append((batch.positions, batch.mrope_positions))
        return torch.nn.functional.one_hot(batch.mrope_positions[batch.sample_rows, 1], 99).float()

    runner = GraphRunner(GraphCapturableOps(), forward)
    runner.reserve(4, 4, MAX_BLOCKS, True, "cpu", BLOCK_SIZE)
    images = [
        PromptImage(b"", count, (1, 2, count // 2), (28, 28), (1, 3, 28, 28), None) for count in (4, 10, 16)
    ]
    offsets = [MRopePositions((image,)).offset for image in images]
    jobs = [
        job_of(n, start_position=image.end, mrope_offset=shift)
        for n, (image, shift) in enumerate(zip(images, offsets, strict=True))
    ]
    drafted = runner.draft(jobs, BLOCK_SIZE, torch.tensor([], dtype=torch.int64))
    for image, offset, draft in zip(images, offsets, drafted, strict=True):
        assert draft.token_ids == tuple(range(image.end + offset + 2, image.end + offset + 6))


def test_draft_job_without_slots_fails(beds: tuple[GraphTestBed, GraphTestBed]) -> None:
    with pytest.raises(AssertionError, match="without slots"):
        beds[0].forward.draft(
            [job_of(0, block_table=[1], max_tokens=BLOCK_SIZE)], BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS)
        )
