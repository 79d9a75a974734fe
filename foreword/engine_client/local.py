"""An engine in the caller's process and thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreword.config.options import Config
from foreword.config.resolve import EngineInfo
from foreword.core.outputs import StepReport
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine.loader import load

__all__ = ["LocalClient"]


class LocalClient:
    """Runs one step of the engine in each step()."""

    def __init__(
        self,
        config: Config,
        never_sampled_ids: Sequence[int],
        vocabulary: Callable[[], Vocabulary],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the engine. Raises ConfigError or CheckpointError.

        vocabulary  called with the first grammar
        """
        self._engine = load(config, never_sampled_ids, on_progress=on_progress)
        self._vocabulary: Callable[[], Vocabulary] | None = vocabulary

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def submit(self, request: Request) -> None:
        """Add a request; the reports of the following steps have its events."""
        if request.params.structured is not None and self._vocabulary is not None:
            self._engine.set_vocabulary(self._vocabulary())
            self._vocabulary = None
        self._engine.submit(request)

    def step(self) -> StepReport:
        return self._engine.step()

    def finish(self, request_id: str, num_tokens: int) -> None:
        """End a request whose answer was cut after `num_tokens` output tokens (a stop string)."""
        self._engine.remove(request_id, num_tokens)

    def abort(self, request_id: str) -> None:
        self._engine.remove(request_id)

    def check(self) -> None:
        """Assert the engine's invariants."""
        self._engine.check()
