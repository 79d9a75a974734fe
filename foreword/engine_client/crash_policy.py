"""Blame for crashes, and the decision to give an engine up.

Pure bookkeeping: no processes, no clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from foreword.errors import RequestFailed

CRASHES_TO_SUSPECT: Final = 2  # crashes in a row without a new token of a request, until it runs alone
CRASHES_TO_REFUSE: Final = 2  # crashes while it runs alone, until it is refused
CRASHES_TO_PROBE: Final = 2  # crashes in a row without any new token, until a new engine gets a probe request
MAX_IDLE_CRASHES: Final = 5
MAX_START_ATTEMPTS: Final = 3
HEALTHY_S: Final = 60.0  # uptime after which a crash resets the count of idle crashes


class CrashSuspects:
    """Finds requests that crash the engine.

    A request in the batch at two crashes in a row, without a new token between them, is a suspect. Suspects
    run alone, one after another, until they gain a token or end; two crashes while alone mean refusal.
    The crashes may be of different engines.
    """

    def __init__(self) -> None:
        self._num_crashes: dict[str, int] = {}
        self._num_solo_crashes: dict[str, int] = {}  # suspects, in the order in which they run

    @property
    def quarantined(self) -> str | None:
        """The suspect that runs alone now."""
        return next(iter(self._num_solo_crashes), None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_solo_crashes

    def on_crash(self, busy_ids: Sequence[str], idle_ids: Iterable[str] = ()) -> str | None:
        """An engine crashed with these open requests in the batch. Returns the request to refuse.

        idle_ids  its other open requests, which are innocent
        """
        suspect = self.quarantined
        if suspect is not None and suspect in busy_ids:
            self._num_solo_crashes[suspect] += 1
            if self._num_solo_crashes[suspect] >= CRASHES_TO_REFUSE:
                self.clear(suspect)
                return suspect
        elif busy_ids:  # a crash while idle or loading has no suspects
            for request_id in idle_ids:
                self._num_crashes.pop(request_id, None)
            for request_id in busy_ids:
                count = self._num_crashes[request_id] = self._num_crashes.get(request_id, 0) + 1
                if count >= CRASHES_TO_SUSPECT:
                    self._num_solo_crashes.setdefault(request_id, 0)
        return None

    def clear(self, request_id: str) -> None:
        """The request gained a token, or ended."""
        self._num_crashes.pop(request_id, None)
        self._num_solo_crashes.pop(request_id, None)


class RestartPolicy:
    """Decides when to give up on the engine.

    Crashes during requests never lead to that: such requests are refused in the end. Failed starts do, and
    crashes without requests. A probe request turns crashes of a broken engine into crashes without requests.
    """

    def __init__(self) -> None:
        self._fruitless_crashes = 0  # since the last new token
        self._idle_crashes = 0
        self._failed_starts = 0

    @property
    def needs_probe(self) -> bool:
        """Whether the next engine has to answer a probe request first."""
        return self._fruitless_crashes >= CRASHES_TO_PROBE

    def on_crash(self, healthy_s: float, had_requests: bool) -> bool:
        """The engine crashed; returns whether to restart it.

        healthy_s     seconds from readiness to the last step, or to the last heartbeat if idle
        had_requests  a user's request was in the batch
        """
        self._fruitless_crashes += 1
        if healthy_s >= HEALTHY_S:
            self._idle_crashes = 0
        self._idle_crashes += not had_requests
        return self._idle_crashes < MAX_IDLE_CRASHES

    def on_start_failed(self) -> bool:
        """Returns whether to try again."""
        self._failed_starts += 1
        return self._failed_starts < MAX_START_ATTEMPTS

    def on_started(self) -> None:
        self._failed_starts = 0

    def record_progress(self) -> None:
        """A request gained a token or ended."""
        self._fruitless_crashes = self._idle_crashes = 0


def crash_error() -> RequestFailed:
    return RequestFailed(
        f"the engine died {CRASHES_TO_REFUSE} times while it ran this request alone; it is not retried"
    )
