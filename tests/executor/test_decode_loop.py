"""Rounds on the device give what the host decodes step by step: tokens, guesses, log-probabilities, hashes of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.executor import graph_runner as recorded
from foreword.executor.decode_loop import DecodeResult, DecodeSlot, DeviceDecodeLoop
from foreword.executor.draft_loop import INITIAL_DRAFT_CAPACITY
from foreword.executor.graph_runner import GraphRunner
from foreword.kernels.ops import DraftJob
from foreword.sampling.sampler import Sampler
from foreword.sampling.verify import verify
from foreword.speculation.base import DraftRequest
from foreword.speculation.drafters.draft_model import DraftState, EagerDraftLoop
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint, write_drafter
from tests.support.graph_capture_fake import (
    BLOCK_SIZE,
    CONTEXT_LEN,
    MAX_BLOCKS,
    GraphCapturableOps,
    GraphTestBed,
    TapedGraphPool,
)

UNUSED = (0, 17, VOCAB_SIZE - 1)
ROWS = 8
LANES = 5
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass
class Beds:
    """Models that are captured, each beside the same one operation by operation."""

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
    """Drafters: equal to the target, nearly so, and others, one with more tokens and one with fewer."""
    directory = tmp_path_factory.mktemp("rounds")
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


def blocks_of(number: int) -> list[int]:
    return [1 + number + 6 * ((5 * place) % MAX_BLOCKS) for place in range(MAX_BLOCKS)]


def held(length: int) -> int:
    """Blocks for so many tokens."""
    return -(-length // BLOCK_SIZE)


class Host:
    """The plain loop, one round at a time: draft, forward, sample, verify."""

    def __init__(
        self, target: GraphTestBed, drafter: GraphTestBed | None, states: Sequence[RequestState]
    ) -> None:
        self.target = target
        self.states = states
        self.forward: Callable[[Batch], Tensor] = target.forward
        self.sampler = Sampler(target.ops, VOCAB_SIZE, UNUSED, test_mode=True)
        self.passes = self.drafted = None
        if drafter is not None:
            self.drafted = drafter.model.vocab_size
            unused = [i for i in UNUSED if i < self.drafted] + list(range(VOCAB_SIZE, self.drafted))
            sampler = Sampler(drafter.ops, self.drafted, unused)
            self.passes = EagerDraftLoop(drafter.forward, drafter.ops, sampler, BLOCK_SIZE, "cpu")

    @torch.inference_mode()
    def round(self, numbers: Sequence[int], num_draft: int) -> dict[int, DecodeResult]:
        drafts, logprobs = self._drafts(numbers, num_draft)
        chunks = [
            Chunk(
                [self.states[n].tokens[-1], *drafts[n]],
                len(self.states[n].tokens) - 1,
                blocks_of(n),
                1 + len(drafts[n]),
            )
            for n in numbers
        ]
        rows = [
            SampleRow(self.states[n], drafts[n][:place])
            for n in numbers
            for place in range(len(drafts[n]) + 1)
        ]
        sampled = self.sampler(self.forward(build_batch(chunks, BLOCK_SIZE, 1, "cpu")), rows)
        results, line = {}, 0
        for n in numbers:
            end = line + 1 + len(drafts[n])
            count = 1 + verify(sampled.token_ids[line:end], drafts[n])
            run = tuple(sampled.token_ids[line : line + count])
            results[n] = DecodeResult(
                run, drafts[n], logprobs[n], tuple(sampled.logits_hashes[line : line + count])
            )
            if run[-1] >= 0:
                self.states[n].append(run)
            line = end
        return results

    def _drafts(
        self, numbers: Sequence[int], num_draft: int
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[float, ...]]]:
        if self.passes is None or self.drafted is None:
            return dict.fromkeys(numbers, ()), dict.fromkeys(numbers, ())
        lanes = []
        for n in numbers:
            tokens = self.states[n].tokens
            known = [token if token < self.drafted else 0 for token in tokens[-2:]]
            sampling = DraftState.from_state(self.states[n], self.drafted).sampling
            first = len(tokens) - len(known)
            lanes.append(DraftJob(known, first, blocks_of(n), len(tokens), num_draft, -torch.inf, sampling))
        guesses = self.passes.draft([DraftRequest(self.states[n]) for n in numbers], lanes)
        return (
            {n: guess.token_ids for n, guess in zip(numbers, guesses, strict=True)},
            {n: guess.logprobs for n, guess in zip(numbers, guesses, strict=True)},
        )


def prompt_pass(bed: GraphTestBed, states: Sequence[RequestState]) -> None:
    """KV of all known tokens but the last."""
    vocab = bed.model.vocab_size
    for number, state in enumerate(states):
        token_ids = [token if token < vocab else 0 for token in state.tokens[:-1]]
        if token_ids:
            with torch.inference_mode():
                bed.forward(build_batch([Chunk(token_ids, 0, blocks_of(number), 0)], BLOCK_SIZE, 1, "cpu"))


def lane_of(number: int, state: RequestState, length: int, drafted: bool) -> DecodeSlot:
    """With blocks for so many tokens."""
    blocks = blocks_of(number)[: held(length)]
    sampling = DraftState.from_state(state, VOCAB_SIZE).sampling
    return DecodeSlot(
        tuple(state.tokens[-2:]), len(state.tokens), blocks, sampling, blocks if drafted else ()
    )


seeds = st.integers(0, 9) | st.integers(2**63, 2**64 - 1)


@st.composite
def requests(draw: st.DrawFn) -> list[RequestState]:
    states = []
    for number in range(draw(st.integers(1, LANES))):
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


def copied(states: Sequence[RequestState]) -> list[RequestState]:
    return [RequestState(state.request, state.arrival, 4096) for state in states]


def run_rounds(rounds: DeviceDecodeLoop, host: Host, drafted: bool, data: st.DataObject) -> None:
    """Launch, collect and grow in any order that is allowed, and compare each round with the host's."""
    states = host.states
    room = [len(state.tokens) for state in states]  # tokens that what was launched may come to
    rounds._in_flight.clear()  # of an example that was given up
    rounds.start([lane_of(n, state, room[n], drafted) for n, state in enumerate(states)])
    kept = list(room)
    under_way: list[tuple[list[int], int]] = []
    broken: set[int] = set()
    for _ in range(data.draw(st.integers(1, 7))):
        if len(under_way) < 2 and (not under_way or data.draw(st.booleans())):
            num_draft = data.draw(st.sampled_from([0, 2, 5])) if drafted else 0
            able = [n for n in range(len(states)) if room[n] + 1 + num_draft <= CONTEXT_LEN]
            if not able:
                break
            active = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True))
            for n in active:
                room[n] += 1 + num_draft
                if held(room[n]) > held(kept[n]):
                    kept[n] = room[n]
                    rounds.extend_blocks(
                        n, blocks_of(n)[: held(kept[n])], blocks_of(n)[: held(kept[n])] if drafted else ()
                    )
            rounds.launch(active, num_draft)
            under_way.append((active, num_draft))
        else:
            compare(rounds, host, under_way, broken)
    while under_way:
        compare(rounds, host, under_way, broken)


