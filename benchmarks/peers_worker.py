"""One engine in a process of its own: commands on stdin, one JSON array a line; answers on stdout.

    ["decode", {"prompt": [...], "tokens": 64}]  ->  {"seconds": 1.5, "ids": [...]}

An engine is a class whose public methods are the commands. Every engine has some of these:

    load(...)                    load the model
    decode(prompt, tokens)       seconds of `tokens` greedy tokens after the first one
    prompt(ids)                  seconds from the prompt to its first token
    streams(prompts, tokens)     seconds of all prompts at once, `tokens` greedy tokens each
    rows(context, counts, steps) median seconds of a step that verifies so many rows after a context, by count

"ids" are the tokens of the answer, for streams of each; "rows" the counts that steps verified. Where the
engine tells: "cached", prompt tokens that were not computed; "at_once", the most requests of one step;
"spans", when each request ran.

Standard library only, since it runs in other environments too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def serve(engine: object) -> None:
    """Answer commands until stdin ends; libraries print to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answers.write(json.dumps(getattr(engine, command)(**arguments)) + "\n")
        answers.flush()


def peak_bytes(pid: int | str) -> int:
    """Peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


class Worker:
    """The client of an engine process."""

    def __init__(
        self, python: str, script: Path, log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are those of the process instead of this one's."""
        self.log = log
        pipe = subprocess.PIPE
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, str(script)], stdin=pipe, stdout=pipe, stderr=errors, text=True, env=variables
            )

    def __call__(self, command: str, **arguments: Any) -> Any:
        """Raises RuntimeError with the log file if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([command, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the process has ended; see {self.log}") from None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{command} failed; see {self.log}")
        return json.loads(answer)

    @property
    def peak_bytes(self) -> int:
        return peak_bytes(self._process.pid)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
