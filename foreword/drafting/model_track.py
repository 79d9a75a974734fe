"""What a draft model has computed of one request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.core.positions import MRopePositions
from foreword.core.request import Request, RequestState
from foreword.drafting.base import DraftRequest
from foreword.kernels.ops import DraftSamplingParams
from foreword.sampling.steps import draft_sampling_params, only_filters

__all__ = ["DraftState"]


@dataclass(slots=True)
class DraftState:
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

    sampling: DraftSamplingParams
    is_simple: bool
    num_skipped_image_tokens: int = 0
    text_prompt_ids: Sequence[int] = ()
    last_image_end: int = 0
    mrope_positions: MRopePositions | None = None
    was_requested: bool = False
    length: int = 0
    window_start: int = 0
    num_computed: int = 0
    last_used: int = 0
    draft_ids: tuple[int, ...] = ()
    block_table: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def from_state(cls, state: RequestState, vocab_size: int, is_multimodal: bool = False) -> DraftState:
        """Of a request that begins, for a model with logits of this width that sees pictures or not."""
        sampling, plain = draft_sampling_params(state.request, vocab_size), only_filters(state.request)
        pictures = state.request.images
        if is_multimodal or not pictures:
            return cls(sampling, plain, last_image_end=pictures[-1].end if pictures else 0, mrope_positions=state.mrope_positions)
        prompt = _text_only_prompt(state.request)
        return cls(sampling, plain, state.num_prompt - len(prompt), prompt)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not computed."""
        return self.length - self.num_computed

    def tokens_from(self, request: DraftRequest, index: int) -> Sequence[int]:
        """The text from an index on."""
        if index >= len(self.text_prompt_ids):
            return request.tokens_from(index + self.num_skipped_image_tokens)
        return [*self.text_prompt_ids[index:], *request.tokens_from(len(self.text_prompt_ids) + self.num_skipped_image_tokens)]

    def sync(self, request: DraftRequest) -> None:
        """Keep the guesses that came true, and never the last known token: its row yields the first guess."""
        self.length = request.num_tokens - self.num_skipped_image_tokens
        if self.draft_ids:
            for guess, token_id in zip(self.draft_ids, self.tokens_from(request, self.num_computed), strict=False):
                if guess != token_id:
                    break
                self.num_computed += 1
            self.draft_ids = ()
        self.num_computed = max(min(self.num_computed, self.length - 1), self.window_start)  # there may be no text but pictures

    def reset_at(self, window_start: int) -> None:
        """Forget what was computed and the blocks, which the caller has released; the text is read from `origin` on."""
        if window_start > self.window_start:
            self.mrope_positions = None
        self.window_start = self.num_computed = window_start
        self.draft_ids = ()
        del self.block_table[:]


def _text_only_prompt(request: Request) -> tuple[int, ...]:
    """The prompt as it is read by a model that sees nothing."""
    ends = (0, *(picture.end for picture in request.images))
    starts = (*(picture.start for picture in request.images), len(request.prompt_ids))
    return tuple(token_id for end, start in zip(ends, starts, strict=True) for token_id in request.prompt_ids[end:start])
