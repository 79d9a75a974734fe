"""The contract of a drafter."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.executor.decode_loop import SupportsDecodeLoop

__all__ = ["DeviceDrafter", "DraftRequest", "Drafter", "ModelBasedDrafter"]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that wants a draft: what may follow state.tokens.

    max_tokens  longest draft that is of use
    worth       a drafter that pays for each token may stop once the product of its confidences is below this
    """

    state: RequestState
    max_tokens: int = 0
    min_prob: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the absolute index of the first one to guess."""
        return len(self.state.tokens)

    def tokens_from(self, index: int) -> list[int]:
        """Known tokens from an absolute index on."""
        return self.state.tokens[index:]


class Drafter(Protocol):
    """Guesses what comes next. A guess is advisory: it may be wrong, short or missing.

    An exception drops the draft, is counted, and never reaches the request. State is kept by
    request id, between start() and finish(); a request may be skipped for any number of steps.
    """

    name: str

    def start(self, state: RequestState) -> None:
        """A request begins."""

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        """A request is over: forget it. Called once for every start().

        output  all that was delivered of an answer that ended by itself, to learn from; empty for one that was given up
        """

    def check(self, live: Container[str]) -> None:
        """Assert that state is kept of `live` requests alone, and that nothing leaked."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """One draft for each ask, of at most its max_tokens; None where there is nothing to guess from."""


@runtime_checkable
class ModelBasedDrafter(Drafter, Protocol):
    """A drafter that runs a model: each token costs a forward pass, so it is asked only where that pays."""

    def num_pending_rows(self, request: DraftRequest) -> int:
        """Rows that its model must compute for this ask before it has a first guess, at least 1; or 0: it was asked before,
        and is still kept from guessing by what others do for it."""

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        """Time one pass over `rows` rows, of which `sampled` are sampled, without touching any request's state."""


@runtime_checkable
class DeviceDrafter(ModelBasedDrafter, Protocol):
    """A drafter whose model can draft in rounds (executor/decode_loop.py), which write to its cache while they run.

    What is lent stays in its books: a request that is over gives its blocks back at once, as ever. Rounds that are under way
    may still write to them, before any work that is launched later and could have got them.

    ahead  drafts in rounds; None: this backend, or this model, cannot
    """

    decode_loop_forward: SupportsDecodeLoop | None

    def acquire_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """Whether all of these can be drafted for in rounds: there is KV for all but their last two tokens, and now there are
        slots for `num_tokens` more. False: one of them is too far behind, does not fit, or is not read from its beginning."""

    def reserve_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """Slots for `num_tokens` behind the known tokens of each; False if there are too few, or if one would come to the end of
        what either model can read. Nobody gives way for it."""

    def device_blocks(self, state: RequestState) -> Sequence[int]:
        """The block table of a request that is lent."""

    def release_device(self, state: RequestState, num_computed: int) -> None:
        """A request is drafted for in rounds no more; its cache holds KV of its first `known` tokens."""
