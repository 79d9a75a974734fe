"""Image encoding: the vision encoder runs a piece at a time between decode steps, and features are cached.

An image is encoded alone, once for all requests that show it. Its features are kept while a running request
needs them, and then within a memory bound. The cost of a piece counts as rows of the decoder.
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
from foreword.engine.fault_isolation import NONFINITE
from foreword.engine.timers import StepTimer
from foreword.errors import InvalidRequest, RequestFailed
from foreword.kernels.gpu import is_device_lost
from foreword.models.interfaces import VisionEncoder

logger = logging.getLogger(__name__)

STAGE: Final = "encode"  # label of the step timer and of faults
ERROR_FIELD = "messages"  # the request field that images come from
DIGEST_BYTES = 16

FeatureKey = tuple[str, bytes]  # cache salt and digest: timing does not reveal other tenants' images


class EncoderCache:
    """LRU cache of image features within a memory bound; needed features are never evicted."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._features: OrderedDict[FeatureKey, Tensor] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._features

    def __getitem__(self, key: FeatureKey) -> Tensor:
        """Features [num_tokens, width], marked as used."""
        self._features.move_to_end(key)
        return self._features[key]

    def put(self, key: FeatureKey, features: Tensor) -> None:
        """Add features; evict() restores the bound."""
        assert key not in self._features, "the image is encoded twice"
        self._features[key] = features
        self.num_bytes += features.nbytes

    def needed_bytes(self, needed: Container[FeatureKey]) -> int:
        return sum(features.nbytes for key, features in self._features.items() if key in needed)

    def evict(self, needed: Container[FeatureKey], room_bytes: int = 0) -> None:
        """Evict features that are not needed until `room_bytes` more fit."""
        for key in list(self._features):
            if self.num_bytes <= self.max_bytes - room_bytes:
                return
            if key not in needed:
                self.num_bytes -= self._features.pop(key).nbytes

    def check(self) -> None:
        assert self.num_bytes == sum(features.nbytes for features in self._features.values())


def feature_key(state: RequestState, image: PromptImage) -> FeatureKey:
    return state.request.cache_salt, image.digest


def pending_images(state: RequestState, start: int) -> Sequence[PromptImage]:
    """Images with tokens at or after index `start`."""
    images = state.request.images
    if not images or images[-1].end <= start:  # the common case: it decodes
        return ()
    return [image for image in images if image.end > start]


def check_images(request: Request, placeholder_id: int | None, mrope: bool) -> None:
    """Check that images and placeholders match, in order; Request.check_bounds() has passed.

    placeholder_id  None: the model has no vision encoder
    Raises InvalidRequest.
    """
    ids, images = request.prompt_ids, request.images
    if not images and (placeholder_id is None or placeholder_id not in ids):
        return
    if placeholder_id is None:
        raise InvalidRequest("the model has no vision encoder and takes no images", ERROR_FIELD)
    if request.pooling is not None:
        raise InvalidRequest("prompts with images cannot be embedded; send text only", ERROR_FIELD)
    previous_end = 0
    for image in images:
        error = _image_error(image, mrope)
        if error is None and image.start < previous_end:
            error = f"image at token {image.start} overlaps another"
        if error is None and ids[image.start : image.end].count(placeholder_id) != image.num_tokens:
            error = f"image at token {image.start} needs {image.num_tokens} placeholder tokens there"
        if error is not None:
            raise InvalidRequest(error, ERROR_FIELD)
        previous_end = image.end
    is_spare = ids.count(placeholder_id) != sum(image.num_tokens for image in images)
    if is_spare or placeholder_id in request.resume_output_ids:
        raise InvalidRequest(f"token id {placeholder_id} is reserved for image placeholders", "prompt")


def _image_error(image: PromptImage, mrope: bool) -> str | None:
    if len(image.digest) != DIGEST_BYTES:
        return f"an image digest has {len(image.digest)} bytes, needs {DIGEST_BYTES}"
    if image.pixels is not None and len(image.pixels) != image.num_bytes:
        return f"an image of shape {image.shape} has {len(image.pixels)} bytes of pixels"
    if mrope and math.prod(image.grid_thw) != image.num_tokens:
        return f"an image of grid {image.grid_thw} has {image.num_tokens} tokens"
    return None


OnBatch = Callable[[Sequence[RequestState]], None]
NumComputed = Callable[[RequestState], int]


@dataclass(slots=True)
class _ImageNeed:
    """An image, and by rank the running requests with uncomputed rows of it."""

    image: PromptImage
    states: list[RequestState]


