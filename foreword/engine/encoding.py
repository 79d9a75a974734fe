"""Pictures become features, a piece at a time between the passes of those who only wait for their next token.

A picture is encoded alone, once for all who show it. Its features are kept as long as a running request has rows of it
to compute, and then within a bound. What a piece costs is told in rows of the decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from foreword.cache.features import FeatureCache, Key
from foreword.core.pictures import Picture
from foreword.core.request import RequestState
from foreword.engine.containment import NONFINITE, is_device_lost
from foreword.engine.pictures import key_of, to_come
from foreword.engine.stages import Stages
from foreword.errors import RequestFailed
from foreword.models.base import Tower

__all__ = ["Encoder", "Unseen"]

logger = logging.getLogger(__name__)

STAGE: Final = "encode"
Announce = Callable[[Sequence[RequestState]], None]
Progress = Callable[[RequestState], int]


@dataclass(slots=True)
class _Wanted:
    """A picture, and the running requests that have rows of it to compute, by rank."""

    picture: Picture
    states: list[RequestState]


@dataclass(frozen=True, slots=True)
class _Job:
    """A picture that is being encoded; `again`: the first try failed."""

    key: Key
    pieces: Generator[int, None, Tensor]
    again: bool


@dataclass(frozen=True, slots=True)
class Unseen:
    """A picture that cannot be encoded, and the requests that end for it. `stage` is what the error is counted under."""

    states: tuple[RequestState, ...]
    error: RequestFailed
    stage: str


def _num_computed(state: RequestState) -> int:
    return state.num_computed


class _EncodingError(Exception):
    """There are no features; the message is for the caller."""

    def __init__(self, message: str, stage: str = STAGE) -> None:
        super().__init__(message)
        self.stage = stage


class Encoder:
    """The tower, with the pictures that it works on.

    row_cost     multiply-adds of one row of the decoder
    horizon      rows of a step: so far ahead of a request its pictures are encoded
    value_bytes  of one value of a feature
    progress     how many tokens of a request are computed; the draft model's tower has a progress of its own
    rows         what the last advance() cost
    num_encoded  pictures that were encoded
    num_hits     pictures of requests that were encoded for others, or just being so, or of which others had computed all tokens
    """

    def __init__(
        self,
        tower: Tower | None,
        cache: FeatureCache,
        row_cost: int,
        horizon: int,
        value_bytes: int,
        stages: Stages,
        progress: Progress = _num_computed,
    ) -> None:
        self.cache = cache
        self.rows = 0
        self._spent = self._num_tokens = 0  # multiply-adds, and tokens of the pictures that were made of them
        self.num_encoded = self.num_hits = 0
        self._tower = tower
        self._row_cost = max(row_cost, 1)
        self._horizon = horizon
        self._value_bytes = value_bytes
        self._stages = stages
        self._progress = progress
        self._pixels: dict[bytes, bytes] = {}
        self._job: _Job | None = None

    @property
    def sees(self) -> bool:
        """There is a tower."""
        return self._tower is not None

    def beside(self, tower: Tower, progress: Progress) -> Encoder:
        """For the tower of a draft model: it is shown the same pictures, and has its part of the memory from now on."""
        assert self._tower is not None, "a draft model that sees, beside a model that does not"
        part = self.cache.max_bytes * tower.width // (tower.width + self._tower.width)
        self.cache.max_bytes -= part
        other = Encoder(tower, FeatureCache(part), self._row_cost, self._horizon, self._value_bytes, self._stages, progress)
        other._pixels = self._pixels
        return other

    def show(self, digest: bytes, pixels: bytes) -> None:
        """Requests with this picture may come without its pixels from now on."""
        self._pixels[digest] = pixels

    def forget(self, digest: bytes) -> None:
        """No request has it any more."""
        self._pixels.pop(digest, None)

    def reach(self, state: RequestState, start: int) -> int:
        """How many of its tokens can be computed before a picture is needed, once those before `start` are."""
        for picture in to_come(state, start):
            if key_of(state, picture) not in self.cache:
                return max(picture.start, start)
        return len(state.tokens)

    def cost(self, state: RequestState, start: int) -> int:
        """Multiply-adds until all is seen that a request comes to behind its first `start` tokens, as far as is known: by what
        other pictures took."""
        unseen = (picture for picture in to_come(state, start) if key_of(state, picture) not in self.cache)
        return sum(picture.num_tokens for picture in unseen) * self._spent // max(self._num_tokens, 1)

    def waits(self, running: Sequence[RequestState]) -> bool:
        """Somebody comes to a picture that is not seen yet."""
        return any(key not in self.cache for key in self._needed(running))

    def features(self, state: RequestState, start: int, end: int) -> list[tuple[int, Tensor]]:
        """What stands for tokens [start, end) of a request: (index of the first behind `start`, [rows, width])."""
        found = []
        if start < state.num_prompt:
            self._pass(state, start)
        for picture in to_come(state, start):
            first, last = max(picture.start, start), min(picture.end, end)
            if first < last:
                features = self.cache[key_of(state, picture)]
                self._meet(state, picture, encoded=True)
                found.append((first - start, features[first - picture.start : last - picture.start]))
        return found

    def advance(self, running: Sequence[RequestState], rows: int, announce: Announce) -> Unseen | None:
        """Encode what running requests come to, in order of rank, until that has cost `rows` rows; a piece at least.

        announce  told whom the next piece is for: if it ends the process, that was it
        Returns whoever cannot go on; there may be more. Raises if the device is lost.
        """
        self.rows = cost = 0
        needed = self._needed(running)
        self._count_hits(needed)
        while cost < rows * self._row_cost and (key := self._next(needed)) is not None:
            announce(needed[key].states)
            try:
                with self._stages(STAGE):
                    cost += self._piece(key, needed)
            except _EncodingError as error:
                self._job = None
                return Unseen(tuple(needed[key].states), RequestFailed(str(error)), error.stage)
            self.rows = max(-(-cost // self._row_cost), 1)
        return None

    def settle(self, running: Sequence[RequestState]) -> None:
        """Let go of what no running request needs, as far as there is no room for it."""
        needed = self._needed(running)
        if self._job is not None and self._job.key not in needed:
            self._job = None
        self.cache.trim(needed)

    def check(self, running: Sequence[RequestState]) -> None:
        """Assert the invariants between steps."""
        self.cache.check()
        needed = self._needed(running)
        assert self._job is None or self._job.key in needed, "a picture is encoded that nobody needs"
        assert self.cache.num_bytes <= self.cache.max_bytes or any(key in self.cache for key in needed)

    # What is to be encoded

    def _needed(self, running: Sequence[RequestState]) -> dict[Key, _Wanted]:
        """Pictures that running requests come to within a step, in order of rank."""
        needed: dict[Key, _Wanted] = {}
        for state in running:
            known = self._progress(state)
            for picture in to_come(state, known):
                if picture.start < known + self._horizon:
                    needed.setdefault(key_of(state, picture), _Wanted(picture, [])).states.append(state)
        return needed

    def _count_hits(self, needed: Mapping[Key, _Wanted]) -> None:
        """Whoever is not the first to need a picture finds it encoded."""
        for key, one in needed.items():
            encoded = key in self.cache or (self._job is not None and self._job.key == key)
            for state in one.states:
                self._meet(state, one.picture, encoded)
                encoded = True

    def _meet(self, state: RequestState, picture: Picture, encoded: bool) -> None:
        """A request comes to each of its pictures once, also if it loses its place, or its engine, and comes again."""
        if picture.digest not in state.met:
            state.met.add(picture.digest)
            self.num_hits += encoded and not state.request.resumed

    def _pass(self, state: RequestState, start: int) -> None:
        """Pictures before `start` that it never came to: their tokens were computed for others."""
        for picture in state.request.pictures:
            if picture.end <= start:
                self._meet(state, picture, encoded=True)

    def _next(self, needed: Mapping[Key, _Wanted]) -> Key | None:
        """The picture that is being encoded, or the next that there is memory for. The first of all need not ask for it."""
        if self._job is not None and self._job.key in needed:
            return self._job.key
        self._job = None
        for number, (key, one) in enumerate(needed.items()):
            if key not in self.cache:
                return key if number == 0 or self._has_room(one.picture, needed) else None
        return None

    def _has_room(self, picture: Picture, needed: Mapping[Key, _Wanted]) -> bool:
        return self.cache.bytes_of(needed) + self._size(picture) <= self.cache.max_bytes

    def _size(self, picture: Picture) -> int:
        """Bytes of its features."""
        assert self._tower is not None, "a picture for a model that sees none"
        return picture.num_tokens * self._tower.width * self._value_bytes

    # Encoding

    def _piece(self, key: Key, needed: Mapping[Key, _Wanted]) -> int:
        """Go on with a picture; returns the multiply-adds. An error that does not come again is nobody's fault."""
        job = self._job = self._job or self._begin(key, needed, again=False)
        try:
            with torch.inference_mode():
                cost = next(job.pieces)
            self._spent += cost
            return cost
        except StopIteration as end:
            self._put(key, end.value)
            return 0
        except _EncodingError:
            raise
        except Exception as error:
            if is_device_lost(error):
                raise
            if job.again:
                logger.exception("a picture could not be encoded; those who show it end, others go on")
                raise _EncodingError("an error of ours ended this request (encode); the server's log tells more") from error
        # The error is gone, and the memory that it held
        self.cache.clear(needed)
        self._job = self._begin(key, needed, again=True)
        return 0

    def _begin(self, key: Key, needed: Mapping[Key, _Wanted], again: bool) -> _Job:
        picture = needed[key].picture
        pixels = picture.pixels or self._pixels.get(picture.digest)
        if pixels is None:
            raise _EncodingError("a picture of this request did not reach the engine")
        self.cache.trim(needed, self._size(picture))
        return _Job(key, self._encode(replace(picture, pixels=pixels)), again)

    def _encode(self, picture: Picture) -> Generator[int, None, Tensor]:
        """What the tower says, if it can be used."""
        assert self._tower is not None
        features = yield from self._tower.encode(picture)
        if features.shape != (picture.num_tokens, self._tower.width):
            raise _EncodingError(f"a picture of {picture.num_tokens} tokens has features of the shape {tuple(features.shape)}")
        if not bool(torch.isfinite(features).all()):
            raise _EncodingError("the features of a picture are not finite", NONFINITE)
        return features.clone()  # they may be a part of something larger

    def _put(self, key: Key, features: Tensor) -> None:
        self._job = None
        self.cache.put(key, features)
        self.num_encoded += 1
        self._num_tokens += len(features)
