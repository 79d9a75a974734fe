"""An engine process with injected faults, given as JSON in an environment variable."""

from __future__ import annotations

import json
import os
from typing import Final

from foreword.engine.engine import Engine
from foreword.engine_client import engine_main as worker
from tests.support.fault_injection import Fault, FaultInjector

FAULTS_VARIABLE: Final = "FOREWORD_TEST_FAULTS"


def main(fd: int) -> int:
    return worker.main(fd, _install_faults)


def _install_faults(engine: Engine) -> None:
    FaultInjector(engine, *(Fault(**fields) for fields in json.loads(os.environ.get(FAULTS_VARIABLE, "[]"))))