def compare(
    rounds: DeviceDecodeLoop, host: Host, under_way: list[tuple[list[int], int]], broken: set[int]
) -> None:
    active, num_draft = under_way.pop(0)
    takes_part = [n for n in active if n not in broken]
    wanted = host.round(takes_part, num_draft) if takes_part else {}
    assert rounds.collect() == wanted
    broken.update(n for n, result in wanted.items() if result.token_ids[-1] < 0)


@given(states=requests(), name=st.sampled_from([None, "equal", "near", "wide", "narrow"]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_rounds_are_what_the_host_decodes(
    beds: Beds, states: list[RequestState], name: str | None, data: st.DataObject
) -> None:
    drafter, plain_drafter = beds.drafters[name] if name else (None, None)
    beds.forget()
    for bed in (
        beds.target,
        beds.plain_target,
        *((drafter, plain_drafter) if drafter and plain_drafter else ()),
    ):
        prompt_pass(bed, states)
    rounds = beds.target.forward.get_decode_loop(
        BLOCK_SIZE, torch.tensor(UNUSED), drafter.forward if drafter else None, with_hashes=True
    )
    run_rounds(rounds, Host(beds.plain_target, plain_drafter, copied(states)), drafter is not None, data)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_equal_to_its_target_is_always_right(beds: Beds, temperature: float) -> None:
    beds.forget()
    drafter = beds.drafters["equal"][0]
    request = Request("", (40, 41, 42), SamplingParams(temperature=temperature), 7)
    state = RequestState(request, 0, 4096)
    prompt_pass(beds.target, [state])
    prompt_pass(drafter, [state])
    rounds = beds.target.forward.get_decode_loop(BLOCK_SIZE, torch.tensor(UNUSED), drafter.forward)
    rounds.start([lane_of(0, state, CONTEXT_LEN, drafted=True)])
    for _ in range(5):
        rounds.launch([0], 5)
        result = rounds.collect()[0]
        assert (
            result.token_ids[:5] == result.draft_ids
            and len(result.token_ids) == 6
            and not result.logits_hashes
        )


class Breaking(GraphCapturableOps):
    """Logits of the row at one position are no numbers; positions are those of the last batch."""

    def __init__(self, forward: Callable[[Batch], Tensor], position: int, owner_token: int) -> None:
        super().__init__()
        self.forward, self.position, self.owner_token = forward, position, owner_token

    def __call__(self, batch: Batch) -> Tensor:
        logits = self.forward(batch)
        here = (batch.positions == self.position) & (
            batch.block_tables[batch.request_index, 0] == self.owner_token
        )
        return torch.where(here[batch.sample_rows][:, None], torch.nan, logits)


@pytest.mark.parametrize("who", ["target", "drafter"])
@pytest.mark.parametrize("position", [3, 5, 6, 9])
def test_a_broken_row_ends_its_own_lane_only(
    beds: Beds, monkeypatch: pytest.MonkeyPatch, who: str, position: int
) -> None:
    """Of the target: nothing more comes of the lane, even in the round that was under way. Of the drafter: a shorter draft."""
    beds.forget()
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    first = blocks_of(1)[0]
    forwards = {}
    for name, bed in (("target", beds.target), ("drafter", beds.drafters["equal"][0])):
        plain = bed.forward._forward
        broken = Breaking(plain, position, first) if name == who else plain
        forwards[name] = GraphRunner(bed.ops, broken)
        forwards[name].reserve(ROWS, MAX_BLOCKS, False, "cpu", BLOCK_SIZE)
    states = [RequestState(Request(f"{n}", (40 + n, 41), SamplingParams(), n), n, 4096) for n in range(3)]
    plain_target, plain_drafter = beds.plain_target, beds.drafters["equal"][1]
    for bed in (beds.target, plain_target, beds.drafters["equal"][0], plain_drafter):
        prompt_pass(bed, states)
    host = Host(plain_target, plain_drafter, copied(states))
    if who == "target":
        host.forward = GraphRunner(plain_target.ops, Breaking(plain_target.forward._forward, position, first))
    else:
        broken_drafter = GraphRunner(
            plain_drafter.ops, Breaking(plain_drafter.forward._forward, position, first)
        )
        assert host.passes is not None
        host.passes._forward = broken_drafter
    rounds = forwards["target"].rounds(BLOCK_SIZE, torch.tensor(UNUSED), forwards["drafter"], hashed=True)
    rounds.begin([lane_of(n, state, CONTEXT_LEN, drafted=True) for n, state in enumerate(states)])
    under_way: list[tuple[list[int], int]] = []
    gone: set[int] = set()
    for number in range(4):
        rounds.launch([0, 1, 2], 3)
        under_way.append(([0, 1, 2], 3))
        if number:
            compare(rounds, host, under_way, gone)
    compare(rounds, host, under_way, gone)
    assert gone == ({1} if who == "target" else set())


def test_a_request_without_a_token_before_its_last(beds: Beds) -> None:
    """Its first row is padding: the draft model is shown one token."""
    beds.forget()
    states = [RequestState(Request("", (40,), SamplingParams(temperature=0), 1), 0, 4096)]
    drafter, plain = beds.drafters["near"]
    rounds = beds.target.forward.get_decode_loop(
        BLOCK_SIZE, torch.tensor(UNUSED), drafter.forward, with_hashes=True
    )
    rounds.start([lane_of(0, states[0], CONTEXT_LEN, drafted=True)])
    rounds.launch([0], 2)
    assert rounds.collect() == Host(beds.plain_target, plain, copied(states)).round([0], 2)


def test_places_follow_the_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model only tells where a row stands."""
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)

    def forward(batch: Batch) -> Tensor:
        assert batch.mrope_positions is not None
        return torch.nn.functional.one_hot(batch.mrope_positions[batch.sample_rows, 2], 99).float()

    quick = GraphRunner(GraphCapturableOps(), forward)
    quick.reserve(4, MAX_BLOCKS, True, "cpu", BLOCK_SIZE)
    rounds = quick.get_decode_loop(BLOCK_SIZE, torch.tensor([], dtype=torch.int64))
    sampling = DraftState.from_state(
        RequestState(Request("", (1,), SamplingParams(temperature=0), 0), 0, 9), 99
    ).sampling
    rounds.start([DecodeSlot((1, 2), 30, blocks_of(n), sampling, mrope_offset=-4 * n) for n in range(3)])
    rounds.launch([2, 0, 1], 0)
    assert {n: result.token_ids for n, result in rounds.collect().items()} == {0: (29,), 1: (25,), 2: (21,)}


def test_what_is_recorded_before_a_run_changes_nothing(beds: Beds) -> None:
    """prepare(), and longer drafts than there was room for, between rounds that are under way."""
    beds.forget()
    states = [RequestState(Request("", (40, 41), SamplingParams(temperature=0), 1), 0, 4096)]
    drafter, plain = beds.drafters["near"]
    for bed in (beds.target, beds.plain_target, drafter, plain):
        prompt_pass(bed, states)
    rounds = beds.target.forward.get_decode_loop(
        BLOCK_SIZE, torch.tensor(UNUSED), drafter.forward, with_hashes=True
    )
    host = Host(beds.plain_target, plain, copied(states))
    rounds.start([lane_of(0, states[0], CONTEXT_LEN, drafted=True)])
    rounds.launch([0], 2)
    told: list[tuple[int, int]] = []
    rounds.capture_graphs(3, 4, lambda done, total: told.append((done, total)))
    assert told == [(done, 6) for done in range(1, 7)], "of 4, 2 and 1 requests, with filters and without"
    rounds.launch([0], INITIAL_DRAFT_CAPACITY + 1)
    assert rounds.collect() == host.round([0], 2)
    assert rounds.collect() == host.round([0], INITIAL_DRAFT_CAPACITY + 1)


def test_what_is_not_allowed_is_our_own_bug(beds: Beds) -> None:
    state = RequestState(Request("", (40, 41), SamplingParams(), 1), 0, 4096)
    rounds = beds.target.forward.get_decode_loop(BLOCK_SIZE, torch.tensor(UNUSED))
    lane = lane_of(0, state, CONTEXT_LEN, drafted=False)
    with pytest.raises(AssertionError, match="reserved"):
        rounds.start([lane] * (ROWS + 1))
    rounds.start([lane])
    with pytest.raises(AssertionError, match="without a draft model"):
        rounds.launch([0], 1)
    rounds.launch([0], 0)
    rounds.launch([0], 0)
    with pytest.raises(AssertionError, match="third round"):
        rounds.launch([0], 0)
    with pytest.raises(AssertionError, match="under way"):
        rounds.start([lane])
    rounds.collect()
    rounds.collect()
    with pytest.raises(AssertionError, match="shorter"):
        rounds.extend_blocks(0, [1])
