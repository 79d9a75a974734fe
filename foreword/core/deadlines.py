"""Whether a request has time left: asked in the engine, and by its client while that cannot answer."""

from __future__ import annotations

from typing import Final

from foreword.core.request import Request
from foreword.errors import DeadlineExceeded, ForewordError, Overloaded

__all__ = ["check_deadline"]

MAX_RETRY_AFTER_S: Final = 60.0  # is asked of a caller


def check_deadline(request: Request, now_s: float, has_run: bool) -> ForewordError | None:
    """Why a request has no more time, or None. One that was resumed has run before."""
    waited_s = now_s - request.arrival_s
    if request.deadline_s is not None and now_s >= request.deadline_s:
        return DeadlineExceeded(f"the request was given {request.deadline_s - request.arrival_s:.3g} s, and took longer")
    if request.queue_deadline_s is None or now_s < request.queue_deadline_s or has_run or request.resume_output_ids:
        return None
    return Overloaded(
        f"the request waited {waited_s:.3g} s and could not be started", retry_after_s=min(max(waited_s, 1.0), MAX_RETRY_AFTER_S)
    )
