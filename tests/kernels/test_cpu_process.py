"""Kernel threads at process exit, after fork and under limits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foreword.kernels.cpu.library import supported_isas
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.skipif(not supported_isas(), reason="the native library is not built")

START = """
import os, sys, threading, time, torch
from foreword.kernels.cpu.backend import CpuOps
ops = CpuOps(threads=3)
weight = ops.pack_linear([torch.ones(4096, 512)], "float32")
x = torch.ones(64, 512)
"""
# Only kernels run in the thread: torch aborts when it needs the interpreter at shutdown.
BUSY_AT_EXIT = """
calls, run = [], ops._run_program
ops._run_program = lambda *call: calls.append(call) or run(*call)
out = ops.linear(x, weight)
def compute():
    while True:
        run(*calls[0])
threading.Thread(target=compute, daemon=True).start()
time.sleep(0.2)
"""
FORKED = """
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert ops.linear(x, weight)[0, 0] == 512
"""


@pytest.mark.parametrize("end", [BUSY_AT_EXIT, FORKED], ids=["busy", "forked"])
def test_process_with_threads_ends(end: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + end], timeout=WAIT_S, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")
def test_refused_threads_are_reported() -> None:
    limit = """
import resource
from foreword.errors import ConfigError
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
try:
    CpuOps(threads=100_000)
except ConfigError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + limit], timeout=WAIT_S, capture_output=True, text=True
    )
    assert "the system does not grant 100000 threads" in run.stdout, run.stderr
