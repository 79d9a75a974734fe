"""Fault isolation: an error in a step fails the requests that cause it, and no others.

A failed batch is retried in halves down to single requests, and a single request once more. Retries are
safe because a pass writes only the KV of its own rows, and the same values again. They change no token
because no row depends on another. So a transient error, or a batch too large for memory, fails no request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch

from foreword.core.batch import NULL_BLOCK
from foreword.core.outputs import StepOutput
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.engine.pooler import PoolOutput
from foreword.engine.scheduler import ScheduledRequest
from foreword.engine.timers import StepTimer
from foreword.errors import RequestFailed
from foreword.kernels.gpu import is_device_lost

logger = logging.getLogger(__name__)

NONFINITE: Final = "nonfinite"  # the fault label of logits, hidden states and features that are not finite
MAX_FAILED_PASSES: Final = 16  # passes in a row with errors only before the engine gives up

Output = TypeVar("Output", bound=StepOutput | PoolOutput)


@dataclass(slots=True)
class FailedPasses:
    """Passes in a row in which every request failed, shared by all kinds of passes of an engine.

    A success of any kind proves the engine healthy: failing embeddings do not end the streams beside them.
    """

    num_in_a_row: int = 0


class FaultIsolation(Generic[Output]):
    """Runs a pass of the step, and turns its errors into failed outputs of single requests."""

    def __init__(
        self,
        run_pass: Callable[[Sequence[ScheduledRequest]], Sequence[Output]],
        output_type: type[Output],
        on_batch: Callable[[Sequence[ScheduledRequest]], None],  # before each pass, see Engine
        timer: StepTimer,
        faults: Counter[str],  # isolated errors by stage
        failed_passes: FailedPasses,
    ) -> None:
        self.was_retried = False  # whether the last run was retried
        self._run_pass = run_pass
        self._output_type = output_type
        self._on_batch = on_batch
        self._timer = timer
        self._faults = faults
        self._failed_passes = failed_passes

    def run(self, requests: Sequence[ScheduledRequest]) -> list[Output]:
        """One output per request, the same as if it ran alone.

        Raises if no request is to blame: the device is lost, or every request fails.
        """
        self.was_retried = False
        outputs = self._run(requests)
        if any(output.error is None for output in outputs):
            self._failed_passes.num_in_a_row = 0
        elif any(isinstance(output.error, RequestFailed) for output in outputs):
            self._health_check()
        return outputs

    def _run(self, requests: Sequence[ScheduledRequest], is_retry: bool = False) -> list[Output]:
        try:
            self._on_batch(requests)
            outputs = list(self._run_pass(requests))
            if len(outputs) != len(requests):
                raise RuntimeError(f"a pass over {len(requests)} requests returned {len(outputs)} outputs")
            for error in [output.error for output in outputs if output.error is not None]:
                if isinstance(error, RequestFailed):
                    self._faults[NONFINITE] += 1
            return outputs
        except Exception as error:
            if is_device_lost(error):
                raise
            self.was_retried = True
            reset_state([request.state for request in requests])
            if is_retry:
                return [self._fail(requests[0].state.id)]
            if isinstance(error, torch.OutOfMemoryError):
                logger.warning("out of memory in a step of %d requests, retrying: %s", len(requests), error)
        # The error is freed by now, and with it the memory of the failed pass
        if len(requests) == 1:
            return self._run(requests, is_retry=True)
        middle = len(requests) // 2
        return [*self._run(requests[:middle]), *self._run(requests[middle:])]

    def _fail(self, request_id: str) -> Output:
        """The output of a request that failed twice alone, called in the except block."""
        stage = self._timer.current_stage
        self._faults[stage] += 1
        logger.exception("request %s failed in stage %s", request_id, stage)
        return self._output_type(
            error=RequestFailed(f"internal error in stage {stage}; see the server's log")
        )

    def _health_check(self) -> None:
        """Every request failed: run a dummy request to see if the engine itself is broken."""
        self._failed_passes.num_in_a_row += 1
        (output,) = self._run_pass([_dummy_request("last" if self._output_type is PoolOutput else None)])
        if output.error is not None:
            raise RuntimeError("the engine is broken: a dummy request fails as well") from output.error
        if self._failed_passes.num_in_a_row >= MAX_FAILED_PASSES:
            raise RuntimeError(f"all requests failed in {MAX_FAILED_PASSES} passes in a row")


def reset_state(states: Sequence[RequestState]) -> None:
    """Drop state that an interrupted pass left half-updated; it is rebuilt from the tokens."""
    for state in states:
        state.penalty_state = None
        if state.grammar is not None:
            state.grammar.reset()


def _dummy_request(pooling: str | None) -> ScheduledRequest:
    """A request of one token whose KV goes to the scratch block."""
    request = Request("dummy", (0,), SamplingParams(temperature=0.0, max_tokens=1), seed=0, pooling=pooling)
    state = RequestState(request, 0, 2)
    state.blocks.append(NULL_BLOCK)
    return ScheduledRequest(state, 0, 1, is_sampled=pooling is None)
