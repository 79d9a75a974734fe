"""The open requests of one engine process, which end with it. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from foreword.core.outputs import ErrorEvent, Event, StepReport, StepStats
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine_client.base import PendingCalls, is_last
from foreword.engine_client.engine_process import EngineProcess, SendFailed
from foreword.engine_client.messages import AddImage, DropImage, RemoveRequest
from foreword.errors import EngineDead, RequestFailed


class _OpenRequest(NamedTuple):
    request: Request
    arrival: int  # index among the requests sent to the process
    on_event: Callable[[Event], None]


class ProcessSession:
    """Sends requests and passes their events on."""

    def __init__(self, process: EngineProcess, vocabulary: Callable[[], Vocabulary]) -> None:
        """vocabulary  called in a thread, with the first grammar"""
        self.process = process
        self.calls = PendingCalls()
        self.stats = StepStats()
        self._vocabulary = vocabulary
        self._has_vocabulary = False
        self._images = SentImages()
        self._open: dict[str, _OpenRequest] = {}
        self._num_sent = 0

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        self._open[request.id] = _OpenRequest(request, self._num_sent, on_event)
        self._num_sent += 1
        *images, bare = self._images.add(request)
        for image in images:
            self.process.send(image)
        needs_vocabulary = request.params.structured is not None and not self._has_vocabulary
        self._has_vocabulary = self._has_vocabulary or needs_vocabulary
        self.process.send(bare, self._vocabulary if needs_vocabulary else None)

    def remove(self, request_id: str, num_tokens: int | None) -> None:
        """End a request, if it is open."""
        opened = self._open.get(request_id)
        if opened is not None:
            self.process.send(RemoveRequest(request_id, num_tokens))
            self._end(opened.request)

    def _end(self, request: Request) -> None:
        del self._open[request.id]
        for message in self._images.remove(request):
            self.process.send(message)

    def on_report(self, report: StepReport) -> None:
        for event in report.events:
            opened = self._open.get(event.request_id)
            if opened is None:  # removed meanwhile
                continue
            if is_last(event):
                self._end(opened.request)
            opened.on_event(event)

    def on_send_failed(self, failure: SendFailed) -> None:
        """Fail the request of the message; end the engine, whose arrival numbers differ now."""
        name = type(failure.error).__name__
        message = failure.message
        if isinstance(message, Request) and (opened := self._open.pop(message.id, None)) is not None:
            error = RequestFailed(f"the request could not be sent to the engine ({name})")
            opened.on_event(ErrorEvent(message.id, error))
        self.process.kill(f"a message to it could not be sent ({name})")

    def running_ids(self) -> frozenset[str]:
        """Open requests in the current or last batch; consistent once the process is gone."""
        arrivals = frozenset(self.process.heartbeat.busy_requests())
        return frozenset(name for name, opened in self._open.items() if opened.arrival in arrivals)

    def close(self, error: EngineDead) -> None:
        """End what is open."""
        self.calls.fail_all(RequestFailed("the engine ended meanwhile: try again"))
        while self._open:  # a listener may remove others
            request_id = next(iter(self._open))
            self._open.pop(request_id).on_event(ErrorEvent(request_id, error))


class SentImages:
    """Images that an engine has: it gets each image once, and keeps it until its last request ends."""

    __slots__ = ("_ref_counts",)

    def __init__(self) -> None:
        self._ref_counts: Counter[bytes] = Counter()

    def add(self, request: Request) -> list[AddImage | Request]:
        """Images that the engine lacks, then the request without pixels."""
        if not request.images:
            return [request]
        images = {image.digest: image for image in request.images}
        new = [
            AddImage(digest, image.pixels)
            for digest, image in images.items()
            if image.pixels is not None and not self._ref_counts[digest]
        ]
        self._ref_counts.update(images.keys())
        bare = replace(request, images=tuple(image.without_pixels() for image in request.images))
        return [*new, bare]

    def remove(self, request: Request) -> list[DropImage]:
        """Images that no open request has."""
        released = []
        for digest in {image.digest for image in request.images}:
            self._ref_counts[digest] -= 1
            if not self._ref_counts[digest]:
                del self._ref_counts[digest]
                released.append(DropImage(digest))
        return released
