"""A scheduler driven without a model: tokens come from a hash of the history, KV is a table of who wrote what.

Every step checks what attention would read: for each row, each earlier position of its request must hold
exactly the KV of that request's own tokens and pictures. A block shared wrongly, freed early or published too soon shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b

import torch

from foreword.cache.blocks import BlockPool
from foreword.cache.features import FeatureCache
from foreword.core.draft import Draft, Outcome
from foreword.core.events import Embedded, Event, Failed
from foreword.core.params import SamplingParams
from foreword.core.pictures import Picture
from foreword.core.request import Request, RequestState
from foreword.engine.encoding import Encoder
from foreword.engine.plan import Plan, Work
from foreword.engine.scheduler import Scheduler
from foreword.engine.stages import Stages
from foreword.errors import RequestFailed
from foreword.sampling.verify import verify

VOCAB = 11
EOS = 0
SEEN = 100  # tokens of pictures are told as numbers from here on


def next_token(history: Sequence[int], seed: int) -> int:
    """The token that the pretended model samples after `history`."""
    digest = blake2b(bytes(history) + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_output(request: Request, max_model_len: int) -> list[int]:
    """What plain decoding yields for a request."""
    state = RequestState(request, 0, max_model_len)
    history = content(request, state.tokens)
    while len(history) < state.limit:
        history.append(next_token(history, request.seed))
        if history[-1] in state.stop_ids:
            break
    return history[len(request.prompt_ids) :]


def content(request: Request, tokens: Sequence[int]) -> list[int]:
    """What the pretended model reads: tokens, and parts of pictures."""
    read = list(tokens)
    for picture in request.pictures:
        read[picture.start : picture.end] = [SEEN + 10 * picture.digest[0] + place for place in range(picture.num_tokens)]
    return read


def make_picture(which: int, start: int, num_tokens: int) -> Picture:
    """One of few, of at most ten tokens."""
    return Picture(bytes([which, num_tokens]) * 8, num_tokens, (1, 1, num_tokens), (1, 1), (1, 3, 1, 1), b"abc", start)


class Tower:
    """A feature is the number that the pretended model reads; two pieces for each token, of a row each."""

    width = 1

    def encode(self, picture: Picture) -> Generator[int, None, torch.Tensor]:
        for _ in range(2 * picture.num_tokens):
            yield 1
        return SEEN + 10.0 * picture.digest[0] + torch.arange(picture.num_tokens)[:, None]


def make_request(
    name: str, prompt: Sequence[int], seed: int = 0, priority: int = 0, pooling: str | None = None, **params: object
) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(name, tuple(prompt), sampling, seed, eos_token_ids=(EOS,), priority=priority, pooling=pooling)


Guess = Callable[[RequestState], Sequence[int]]


def no_guess(state: RequestState) -> Sequence[int]:
    return ()


Fate = Callable[[], str | None]


def no_fault() -> None:
    return None


class Simulation:
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
        guess: Guess = no_guess,
        fate: Fate = no_fault,
        memory: int = 0,
        **options: object,
    ) -> None:
        chosen = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefix_caching": True} | options
        rows: int = chosen["max_num_batched_tokens"]  # type: ignore[assignment]
        self.encoder = Encoder(Tower(), FeatureCache(4 * memory), 1, rows, 4, Stages())
        self.scheduler = Scheduler(BlockPool(num_blocks), block_size, reach=self.encoder.reach, **chosen)  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.guess = guess
        self.fate = fate
        self.failed: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.vectors: dict[str, bytes] = {}
        self._rows: dict[str, int] = {}
        self.num_steps = 0
        self._worked = True
        self._arrivals = 0
        self._kv: dict[int, tuple[int, ...]] = {}

    def add(self, request: Request) -> None:
        self.outputs[request.id] = list(request.delivered_ids)
        self.scheduler.add(RequestState(request, self._arrivals, self.max_model_len))
        self._arrivals += 1
        self._worked = True

    def remove(self, request_id: str) -> bool:
        """Give a request up; False if it has ended."""
        self._worked = True
        found = self.scheduler.remove(request_id) is not None
        self.encoder.settle(self.scheduler.running)
        self.scheduler.check()
        return found

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def step(self) -> Plan:
        self._encode()
        decoding = [state for state in self.scheduler.running if state.decodes]
        self.scheduler.draft({state.id: Draft(tuple(self.guess(state)), "fake") for state in decoding})
        taken = self.encoder.rows
        plan = self.scheduler.plan(taken)
        works = (*plan.work, *plan.pooled)
        worked = bool(works or taken or self.scheduler.idle)
        assert worked or self._worked, "live requests, but nothing planned; only who begins with a picture has a step for itself"
        self._worked = worked
        rows = sum(w.num_tokens + w.num_draft for w in works)
        assert rows <= max(self.scheduler.max_num_batched_tokens - taken, self.scheduler.max_num_seqs)
        assert all(w.num_tokens for w in works) and len({w.state.id for w in works}) == len(works)
        fates = {work.state.id: self.fate() for work in works}
        for work in works:
            if fates[work.state.id] != "pass":
                self._write(work)
        for work in works:
            if fates[work.state.id] != "pass":
                self._read(work)
        outcomes = tuple(self._fated(work, fates[work.state.id]) for work in plan.work)
        vectors = [RequestFailed("a fault") if fates[work.state.id] else self._vector(work) for work in plan.pooled]
        for event in (*self.scheduler.commit(plan, outcomes), *self.scheduler.commit_pooled(plan, vectors)):
            self._take(event, struck=fates[event.request_id] is not None)
        self.encoder.settle(self.scheduler.running)
        self.encoder.check(self.scheduler.running)
        self.scheduler.check()
        self.num_steps += 1
        assert self.num_steps < 100_000, "runs without end"
        return plan

    def _encode(self) -> None:
        """Half of the step's rows for pictures."""
        rows = max(self.scheduler.max_num_batched_tokens // 2, 1)
        assert self.encoder.advance(self.scheduler.running, rows, lambda states: None) is None
        assert self.encoder.rows <= rows

    def _tokens(self, work: Work) -> list[int]:
        """What is read of a request; parts of pictures that the step computes are those that were encoded."""
        state, end = work.state, work.start + work.num_tokens
        read = content(state.request, state.tokens + state.draft[: work.num_draft])
        for index, features in self.encoder.features(state, work.start, end):
            first = work.start + index
            assert features[:, 0].tolist() == read[first : first + len(features)]
            read[first : first + len(features)] = [0] * len(features)
        assert all(number < SEEN for number in read[work.start : end]), "a part of a picture that is not there"
        return content(state.request, state.tokens + state.draft[: work.num_draft])

    def _slot(self, state: RequestState, position: int) -> int:
        size = self.scheduler.block_size
        return state.blocks[position // size] * size + position % size

    def _write(self, work: Work) -> None:
        tokens = self._tokens(work)
        for position in range(work.start, work.start + work.num_tokens + work.num_draft):
            self._kv[self._slot(work.state, position)] = tuple(tokens[: position + 1])

    def _read(self, work: Work) -> None:
        tokens = self._tokens(work)
        for position in range(work.start + work.num_tokens + work.num_draft):
            assert self._kv[self._slot(work.state, position)] == tuple(tokens[: position + 1]), "somebody else's KV"

    def _fated(self, work: Work, fate: str | None) -> Outcome:
        if fate == "pass":
            return Outcome(error=RequestFailed("a fault"))
        return Outcome((1,) * (self.max_model_len + 1)) if fate == "commit" else self._outcome(work)

    def _outcome(self, work: Work) -> Outcome:
        state = work.state
        if not work.samples:
            return Outcome()
        draft = state.draft[: work.num_draft]
        tokens = content(state.request, state.tokens)
        sampled = [next_token([*tokens, *draft[:n]], state.request.seed) for n in range(len(draft) + 1)]
        accepted = verify(sampled, draft)
        end = state.ending(sampled[: accepted + 1])
        return Outcome(tuple(sampled[: end.kept]), min(accepted, end.kept), finish_reason=end.finish_reason, stop_id=end.stop_id)

    def _vector(self, work: Work) -> bytes | None:
        """A mean needs every row, in order and once since the last start."""
        state = work.state
        assert not work.samples and not work.num_draft
        rows = self._rows.get(state.id, 0) if work.start else 0
        assert work.start == rows or state.request.pooling != "mean"
        self._rows[state.id] = rows + work.num_tokens
        return bytes(state.tokens) if work.start + work.num_tokens == len(state.tokens) else None

    def _take(self, event: Event, struck: bool) -> None:
        assert isinstance(event, Failed) == struck
        if isinstance(event, Failed):
            self.failed.add(event.request_id)
            return
        if isinstance(event, Embedded):
            assert event.request_id not in self.vectors, "an event after the end"
            self.vectors[event.request_id] = event.vector
            return
        assert event.index == len(self.outputs[event.request_id])
        assert event.request_id not in self.reasons, "an event after the end"
        self.outputs[event.request_id] += event.token_ids
        if event.finish_reason:
            self.reasons[event.request_id] = event.finish_reason
