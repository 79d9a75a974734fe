"""Threads of their own: work in them waits for no executor, and the end of the process ends them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As asyncio.to_thread(), whose executor others may fill and whose threads the process waits for."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(work, *args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await asyncio.wrap_future(future)


async def join_in_own_thread(make_pieces: Callable[[], Iterable[bytes]]) -> bytes:
    """The joined pieces, made in a thread; a cancel ends its work after the piece that it makes."""
    is_cancelled = False

    def join() -> bytes:
        joined = bytearray()
        for piece in make_pieces():
            if is_cancelled:
                break
            joined += piece
        return bytes(joined)

    try:
        return await run_in_own_thread(join)
    except asyncio.CancelledError:
        is_cancelled = True
        raise
