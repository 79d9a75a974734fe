"""The process that forks engines: one thread, its children's ends are told, and it is replaced when it dies."""

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
from tests.engine_client.test_worker import is_gone

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 60.0
ECHO = """
import os, socket, threading
{thread}
def main(fd):
    with socket.socket(fileno=fd) as ours:
        facts = (len(os.listdir("/proc/self/fd")), os.getpgid(0) == os.getpid(), len(os.listdir("/proc/self/task")))
        ours.sendall(repr(facts).encode())
        return int(ours.recv(100) or b"0")
"""
FEW_FDS = 5  # standard ones, its own socket, and the one that lists them


@pytest.fixture(scope="module", autouse=True)
def entries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules to run; one of them has a thread as soon as it is imported."""
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
async def spawner() -> AsyncIterator[ForkServer]:
    spawner = ForkServer("echo")
    yield spawner
    await spawner.close()


async def spawn(spawner: ForkServer) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    try:
        with theirs:
            return await spawner.spawn(theirs.fileno()), ours
    except ConfigError:
        ours.close()
        raise


async def heard(ours: socket.socket) -> object:
    return eval(await asyncio.to_thread(ours.recv, 1000))


async def test_an_engine_has_nothing_of_its_parent(spawner: ForkServer) -> None:
    for _ in range(2):
        pid, ours = await spawn(spawner)
        with ours:
            assert await heard(ours) == (FEW_FDS, True, 1)
            ours.sendall(b"7")
            assert await spawner.exit_code(pid, WAIT_S) == 7
        assert is_gone(pid)


async def test_ends_by_signals_are_told(spawner: ForkServer) -> None:
    engines = [await spawn(spawner) for _ in range(3)]
    for _, ours in engines:
        await heard(ours)
    for pid, _ in engines[1:]:
        os.kill(pid, signal.SIGKILL)
    assert [await spawner.exit_code(pid, WAIT_S) for pid, _ in engines[1:]] == [-signal.SIGKILL] * 2
    pid, ours = engines[0]
    assert await spawner.exit_code(pid, 0.01) is None, "it lives"
    for _, ours in engines:
        ours.close()
    assert await spawner.exit_code(pid, WAIT_S) == 0, "it ended, for its client is gone"


async def test_a_spawner_that_was_killed_is_replaced(spawner: ForkServer) -> None:
    pid, ours = await spawn(spawner)
    process = spawner._process
    assert process is not None
    process.kill()
    assert await spawner.exit_code(pid, WAIT_S) is None, "nobody is left who knows"
    with ours:
        assert await heard(ours) == (FEW_FDS, True, 1), "the engine lives on"
    _, ours = await spawn(spawner)
    ours.close()


async def test_a_spawner_that_does_not_answer_is_replaced(
    spawner: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.engine_client.forkserver.FORK_TIMEOUT_S", 0.2)
    _, ours = await spawn(spawner)
    ours.close()
    assert spawner._process is not None
    os.kill(spawner._process.pid, signal.SIGSTOP)
    _, ours = await spawn(spawner)
    with ours:
        assert await heard(ours) == (FEW_FDS, True, 1)


async def test_engines_of_a_spawner_with_threads_are_whole_all_the_same() -> None:
    spawner = ForkServer("echo_with_thread")
    pid, ours = await spawn(spawner)
    with ours:
        fds, leads, threads = await heard(ours)  # type: ignore[misc]
        assert (leads, threads) == (True, 2) and fds == FEW_FDS
        ours.sendall(b"5")
        assert await spawner.exit_code(pid, WAIT_S) == 5
    await spawner.close()


async def test_what_cannot_be_imported_is_an_error() -> None:
    spawner = ForkServer("no_entry")
    with pytest.raises(ConfigError, match="ended before it could load"):
        await spawn(spawner)
    await spawner.close()


async def test_engines_need_one_thread_to_be_imported() -> None:
    """What a fork copies whole: so it stays with what the engine imports, torch among it."""
    code = "import foreword.engine_client.worker, os; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.strip() == b"1"
