"""What a draft model has computed of one request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.core.positions import RopePositions
from foreword.core.request import Request, RequestState
from foreword.drafting.base import Ask
from foreword.kernels.ops import DraftSampling
from foreword.sampling.steps import filters_of, is_plain

__all__ = ["Track"]


@dataclass(slots=True)
class Track:
    """The KV cache holds what lies between origin and the end of `guessed`, at positions counted from origin.

    |<-- not read -->|<-------- computed -------->|<-- guessed -->|     indices in the text
                     origin                       known
    |<---------------------- the text --------------------->|
                                                         length

    The text is what the model reads: all tokens of the request, or, for a model that sees nothing, all but those of pictures.

    skipped   tokens of pictures that are left out of the text
    prompt    without them; empty: nothing was left out
    sights    index behind the last picture that the model is shown; 0: none
    places    where its tokens stand if it is shown any and reads from the beginning, for models that know several directions
    asked     somebody wanted a guess
    served    number of the last propose() that computed something of it
    guessed   what was guessed and computed beyond the known tokens, not yet compared with the text
    blocks    block ids that hold its KV, in order of position
    sampling  seed, temperature and filters of the request
    plain     it asked for no other step of the pipeline
    """

    sampling: DraftSampling
    plain: bool
    skipped: int = 0
    prompt: Sequence[int] = ()
    sights: int = 0
    places: RopePositions | None = None
    asked: bool = False
    length: int = 0
    origin: int = 0
    known: int = 0
    served: int = 0
    guessed: tuple[int, ...] = ()
    blocks: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, state: RequestState, vocab_size: int, sees: bool = False) -> Track:
        """Of a request that begins, for a model with logits of this width that sees pictures or not."""
        sampling, plain = filters_of(state.request, vocab_size), is_plain(state.request)
        pictures = state.request.pictures
        if sees or not pictures:
            return cls(sampling, plain, sights=pictures[-1].end if pictures else 0, places=state.positions)
        prompt = _without_pictures(state.request)
        return cls(sampling, plain, state.num_prompt - len(prompt), prompt)

    @property
    def backlog(self) -> int:
        """Known tokens that are not computed."""
        return self.length - self.known

    def tokens_from(self, ask: Ask, index: int) -> Sequence[int]:
        """The text from an index on."""
        if index >= len(self.prompt):
            return ask.tokens_from(index + self.skipped)
        return [*self.prompt[index:], *ask.tokens_from(len(self.prompt) + self.skipped)]

    def follow(self, ask: Ask) -> None:
        """Keep the guesses that came true, and never the last known token: its row yields the first guess."""
        self.length = ask.length - self.skipped
        if self.guessed:
            for guess, token_id in zip(self.guessed, self.tokens_from(ask, self.known), strict=False):
                if guess != token_id:
                    break
                self.known += 1
            self.guessed = ()
        self.known = max(min(self.known, self.length - 1), self.origin)  # there may be no text but pictures

    def begin_at(self, origin: int) -> None:
        """Forget what was computed and the blocks, which the caller has released; the text is read from `origin` on."""
        if origin > self.origin:
            self.places = None
        self.origin = self.known = origin
        self.guessed = ()
        del self.blocks[:]


def _without_pictures(request: Request) -> tuple[int, ...]:
    """The prompt as it is read by a model that sees nothing."""
    ends = (0, *(picture.end for picture in request.pictures))
    starts = (*(picture.start for picture in request.pictures), len(request.prompt_ids))
    return tuple(token_id for end, start in zip(ends, starts, strict=True) for token_id in request.prompt_ids[end:start])