@dataclass(frozen=True, slots=True)
class _EncodeJob:
    """The image being encoded."""

    key: FeatureKey
    pieces: Generator[int, None, Tensor]
    is_retry: bool


@dataclass(frozen=True, slots=True)
class EncodeFailure:
    """An image that cannot be encoded, and the requests that fail with it."""

    states: tuple[RequestState, ...]
    error: RequestFailed
    stage: str  # the fault label


class _EncodingError(Exception):
    """No features; the message is for the caller."""

    def __init__(self, message: str, stage: str = STAGE) -> None:
        super().__init__(message)
        self.stage = stage


class VisionEncoderRunner:
    """A vision encoder with its feature cache and the image it is working on."""

    def __init__(
        self,
        encoder: VisionEncoder | None,
        cache: EncoderCache,
        row_cost: int,  # multiply-adds that take as long as one decoder row
        max_lookahead: int,  # rows: images this far ahead of a request are encoded
        value_bytes: int,  # size of one feature value
        timer: StepTimer,
        num_computed: NumComputed = lambda state: state.num_computed,  # tokens of a request, per model
    ) -> None:
        self.cache = cache
        self.cost_rows = 0  # cost of the last step()
        self.num_encoded = 0
        self.num_hits = 0  # images of requests that needed no encoding of their own
        self._encoder = encoder
        self._row_cost = max(row_cost, 1)
        self._max_lookahead = max_lookahead
        self._value_bytes = value_bytes
        self._timer = timer
        self._num_computed = num_computed
        self._pixels: dict[bytes, bytes] = {}  # by digest
        self._job: _EncodeJob | None = None
        self._encoded_cost = 0  # multiply-adds so far, and the image tokens they yielded
        self._encoded_tokens = 0

    def for_draft_model(self, encoder: VisionEncoder, num_computed: NumComputed) -> VisionEncoderRunner:
        """A runner for the draft model's encoder: it shares the pixels, and gets a part of the memory."""
        assert self._encoder is not None, "a multimodal draft model needs a multimodal target"
        sizes = encoder.feature_size + self._encoder.feature_size
        max_bytes = self.cache.max_bytes * encoder.feature_size // sizes
        self.cache.max_bytes -= max_bytes
        runner = VisionEncoderRunner(
            encoder,
            EncoderCache(max_bytes),
            self._row_cost,
            self._max_lookahead,
            self._value_bytes,
            self._timer,
            num_computed,
        )
        runner._pixels = self._pixels
        return runner

    def add_pixels(self, digest: bytes, pixels: bytes) -> None:
        """Keep pixels: later requests with this image may come without them."""
        self._pixels[digest] = pixels

    def drop_pixels(self, digest: bytes) -> None:
        self._pixels.pop(digest, None)

    def computable_until(self, state: RequestState, start: int) -> int:
        """Index of the first token at or after `start` that needs an image not yet encoded."""
        if state.request.images:
            for image in pending_images(state, start):
                if feature_key(state, image) not in self.cache:
                    return max(image.start, start)
        return len(state.tokens)

    def remaining_cost(self, state: RequestState, start: int) -> int:
        """Estimated multiply-adds to encode the request's images after index `start`."""
        num_tokens = sum(
            image.num_tokens
            for image in pending_images(state, start)
            if feature_key(state, image) not in self.cache
        )
        return num_tokens * self._encoded_cost // max(self._encoded_tokens, 1)

    def is_pending(self, running: Sequence[RequestState]) -> bool:
        """Whether a running request needs an image that is not encoded."""
        return any(key not in self.cache for key in self._needed_images(running))

    def features(self, state: RequestState, start: int, end: int) -> list[tuple[int, Tensor]]:
        """Features of the image tokens in [start, end), as (offset from `start`, [rows, width])."""
        if start < state.num_prompt:
            for image in state.request.images:
                if image.end <= start:  # skipped: its tokens were found in the prefix cache
                    self._count_use(state, image, is_encoded=True)
        parts = []
        for image in pending_images(state, start):
            first, last = max(image.start, start), min(image.end, end)
            if first < last:
                features = self.cache[feature_key(state, image)]
                self._count_use(state, image, is_encoded=True)
                parts.append((first - start, features[first - image.start : last - image.start]))
        return parts

    def step(self, running: Sequence[RequestState], max_rows: int, on_batch: OnBatch) -> EncodeFailure | None:
        """Encode images of running requests by rank, at least one piece, until it has cost `max_rows`.

        on_batch  called before each piece with its requests; they are blamed if the process crashes
        Returns the first failure; later images wait. Raises if the device is lost.
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
        """Drop an unneeded job, and features beyond the bound."""
        needed = self._needed_images(running)
        if self._job is not None and self._job.key not in needed:
            self._job = None
        self.cache.evict(needed)

    def check(self, running: Sequence[RequestState]) -> None:
        """Assert the invariants between steps."""
        self.cache.check()
        needed = self._needed_images(running)
        assert self._job is None or self._job.key in needed, "the image being encoded is not needed"
        assert self.cache.num_bytes <= self.cache.max_bytes or any(key in self.cache for key in needed)

    # Order

    def _needed_images(self, running: Sequence[RequestState]) -> dict[FeatureKey, _ImageNeed]:
        """Images that running requests need within the lookahead, by rank."""
        needed: dict[FeatureKey, _ImageNeed] = {}
        if self._encoder is None:
            return needed
        for state in running:
            num_computed = self._num_computed(state)
            for image in pending_images(state, num_computed):
                if image.start < num_computed + self._max_lookahead:
                    need = needed.setdefault(feature_key(state, image), _ImageNeed(image, []))
                    need.states.append(state)
        return needed

    def _count_hits(self, needed: Mapping[FeatureKey, _ImageNeed]) -> None:
        """All requests but the first that needs an image find it encoded."""
        for key, need in needed.items():
            is_encoded = key in self.cache or (self._job is not None and self._job.key == key)
            for state in need.states:
                self._count_use(state, need.image, is_encoded)
                is_encoded = True

    def _count_use(self, state: RequestState, image: PromptImage, is_encoded: bool) -> None:
        """Count each image of a request once, also after a preemption or an engine restart."""
        if image.digest not in state.counted_images:
            state.counted_images.add(image.digest)
            self.num_hits += is_encoded and not state.request.is_resumed

    def _next_key(self, needed: Mapping[FeatureKey, _ImageNeed]) -> FeatureKey | None:
        """The current job's image, or the next that fits into memory; the first is encoded regardless."""
        if self._job is not None and self._job.key in needed:
            return self._job.key
        self._job = None
        for index, (key, need) in enumerate(needed.items()):
            if key not in self.cache:
                num_bytes = self.cache.needed_bytes(needed) + self._feature_bytes(need.image)
                return key if index == 0 or num_bytes <= self.cache.max_bytes else None
        return None

    def _feature_bytes(self, image: PromptImage) -> int:
        assert self._encoder is not None, "an image for a model without a vision encoder"
        return image.num_tokens * self._encoder.feature_size * self._value_bytes

    # Encode

    def _encode_piece(self, key: FeatureKey, needed: Mapping[FeatureKey, _ImageNeed]) -> int:
        """Continue with an image, and return the multiply-adds. After its first error it is retried."""
        job = self._job = self._job or self._start_job(key, needed, is_retry=False)
        try:
            with torch.inference_mode():
                cost = next(job.pieces)
            self._encoded_cost += cost
            return cost
        except StopIteration as end:
            self._job = None
            self.cache.put(key, end.value)
            self.num_encoded += 1
            self._encoded_tokens += len(end.value)
            return 0
        except _EncodingError:
            raise
        except Exception as error:
            if is_device_lost(error):
                raise
            if job.is_retry:
                logger.exception("image encoding failed for %d requests", len(needed[key].states))
                raise _EncodingError(f"internal error in stage {STAGE}; see the server's log") from error
        # The error is freed by now, and with it the memory of the failed pass
        self.cache.evict(needed, self.cache.max_bytes)
        self._job = self._start_job(key, needed, is_retry=True)
        return 0

    def _start_job(
        self, key: FeatureKey, needed: Mapping[FeatureKey, _ImageNeed], is_retry: bool
    ) -> _EncodeJob:
        image = needed[key].image
        pixels = image.pixels or self._pixels.get(image.digest)
        if pixels is None:
            raise _EncodingError("the pixels of an image did not reach the engine")
        self.cache.evict(needed, self._feature_bytes(image))
        return _EncodeJob(key, self._encode(replace(image, pixels=pixels)), is_retry)

    def _encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Run the encoder and check its features."""
        assert self._encoder is not None
        features = yield from self._encoder.encode(image)
        if features.shape != (image.num_tokens, self._encoder.feature_size):
            raise _EncodingError(
                f"an image of {image.num_tokens} tokens has features of shape {tuple(features.shape)}"
            )
        if not bool(torch.isfinite(features).all()):
            raise _EncodingError("the features of an image are not finite", NONFINITE)
        return features.clone()  # they may be a view of a larger tensor
