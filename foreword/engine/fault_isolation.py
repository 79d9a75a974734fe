"""An error stays with the work it belongs to: what fails is done again in halves, until it is known who fails alone, twice.

That is allowed because a pass changes nothing but the KV of its own rows, and writes the same again; and it changes no
token, because no row depends on the others. So an error that passes, or an allocation that fails for the size of the step
alone, ends nobody.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import torch

from foreword.core.batch import NULL_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.schedule import ScheduledRequest
from foreword.engine.timers import StepTimer
from foreword.errors import ForewordError, RequestFailed

__all__ = ["NONFINITE", "FaultIsolation", "is_device_lost"]

logger = logging.getLogger(__name__)

NONFINITE: Final = "nonfinite"
MAX_FAILED_STEPS: Final = 16  # passes in a row that yield nothing but errors, though a harmless one works
DEVICE_LOST_ERRORS: Final = (
    "illegal",
    "unspecified launch failure",
    "misaligned",
    "device-side assert",
    "uncorrectable",
    "hardware stack",
)


class StepResult(Protocol):
    """What a pass yields for one piece of work; a RequestFailed where its numbers are none."""

    @property
    def error(self) -> ForewordError | None: ...


R = TypeVar("R", bound=StepResult)


class FaultIsolation(Generic[R]):
    """One of the passes of a step, kept from ending more than the requests that it fails for.

    compute    the pass: one result for each piece of work
    announce   told what is to be computed next: if it ends the process, that was it
    failed     the result of work that fails alone
    pooling    of the request by which it is tried whether the pass works at all
    faults     errors kept to their request, by stage; shared by all passes
    disturbed  the last run had to be done again, in whole or in part
    """

    def __init__(
        self,
        compute: Callable[[Sequence[ScheduledRequest]], Sequence[R]],
        on_batch: Callable[[Sequence[ScheduledRequest]], None],
        make_failed: Callable[[RequestFailed], R],
        pooling: str | None,
        timer: StepTimer,
        faults: Counter[str],
    ) -> None:
        self.was_retried = False
        self._compute = compute
        self._on_batch = on_batch
        self._make_failed = make_failed
        self._pooling = pooling
        self._timer = timer
        self._faults = faults
        self._failed_steps = 0

    def run(self, requests: Sequence[ScheduledRequest]) -> list[R]:
        """One result for each piece of work, each what it would be without the others.

        Raises what cannot be blamed on any request: the device is lost, or nothing works at all.
        """
        self.was_retried = False
        results = self._run(requests)
        if any(result.error is None for result in results):
            self._failed_steps = 0
        elif any(isinstance(result.error, RequestFailed) for result in results):
            self._health_check()
        return results

    def _run(self, requests: Sequence[ScheduledRequest]) -> list[R]:
        results = self._try(requests)
        if results is not None:
            return list(results)
        if len(requests) == 1:
            return [self._retry_single(requests)]
        middle = len(requests) // 2
        return [*self._run(requests[:middle]), *self._run(requests[middle:])]

    def _try(self, requests: Sequence[ScheduledRequest]) -> Sequence[R] | None:
        """The results, or None. The error is let go before anything else is tried: it holds the memory of its pass."""
        try:
            return self._compute_checked(requests)
        except Exception as error:
            self._recover(requests, error)
            return None

    def _retry_single(self, requests: Sequence[ScheduledRequest]) -> R:
        """Once more, for what does not happen again is nobody's fault. Then it is this request's."""
        try:
            return self._compute_checked(requests)[0]
        except Exception as error:
            self._recover(requests, error)
            return self._fail_request(requests[0].state.id)

    def _recover(self, requests: Sequence[ScheduledRequest], error: Exception) -> None:
        """After an error, begin anew. Raises it if the device is lost: it answers with errors for ever."""
        if is_device_lost(error):
            raise error
        if isinstance(error, torch.OutOfMemoryError):
            logger.warning(
                "a step of %d requests ran out of memory and is done in parts: %s", len(requests), error
            )
        self.was_retried = True
        _reset_state(requests)

    def _compute_checked(self, requests: Sequence[ScheduledRequest]) -> Sequence[R]:
        self._on_batch(requests)
        results = self._compute(requests)
        if len(results) != len(requests):
            raise RuntimeError(f"{len(results)} results of {len(requests)} pieces of work")
        for result in results:
            if isinstance(result.error, RequestFailed):
                self._faults[NONFINITE] += 1
        return results

    def _fail_request(self, request_id: str) -> R:
        """The error being handled is this request's own."""
        stage = self._timer.current_stage
        self._faults[stage] += 1
        logger.exception("request %s ends by an error of ours (%s); others go on", request_id, stage)
        return self._make_failed(
            RequestFailed(f"an error of ours ended this request ({stage}); the server's log tells more")
        )

    def _health_check(self) -> None:
        """Nobody got anything: is it really they who fail? Raises if a harmless request fails as well."""
        self._failed_steps += 1
        (result,) = self._compute([_dummy_request(self._pooling)])
        if result.error is not None:
            raise RuntimeError(
                "a request that nobody sent fails as well: the engine is broken"
            ) from result.error
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{self._failed_steps} steps in a row yielded nothing but errors")


def is_device_lost(error: Exception) -> bool:
    """Whatever is tried now would fail as well. Triton has no class of its own for what the driver tells it."""
    told = str(error)
    if told.startswith("Triton Error"):
        return any(one in told for one in DEVICE_LOST_ERRORS)
    return isinstance(error, torch.AcceleratorError) and "out of memory" not in told


def _reset_state(requests: Sequence[ScheduledRequest]) -> None:
    """What an interrupted pass may have left half done is made anew from the tokens."""
    for work in requests:
        work.state.penalty_state = None
        if work.state.grammar is not None:
            work.state.grammar.reset()


def _dummy_request(pooling: str | None) -> ScheduledRequest:
    """One token of a request that nobody sent. Its KV lies in the scratch block."""
    request = Request("nobody", (0,), SamplingParams(temperature=0.0, max_tokens=1), seed=0, pooling=pooling)
    state = RequestState(request, 0, 2)
    state.blocks = [NULL_BLOCK]
    return ScheduledRequest(state, 0, 1, is_sampled=pooling is None)
