"""Pictures become features, a piece at a time between the passes of those who only wait for their next token.

A picture is encoded alone, once for all who show it. Its features are kept as long as a running request has rows of it
to compute, and then within a bound. What a piece costs is told in rows of the decoder.

Pictures of requests: whether they stand where they should, and which rows wait for them.

What a tower has made of pictures, kept within a bound of memory.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from foreword.core.images import PromptImage
from foreword.core.request import Request, RequestState
from foreword.engine.fault_isolation import NONFINITE, is_device_lost
from foreword.engine.timers import StepTimer
from foreword.errors import InvalidRequest, RequestFailed
from foreword.models.base import VisionEncoder

__all__ = [
    "EncodeFailure",
    "EncoderCache",
    "FeatureKey",
    "VisionEncoderRunner",
    "check_images",
    "feature_key",
    "pending_images",
]

logger = logging.getLogger(__name__)

FeatureKey = tuple[
    str, bytes
]  # tenant and digest: nobody learns from the time it takes what others have shown


class EncoderCache:
    """Features by tenant and picture. Who needs some says so; the others go once the bound is reached, least recently used first.

    num_bytes  that are held
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._features: OrderedDict[FeatureKey, Tensor] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def __getitem__(self, key: FeatureKey) -> Tensor:
        """[num_tokens, width]; it has been used just now."""
        self._features.move_to_end(key)
        return self._features[key]

    def put(self, key: FeatureKey, features: Tensor) -> None:
        """Hold more. What must give way for it does so in trim()."""
        assert key not in self._features, "encoded twice"
        self._features[key] = features
        self.num_bytes += features.nbytes

    def needed_bytes(self, needed: Container[FeatureKey]) -> int:
        """Of those that are needed."""
        return sum(features.nbytes for key, features in self._features.items() if key in needed)

    def evict(self, needed: Container[FeatureKey], room_bytes: int = 0) -> None:
        """Let go of what nobody needs, until `room` bytes more would not exceed the bound."""
        most = self.max_bytes - room_bytes
        for key in [key for key in self._features if key not in needed] if self.num_bytes > most else ():
            self.num_bytes -= self._features.pop(key).nbytes
            if self.num_bytes <= most:
                return

    def evict_unneeded(self, needed: Container[FeatureKey]) -> None:
        """Let go of all that nobody needs: memory is short."""
        self.evict(needed, self.max_bytes)

    def check(self) -> None:
        """Assert that what is held is what is counted."""
        assert self.num_bytes == sum(features.nbytes for features in self._features.values())


ERROR_FIELD = "messages"  # where pictures came from
DIGEST_BYTES = 16


def feature_key(state: RequestState, image: PromptImage) -> FeatureKey:
    """The name of its features."""
    return state.request.cache_salt, image.digest


def pending_images(state: RequestState, start: int) -> Sequence[PromptImage]:
    """Pictures that reach behind its first `start` tokens."""
    pictures = state.request.images
    if not pictures or pictures[-1].end <= start:  # as a rule: it decodes
        return ()
    return [picture for picture in pictures if picture.end > start]


def check_images(request: Request, placeholder_id: int | None, mrope: bool) -> None:
    """Every placeholder lies in a picture, and every picture on its placeholders, in order.

    placeholder  None: the model sees no pictures
    directions   tokens of a picture know their place in it
    Raises InvalidRequest.
    """
    if not request.images and (placeholder_id is None or placeholder_id not in request.prompt_ids):
        return
    if placeholder_id is None:
        raise InvalidRequest("the model sees no pictures", ERROR_FIELD)
    if request.pooling is not None:
        raise InvalidRequest("prompts with pictures cannot be embedded", ERROR_FIELD)
    for picture in request.images:
        _check_image(picture, mrope)
    _check_placeholders(request, placeholder_id)


def _check_image(image: PromptImage, mrope: bool) -> None:
    if len(image.digest) != DIGEST_BYTES or image.num_tokens < 1:
        raise InvalidRequest(
            f"a picture needs a digest of {DIGEST_BYTES} bytes and a token at least", ERROR_FIELD
        )
    if image.pixels is not None and len(image.pixels) != image.num_bytes:
        raise InvalidRequest(
            f"a picture of the shape {image.shape} has {len(image.pixels)} bytes of pixels", ERROR_FIELD
        )
    if mrope and math.prod(image.grid_thw) != image.num_tokens:
        raise InvalidRequest(
            f"a picture of the grid {image.grid_thw} has {image.num_tokens} tokens", ERROR_FIELD
        )


def _check_placeholders(request: Request, placeholder_id: int) -> None:
    ids, before = request.prompt_ids, 0
    for picture in request.images:
        if picture.start < before or picture.end > len(ids):
            raise InvalidRequest(
                f"a picture at token {picture.start} overlaps another, or reaches out of the prompt",
                ERROR_FIELD,
            )
        if ids[picture.start : picture.end].count(placeholder_id) != picture.num_tokens:
            raise InvalidRequest(
                f"the picture at token {picture.start} does not stand on {picture.num_tokens} placeholders",
                ERROR_FIELD,
            )
        before = picture.end
    spare = ids.count(placeholder_id) - sum(picture.num_tokens for picture in request.images)
    if spare or placeholder_id in request.resume_output_ids:
        raise InvalidRequest(f"token id {placeholder_id} stands for pictures, and for nothing else", "prompt")


