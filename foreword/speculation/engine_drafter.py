"""The engine's own interfaces of drafters; plug-ins have `drafter.py: Drafter`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.core.structured_output import Vocabulary

if TYPE_CHECKING:
    from foreword.cuda_graphs.decode_loop import SupportsDecodeLoop


class DraftRequest(NamedTuple):
    """A request for a draft: a continuation of state.tokens."""

    state: RequestState
    max_draft_tokens: int = 0  # longest useful draft
    min_prob: float = 0.0  # a model-based drafter stops once the product of its confidences is lower

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the index of the first draft token."""
        return len(self.state.tokens)


class NoFiniteLogits(RuntimeError):
    """The logits of a model-based drafter hold NaN or infinity, or no finite value, for some requests."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        super().__init__("its logits are not finite")
        self.request_ids = request_ids


class OnePass(NamedTuple):
    """A pass that drafts all tokens of a request, with a row for each."""

    max_tokens: int
    extra_rows: int  # rows of a request without a draft token

    @property
    def max_rows(self) -> int:
        return self.max_tokens + self.extra_rows


class EngineDrafter(Protocol):
    """A drafter as the engine runs it: built-in ones may read all of a request's state.

    An exception drops the draft and is counted. State is kept by request id between start() and finish();
    a request may be skipped for any number of steps.
    """

    name: str
    is_fallback: bool = False  # not asked where another draft is long and likely right

    @property
    def is_timed(self) -> bool:
        """Whether its next call is timed: its drafts must save more than it takes."""
        return False

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The tokens, for drafters that write text."""
        return

    def prepare(self) -> None:
        """Do work that the first draft would wait for; the engine is idle."""
        return

    def start(self, state: RequestState) -> bool | None:
        """A request begins. False: it gets no draft from here, so this is the last call for it."""
        return None

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        """Forget a request. Called once for every start() that did not return False.

        output  delivered tokens of a completed request, to learn from; empty for an aborted one
        """
        return

    def check(self, live: Container[str]) -> None:
        """Assert that only `live` requests have state."""
        return

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """One draft of at most max_draft_tokens for each request, or None."""


@runtime_checkable
class ModelBasedDrafter(EngineDrafter, Protocol):
    """A drafter that runs a model, so it runs only where that pays.

    propose() returns an empty draft where no token is legal, None where the model does not draft yet, and
    raises NoFiniteLogits.
    """

    one_pass: OnePass | None  # None: each token costs a forward pass

    def num_pending_rows(self, request: DraftRequest) -> int:
        """Rows to compute before the first draft token, at least 1; 0: images are not encoded yet."""

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        """Time one pass over `num_rows` rows, `num_sampled` of them sampled, without changing state."""


@runtime_checkable
class DeviceDrafter(ModelBasedDrafter, Protocol):
    """A drafter whose model can draft in the device decode loop (cuda_graphs/decode_loop.py).

    A request that ends still releases its blocks at once: steps in flight may write them, but only before any
    later work that could reuse them.
    """

    decode_loop_forward: SupportsDecodeLoop | None  # None: the backend or model has no device loop

    def acquire_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """Reserve `num_tokens` more slots for device drafting, if only the last two tokens of each lack KV.

        False: a request is too far behind, does not fit, or is not read from its beginning.
        """

    def reserve_device(self, states: Sequence[RequestState], num_tokens: int) -> bool:
        """Reserve slots for `num_tokens` after the known tokens of each request, without evicting any.

        False: too few blocks, or a request would exceed the context of either model.
        """

    def device_blocks(self, state: RequestState) -> Sequence[int]:
        """The block table of an acquired request."""

    def release_device(self, state: RequestState, num_computed: int) -> None:
        """End device drafting; the cache holds KV of the first `num_computed` tokens."""
