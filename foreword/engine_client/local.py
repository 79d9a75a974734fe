"""An engine in the caller's process and thread, and the LoRA adapters within its slots."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from foreword.config.lora import AdapterInfo, LoRARequest
from foreword.config.options import Config
from foreword.core.outputs import StepReport
from foreword.core.readiness import OnLoadProgress
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine.loader import load
from foreword.errors import AdapterConflict, InvalidRequest, shown
from foreword.planning.resolve import EngineInfo

logger = logging.getLogger(__name__)

HANG_NOTICE_S = 5.0
LoraInput = str | LoRARequest  # a name of `lora_modules`, or an adapter by its path


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

        vocabulary  called with the first grammar, or at once for drafters that write text
        """
        self._engine = load(config, never_sampled_ids, on_progress=on_progress)
        self._vocabulary: Callable[[], Vocabulary] | None = vocabulary
        if self._engine.prefix_loader is not None:
            weakref.finalize(self, self._engine.prefix_loader.close)
        if config.drafts_text:
            self._send_vocabulary()
        if config.drafter_plugins():
            watch = _PluginWatch()
            self._engine.proposer.on_timed_call = watch.on_plugin
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
        if request.params.structured is not None:
            self._send_vocabulary()
        self._engine.submit(request)

    def _send_vocabulary(self) -> None:
        """Once."""
        if self._vocabulary is not None:
            self._engine.set_vocabulary(self._vocabulary())
            self._vocabulary = None

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


class LocalAdapters:
    """Loads adapters on first use. Those of paths give way, the least recently used first."""

    def __init__(self, client: LocalClient, names: Sequence[str]) -> None:
        """names  of the adapters that the engine was started with; these stay"""
        self._client = client
        self._pinned = frozenset(info.digest for info in client.info.adapters)
        # By name, or by path; the last was used most recently.
        self._adapters: dict[str, AdapterInfo] = dict(zip(names, client.info.adapters, strict=True))

    def load(self, adapters: Sequence[LoraInput | None]) -> list[str]:
        """Digests, empty for the base model. Adapters of one call are in memory together.

        Raises InvalidRequest for an unknown name, AdapterConflict for more adapters than slots.
        """
        needed: list[str] = []
        for adapter in adapters:
            needed.append("" if adapter is None else self._load(adapter, needed))
        return needed

    def _load(self, adapter: LoraInput, needed: Sequence[str]) -> str:
        request = LoRARequest(adapter) if isinstance(adapter, str) else adapter
        key = request.lora_path or request.lora_name
        if key not in self._adapters and not request.lora_path:
            names = ", ".join(sorted(self._adapters)) or "none"
            raise InvalidRequest(
                f"no adapter is named {shown(key, 200)}; loaded: {names}; lora_path loads another",
                "lora_request",
            )
        info = self._adapters.pop(key, None)
        while info is None:
            try:
                info = self._client.load_adapter(request.lora_path)
            except AdapterConflict:
                self._evict(needed)
        self._adapters[key] = info
        return info.digest

    def _evict(self, needed: Sequence[str]) -> None:
        """Unload the adapter of a path that was not used for longest. Raises AdapterConflict."""
        for oldest in self._adapters.values():
            if oldest.digest not in self._pinned and oldest.digest not in needed:
                self._client.unload_adapter(oldest.digest)
                self._adapters = {  # also its other paths
                    key: info for key, info in self._adapters.items() if info.digest != oldest.digest
                }
                return
        limit = self._client.info.resolved.max_loras
        raise AdapterConflict(f"more adapters are needed at a time than --max-loras {limit}", "lora_request")


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. The second Ctrl-C is not delayed: the block may hang."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[FrameType | None] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frames:
            handler(number, frame)
        frames.append(frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if frames:
        handler(signal.SIGINT, frames[0])
