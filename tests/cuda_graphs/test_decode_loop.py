"""The decode loop equals the host's decoding step by step: tokens, drafts, logprobs, hashes of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import Batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.cuda_graphs import graph_runner as recorded
from foreword.cuda_graphs.decode_loop import DecodeSlot, DeviceDecodeLoop
from foreword.cuda_graphs.draft_loop import INITIAL_DRAFT_CAPACITY
from foreword.cuda_graphs.graph_runner import GraphRunner
from foreword.kernels.ops import DraftTokens
from foreword.speculation.drafters.draft_model import DraftState
from tests.support.budget import examples
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint, write_drafter
from tests.support.decode_loops import sample_rows
from tests.support.graph_capture_fake import (
    BLOCK_SIZE,
    CONTEXT_LEN,
    MAX_BLOCKS,
    GraphCapturableOps,
    GraphTestBed,
    TapedGraphPool,
)
from tests.support.host_decode_loop import (
    NEVER_SAMPLED_IDS,
    HostDecodeLoop,
    blocks_of,
    compute_prompts,
    num_blocks,
    slot_of,
)

ROWS = 8
NUM_REQUESTS = 5
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass
class Beds:
    """Captured models and their eager twins."""

    target: GraphTestBed
    plain_target: GraphTestBed
    drafters: dict[str, tuple[GraphTestBed, GraphTestBed]]

    def forget(self) -> None:
        for bed in (
            self.target,
            self.plain_target,
            *(bed for pair in self.drafters.values() for bed in pair),
        ):
            bed.clear_cache()


@pytest.fixture(scope="module")
def beds(tmp_path_factory: pytest.TempPathFactory) -> Beds:
    """Draft models: equal to the target, nearly so, and with a larger and a smaller vocabulary."""
    directory = tmp_path_factory.mktemp("loop")
    target = write_checkpoint(directory / "target", "llama", seed=5, **SMALL)
    near = write_checkpoint(directory / "near", "llama", seed=5, dtype="bfloat16", **SMALL)
    wide = write_drafter(directory / "wide", vocab_size=VOCAB_SIZE + 8)
    narrow = write_drafter(directory / "narrow", vocab_size=VOCAB_SIZE - 8)
    drafters = {"equal": target, "near": near, "wide": wide, "narrow": narrow}
    return Beds(*pair(target), {name: pair(path) for name, path in drafters.items()})


def pair(path: Path) -> tuple[GraphTestBed, GraphTestBed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
        captured, plain = GraphTestBed(path), GraphTestBed(path)
        captured.reserve(ROWS)
    return captured, plain


seeds = st.integers(0, 9) | st.integers(2**63, 2**64 - 1)


@st.composite
def requests(draw: st.DrawFn) -> list[RequestState]:
    states = []
    for number in range(draw(st.integers(1, NUM_REQUESTS))):
        filters = {
            "top_k": draw(st.sampled_from([0, 5])),
            "top_p": draw(st.sampled_from([1.0, 0.8])),
            "min_p": 0.02,
        }
        temperature = draw(st.sampled_from([0.0, 0.0, 1.0, 0.7, 2.0]))
        params = SamplingParams(temperature=temperature, **draw(st.sampled_from([{}, filters])))
        prompt = tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)))
        states.append(RequestState(Request(f"{number}", prompt, params, draw(seeds)), number, 4096))
    return states


def run_steps(
    loop: DeviceDecodeLoop,
    host: HostDecodeLoop,
    states: Sequence[RequestState],
    drafted: bool,
    data: st.DataObject,
) -> None:
    """Launch, collect and extend in any valid order; compare each step with the host's."""
    room = [len(state.tokens) for state in states]  # tokens after all launched steps
    loop._in_flight.clear()  # of an aborted example
    loop.start([slot_of(n, state, room[n], drafted) for n, state in enumerate(states)])
    kept = list(room)
    in_flight: list[tuple[list[int], int]] = []
    broken: set[int] = set()
    for _ in range(data.draw(st.integers(1, 7))):
        if len(in_flight) < 2 and (not in_flight or data.draw(st.booleans())):
            by_host = not in_flight and data.draw(st.booleans())
            num_draft = data.draw(st.sampled_from([0, 2, 5])) if drafted else 0
            able = [n for n in range(len(states)) if room[n] + 1 + num_draft <= CONTEXT_LEN]
            if not able:
                break
            active = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True))
            for n in active:
                room[n] += 1 + num_draft
                if num_blocks(room[n]) > num_blocks(kept[n]):
                    kept[n] = room[n]
                    loop.extend_blocks(
                        n,
                        blocks_of(n)[: num_blocks(kept[n])],
                        blocks_of(n)[: num_blocks(kept[n])] if drafted else (),
                    )
            if by_host:
                compare_host_sampled(loop, host, [n for n in active if n not in broken], num_draft, broken)
            else:
                loop.launch(active, num_draft)
                in_flight.append((active, num_draft))
        else:
            compare(loop, host, in_flight, broken)
    while in_flight:
        compare(loop, host, in_flight, broken)


