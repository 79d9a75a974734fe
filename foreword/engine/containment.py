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

from foreword.core.batch import SCRATCH_BLOCK
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.plan import Work
from foreword.engine.stages import Stages
from foreword.errors import ForewordError, RequestFailed

__all__ = ["NONFINITE", "Containment", "is_device_lost"]

logger = logging.getLogger(__name__)

NONFINITE: Final = "nonfinite"
PATIENCE: Final = 16  # passes in a row that yield nothing but errors, though a harmless one works
LOST: Final = ("illegal", "unspecified launch failure", "misaligned", "device-side assert", "uncorrectable", "hardware stack")


class Result(Protocol):
    """What a pass yields for one piece of work; a RequestFailed where its numbers are none."""

    @property
    def error(self) -> ForewordError | None: ...


R = TypeVar("R", bound=Result)


class Containment(Generic[R]):
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
        compute: Callable[[Sequence[Work]], Sequence[R]],
        announce: Callable[[Sequence[Work]], None],
        failed: Callable[[RequestFailed], R],
        pooling: str | None,
        stages: Stages,
        faults: Counter[str],
    ) -> None:
        self.disturbed = False
        self._compute = compute
        self._announce = announce
        self._failed = failed
        self._pooling = pooling
        self._stages = stages
        self._faults = faults
        self._in_vain = 0

    def run(self, works: Sequence[Work]) -> list[R]:
        """One result for each piece of work, each what it would be without the others.

        Raises what cannot be blamed on any request: the device is lost, or nothing works at all.
        """
        self.disturbed = False
        results = self._run(works)
        if any(result.error is None for result in results):
            self._in_vain = 0
        elif any(isinstance(result.error, RequestFailed) for result in results):
            self._doubt()
        return results

    def _run(self, works: Sequence[Work]) -> list[R]:
        results = self._try(works)
        if results is not None:
            return list(results)
        if len(works) == 1:
            return [self._try_alone(works)]
        middle = len(works) // 2
        return [*self._run(works[:middle]), *self._run(works[middle:])]

    def _try(self, works: Sequence[Work]) -> Sequence[R] | None:
        """The results, or None. The error is let go before anything else is tried: it holds the memory of its pass."""
        try:
            return self._checked(works)
        except Exception as error:
            self._recover(works, error)
            return None

    def _try_alone(self, works: Sequence[Work]) -> R:
        """Once more, for what does not happen again is nobody's fault. Then it is this request's."""
        try:
            return self._checked(works)[0]
        except Exception as error:
            self._recover(works, error)
            return self._blame(works[0].state.id)

    def _recover(self, works: Sequence[Work], error: Exception) -> None:
        """After an error, begin anew. Raises it if the device is lost: it answers with errors for ever."""
        if is_device_lost(error):
            raise error
        if isinstance(error, torch.OutOfMemoryError):
            logger.warning("a step of %d requests ran out of memory and is done in parts: %s", len(works), error)
        self.disturbed = True
        _renew(works)

    def _checked(self, works: Sequence[Work]) -> Sequence[R]:
        self._announce(works)
        results = self._compute(works)
        if len(results) != len(works):
            raise RuntimeError(f"{len(results)} results of {len(works)} pieces of work")
        for result in results:
            if isinstance(result.error, RequestFailed):
                self._faults[NONFINITE] += 1
        return results

    def _blame(self, request_id: str) -> R:
        """The error being handled is this request's own."""
        stage = self._stages.current
        self._faults[stage] += 1
        logger.exception("request %s ends by an error of ours (%s); others go on", request_id, stage)
        return self._failed(RequestFailed(f"an error of ours ended this request ({stage}); the server's log tells more"))

    def _doubt(self) -> None:
        """Nobody got anything: is it really they who fail? Raises if a harmless request fails as well."""
        self._in_vain += 1
        (result,) = self._compute([_nobody(self._pooling)])
        if result.error is not None:
            raise RuntimeError("a request that nobody sent fails as well: the engine is broken") from result.error
        if self._in_vain >= PATIENCE:
            raise RuntimeError(f"{self._in_vain} steps in a row yielded nothing but errors")


def is_device_lost(error: Exception) -> bool:
    """Whatever is tried now would fail as well. Triton has no class of its own for what the driver tells it."""
    told = str(error)
    if told.startswith("Triton Error"):
        return any(one in told for one in LOST)
    return isinstance(error, torch.AcceleratorError) and "out of memory" not in told


def _renew(works: Sequence[Work]) -> None:
    """What an interrupted pass may have left half done is made anew from the tokens."""
    for work in works:
        work.state.ledger = None
        if work.state.grammar is not None:
            work.state.grammar.renew()


def _nobody(pooling: str | None) -> Work:
    """One token of a request that nobody sent. Its KV lies in the scratch block."""
    request = Request("nobody", (0,), SamplingParams(temperature=0.0, max_tokens=1), seed=0, pooling=pooling)
    state = RequestState(request, 0, 2)
    state.blocks = [SCRATCH_BLOCK]
    return Work(state, 0, 1, samples=pooling is None)
