"""Predicted outputs: drafts from the text that the caller expects, and finds its place again after an edit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import Ask

__all__ = ["PredictionDrafter"]

SIZES = (3, 2, 1)  # n-grams by which a place is found again, the surest first
REACH = {3: (-(1 << 30), 1 << 30), 2: (-64, 128), 1: (1, 8)}  # how far from the last sure place each is believed
AHEAD = 4  # a place so many times farther ahead than another lies behind is still the likelier one
SURE = 4  # tokens in agreement from which on a place is the one to look from when it is lost
LONGEST = 64
# How often the next token was right, by tokens in agreement so far (1, 2, ...): measured on the Python standard library with
# lines, words and names changed, put in, left out and moved. Places just ahead of the last sure one are mostly right.
NEAR = (0.65, 0.93, 0.97, 0.98, 0.985, 0.985, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.995)
FAR = (0.1, 0.38, 0.52, 0.73, 0.84, 0.92, 0.95, 0.97, 0.97, 0.98, 0.985, 0.985, 0.985, 0.99, 0.99, 0.995)
CONFIDENCE = {near: (*ramp, *ramp[-1:] * LONGEST) for near, ramp in ((True, NEAR), (False, FAR))}


class _Follower:
    """Where an output stands in the text that was predicted for it.

    seen    known tokens that were followed, prompt included
    cursor  index in `text` of what should come next; None: the place is lost
    agreed  tokens before the cursor that output and text have in common, as far as is known
    near    the place was found just ahead of the last sure one
    anchor  the last sure place
    """

    __slots__ = ("_fences", "_newest", "_places", "agreed", "anchor", "cursor", "near", "seen", "text")

    def __init__(self, text: Sequence[int], seen: int, never: Container[int]) -> None:
        self.text = text
        self.seen = seen
        self.cursor: int | None = 0
        self.agreed = 0
        self.near = True
        self.anchor = 0
        self._newest: tuple[int, ...] = ()
        self._places: dict[tuple[int, ...], list[int]] | None = None
        self._fences = [place for place, token_id in enumerate(text) if token_id in never]

    def follow(self, token_ids: Sequence[int]) -> None:
        """The output goes on."""
        self.seen += len(token_ids)
        for token_id in token_ids:
            self._newest = (*self._newest[1 - SIZES[0] :], token_id)
            if self.cursor is not None and self.cursor < len(self.text) and self.text[self.cursor] == token_id:
                self.cursor += 1
                self.agreed += 1
            else:
                self._find()
            if self.agreed >= SURE and self.cursor is not None:
                self.anchor = self.cursor

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

    def _find(self) -> None:
        """Look for the newest tokens: the longest n-gram wins, of its places the one nearest to the anchor."""
        self.cursor, self.agreed = None, 0
        places = self._index()
        for size in SIZES:
            found = places.get(self._newest[-size:]) if size <= len(self._newest) else None
            place = None if found is None else _nearest(found, self.anchor)
            if place is not None and REACH[size][0] <= place - self.anchor <= REACH[size][1]:
                self.cursor, self.agreed = place, size
                self.near = REACH[1][0] <= place - self.anchor <= REACH[1][1]
                return

    def _index(self) -> dict[tuple[int, ...], list[int]]:
        """Where each n-gram of the text ends, ascending. Made when a place is first lost: a prediction may come true."""
        if self._places is None:
            self._places = {}
            for size in SIZES:
                for end, gram in enumerate(zip(*(self.text[i:] for i in range(size)), strict=False), start=size):
                    self._places.setdefault(gram, []).append(end)
        return self._places


def _nearest(places: Sequence[int], anchor: int) -> int:
    """Of ascending places the nearest to the anchor, those ahead of it preferred."""
    index = bisect_left(places, anchor)
    if index == len(places):
        return places[-1]
    ahead = places[index]
    if index == 0:
        return ahead
    behind = places[index - 1]
    return ahead if ahead - anchor <= AHEAD * (anchor - behind) else behind


class PredictionDrafter:
    """Drafts from the prediction of each request, from its first token on; nothing where there is none.

    never  ids that are not drafted: no token has them, or they stand for images
    """

    name = "prediction"

    def __init__(self, never: Container[int] = frozenset()) -> None:
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
        guess = tuple(follower.ahead(min(ask.max_tokens, LONGEST)))
        return Draft(guess, self.name, follower.confidence(len(guess))) if guess else None
