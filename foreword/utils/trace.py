"""Traces: all inputs and decisions of an object as JSON lines, and their replay on a new object.

A trace from the field reproduces every decision on any machine, if the object has no other input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


class TraceWriter:
    """Appends calls to a file: each line is on disk before the caller goes on. Raises OSError."""

    def __init__(self, path: Path, **setup: Any) -> None:
        """setup  arguments of the replayer's constructor"""
        self._path = path
        path.write_text("")
        self.write("setup", **setup)

    def write(self, call: str, **fields: Any) -> None:
        """fields  arguments of the call; "decided", if it is there, is its result"""
        with self._path.open("a") as file:
            file.write(json.dumps({"call": call, **fields}) + "\n")


def replay(lines: Iterable[str], make_replayer: Callable[..., object]) -> Iterator[Any]:
    """Replay a trace and yield the decisions, asserted to equal the recorded ones.

    make_replayer  takes the setup; the replayer's methods are named as the calls and take their fields
    """
    records = map(json.loads, lines)
    setup = next(records)
    assert setup.pop("call") == "setup", "the trace does not begin with its setup"
    replayer = make_replayer(**setup)
    for record in records:
        call, is_decision, expected = record.pop("call"), "decided" in record, record.pop("decided", None)
        decided = getattr(replayer, call)(**record)
        if is_decision:
            assert decided == expected, f"{call} decided {decided}, recorded {expected}"
            yield decided
