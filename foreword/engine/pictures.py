"""Pictures of requests: whether they stand where they should, and which rows wait for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreword.cache.features import Key
from foreword.core.pictures import Picture
from foreword.core.request import Request, RequestState
from foreword.errors import InvalidRequest

__all__ = ["check_pictures", "key_of", "to_come"]

FIELD = "messages"  # where pictures came from
DIGEST_BYTES = 16


def key_of(state: RequestState, picture: Picture) -> Key:
    """The name of its features."""
    return state.request.tenant, picture.digest


def to_come(state: RequestState, start: int) -> Sequence[Picture]:
    """Pictures that reach behind its first `start` tokens."""
    pictures = state.request.pictures
    if not pictures or pictures[-1].end <= start:  # as a rule: it decodes
        return ()
    return [picture for picture in pictures if picture.end > start]


def check_pictures(request: Request, placeholder: int | None, directions: bool) -> None:
    """Every placeholder lies in a picture, and every picture on its placeholders, in order.

    placeholder  None: the model sees no pictures
    directions   tokens of a picture know their place in it
    Raises InvalidRequest.
    """
    if not request.pictures and (placeholder is None or placeholder not in request.prompt_ids):
        return
    if placeholder is None:
        raise InvalidRequest("the model sees no pictures", FIELD)
    if request.pooling is not None:
        raise InvalidRequest("prompts with pictures cannot be embedded", FIELD)
    for picture in request.pictures:
        _check_picture(picture, directions)
    _check_places(request, placeholder)


def _check_picture(picture: Picture, directions: bool) -> None:
    if len(picture.digest) != DIGEST_BYTES or picture.num_tokens < 1:
        raise InvalidRequest(f"a picture needs a digest of {DIGEST_BYTES} bytes and a token at least", FIELD)
    if picture.pixels is not None and len(picture.pixels) != picture.num_bytes:
        raise InvalidRequest(f"a picture of the shape {picture.shape} has {len(picture.pixels)} bytes of pixels", FIELD)
    if directions and math.prod(picture.grid) != picture.num_tokens:
        raise InvalidRequest(f"a picture of the grid {picture.grid} has {picture.num_tokens} tokens", FIELD)


def _check_places(request: Request, placeholder: int) -> None:
    ids, before = request.prompt_ids, 0
    for picture in request.pictures:
        if picture.start < before or picture.end > len(ids):
            raise InvalidRequest(f"a picture at token {picture.start} overlaps another, or reaches out of the prompt", FIELD)
        if ids[picture.start : picture.end].count(placeholder) != picture.num_tokens:
            raise InvalidRequest(
                f"the picture at token {picture.start} does not stand on {picture.num_tokens} placeholders", FIELD
            )
        before = picture.end
    spare = ids.count(placeholder) - sum(picture.num_tokens for picture in request.pictures)
    if spare or placeholder in request.delivered_ids:
        raise InvalidRequest(f"token id {placeholder} stands for pictures, and for nothing else", "prompt")