def compare(
    loop: DeviceDecodeLoop, host: HostDecodeLoop, in_flight: list[tuple[list[int], int]], broken: set[int]
) -> None:
    active, num_draft = in_flight.pop(0)
    takes_part = [n for n in active if n not in broken]
    wanted = host.round(takes_part, num_draft) if takes_part else {}
    assert loop.collect() == wanted
    broken.update(n for n, result in wanted.items() if result.token_ids[-1] < 0)


@torch.inference_mode()
def compare_host_sampled(
    loop: DeviceDecodeLoop, host: HostDecodeLoop, active: list[int], num_draft: int, broken: set[int]
) -> None:
    """A step of launch_forward() and commit()."""
    if not active:
        return
    forward = loop.launch_forward(active, num_draft)
    assert (forward.read_drafts is None) == (num_draft == 0)
    drafts = [DraftTokens((), ())] * len(active) if forward.read_drafts is None else forward.read_drafts()
    states = [host._slots[n].state for n in active]
    sampled = host._sampler(forward.logits, sample_rows(zip(states, drafts, strict=True)))
    loop.commit(torch.tensor(sampled.token_ids))
    wanted = host.round(active, num_draft)
    for index, (n, draft) in enumerate(zip(active, drafts, strict=True)):
        first, result = index * (1 + num_draft), wanted[n]
        end = first + len(result.token_ids)
        assert tuple(sampled.token_ids[first:end]) == result.token_ids
        assert tuple(sampled.logits_hashes[first:end]) == result.logits_hashes
        assert draft == DraftTokens(result.draft_ids, result.draft_logprobs)
    broken.update(n for n, result in wanted.items() if result.token_ids[-1] < 0)


@given(states=requests(), name=st.sampled_from([None, "equal", "near", "wide", "narrow"]), data=st.data())
@settings(max_examples=examples(40))
def test_decode_loop_equals_host_decoding(
    beds: Beds, states: list[RequestState], name: str | None, data: st.DataObject
) -> None:
    drafter, plain_drafter = beds.drafters[name] if name else (None, None)
    beds.forget()
    for bed in (
        beds.target,
        beds.plain_target,
        *((drafter, plain_drafter) if drafter and plain_drafter else ()),
    ):
        compute_prompts(bed, states)
    loop = beds.target.forward.get_decode_loop(
        BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS), drafter.forward if drafter else None, with_hashes=True
    )
    host = HostDecodeLoop(beds.plain_target, plain_drafter, states)
    run_steps(loop, host, states, drafter is not None, data)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_model_equal_to_target_is_always_accepted(beds: Beds, temperature: float) -> None:
    beds.forget()
    drafter = beds.drafters["equal"][0]
    request = Request("", (40, 41, 42), SamplingParams(temperature=temperature), 7)
    state = RequestState(request, 0, 4096)
    compute_prompts(beds.target, [state])
    compute_prompts(drafter, [state])
    loop = beds.target.forward.get_decode_loop(BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS), drafter.forward)
    loop.start([slot_of(0, state, CONTEXT_LEN, drafted=True)])
    for _ in range(5):
        loop.launch([0], 5)
        result = loop.collect()[0]
        assert (
            result.token_ids[:5] == result.draft_ids
            and len(result.token_ids) == 6
            and not result.logits_hashes
        )


class Breaking(GraphCapturableOps):
    """Logits of one request are NaN at one position."""

    def __init__(self, forward: Callable[[Batch], Tensor], position: int, owner_token: int) -> None:
        super().__init__()
        self.forward, self.position, self.owner_token = forward, position, owner_token

    def __call__(self, batch: Batch) -> Tensor:
        logits = self.forward(batch)
        here = (batch.positions == self.position) & (
            batch.block_tables[batch.request_index, 0] == self.owner_token
        )
        return torch.where(here[batch.sample_rows][:, None], torch.nan, logits)


