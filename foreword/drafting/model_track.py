"""What a draft model has computed of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from foreword.core.request import RequestState
from foreword.drafting.base import Ask
from foreword.kernels.ops import DraftSampling
from foreword.sampling.steps import MinP, Temperature, TopK, TopP, steps_of

__all__ = ["Track"]

FILTERS = (Temperature, TopK, TopP, MinP)


@dataclass(slots=True)
class Track:
    """The KV cache holds what lies between origin and the end of `guessed`, at positions counted from origin.

    |<-- not read -->|<-------- computed -------->|<-- guessed -->|     absolute indices
                     origin                       known
    |<---------------------- the text --------------------->|
                                                         length

    served    number of the last propose() that computed something of it
    guessed   what was guessed and computed beyond the known tokens, not yet compared with the text
    blocks    block ids that hold its KV, in order of position
    sampling  seed, temperature and filters of the request
    plain     it asked for no other step of the pipeline
    """

    sampling: DraftSampling
    plain: bool
    length: int = 0
    origin: int = 0
    known: int = 0
    served: int = 0
    guessed: tuple[int, ...] = ()
    blocks: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, state: RequestState, vocab_size: int) -> Track:
        """Of a request that begins, for a model with logits of this width."""
        params = state.params
        top_k = min(params.top_k, vocab_size)
        sampling = DraftSampling(state.request.seed, params.greedy, params.temperature, top_k, params.top_p, params.min_p)
        return cls(sampling, all(isinstance(step, FILTERS) for step in steps_of(state.request)))

    @property
    def backlog(self) -> int:
        """Known tokens that are not computed."""
        return self.length - self.known

    def follow(self, ask: Ask) -> None:
        """Keep the guesses that came true, and never the last known token: its row yields the first guess."""
        self.length = ask.length
        if self.guessed:
            for guess, token_id in zip(self.guessed, ask.tokens_from(self.known), strict=False):
                if guess != token_id:
                    break
                self.known += 1
            self.guessed = ()
        self.known = min(self.known, self.length - 1)

    def begin_at(self, origin: int) -> None:
        """Forget what was computed and the blocks, which the caller has released; the text is read from `origin` on."""
        self.origin = self.known = origin
        self.guessed = ()
        del self.blocks[:]
