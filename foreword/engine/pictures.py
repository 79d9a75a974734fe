"""Pictures of requests: whether they stand where they should, and which rows wait for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreword.cache.features import FeatureKey
from foreword.core.pictures import PromptImage
from foreword.core.request import Request, RequestState
from foreword.errors import InvalidRequest

__all__ = ["check_images", "feature_key", "pending_images"]

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
        raise InvalidRequest(f"a picture needs a digest of {DIGEST_BYTES} bytes and a token at least", ERROR_FIELD)
    if image.pixels is not None and len(image.pixels) != image.num_bytes:
        raise InvalidRequest(f"a picture of the shape {image.shape} has {len(image.pixels)} bytes of pixels", ERROR_FIELD)
    if mrope and math.prod(image.grid_thw) != image.num_tokens:
        raise InvalidRequest(f"a picture of the grid {image.grid_thw} has {image.num_tokens} tokens", ERROR_FIELD)


def _check_placeholders(request: Request, placeholder_id: int) -> None:
    ids, before = request.prompt_ids, 0
    for picture in request.images:
        if picture.start < before or picture.end > len(ids):
            raise InvalidRequest(f"a picture at token {picture.start} overlaps another, or reaches out of the prompt", ERROR_FIELD)
        if ids[picture.start : picture.end].count(placeholder_id) != picture.num_tokens:
            raise InvalidRequest(
                f"the picture at token {picture.start} does not stand on {picture.num_tokens} placeholders", ERROR_FIELD
            )
        before = picture.end
    spare = ids.count(placeholder_id) - sum(picture.num_tokens for picture in request.images)
    if spare or placeholder_id in request.resume_output_ids:
        raise InvalidRequest(f"token id {placeholder_id} stands for pictures, and for nothing else", "prompt")
