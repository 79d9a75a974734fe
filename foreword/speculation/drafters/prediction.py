"""Predicted outputs: drafts from the text that the caller expects, and finds its place again after an edit."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Container, Sequence, Set

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.speculation.base import DraftRequest

__all__ = ["PredictionDrafter"]

UNLIMITED = 1 << 30
MAX_NGRAM = 3
# n-grams by which a place is found again, the surest first, and how far from the last sure place each is believed
RESYNC_WINDOWS = ((MAX_NGRAM, -UNLIMITED, UNLIMITED), (2, -64, 128), (1, 1, 8))
NEAR_OFFSETS = range(1, 9)
FORWARD_PREFERENCE = (
    4  # a place so many times farther ahead than another lies behind is still the likelier one
)
ANCHOR_MATCH_LEN = 4  # tokens in agreement from which on a place is the one to look from when it is lost
MAX_DRAFT_LEN = 64
ENCODING = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
# How often the next token was right, by tokens in agreement so far (1, 2, ...): measured on the Python standard library with
# lines, words and names changed, put in, left out and moved. Places just ahead of the last sure one are mostly right.
CONFIDENCE_NEAR = (
    0.65,
    0.93,
    0.97,
    0.98,
    0.985,
    0.985,
    0.99,
    0.99,
    0.99,
    0.99,
    0.99,
    0.99,
    0.99,
    0.99,
    0.99,
    0.995,
)
CONFIDENCE_FAR = (
    0.1,
    0.38,
    0.52,
    0.73,
    0.84,
    0.92,
    0.95,
    0.97,
    0.97,
    0.98,
    0.985,
    0.985,
    0.985,
    0.99,
    0.99,
    0.995,
)
CONFIDENCE = {
    near: (*ramp, *ramp[-1:] * MAX_DRAFT_LEN)
    for near, ramp in ((True, CONFIDENCE_NEAR), (False, CONFIDENCE_FAR))
}


class _PredictionCursor:
    """Where an output stands in the text that was predicted for it.

    Tokens are searched for as characters of a string, which costs less than to index them would.

    text    the prediction, as token ids
    seen    known tokens that were followed, prompt included
    cursor  index in `text` of what should come next; None: the place is lost
    agreed  tokens before the cursor that output and text have in common, as far as is known
    near    the place was found just ahead of the last sure one
    anchor  the last sure place
    """

    __slots__ = (
        "_chars",
        "_never_sampled_at",
        "_recent",
        "anchor",
        "cursor",
        "match_len",
        "near",
        "num_seen",
        "prediction_ids",
    )

    def __init__(self, prediction_ids: Sequence[int], num_seen: int, never_sampled_ids: Set[int]) -> None:
        self.prediction_ids = prediction_ids
        self.num_seen = num_seen
        self.cursor: int | None = 0
        self.match_len = 0
        self.near = True
        self.anchor = 0
        self._chars = _to_chars(prediction_ids)
        self._recent = ""
        self._never_sampled_at = (
            []
            if never_sampled_ids.isdisjoint(prediction_ids)
            else [place for place, token_id in enumerate(prediction_ids) if token_id in never_sampled_ids]
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """The output goes on."""
        self.num_seen += len(token_ids)
        run = _to_chars(token_ids)
        if self.cursor is not None and self._chars.startswith(run, self.cursor):
            self._extend_match(run)
            return
        for character in run:
            if self.cursor is not None and self._chars.startswith(character, self.cursor):
                self._extend_match(character)
            else:
                self._recent = self._recent[1 - MAX_NGRAM :] + character
                self._resync()

    def next_tokens(self, max_tokens: int) -> Sequence[int]:
        """What the text goes on with, up to a token that is never drafted."""
        if self.cursor is None:
            return ()
        fence = bisect_left(self._never_sampled_at, self.cursor)
        end = self.cursor + max_tokens
        return self.prediction_ids[self.cursor : min([end, *self._never_sampled_at[fence : fence + 1]])]

    def confidence(self, draft_len: int) -> tuple[float, ...]:
        """Probability that each of the next tokens is right where those before it are."""
        ramp = CONFIDENCE[self.near]
        first = min(self.match_len, len(CONFIDENCE_NEAR)) - 1
        return ramp[max(first, 0) :][:draft_len]

    def _extend_match(self, run: str) -> None:
        assert self.cursor is not None
        self._recent = (self._recent + run)[-MAX_NGRAM:]
        self.match_len += len(run)
        self._set_cursor(self.cursor + len(run))

    def _resync(self) -> None:
        """Look for the newest tokens: the longest n-gram wins, of its places the one nearest to the anchor."""
        self.cursor, self.match_len = None, 0
        for size, least, most in RESYNC_WINDOWS:
            gram = self._recent[-size:]
            place = _find_nearest(self._chars, gram, self.anchor, least, most) if len(gram) == size else None
            if place is not None:
                self.match_len = size
                self.near = place - self.anchor in NEAR_OFFSETS
                self._set_cursor(place)
                return

    def _set_cursor(self, position: int) -> None:
        self.cursor = position
        if self.match_len >= ANCHOR_MATCH_LEN:
            self.anchor = position


def _to_chars(token_ids: Sequence[int]) -> str:
    """A character for each token."""
    return array("I", token_ids).tobytes().decode(ENCODING, "surrogatepass")


def _find_nearest(text: str, ngram: str, anchor: int, min_offset: int, max_offset: int) -> int | None:
    """Where `gram` ends, at least `least` and at most `most` from the anchor; the nearest such place, those ahead preferred."""
    size = len(ngram)
    ahead = text.find(ngram, max(anchor + max(min_offset, 0) - size, 0), anchor + max_offset)
    behind = (
        text.rfind(ngram, max(anchor + min_offset - size, 0), max(anchor - 1, 0)) if min_offset < 0 else -1
    )
    if ahead < 0 or (behind >= 0 and ahead + size - anchor > FORWARD_PREFERENCE * (anchor - behind - size)):
        return behind + size if behind >= 0 else None
    return ahead + size


class PredictionDrafter:
    """Drafts from the prediction of each request, from its first token on; nothing where there is none.

    never  ids that are not drafted: no token has them, or they stand for images
    """

    name = "prediction"

    def __init__(self, never_sampled_ids: Set[int] = frozenset()) -> None:
        self._never_sampled_ids = never_sampled_ids
        self._cursors: dict[str, _PredictionCursor] = {}

    def start(self, state: RequestState) -> None:
        text = state.request.prediction_ids
        if text:
            self._cursors[state.id] = _PredictionCursor(text, state.num_prompt, self._never_sampled_ids)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._cursors.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._cursors)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._propose(ask) for ask in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        follower = self._cursors.get(request.state.id)
        if follower is None:
            return None
        follower.advance(request.tokens_from(follower.num_seen))
        guess = tuple(follower.next_tokens(min(request.max_tokens, MAX_DRAFT_LEN)))
        return Draft(guess, self.name, follower.confidence(len(guess))) if guess else None
