"""Traces: all inputs and decisions of an object as JSON lines, and their replay on a new object.

A trace from the field reproduces every decision on any machine, if the object has no other input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Encode = Callable[[Any], Any]  # arguments or a decision as JSON


class TraceWriter:
    """Appends calls and decisions to a file, each line before the caller goes on. Raises OSError."""

    def __init__(self, path: Path, *setup: Any) -> None:
        """setup  arguments of the replayer's constructor"""
        self._path = path
        path.write_text("")
        self.write("setup", *setup)

    def write(self, call: str, *args: Any) -> None:
        self._append({"call": call, "args": args})

    def write_decision(self, decided: Any) -> None:
        """The result of the last call."""
        self._append({"decided": decided})

    def traced(self, call: str, function: Callable[..., Any], encode: Encode) -> Callable[..., Any]:
        """The function, with its arguments and results in the trace."""

        def run(*args: Any) -> Any:
            self.write(call, *encode(args))
            decided = function(*args)
            if decided is not None:
                self.write_decision(encode(decided))
            return decided

        return run

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def replay(lines: Iterable[str], make_replayer: Callable[..., object], encode: Encode) -> Iterator[Any]:
    """Replay a trace and yield the decisions as JSON, asserted to equal the recorded ones.

    make_replayer  takes the setup; the replayer's methods are named as the calls and take their arguments
    """
    records = map(json.loads, lines)
    setup = next(records)
    assert setup["call"] == "setup", "the trace does not begin with its setup"
    replayer, decided = make_replayer(*setup["args"]), None
    for record in records:
        if "call" in record:
            decided = getattr(replayer, record["call"])(*record["args"])
        else:
            assert encode(decided) == record["decided"], f"{encode(decided)}, recorded {record['decided']}"
            yield record["decided"]
