"""An engine process with faults, run by tests as the `entry` of a ProcessClient: those that the environment names, as JSON."""

from __future__ import annotations

import json
import os
from typing import Final

from foreword.engine import process
from foreword.engine.engine import Engine
from tests.faults import Fault, Faults

__all__ = ["VARIABLE", "main"]

VARIABLE: Final = "FOREWORD_TEST_FAULTS"


def main(fd: int) -> int:
    return process.main(fd, _break)


def _break(engine: Engine) -> None:
    Faults(engine, *(Fault(**fields) for fields in json.loads(os.environ.get(VARIABLE, "[]"))))
