"""A captured pass and a captured draft give the bits of the operations one by one."""

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
from foreword.executor import graph_runner as recorded
from foreword.executor.cuda_graphs import capture_sizes
from foreword.executor.decode_loop import SupportsDecodeLoop
from foreword.executor.draft_loop import INITIAL_DRAFT_CAPACITY
from foreword.executor.graph_runner import MAX_ROWS_PER_REQUEST, GraphRunner
from foreword.kernels.ops import DraftJob, DraftLoop, DraftTokens
from foreword.sampling.sampler import Sampler
from foreword.speculation.base import DraftRequest
from foreword.speculation.drafters.draft_model import DraftState, EagerDraftLoop
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

UNUSED = (0, 17, VOCAB_SIZE - 1)
ROWS = 16
LANES = 5
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def beds(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphTestBed, GraphTestBed]:
    """The same model twice: captured, and operation by operation."""
    path = write_drafter(tmp_path_factory.mktemp("recorded") / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
        captured, plain = GraphTestBed(path), GraphTestBed(path)
        captured.reserve(ROWS)
    return captured, plain


def blocks_of(number: int) -> list[int]:
    """Of one request: not in order, and not next to each other."""
    return [1 + number + 6 * ((5 * place) % MAX_BLOCKS) for place in range(MAX_BLOCKS)]


@torch.inference_mode()
def poison(forward: GraphRunner) -> None:
    """What buffers hold between two calls is nobody's."""
    for bucket in forward._captured.values():
        bucket.inputs.fill_(1 << 40)
        assert bucket.batch.request_index is not None
        bucket.batch.request_index.fill_(1 << 40)
    forward._block_tables.fill_(1 << 40)
    forward._output.fill_(torch.nan)


@st.composite
def steps(draw: st.DrawFn) -> list[Batch]:
    """What requests that go on, each by some rows a step, put into batches."""
    token_ids = st.integers(0, VOCAB_SIZE - 1)
    starts = [0] * LANES
    found = []
    for _ in range(draw(st.integers(1, 4))):
        chunks = []
        for number in draw(st.lists(st.integers(0, LANES - 1), min_size=1, max_size=LANES, unique=True)):
            rows = draw(st.sampled_from([1, 1, 2, 4, 7, MAX_ROWS_PER_REQUEST + 1]))
            if starts[number] + rows <= CONTEXT_LEN:
                own = draw(st.lists(token_ids, min_size=rows, max_size=rows))
                held = -(-(starts[number] + rows) // BLOCK_SIZE)
                chunks.append(
                    Chunk(own, starts[number], blocks_of(number)[:held], draw(st.integers(0, rows)))
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
@settings(max_examples=25, deadline=None)
def test_a_captured_pass_has_the_bits_of_its_operations(
    beds: tuple[GraphTestBed, GraphTestBed], batches: list[Batch]
) -> None:
    captured, plain = beds
    for bed in beds:
        bed.clear_cache()
    for batch in batches:
        poison(captured.forward)
        assert torch.equal(captured.forward(batch), plain.forward(batch))
    for found, wanted in zip(captured.copy_cache(), plain.copy_cache(), strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), (
            "the same slots were written, and no other"
        )


@pytest.mark.parametrize("rows", range(1, ROWS + 2))
def test_every_number_of_rows(beds: tuple[GraphTestBed, GraphTestBed], rows: int) -> None:
    """Each bucket's edges, one row beyond the last one too."""
    captured, plain = beds
    for bed in beds:
        bed.clear_cache()
    chunks = [Chunk([40 + row], 0, blocks_of(0)[row % MAX_BLOCKS :][:1], 1) for row in range(rows)]
    batch = build_batch(chunks, BLOCK_SIZE, 1, "cpu")
    poison(captured.forward)
    assert torch.equal(captured.forward(batch), plain.forward(batch))


def test_sizes_are_captured_once_the_largest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    bed = GraphTestBed(write_drafter(tmp_path))
    bed.reserve(ROWS)
    told: list[tuple[int, int]] = []
    bed.forward.capture_graphs(lambda done, total: told.append((done, total)))
    assert list(bed.forward._captured) == sorted(capture_sizes(ROWS), reverse=True)
    assert told == [(number, len(capture_sizes(ROWS))) for number in range(1, len(capture_sizes(ROWS)) + 1)]
    bed.forward.capture_graphs()
    bed.forward(build_batch([Chunk([1, 2, 3], 0, [1], 3)], BLOCK_SIZE, 1, "cpu"))
    assert bed.forward.num_graphs == len(capture_sizes(ROWS))


def test_what_no_graph_is_for_goes_operation_by_operation() -> None:
    """Pictures, long tables, blocks of another size, prompts, many rows; and everything before reserve()."""
    batches: list[Batch] = []

    def forward(batch: Batch) -> Tensor:
        assert batch.request_index is not None
        batches.append(batch)
        return torch.zeros(len(batch.sample_rows), 3)

    quick = GraphCapturableOps().compile(forward)
    assert isinstance(quick, DraftLoop) and isinstance(quick, SupportsDecodeLoop)
    one = build_batch([Chunk([1], 0, [1], 1)], BLOCK_SIZE, 1, "cpu")
    quick(one)
    quick.reserve(ROWS, 2, False, "cpu", BLOCK_SIZE)
    pictures = replace(one, features=ImageFeatures(torch.tensor([0]), torch.zeros(1, 8)))
    wide = build_batch([Chunk([1], 0, [1, 2, 3], 1)], BLOCK_SIZE, 1, "cpu")
    other = build_batch([Chunk([1], 0, [1], 1)], 2 * BLOCK_SIZE, 1, "cpu")
    prompt = build_batch([Chunk([1] * (MAX_ROWS_PER_REQUEST + 1), 0, [1] * 5, 1)], BLOCK_SIZE, 1, "cpu")
    del batches[:]
    for batch in (pictures, wide, other, prompt):
        quick(batch)
    assert [len(batch.seq_lens) for batch in batches] == [1] * 4, "what was given"
    quick(one)
    assert batches[-1].seq_lens == (), "what was captured does not know"


def one_by_one(bed: GraphTestBed) -> EagerDraftLoop:
    return EagerDraftLoop(bed.forward, bed.ops, Sampler(bed.ops, VOCAB_SIZE, UNUSED), BLOCK_SIZE, "cpu")


@st.composite
def asked(draw: st.DrawFn, number: int) -> tuple[DraftRequest, DraftJob]:
    """A request of a few tokens, of which none is computed."""
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
    ahead = draw(st.integers(0, 3))  # what the draft model is not told of
    ask = DraftRequest(extended(state, [41] * ahead) if ahead else state)
    lane = DraftJob(
        token_ids=tokens,
        start_position=0,
        block_table=blocks_of(number)[: draw(st.sampled_from([4, MAX_BLOCKS]))],
        first_draft_index=ask.num_tokens,
        max_tokens=draw(st.integers(0, MAX_TOKENS)),
        min_logprob_sum=draw(st.sampled_from([-math.inf, -1.0, -9.0, 0.0])),
        sampling=DraftState.from_state(state, VOCAB_SIZE).sampling,
    )
    return ask, lane


@st.composite
def drafts(draw: st.DrawFn) -> list[tuple[DraftRequest, DraftJob]]:
    return [draw(asked(number)) for number in range(draw(st.integers(1, LANES)))]


@given(pairs=drafts())
@settings(max_examples=25, deadline=None)
def test_a_draft_equals_its_passes_one_by_one(
    beds: tuple[GraphTestBed, GraphTestBed], pairs: list[tuple[DraftRequest, DraftJob]]
) -> None:
    captured, plain = beds
    for bed in beds:
        bed.clear_cache()
    asks, lanes = zip(*pairs, strict=True)
    found = captured.forward.draft(lanes, BLOCK_SIZE, torch.tensor(UNUSED))
    with torch.inference_mode():
        assert found == one_by_one(plain).draft(asks, lanes)
    for cached, wanted in zip(captured.copy_cache(), plain.copy_cache(), strict=True):
        assert torch.equal(cached.nan_to_num(7.0), wanted.nan_to_num(7.0)), "the same tokens were computed"


def lane_of(number: int, **changes: object) -> DraftJob:
    state = RequestState(Request(f"{number}", (5, 6, 7), SamplingParams(temperature=0), 0), 0, 4096)
    sampling = DraftState.from_state(state, VOCAB_SIZE).sampling
    lane = DraftJob([5, 6, 7 + number], 0, blocks_of(number), 3, 4, -math.inf, sampling)
    return replace(lane, **changes)  # type: ignore[arg-type]


def test_nothing_legal_ends_the_draft(beds: tuple[GraphTestBed, GraphTestBed]) -> None:
    forward = beds[0].forward
    assert forward.draft([lane_of(0)], BLOCK_SIZE, torch.arange(VOCAB_SIZE)) == [DraftTokens((), ())]
    few = forward.draft([lane_of(0), lane_of(1, max_tokens=0)], BLOCK_SIZE, torch.arange(1, VOCAB_SIZE))
    assert few == [DraftTokens((0,) * 4, (0.0,) * 4), DraftTokens((), ())], "one token is left, and certain"


def test_more_requests_than_are_captured_and_longer_drafts_than_before(
    beds: tuple[GraphTestBed, GraphTestBed],
) -> None:
    forward, unused = beds[0].forward, torch.tensor(UNUSED)
    lane = lane_of(1, max_tokens=3)
    alone = forward.draft([lane], BLOCK_SIZE, unused)[0]
    assert forward.draft([lane] * (ROWS + 3), BLOCK_SIZE, unused) == [alone] * (ROWS + 3)
    long = forward.draft([replace(lane, max_tokens=INITIAL_DRAFT_CAPACITY + 5)], BLOCK_SIZE, unused)[0]
    assert len(long.token_ids) == INITIAL_DRAFT_CAPACITY + 5 and long.token_ids[:3] == alone.token_ids
    assert forward.draft([lane], BLOCK_SIZE, unused) == [alone]


def test_text_behind_pictures_stands_where_the_shift_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and their places, as an ordinary batch has them; the model only tells what it got."""
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    seen: list[tuple[Tensor, Tensor]] = []

    def forward(batch: Batch) -> Tensor:
        assert batch.mrope_positions is not None
        seen.append((batch.positions, batch.mrope_positions))
        return torch.nn.functional.one_hot(batch.mrope_positions[batch.sample_rows, 1], 99).float()

    quick = GraphRunner(GraphCapturableOps(), forward)
    quick.reserve(4, MAX_BLOCKS, True, "cpu", BLOCK_SIZE)
    pictures = [
        PromptImage(b"", count, (1, 2, count // 2), (28, 28), (1, 3, 28, 28), None) for count in (4, 10, 16)
    ]
    shifts = [MRopePositions((picture,)).offset for picture in pictures]
    lanes = [
        lane_of(n, start=picture.end, shift=shift)
        for n, (picture, shift) in enumerate(zip(pictures, shifts, strict=True))
    ]
    guesses = quick.draft(lanes, BLOCK_SIZE, torch.tensor([], dtype=torch.int64))
    for picture, shift, guess in zip(pictures, shifts, guesses, strict=True):
        assert guess.token_ids == tuple(range(picture.end + shift + 2, picture.end + shift + 6))


def test_a_row_without_a_slot_is_our_own_bug(beds: tuple[GraphTestBed, GraphTestBed]) -> None:
    with pytest.raises(AssertionError, match="without a slot"):
        beds[0].forward.draft(
            [lane_of(0, blocks=[1], max_tokens=BLOCK_SIZE)], BLOCK_SIZE, torch.tensor(UNUSED)
        )
