"""Predicted outputs: drafts from the text that the caller expects, and finds its place again after an edit."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Container, Sequence, Set

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import Ask

__all__ = ["PredictionDrafter"]

ANYWHERE = 1 << 30
LONGEST_GRAM = 3
# n-grams by which a place is found again, the surest first, and how far from the last sure place each is believed
REACH = ((LONGEST_GRAM, -ANYWHERE, ANYWHERE), (2, -64, 128), (1, 1, 8))
JUST_AHEAD = range(1, 9)
AHEAD = 4  # a place so many times farther ahead than another lies behind is still the likelier one
SURE = 4  # tokens in agreement from which on a place is the one to look from when it is lost
LONGEST_DRAFT = 64
ENCODING = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
# How often the next token was right, by tokens in agreement so far (1, 2, ...): measured on the Python standard library with
# lines, words and names changed, put in, left out and moved. Places just ahead of the last sure one are mostly right.
NEAR = (0.65, 0.93, 0.97, 0.98, 0.985, 0.985, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.995)
FAR = (0.1, 0.38, 0.52, 0.73, 0.84, 0.92, 0.95, 0.97, 0.97, 0.98, 0.985, 0.985, 0.985, 0.99, 0.99, 0.995)
CONFIDENCE = {near: (*ramp, *ramp[-1:] * LONGEST_DRAFT) for near, ramp in ((True, NEAR), (False, FAR))}


class _Follower:
    """Where an output stands in the text that was predicted for it.

    Tokens are searched for as characters of a string, which costs less than to index them would.

    text    the prediction, as token ids
    seen    known tokens that were followed, prompt included
    cursor  index in `text` of what should come next; None: the place is lost
    agreed  tokens before the cursor that output and text have in common, as far as is known
    near    the place was found just ahead of the last sure one
    anchor  the last sure place
    """

    __slots__ = ("_characters", "_fences", "_newest", "agreed", "anchor", "cursor", "near", "seen", "text")

    def __init__(self, text: Sequence[int], seen: int, never: Set[int]) -> None:
        self.text = text
        self.seen = seen
        self.cursor: int | None = 0
        self.agreed = 0
        self.near = True
        self.anchor = 0
        self._characters = _characters(text)
        self._newest = ""
        self._fences = [] if never.isdisjoint(text) else [place for place, token_id in enumerate(text) if token_id in never]

    def follow(self, token_ids: Sequence[int]) -> None:
        """The output goes on."""
        self.seen += len(token_ids)
        run = _characters(token_ids)
        if self.cursor is not None and self._characters.startswith(run, self.cursor):
            self._agree(run)
            return
        for character in run:
            if self.cursor is not None and self._characters.startswith(character, self.cursor):
                self._agree(character)
            else:
                self._newest = self._newest[1 - LONGEST_GRAM :] + character
                self._find()

    def ahead(self, max_tokens: int) -> Sequence[int]:
        """What the text goes on with, up to a token that is never drafted."""
        if self.cursor is None:
            return ()
        fence = bisect_left(self._fences, self.cursor)
        end = self.cursor + max_tokens
        return self.text[self.cursor : min([end, *self._fences[fence : fence + 1]])]

    def confidence(self, length: int) -> tuple[float, ...]:
        """Probability that each of the next tokens is right where those before it are."""
        ramp = CONFIDENCE[self.near]
        first = min(self.agreed, len(NEAR)) - 1
        return ramp[max(first, 0) :][:length]

    def _agree(self, run: str) -> None:
        assert self.cursor is not None
        self._newest = (self._newest + run)[-LONGEST_GRAM:]
        self.agreed += len(run)
        self._stand(self.cursor + len(run))

    def _find(self) -> None:
        """Look for the newest tokens: the longest n-gram wins, of its places the one nearest to the anchor."""
        self.cursor, self.agreed = None, 0
        for size, least, most in REACH:
            gram = self._newest[-size:]
            place = _nearest(self._characters, gram, self.anchor, least, most) if len(gram) == size else None
            if place is not None:
                self.agreed = size
                self.near = place - self.anchor in JUST_AHEAD
                self._stand(place)
                return

    def _stand(self, place: int) -> None:
        self.cursor = place
        if self.agreed >= SURE:
            self.anchor = place


def _characters(token_ids: Sequence[int]) -> str:
    """A character for each token."""
    return array("I", token_ids).tobytes().decode(ENCODING, "surrogatepass")


def _nearest(text: str, gram: str, anchor: int, least: int, most: int) -> int | None:
    """Where `gram` ends, at least `least` and at most `most` from the anchor; the nearest such place, those ahead preferred."""
    size = len(gram)
    ahead = text.find(gram, max(anchor + max(least, 0) - size, 0), anchor + most)
    behind = text.rfind(gram, max(anchor + least - size, 0), max(anchor - 1, 0)) if least < 0 else -1
    if ahead < 0 or (behind >= 0 and ahead + size - anchor > AHEAD * (anchor - behind - size)):
        return behind + size if behind >= 0 else None
    return ahead + size


class PredictionDrafter:
    """Drafts from the prediction of each request, from its first token on; nothing where there is none.

    never  ids that are not drafted: no token has them, or they stand for images
    """

    name = "prediction"

    def __init__(self, never: Set[int] = frozenset()) -> None:
        self._never = never
        self._followers: dict[str, _Follower] = {}

    def start(self, state: RequestState) -> None:
        text = state.request.prediction_ids
        if text:
            self._followers[state.id] = _Follower(text, state.num_prompt, self._never)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._followers.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._followers)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft | None:
        follower = self._followers.get(ask.state.id)
        if follower is None:
            return None
        follower.follow(ask.tokens_from(follower.seen))
        guess = tuple(follower.ahead(min(ask.max_tokens, LONGEST_DRAFT)))
        return Draft(guess, self.name, follower.confidence(len(guess))) if guess else None
