"""The work of Python code as a count, which is equal on every machine, and its thread."""

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


def count_calls(work: Callable[[], object]) -> int:
    """Calls of Python functions, steps of generators included."""
    count = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def record_threads(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[bool]:
    """Of each later call of a function: whether it ran on an event loop, which it would hold up."""
    calls: list[bool] = []
    function = getattr(owner, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(asyncio._get_running_loop() is not None)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, record)
    return calls
