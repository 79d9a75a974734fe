"""The fork server has one thread, reports exit codes, and is replaced when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from foreword.engine_client.forkserver import ForkServer
from foreword.errors import ConfigError
from tests.support.client_answers import is_gone
from tests.support.waiting import WAIT_S, stop_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = """
import os, socket, threading
{thread}
def main(fd):
    with socket.socket(fileno=fd) as ours:
        num_fds, num_threads = (len(os.listdir("/proc/self/" + name)) for name in ("fd", "task"))
        facts = (num_fds, os.getpgid(0) == os.getpid(), num_threads)
        ours.sendall(repr(facts).encode())
        return int(ours.recv(100) or b"0")
"""
FEW_FDS = 5  # stdin, stdout, stderr, the socket, and the listing


@pytest.fixture(scope="module", autouse=True)
def entries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Entry modules; one starts a thread at import."""
    folder = tmp_path_factory.mktemp("entries")
    (folder / "echo.py").write_text(ECHO.format(thread=""))
    (folder / "echo_with_thread.py").write_text(
        ECHO.format(thread="threading.Thread(target=threading.Event().wait, daemon=True).start()")
    )
    (folder / "no_entry.py").write_text("raise SystemExit(9)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest_asyncio.fixture(loop_scope="module")
async def fork_server() -> AsyncIterator[ForkServer]:
    fork_server = ForkServer("echo")
    yield fork_server
    await fork_server.close()


async def spawn(fork_server: ForkServer) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    try:
        with theirs:
            return await fork_server.spawn(theirs.fileno()), ours
    except ConfigError:
        ours.close()
        raise


async def receive(ours: socket.socket) -> object:
    return eval(await asyncio.to_thread(ours.recv, 1000))


async def test_engine_inherits_no_descriptors(fork_server: ForkServer) -> None:
    for _ in range(2):
        pid, ours = await spawn(fork_server)
        with ours:
            assert await receive(ours) == (FEW_FDS, True, 1)
            ours.sendall(b"7")
            assert await fork_server.exit_code(pid, WAIT_S) == 7
        assert is_gone(pid)


async def test_exit_signals_are_reported(fork_server: ForkServer) -> None:
    engines = [await spawn(fork_server) for _ in range(3)]
    for _, ours in engines:
        await receive(ours)
    for pid, _ in engines[1:]:
        os.kill(pid, signal.SIGKILL)
    assert [await fork_server.exit_code(pid, WAIT_S) for pid, _ in engines[1:]] == [-signal.SIGKILL] * 2
    pid, ours = engines[0]
    assert await fork_server.exit_code(pid, 0.01) is None, "still running"
    for _, ours in engines:
        ours.close()
    assert await fork_server.exit_code(pid, WAIT_S) == 0, "it exits with its client"


async def test_killed_fork_server_is_replaced(fork_server: ForkServer) -> None:
    pid, ours = await spawn(fork_server)
    process = fork_server._process
    assert process is not None
    process.kill()
    assert await fork_server.exit_code(pid, WAIT_S) is None, "the exit code is unknown"
    with ours:
        assert await receive(ours) == (FEW_FDS, True, 1), "the engine goes on"
    _, ours = await spawn(fork_server)
    ours.close()


async def test_hung_fork_server_is_replaced(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.engine_client.forkserver.FORK_TIMEOUT_S", 0.2)
    _, ours = await spawn(fork_server)
    ours.close()
    assert fork_server._process is not None
    stop_process(fork_server._process.pid)
    _, ours = await spawn(fork_server)
    with ours:
        assert await receive(ours) == (FEW_FDS, True, 1)


async def test_fork_server_with_threads_execs_engines() -> None:
    fork_server = ForkServer("echo_with_thread")
    pid, ours = await spawn(fork_server)
    with ours:
        fds, leads, threads = await receive(ours)  # type: ignore[misc]
        assert (leads, threads) == (True, 2) and fds == FEW_FDS
        ours.sendall(b"5")
        assert await fork_server.exit_code(pid, WAIT_S) == 5
    await fork_server.close()


async def test_failed_import_is_a_config_error() -> None:
    fork_server = ForkServer("no_entry")
    with pytest.raises(ConfigError, match="ended before it could load"):
        await spawn(fork_server)
    await fork_server.close()


@pytest.mark.full
async def test_engine_imports_start_no_threads() -> None:
    """A fork needs a process with one thread, also after the import of torch."""
    code = "import foreword.engine_client.engine_main, os; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.strip() == b"1"
