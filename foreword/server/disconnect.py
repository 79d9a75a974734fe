"""Work that is for nobody once its client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

__all__ = ["CLIENT_CLOSED", "cancel_on_disconnect"]

T = TypeVar("T")

CLIENT_CLOSED = 499  # a status that nobody reads


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, and `work` cancelled, as soon as the client is gone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for leftover in (task, gone):
            leftover.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
