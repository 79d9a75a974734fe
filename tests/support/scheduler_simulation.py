"""A scheduler driven without a model: tokens come from a hash of the history, KV is a table of who wrote what.

Every step checks what attention would read: for each row, each earlier position of its request must hold
exactly the KV of that request's own tokens and pictures. A block shared wrongly, freed early or published too soon shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b

import torch

from foreword.core.images import PromptImage
from foreword.core.outputs import Draft, EmbeddingEvent, ErrorEvent, Event, StepOutput
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.encoder_runner import EncoderCache, VisionEncoderRunner
from foreword.engine.schedule import ScheduledRequest, ScheduleOutput
from foreword.engine.scheduler import Scheduler
from foreword.engine.timers import StepTimer
from foreword.errors import RequestFailed
from foreword.kv_cache.block_pool import BlockPool
from foreword.sampling.verify import verify

VOCAB = 11
EOS = 0
IMAGE_VALUE_OFFSET = 100  # tokens of pictures are told as numbers from here on


def next_token(history: Sequence[int], seed: int) -> int:
    """The token that the pretended model samples after `history`."""
    digest = blake2b(bytes(history) + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_output(request: Request, max_model_len: int) -> list[int]:
    """What plain decoding yields for a request."""
    state = RequestState(request, 0, max_model_len)
    history = readable_ids(request, state.tokens)
    while len(history) < state.max_len:
        history.append(next_token(history, request.seed))
        if history[-1] in state.stop_ids:
            break
    return history[len(request.prompt_ids) :]


def readable_ids(request: Request, tokens: Sequence[int]) -> list[int]:
    """What the pretended model reads: tokens, and parts of pictures."""
    read = list(tokens)
    for picture in request.images:
        read[picture.start : picture.end] = [
            IMAGE_VALUE_OFFSET + 10 * picture.digest[0] + place for place in range(picture.num_tokens)
        ]
    return read


def make_image(which: int, start: int, num_tokens: int) -> PromptImage:
    """One of few, of at most ten tokens."""
    return PromptImage(
        bytes([which, num_tokens]) * 8, num_tokens, (1, 1, num_tokens), (1, 1), (1, 3, 1, 1), b"abc", start
    )


class FakeVisionTower:
    """A feature is the number that the pretended model reads; two pieces for each token, of a row each."""

    feature_size = 1

    def encode(self, image: PromptImage) -> Generator[int, None, torch.Tensor]:
        for _ in range(2 * image.num_tokens):
            yield 1
        return IMAGE_VALUE_OFFSET + 10.0 * image.digest[0] + torch.arange(image.num_tokens)[:, None]


def make_request(
    name: str,
    prompt: Sequence[int],
    seed: int = 0,
    priority: int = 0,
    pooling: str | None = None,
    **params: object,
) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(
        name, tuple(prompt), sampling, seed, eos_token_ids=(EOS,), priority=priority, pooling=pooling
    )


DraftFunction = Callable[[RequestState], Sequence[int]]


def no_draft(state: RequestState) -> Sequence[int]:
    return ()


FaultFunction = Callable[[], str | None]


def no_fault() -> None:
    return None


class SchedulerSimulation:
    """A scheduler, a pretended model and drafter, and the outputs so far by request id.

    fate     asked for each piece of work: "pass" if it fails before its KV is there, "commit" if it yields what cannot be taken
    vectors  of prompts that become vectors: the tokens whose rows were pooled
    failed   requests that ended with an error
    memory   features that are kept
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        draft_fn: DraftFunction = no_draft,
        fault_fn: FaultFunction = no_fault,
        cache_features: int = 0,
        **options: object,
    ) -> None:
        chosen = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefix_caching": True} | options
        rows: int = chosen["max_num_batched_tokens"]  # type: ignore[assignment]
        self.encoder = VisionEncoderRunner(
            FakeVisionTower(), EncoderCache(4 * cache_features), 1, rows, 4, StepTimer()
        )
        self.scheduler = Scheduler(
            BlockPool(num_blocks), block_size, computable_until=self.encoder.computable_until, **chosen
        )  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.draft_fn = draft_fn
        self.fault_fn = fault_fn
        self.failed: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.vectors: dict[str, bytes] = {}
        self._rows: dict[str, int] = {}
        self.num_steps = 0
        self._made_progress = True
        self._arrivals = 0
        self._kv: dict[int, tuple[int, ...]] = {}

    def add(self, request: Request) -> None:
        self.outputs[request.id] = list(request.resume_output_ids)
        self.scheduler.add(RequestState(request, self._arrivals, self.max_model_len))
        self._arrivals += 1
        self._made_progress = True

    def remove(self, request_id: str) -> bool:
        """Give a request up; False if it has ended."""
        self._made_progress = True
        found = self.scheduler.remove(request_id) is not None
        self.encoder.evict(self.scheduler.running)
        self.scheduler.check()
        return found

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def step(self) -> ScheduleOutput:
        self._encode()
        decoding = [state for state in self.scheduler.running if state.is_decoding]
        self.scheduler.set_drafts(
            {state.id: Draft(tuple(self.draft_fn(state)), "fake") for state in decoding}
        )
        taken = self.encoder.cost_rows
        plan = self.scheduler.schedule(taken)
        works = (*plan.requests, *plan.pooling_requests)
        worked = bool(works or taken or self.scheduler.idle)
        assert worked or self._made_progress, (
            "live requests, but nothing planned; only who begins with a picture has a step for itself"
        )
        self._made_progress = worked
        rows = sum(w.num_tokens + w.num_draft_tokens for w in works)
        assert rows <= max(self.scheduler.max_num_batched_tokens - taken, self.scheduler.max_num_seqs)
        assert all(w.num_tokens for w in works) and len({w.state.id for w in works}) == len(works)
        fates = {work.state.id: self.fault_fn() for work in works}
        for work in works:
            if fates[work.state.id] != "pass":
                self._write(work)
        for work in works:
            if fates[work.state.id] != "pass":
                self._read(work)
        outcomes = tuple(self._faulty_output(work, fates[work.state.id]) for work in plan.requests)
        vectors = [
            RequestFailed("a fault") if fates[work.state.id] else self._vector(work)
            for work in plan.pooling_requests
        ]
        for event in (*self.scheduler.update(plan, outcomes), *self.scheduler.update_pooling(plan, vectors)):
            self._on_event(event, has_fault=fates[event.request_id] is not None)
        self.encoder.evict(self.scheduler.running)
        self.encoder.check(self.scheduler.running)
        self.scheduler.check()
        self.num_steps += 1
        assert self.num_steps < 100_000, "runs without end"
        return plan

    def _encode(self) -> None:
        """Half of the step's rows for pictures."""
        rows = max(self.scheduler.max_num_batched_tokens // 2, 1)
        assert self.encoder.step(self.scheduler.running, rows, lambda states: None) is None
        assert self.encoder.cost_rows <= rows

    def _read_tokens(self, work: ScheduledRequest) -> list[int]:
        """What is read of a request; parts of pictures that the step computes are those that were encoded."""
        state, end = work.state, work.start + work.num_tokens
        read = readable_ids(state.request, state.tokens + state.draft[: work.num_draft_tokens])
        for index, features in self.encoder.features(state, work.start, end):
            first = work.start + index
            assert features[:, 0].tolist() == read[first : first + len(features)]
            read[first : first + len(features)] = [0] * len(features)
        assert all(number < IMAGE_VALUE_OFFSET for number in read[work.start : end]), (
            "a part of a picture that is not there"
        )
        return readable_ids(state.request, state.tokens + state.draft[: work.num_draft_tokens])

    def _slot(self, state: RequestState, position: int) -> int:
        size = self.scheduler.block_size
        return state.blocks[position // size] * size + position % size

    def _write(self, work: ScheduledRequest) -> None:
        tokens = self._read_tokens(work)
        for position in range(work.start, work.start + work.num_tokens + work.num_draft_tokens):
            self._kv[self._slot(work.state, position)] = tuple(tokens[: position + 1])

    def _read(self, work: ScheduledRequest) -> None:
        tokens = self._read_tokens(work)
        for position in range(work.start + work.num_tokens + work.num_draft_tokens):
            assert self._kv[self._slot(work.state, position)] == tuple(tokens[: position + 1]), (
                "somebody else's KV"
            )

    def _faulty_output(self, work: ScheduledRequest, fate: str | None) -> StepOutput:
        if fate == "pass":
            return StepOutput(error=RequestFailed("a fault"))
        return StepOutput((1,) * (self.max_model_len + 1)) if fate == "commit" else self._step_output(work)

    def _step_output(self, work: ScheduledRequest) -> StepOutput:
        state = work.state
        if not work.is_sampled:
            return StepOutput()
        draft = state.draft[: work.num_draft_tokens]
        tokens = readable_ids(state.request, state.tokens)
        sampled = [next_token([*tokens, *draft[:n]], state.request.seed) for n in range(len(draft) + 1)]
        accepted = verify(sampled, draft)
        end = state.check_finish(sampled[: accepted + 1])
        return StepOutput(
            tuple(sampled[: end.num_kept]),
            min(accepted, end.num_kept),
            finish_reason=end.finish_reason,
            stop_id=end.stop_id,
        )

    def _vector(self, work: ScheduledRequest) -> bytes | None:
        """A mean needs every row, in order and once since the last start."""
        state = work.state
        assert not work.is_sampled and not work.num_draft_tokens
        rows = self._rows.get(state.id, 0) if work.start else 0
        assert work.start == rows or state.request.pooling != "mean"
        self._rows[state.id] = rows + work.num_tokens
        return bytes(state.tokens) if work.start + work.num_tokens == len(state.tokens) else None

    def _on_event(self, event: Event, has_fault: bool) -> None:
        assert isinstance(event, ErrorEvent) == has_fault
        if isinstance(event, ErrorEvent):
            self.failed.add(event.request_id)
            return
        if isinstance(event, EmbeddingEvent):
            assert event.request_id not in self.vectors, "an event after the end"
            self.vectors[event.request_id] = event.vector
            return
        assert event.index == len(self.outputs[event.request_id])
        assert event.request_id not in self.reasons, "an event after the end"
        self.outputs[event.request_id] += event.token_ids
        if event.finish_reason:
            self.reasons[event.request_id] = event.finish_reason
