"""An engine in the caller's process and thread."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.outputs import StepReport
from foreword.core.readiness import OnLoadProgress
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine.loader import load
from foreword.planning.resolve import EngineInfo

logger = logging.getLogger(__name__)

HANG_NOTICE_S = 5.0


class LocalClient:
    """Runs one step of the engine in each step()."""

    def __init__(
        self,
        config: Config,
        never_sampled_ids: Sequence[int],
        vocabulary: Callable[[], Vocabulary],
        on_progress: OnLoadProgress | None = None,
    ) -> None:
        """Load the engine. Raises ConfigError or CheckpointError.

        vocabulary  called with the first grammar
        """
        self._engine = load(config, never_sampled_ids, on_progress=on_progress)
        self._vocabulary: Callable[[], Vocabulary] | None = vocabulary
        if config.drafter_plugins():
            watch = _PluginWatch()
            self._engine.proposer.on_plugin = watch.on_plugin
            weakref.finalize(self, watch.stopped.set)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def load_adapter(self, path: str) -> AdapterInfo:
        """See Engine.load_adapter."""
        return self._engine.load_adapter(path)

    def unload_adapter(self, digest: str) -> None:
        """See Engine.unload_adapter."""
        self._engine.unload_adapter(digest)

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


class _PluginWatch:
    """Names a plugged-in drafter that does not return: nothing can end its code in the caller's thread."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._call: tuple[str, float, int] | None = None  # drafter, start, and thread of a call
        threading.Thread(target=self._run, name="plug-in watch", daemon=True).start()

    def on_plugin(self, name: str | None) -> None:
        """A call of a drafter begins; None: it ends."""
        self._call = None if name is None else (name, time.monotonic(), threading.get_ident())

    def _run(self) -> None:
        reported = None
        while not self.stopped.wait(HANG_NOTICE_S / 4):
            call = self._call
            if call is None or call is reported or time.monotonic() - call[1] < HANG_NOTICE_S:
                continue
            reported = call
            frame = sys._current_frames().get(call[2])
            place = f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""
            text = "engine: in the code of drafter %s for %.0f s%s; only the end of this process ends it"
            logger.error(text, call[0], time.monotonic() - call[1], place)
