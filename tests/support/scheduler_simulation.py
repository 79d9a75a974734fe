"""A scheduler without a model: tokens are a hash of the history, the KV cache is a table of histories.

Every step checks each position that attention would read: it must hold the KV of the request's own tokens
and images. So a block that is shared wrongly, freed early or indexed too soon fails here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b

import torch

from foreword.core.images import PromptImage
from foreword.core.outputs import Draft, EmbeddingEvent, ErrorEvent, Event, StepOutput
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.encoder_runner import EncoderCache, VisionEncoderRunner
from foreword.engine.scheduler import ScheduledRequest, ScheduleOutput, Scheduler
from foreword.engine.timers import StepTimer
from foreword.errors import RequestFailed
from foreword.kv_cache.block_pool import BlockPool
from foreword.sampling.verify import verify

VOCAB = 11
EOS = 0
IMAGE_VALUE_OFFSET = 100  # image tokens read as values from here on


def next_token(history: Sequence[int], seed: int) -> int:
    """The token that the fake model samples after `history`."""
    digest = blake2b(bytes(history) + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_output(request: Request, max_model_len: int) -> list[int]:
    """The output of plain decoding."""
    state = RequestState(request, 0, max_model_len)
    history = readable_ids(request, state.tokens)
    while len(history) < state.max_len:
        history.append(next_token(history, request.seed))
        if history[-1] in state.stop_ids:
            break
    return history[len(request.prompt_ids) :]


def readable_ids(request: Request, tokens: Sequence[int]) -> list[int]:
    """The input of the fake model: token ids, with a value for each image token."""
    read = list(tokens)
    for image in request.images:
        first = IMAGE_VALUE_OFFSET + 10 * image.digest[0]
        read[image.start : image.end] = range(first, first + image.num_tokens)
    return read


def make_image(number: int, start: int, num_tokens: int) -> PromptImage:
    """An image of at most ten tokens."""
    return PromptImage(
        bytes([number, num_tokens]) * 8, num_tokens, (1, 1, num_tokens), (1, 1), (1, 3, 1, 1), b"abc", start
    )


class FakeVisionEncoder:
    """Features are the values the fake model reads; each token takes two pieces of one row."""

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


def noisy_drafter(seed: int, max_tokens: int, error_rate: float) -> DraftFunction:
    """A drafter with an error rate, and sometimes no draft."""
    chance = random.Random(seed)

    def propose(state: RequestState) -> list[int]:
        history = readable_ids(state.request, state.tokens)
        draft: list[int] = []
        for _ in range(chance.randint(0, max_tokens)):
            token_id = next_token([*history, *draft], state.request.seed)
            draft.append((token_id + 1) % VOCAB if chance.random() < error_rate else token_id)
        return draft

    return propose


FaultFunction = Callable[[], str | None]


def no_fault() -> None:
    return None


class SchedulerSimulation:
    """A scheduler with a fake model and drafter, and the outputs so far by request id."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        draft_fn: DraftFunction = no_draft,
        fault_fn: FaultFunction = no_fault,  # "pass": no KV is written, "commit": bad output
        cache_features: int = 0,  # image tokens that the encoder cache holds
        **options: object,
    ) -> None:
        chosen = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefix_caching": True} | options
        rows: int = chosen["max_num_batched_tokens"]  # type: ignore[assignment]
        self.encoder = VisionEncoderRunner(
            FakeVisionEncoder(), EncoderCache(4 * cache_features), 1, rows, 4, StepTimer()
        )
        self.scheduler = Scheduler(
            BlockPool(num_blocks), block_size, computable_until=self._computable_until, **chosen
        )  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.draft_fn = draft_fn
        self.fault_fn = fault_fn
        self.failed: set[str] = set()  # requests that ended with an error
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.vectors: dict[str, bytes] = {}  # embeddings: the pooled tokens
        self.num_image_lookups = 0
        self._rows: dict[str, int] = {}
        self.num_steps = 0
        self._made_progress = True
        self._arrivals = 0
        self._kv: dict[int, tuple[int, ...]] = {}

    def _computable_until(self, state: RequestState, start: int) -> int:
        self.num_image_lookups += 1
        return self.encoder.computable_until(state, start)

    def add(self, request: Request) -> None:
        self.outputs[request.id] = list(request.resume_output_ids)
        self.scheduler.add(RequestState(request, self._arrivals, self.max_model_len))
        self._arrivals += 1
        self._made_progress = True

    def remove(self, request_id: str) -> bool:
        """Abort a request; False if it has ended."""
        self._made_progress = True
        state = self.scheduler.remove(request_id)
        self.encoder.evict(self.scheduler.running)
        self.scheduler.check()
        return state is not None

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def step(self) -> ScheduleOutput:
        self._encode()
        decoding = [state for state in self.scheduler.running if state.is_decoding]
        self.scheduler.set_drafts(
            {state.id: Draft(tuple(self.draft_fn(state)), "fake") for state in decoding}
        )
        used_rows = self.encoder.cost_rows
        scheduled = self.scheduler.schedule(used_rows)
        requests = (*scheduled.requests, *scheduled.pooling_requests)
        progressed = bool(requests or used_rows or self.scheduler.idle)
        assert progressed or self._made_progress, (
            "live requests, but nothing is scheduled; only a first image has a step for itself"
        )
        self._made_progress = progressed
        rows = sum(r.num_tokens + r.num_draft_tokens for r in requests)
        assert rows <= max(self.scheduler.max_num_batched_tokens - used_rows, self.scheduler.max_num_seqs)
        assert all(r.num_tokens for r in requests) and len({r.state.id for r in requests}) == len(requests)
        faults = {request.state.id: self.fault_fn() for request in requests}
        for request in requests:
            if faults[request.state.id] != "pass":
                self._write(request)
        for request in requests:
            if faults[request.state.id] != "pass":
                self._read(request)
        outputs = tuple(self._faulty_output(r, faults[r.state.id]) for r in scheduled.requests)
        vectors = [
            RequestFailed("a fault") if faults[request.state.id] else self._vector(request)
            for request in scheduled.pooling_requests
        ]
        events = self.scheduler.update(scheduled, outputs)
        events += self.scheduler.update_pooling(scheduled, vectors)
        for event in events:
            self._on_event(event, has_fault=faults[event.request_id] is not None)
        self.encoder.evict(self.scheduler.running)
        self.encoder.check(self.scheduler.running)
        self.scheduler.check()
        self.num_steps += 1
        assert self.num_steps < 100_000, "the simulation does not end"
        return scheduled

    def _encode(self) -> None:
        """Encode images with half of the step's rows."""
        rows = max(self.scheduler.max_num_batched_tokens // 2, 1)
        assert self.encoder.step(self.scheduler.running, rows, lambda states: None) is None
        assert self.encoder.cost_rows <= rows

    def _read_tokens(self, request: ScheduledRequest) -> list[int]:
        """The request's input; image tokens in the step must have encoded features."""
        state, end = request.state, request.start + request.num_tokens
        read = readable_ids(state.request, state.tokens + state.draft[: request.num_draft_tokens])
        for index, features in self.encoder.features(state, request.start, end):
            first = request.start + index
            assert features[:, 0].tolist() == read[first : first + len(features)]
            read[first : first + len(features)] = [0] * len(features)
        assert all(number < IMAGE_VALUE_OFFSET for number in read[request.start : end]), (
            "an image token without features"
        )
        return readable_ids(state.request, state.tokens + state.draft[: request.num_draft_tokens])

    def _slot(self, state: RequestState, position: int) -> int:
        size = self.scheduler.block_size
        return state.blocks[position // size] * size + position % size

    def _write(self, request: ScheduledRequest) -> None:
        tokens = self._read_tokens(request)
        for position in range(request.start, request.start + request.num_tokens + request.num_draft_tokens):
            self._kv[self._slot(request.state, position)] = tuple(tokens[: position + 1])

    def _read(self, request: ScheduledRequest) -> None:
        tokens = self._read_tokens(request)
        for position in range(request.start + request.num_tokens + request.num_draft_tokens):
            assert self._kv[self._slot(request.state, position)] == tuple(tokens[: position + 1]), (
                "KV of another request"
            )

    def _faulty_output(self, request: ScheduledRequest, fault: str | None) -> StepOutput:
        if fault == "pass":
            return StepOutput(error=RequestFailed("a fault"))
        if fault == "commit":
            return StepOutput((1,) * (self.max_model_len + 1))
        return self._step_output(request)

    def _step_output(self, request: ScheduledRequest) -> StepOutput:
        state = request.state
        if not request.is_sampled:
            return StepOutput()
        draft = state.draft[: request.num_draft_tokens]
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

    def _vector(self, request: ScheduledRequest) -> bytes | None:
        """A mean needs every row once and in order since the last start."""
        state = request.state
        assert not request.is_sampled and not request.num_draft_tokens
        rows = self._rows.get(state.id, 0) if request.start else 0
        assert request.start == rows or state.request.pooling != "mean"
        self._rows[state.id] = rows + request.num_tokens
        return bytes(state.tokens) if request.start + request.num_tokens == len(state.tokens) else None

    def _on_event(self, event: Event, has_fault: bool) -> None:
        assert isinstance(event, ErrorEvent) == has_fault
        if isinstance(event, ErrorEvent):
            self.failed.add(event.request_id)
            return
        if isinstance(event, EmbeddingEvent):
            assert event.request_id not in self.vectors, "an event after the last one"
            self.vectors[event.request_id] = event.vector
            return
        assert event.index == len(self.outputs[event.request_id])
        assert event.request_id not in self.reasons, "an event after the last one"
        self.outputs[event.request_id] += event.token_ids
        if event.finish_reason:
            self.reasons[event.request_id] = event.finish_reason