@pytest.mark.parametrize("broken_model", ["target", "drafter"])
@pytest.mark.parametrize("position", [3, 5, 6, 9])
def test_broken_row_ends_its_own_slot_only(
    beds: Beds, monkeypatch: pytest.MonkeyPatch, broken_model: str, position: int
) -> None:
    """In the target: no result of the slot in later steps. In the draft model: a shorter draft."""
    beds.forget()
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    first = blocks_of(1)[0]
    forwards = {}
    for name, bed in (("target", beds.target), ("drafter", beds.drafters["equal"][0])):
        plain = bed.forward._forward
        broken = Breaking(plain, position, first) if name == broken_model else plain
        forwards[name] = GraphRunner(bed.ops, broken)
        forwards[name].reserve(ROWS, ROWS, MAX_BLOCKS, False, "cpu", BLOCK_SIZE)
    states = [RequestState(Request(f"{n}", (40 + n, 41), SamplingParams(), n), n, 4096) for n in range(3)]
    plain_target, plain_drafter = beds.plain_target, beds.drafters["equal"][1]
    for bed in (beds.target, plain_target, beds.drafters["equal"][0], plain_drafter):
        compute_prompts(bed, states)
    host = HostDecodeLoop(plain_target, plain_drafter, states)
    if broken_model == "target":
        twin, bed = host.target, plain_target
    else:
        twin, bed = host.drafter, plain_drafter
    twin.forward = GraphRunner(bed.ops, Breaking(bed.forward._forward, position, first))
    loop = forwards["target"].get_decode_loop(
        BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS), forwards["drafter"], with_hashes=True
    )
    loop.start([slot_of(n, state, CONTEXT_LEN, drafted=True) for n, state in enumerate(states)])
    in_flight: list[tuple[list[int], int]] = []
    gone: set[int] = set()
    for number in range(4):
        loop.launch([0, 1, 2], 3)
        in_flight.append(([0, 1, 2], 3))
        if number:
            compare(loop, host, in_flight, gone)
    compare(loop, host, in_flight, gone)
    assert gone == ({1} if broken_model == "target" else set())


def test_request_with_one_token(beds: Beds) -> None:
    """The draft model's first row is padding."""
    beds.forget()
    states = [RequestState(Request("", (40,), SamplingParams(temperature=0), 1), 0, 4096)]
    drafter, plain = beds.drafters["near"]
    loop = beds.target.forward.get_decode_loop(
        BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS), drafter.forward, with_hashes=True
    )
    loop.start([slot_of(0, states[0], CONTEXT_LEN, drafted=True)])
    loop.launch([0], 2)
    assert loop.collect() == HostDecodeLoop(beds.plain_target, plain, states).round([0], 2)


def test_positions_follow_the_mrope_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake model returns the position of each row."""
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)

    def forward(batch: Batch) -> Tensor:
        assert batch.mrope_positions is not None
        return torch.nn.functional.one_hot(batch.mrope_positions[batch.sample_rows, 2], 99).float()

    runner = GraphRunner(GraphCapturableOps(), forward)
    runner.reserve(4, 4, MAX_BLOCKS, True, "cpu", BLOCK_SIZE)
    loop = runner.get_decode_loop(BLOCK_SIZE, torch.tensor([], dtype=torch.int64))
    sampling = DraftState.from_state(
        RequestState(Request("", (1,), SamplingParams(temperature=0), 0), 0, 9), 99
    ).sampling
    loop.start([DecodeSlot((1, 2), 30, blocks_of(n), sampling, mrope_offset=-4 * n) for n in range(3)])
    loop.launch([2, 0, 1], 0)
    assert {n: result.token_ids for n, result in loop.collect().items()} == {0: (29,), 1: (25,), 2: (21,)}


def test_capture_between_steps_changes_nothing(beds: Beds) -> None:
    """capture_graphs(), and drafts beyond the capacity, with steps in flight."""
    beds.forget()
    states = [RequestState(Request("", (40, 41), SamplingParams(temperature=0), 1), 0, 4096)]
    drafter, plain = beds.drafters["near"]
    for bed in (beds.target, beds.plain_target, drafter, plain):
        compute_prompts(bed, states)
    loop = beds.target.forward.get_decode_loop(
        BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS), drafter.forward, with_hashes=True
    )
    host = HostDecodeLoop(beds.plain_target, plain, states)
    loop.start([slot_of(0, states[0], CONTEXT_LEN, drafted=True)])
    loop.launch([0], 2)
    progress: list[tuple[int, int]] = []
    loop.capture_graphs(3, 4, lambda done, total: progress.append((done, total)))
    assert progress == [(done, 6) for done in range(1, 7)], "sizes 4, 2 and 1, with and without filters"
    loop.launch([0], INITIAL_DRAFT_CAPACITY + 1)
    assert loop.collect() == host.round([0], 2)
    assert loop.collect() == host.round([0], INITIAL_DRAFT_CAPACITY + 1)


def test_invalid_calls_fail(beds: Beds) -> None:
    state = RequestState(Request("", (40, 41), SamplingParams(), 1), 0, 4096)
    loop = beds.target.forward.get_decode_loop(BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS))
    slot = slot_of(0, state, CONTEXT_LEN, drafted=False)
    with pytest.raises(AssertionError, match="reserved"):
        loop.start([slot] * (ROWS + 1))
    loop.start([slot])
    with pytest.raises(AssertionError, match="without a draft model"):
        loop.launch([0], 1)
    loop.launch([0], 0)
    loop.launch([0], 0)
    with pytest.raises(AssertionError, match="2 steps in flight"):
        loop.launch([0], 0)
    with pytest.raises(AssertionError, match="a step in flight"):
        loop.start([slot])
    loop.collect()
    loop.collect()
    with pytest.raises(AssertionError, match="shorter"):
        loop.extend_blocks(0, [1])
