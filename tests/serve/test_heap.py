"""Memory that bodies leave behind goes back to the system, once there is enough of it."""

import subprocess
import sys
from typing import Any

from foreword.serve.heap import LEFT_BYTES, Heap


async def test_only_much_is_given_back(monkeypatch: Any) -> None:
    heap, trimmed = Heap(), []
    monkeypatch.setattr(heap, "_trim", trimmed.append)
    heap.left(LEFT_BYTES)
    await heap.tidy()
    assert trimmed == []
    heap.left(1)
    await heap.tidy()
    await heap.tidy()
    assert trimmed == [0]


async def test_where_there_is_no_such_thing_nothing_happens(monkeypatch: Any) -> None:
    heap = Heap()
    monkeypatch.setattr(heap, "_trim", None)
    heap.left(2 * LEFT_BYTES)
    await heap.tidy()


SETTLED = """
import gc
import foreword.serve.app
from foreword.serve.heap import settle
before = len(gc.get_objects())
settle()
print(before, len(gc.get_objects()))
"""


def test_what_a_server_is_made_of_is_not_looked_through_again() -> None:
    done = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, text=True, timeout=60, check=True)
    before, left = map(int, done.stdout.split())
    assert left < before / 100