STAGE: Final = "encode"
OnBatch = Callable[[Sequence[RequestState]], None]
NumComputed = Callable[[RequestState], int]


@dataclass(slots=True)
class _ImageNeed:
    """A picture, and the running requests that have rows of it to compute, by rank."""

    image: PromptImage
    states: list[RequestState]


@dataclass(frozen=True, slots=True)
class _EncodeJob:
    """A picture that is being encoded; `again`: the first try failed."""

    key: FeatureKey
    pieces: Generator[int, None, Tensor]
    is_retry: bool


@dataclass(frozen=True, slots=True)
class EncodeFailure:
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


class VisionEncoderRunner:
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
        tower: VisionEncoder | None,
        cache: EncoderCache,
        row_cost: int,
        max_lookahead: int,
        value_bytes: int,
        timer: StepTimer,
        num_computed: NumComputed = _num_computed,
    ) -> None:
        self.cache = cache
        self.cost_rows = 0
        self._encoded_cost = self._encoded_tokens = (
            0  # multiply-adds, and tokens of the pictures that were made of them
        )
        self.num_encoded = self.num_hits = 0
        self._tower = tower
        self._row_cost = max(row_cost, 1)
        self._max_lookahead = max_lookahead
        self._value_bytes = value_bytes
        self._timer = timer
        self._num_computed = num_computed
        self._pixels: dict[bytes, bytes] = {}
        self._job: _EncodeJob | None = None

    @property
    def enabled(self) -> bool:
        """There is a tower."""
        return self._tower is not None

    def for_draft_model(self, tower: VisionEncoder, num_computed: NumComputed) -> VisionEncoderRunner:
        """For the tower of a draft model: it is shown the same pictures, and has its part of the memory from now on."""
        assert self._tower is not None, "a draft model that sees, beside a model that does not"
        part = self.cache.max_bytes * tower.feature_size // (tower.feature_size + self._tower.feature_size)
        self.cache.max_bytes -= part
        other = VisionEncoderRunner(
            tower,
            EncoderCache(part),
            self._row_cost,
            self._max_lookahead,
            self._value_bytes,
            self._timer,
            num_computed,
        )
        other._pixels = self._pixels
        return other

    def add_pixels(self, digest: bytes, pixels: bytes) -> None:
        """Requests with this picture may come without its pixels from now on."""
        self._pixels[digest] = pixels

    def drop_pixels(self, digest: bytes) -> None:
        """No request has it any more."""
        self._pixels.pop(digest, None)

    def computable_until(self, state: RequestState, start: int) -> int:
        """How many of its tokens can be computed before a picture is needed, once those before `start` are."""
        for picture in pending_images(state, start):
            if feature_key(state, picture) not in self.cache:
                return max(picture.start, start)
        return len(state.tokens)

    def remaining_cost(self, state: RequestState, start: int) -> int:
        """Multiply-adds until all is seen that a request comes to behind its first `start` tokens, as far as is known: by what
        other pictures took."""
        unseen = (
            picture
            for picture in pending_images(state, start)
            if feature_key(state, picture) not in self.cache
        )
        return (
            sum(picture.num_tokens for picture in unseen) * self._encoded_cost // max(self._encoded_tokens, 1)
        )

    def is_pending(self, running: Sequence[RequestState]) -> bool:
        """Somebody comes to a picture that is not seen yet."""
        return any(key not in self.cache for key in self._needed_images(running))

    def features(self, state: RequestState, start: int, end: int) -> list[tuple[int, Tensor]]:
        """What stands for tokens [start, end) of a request: (index of the first behind `start`, [rows, width])."""
        found = []
        if start < state.num_prompt:
            self._count_skipped(state, start)
        for picture in pending_images(state, start):
            first, last = max(picture.start, start), min(picture.end, end)
            if first < last:
                features = self.cache[feature_key(state, picture)]
                self._count_use(state, picture, is_encoded=True)
                found.append((first - start, features[first - picture.start : last - picture.start]))
        return found

    def step(self, running: Sequence[RequestState], max_rows: int, on_batch: OnBatch) -> EncodeFailure | None:
        """Encode what running requests come to, in order of rank, until that has cost `rows` rows; a piece at least.

        announce  told whom the next piece is for: if it ends the process, that was it
        Returns whoever cannot go on; there may be more. Raises if the device is lost.
        """
        self.cost_rows = cost = 0
        needed = self._needed_images(running)
        self._count_hits(needed)
        while cost < max_rows * self._row_cost and (key := self._next_key(needed)) is not None:
            on_batch(needed[key].states)
            try:
                with self._timer(STAGE):
                    cost += self._encode_piece(key, needed)
            except _EncodingError as error:
                self._job = None
                return EncodeFailure(tuple(needed[key].states), RequestFailed(str(error)), error.stage)
            self.cost_rows = max(-(-cost // self._row_cost), 1)
        return None

    def evict(self, running: Sequence[RequestState]) -> None:
        """Let go of what no running request needs, as far as there is no room for it."""
        needed = self._needed_images(running)
        if self._job is not None and self._job.key not in needed:
            self._job = None
        self.cache.evict(needed)

    def check(self, running: Sequence[RequestState]) -> None:
        """Assert the invariants between steps."""
        self.cache.check()
        needed = self._needed_images(running)
        assert self._job is None or self._job.key in needed, "a picture is encoded that nobody needs"
        assert self.cache.num_bytes <= self.cache.max_bytes or any(key in self.cache for key in needed)

    # What is to be encoded

    def _needed_images(self, running: Sequence[RequestState]) -> dict[FeatureKey, _ImageNeed]:
        """Pictures that running requests come to within a step, in order of rank."""
        needed: dict[FeatureKey, _ImageNeed] = {}
        for state in running:
            known = self._num_computed(state)
            for picture in pending_images(state, known):
                if picture.start < known + self._max_lookahead:
                    needed.setdefault(feature_key(state, picture), _ImageNeed(picture, [])).states.append(
                        state
                    )
        return needed

    def _count_hits(self, needed: Mapping[FeatureKey, _ImageNeed]) -> None:
        """Whoever is not the first to need a picture finds it encoded."""
        for key, one in needed.items():
            encoded = key in self.cache or (self._job is not None and self._job.key == key)
            for state in one.states:
                self._count_use(state, one.image, encoded)
                encoded = True

    def _count_use(self, state: RequestState, image: PromptImage, is_encoded: bool) -> None:
        """A request comes to each of its pictures once, also if it loses its place, or its engine, and comes again."""
        if image.digest not in state.counted_images:
            state.counted_images.add(image.digest)
            self.num_hits += is_encoded and not state.request.is_resumed

    def _count_skipped(self, state: RequestState, start: int) -> None:
        """Pictures before `start` that it never came to: their tokens were computed for others."""
        for picture in state.request.images:
            if picture.end <= start:
                self._count_use(state, picture, is_encoded=True)

    def _next_key(self, needed: Mapping[FeatureKey, _ImageNeed]) -> FeatureKey | None:
        """The picture that is being encoded, or the next that there is memory for. The first of all need not ask for it."""
        if self._job is not None and self._job.key in needed:
            return self._job.key
        self._job = None
        for number, (key, one) in enumerate(needed.items()):
            if key not in self.cache:
                return key if number == 0 or self._has_room(one.image, needed) else None
        return None

    def _has_room(self, image: PromptImage, needed: Mapping[FeatureKey, _ImageNeed]) -> bool:
        return self.cache.needed_bytes(needed) + self._feature_bytes(image) <= self.cache.max_bytes

    def _feature_bytes(self, image: PromptImage) -> int:
        """Bytes of its features."""
        assert self._tower is not None, "a picture for a model that sees none"
        return image.num_tokens * self._tower.feature_size * self._value_bytes

    # Encoding

    def _encode_piece(self, key: FeatureKey, needed: Mapping[FeatureKey, _ImageNeed]) -> int:
        """Go on with a picture; returns the multiply-adds. An error that does not come again is nobody's fault."""
        job = self._job = self._job or self._start_job(key, needed, is_retry=False)
        try:
            with torch.inference_mode():
                cost = next(job.pieces)
            self._encoded_cost += cost
            return cost
        except StopIteration as end:
            self._store(key, end.value)
            return 0
        except _EncodingError:
            raise
        except Exception as error:
            if is_device_lost(error):
                raise
            if job.is_retry:
                logger.exception("a picture could not be encoded; those who show it end, others go on")
                raise _EncodingError(
                    "an error of ours ended this request (encode); the server's log tells more"
                ) from error
        # The error is gone, and the memory that it held
        self.cache.evict_unneeded(needed)
        self._job = self._start_job(key, needed, is_retry=True)
        return 0

    def _start_job(
        self, key: FeatureKey, needed: Mapping[FeatureKey, _ImageNeed], is_retry: bool
    ) -> _EncodeJob:
        picture = needed[key].image
        pixels = picture.pixels or self._pixels.get(picture.digest)
        if pixels is None:
            raise _EncodingError("a picture of this request did not reach the engine")
        self.cache.evict(needed, self._feature_bytes(picture))
        return _EncodeJob(key, self._encode(replace(picture, pixels=pixels)), is_retry)

    def _encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """What the tower says, if it can be used."""
        assert self._tower is not None
        features = yield from self._tower.encode(image)
        if features.shape != (image.num_tokens, self._tower.feature_size):
            raise _EncodingError(
                f"a picture of {image.num_tokens} tokens has features of the shape {tuple(features.shape)}"
            )
        if not bool(torch.isfinite(features).all()):
            raise _EncodingError("the features of a picture are not finite", NONFINITE)
        return features.clone()  # they may be a part of something larger

    def _store(self, key: FeatureKey, features: Tensor) -> None:
        self._job = None
        self.cache.put(key, features)
        self.num_encoded += 1
        self._encoded_tokens += len(features)
