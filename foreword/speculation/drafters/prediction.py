"""Predicted outputs: drafts from the text that the user expects, resynchronized after each difference."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Container, Sequence, Set

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter

UNLIMITED = 1 << 30
MAX_NGRAM = 3
# (n-gram size, min and max offset from the anchor) to search in, most reliable first
RESYNC_WINDOWS = ((MAX_NGRAM, -UNLIMITED, UNLIMITED), (2, -64, 128), (1, 1, 8))
NEAR_OFFSETS = range(1, 9)  # distances from the anchor
FORWARD_PREFERENCE = 4  # a match ahead wins unless it is this many times farther than one before the anchor
ANCHOR_MATCH_LEN = 4  # matched tokens that make a position the new anchor
MAX_DRAFT_LEN = 64
ENCODING = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
# P(next token accepted) by matched tokens so far (1, 2, ...): measured on the Python standard library with
# lines, words and names changed, inserted, deleted and moved. Matches just after the anchor are mostly right.
RAMP_NEAR = (0.65, 0.93, 0.97, 0.98, 0.985, 0.985, *(0.99,) * 9, 0.995)
RAMP_FAR = (0.1, 0.38, 0.52, 0.73, 0.84, 0.92, 0.95, 0.97, 0.97, 0.98, *(0.985,) * 3, 0.99, 0.99, 0.995)
CONFIDENCE = {
    near: (*ramp, *ramp[-1:] * MAX_DRAFT_LEN) for near, ramp in ((True, RAMP_NEAR), (False, RAMP_FAR))
}


class _PredictionCursor:
    """Position of an output in its prediction.

    Tokens are searched as characters of a string, which is cheaper than an index.
    """

    def __init__(self, prediction_ids: Sequence[int], num_seen: int, never_sampled_ids: Set[int]) -> None:
        self.prediction_ids = prediction_ids
        self.num_seen = num_seen  # known tokens so far, prompt included
        self.cursor: int | None = 0  # index in the prediction of the next token; None: lost
        self.match_len = 0  # tokens before the cursor that equal the end of the output
        self.near = True  # the cursor was found just after the anchor
        self.anchor = 0  # the last reliable cursor
        self._chars = _to_chars(prediction_ids)
        self._recent = ""
        self._never_sampled_at = [
            i for i, token_id in enumerate(prediction_ids) if token_id in never_sampled_ids
        ]

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow new tokens of the output."""
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
        """The prediction from the cursor on, up to a never-sampled id."""
        if self.cursor is None:
            return ()
        next_never = bisect_left(self._never_sampled_at, self.cursor)
        ends = [self.cursor + max_tokens, *self._never_sampled_at[next_never : next_never + 1]]
        return self.prediction_ids[self.cursor : min(ends)]

    def confidence(self, draft_len: int) -> tuple[float, ...]:
        """P(accepted | those before accepted) of each of the next tokens."""
        first = min(self.match_len, len(RAMP_NEAR)) - 1
        return CONFIDENCE[self.near][max(first, 0) :][:draft_len]

    def _extend_match(self, run: str) -> None:
        assert self.cursor is not None
        self._recent = (self._recent + run)[-MAX_NGRAM:]
        self.match_len += len(run)
        self._set_cursor(self.cursor + len(run))

    def _resync(self) -> None:
        """Search the newest tokens in the prediction: the longest n-gram, at its match nearest the anchor."""
        self.cursor, self.match_len = None, 0
        for size, min_offset, max_offset in RESYNC_WINDOWS:
            if len(self._recent) < size:
                continue
            position = _find_nearest(self._chars, self._recent[-size:], self.anchor, min_offset, max_offset)
            if position is not None:
                self.match_len = size
                self.near = position - self.anchor in NEAR_OFFSETS
                self._set_cursor(position)
                return

    def _set_cursor(self, position: int) -> None:
        self.cursor = position
        if self.match_len >= ANCHOR_MATCH_LEN:
            self.anchor = position


def _to_chars(token_ids: Sequence[int]) -> str:
    """One character per token."""
    return array("I", token_ids).tobytes().decode(ENCODING, "surrogatepass")


def _find_nearest(text: str, ngram: str, anchor: int, min_offset: int, max_offset: int) -> int | None:
    """End of the n-gram's nearest match within the offsets from the anchor, preferring matches after it."""
    size = len(ngram)
    after = text.find(ngram, max(anchor + max(min_offset, 0) - size, 0), anchor + max_offset)
    before = -1
    if min_offset < 0:
        before = text.rfind(ngram, max(anchor + min_offset - size, 0), max(anchor - 1, 0))
    if after < 0 or (before >= 0 and after + size - anchor > FORWARD_PREFERENCE * (anchor - before - size)):
        return before + size if before >= 0 else None
    return after + size


class PredictionDrafter(EngineDrafter):
    """Drafts from each request's prediction, from its first token on."""

    name = "prediction"

    def __init__(self, never_sampled_ids: Set[int] = frozenset()) -> None:
        self._never_sampled_ids = never_sampled_ids
        self._cursors: dict[str, _PredictionCursor] = {}

    def start(self, state: RequestState) -> bool:
        prediction = state.request.prediction_ids
        if prediction:
            self._cursors[state.id] = _PredictionCursor(prediction, state.num_prompt, self._never_sampled_ids)
        return bool(prediction)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._cursors.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._cursors)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        cursor = self._cursors.get(request.state.id)
        if cursor is None:
            return None
        cursor.advance(request.state.tokens[cursor.num_seen :])
        token_ids = tuple(cursor.next_tokens(min(request.max_draft_tokens, MAX_DRAFT_LEN)))
        return Draft(token_ids, self.name, cursor.confidence(len(token_ids))) if token_ids else None
