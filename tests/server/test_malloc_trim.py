"""Memory that bodies leave behind goes back to the system, once there is enough of it."""

import subprocess
import sys
from typing import Any

from foreword.server.malloc_trim import TRIM_THRESHOLD_BYTES, MallocTrimmer


async def test_only_much_is_given_back(monkeypatch: Any) -> None:
    heap, trimmed = MallocTrimmer(), []
    monkeypatch.setattr(heap, "_malloc_trim", trimmed.append)
    heap.add_freed(TRIM_THRESHOLD_BYTES)
    await heap.trim()
    assert trimmed == []
    heap.add_freed(1)
    await heap.trim()
    await heap.trim()
    assert trimmed == [0]


async def test_where_there_is_no_such_thing_nothing_happens(monkeypatch: Any) -> None:
    heap = MallocTrimmer()
    monkeypatch.setattr(heap, "_malloc_trim", None)
    heap.add_freed(2 * TRIM_THRESHOLD_BYTES)
    await heap.trim()


SETTLED = """
import gc
import foreword.server.app
from foreword.server.malloc_trim import settle
before = len(gc.get_objects())
settle()
print(before, len(gc.get_objects()))
"""


def test_what_a_server_is_made_of_is_not_looked_through_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETTLED], capture_output=True, text=True, timeout=60, check=True
    )
    before, left = map(int, done.stdout.split())
    assert left < before / 100
