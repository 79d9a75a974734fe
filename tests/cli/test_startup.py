"""The start-up line on a pipe and on a terminal."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from foreword import __version__
from foreword.cli import startup
from foreword.cli.startup import CLEAR, StartupLine

MIB = 1 << 20


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "REFRESH_S", 0.001)
    monkeypatch.setattr(startup, "REPEAT_S", 0.002)


@pytest.fixture
def pipe() -> Iterator[tuple[int, StartupLine]]:
    reader, writer = os.pipe()
    line = StartupLine(writer)
    yield reader, line
    line.end()
    os.close(reader)
    os.close(writer)


def read_until(fd: int, text: str) -> str:
    said = ""
    while text not in said:
        said += os.read(fd, 4096).decode()
    return said


def test_line_is_written_at_once_and_repeated(pipe: tuple[int, StartupLine]) -> None:
    reader, line = pipe
    line.begin("loading demo")
    said = os.read(reader, 4096).decode()
    assert said.startswith("loading demo ...\n")
    line.stage("starting")
    assert read_until(reader, "starting").endswith("loading demo: starting ...\n")


@pytest.mark.parametrize(
    ("progress", "stage"),
    [
        (("weights", 3 * MIB, 12 * MIB), "weights, 3.0 of 12.0 MiB"),
        (("weights", 1 << 30, 4 << 30), "weights, 1.0 of 4.0 GiB"),
        (("kernels", 3, 80), "compiling kernels, 3 of 80"),
        (("graphs", 2, 57), "capturing CUDA graphs, 2 of 57"),
        (("graphs", 57, 57), "warm-up and calibration"),
    ],
)
def test_loading_is_a_stage(
    pipe: tuple[int, StartupLine], progress: tuple[str, int, int], stage: str
) -> None:
    reader, line = pipe
    line.begin("loading demo")
    line.on_load(*progress)
    assert f"loading demo: {stage} ..." in read_until(reader, stage + " ...")


def test_rate_and_time_left_follow_the_last_seconds(
    pipe: tuple[int, StartupLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(startup.time, "monotonic", lambda: now)
    _, line = pipe
    shown = []
    for seconds, done in ((0, 0), (1, 1), (1, 2), (1, 2.5), (4, 3), (600, 4), (1, 1)):
        now += seconds
        line.on_load("download", int(done * 1024 * MIB), 6 * 1024 * MIB)
        shown.append(line._stage.removeprefix("download, "))
    assert shown == [
        "0.0 of 6.0 GiB",
        "1.0 of 6.0 GiB, 1.00 GiB/s, 5 s left",
        "2.0 of 6.0 GiB, 1.00 GiB/s, 4 s left",
        "2.5 of 6.0 GiB, 853.3 MiB/s, 4 s left",
        "3.0 of 6.0 GiB, 204.8 MiB/s, 15 s left",
        "4.0 of 6.0 GiB, 1.7 MiB/s, 20 min left",
        "1.0 of 6.0 GiB",  # the next model
    ]


@pytest.mark.parametrize(
    ("columns", "text", "expected"),
    [
        (90, "loading demo", "loading demo: [==========          ] weights, 3.0 of 6.0 MiB ..."),
        (60, "loading demo", "loading demo: weights, 3.0 of 6.0 MiB ..."),
        (39, "模型模型 demo", "模型模...: weights, 3.0 of 6.0 MiB ..."),
        (10, "loading demo", ": weig..."),
    ],
)
def test_line_is_never_wider_than_the_terminal(
    columns: int, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar goes first, then the end of the text: what remains is the progress."""
    leader, terminal = pty.openpty()
    monkeypatch.setattr(startup, "_terminal_width", lambda fd: columns)
    line = StartupLine(terminal)
    line.begin(text, at_once=False)
    line.on_load("weights", 3 * MIB, 6 * MIB)
    last = expected[-12:]
    assert f"{CLEAR}{expected}\r" in read_until(leader, f"{last}\r")
    line.end()
    os.close(terminal)
    os.close(leader)


def test_nothing_is_written_after_the_end(pipe: tuple[int, StartupLine]) -> None:
    reader, line = pipe
    line.begin("loading demo")
    line.end()
    line.stage("starting")
    os.set_blocking(reader, False)
    assert "starting" not in os.read(reader, 65536).decode()
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    assert not line.is_shown


def test_line_is_silent_among_json_lines(pipe: tuple[int, StartupLine]) -> None:
    reader, line = pipe
    line.log_format = "json"
    line.begin("loading demo")
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)


def test_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = StartupLine(writer)
    line.begin("loading demo")
    line.end()
    os.close(writer)


def test_line_of_a_terminal_vanishes() -> None:
    leader, terminal = pty.openpty()
    line = StartupLine(terminal)
    line.begin("loading demo")
    assert read_until(leader, "...").startswith(f"{CLEAR}loading demo ...")
    line.end()
    os.close(terminal)
    said = b""
    try:
        while chunk := os.read(leader, 4096):
            said += chunk
    except OSError:  # the other side is closed
        pass
    os.close(leader)
    assert said.decode().endswith(CLEAR) and b"\n" not in said


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["generate", "What is a seed for?"], "loading demo ..."),
        (["check"], "checking demo ..."),
        (["env"], "reading versions ..."),
    ],
)
def test_first_line_of_a_command_goes_to_stderr(words: list[str], first: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "foreword", *words], capture_output=True, text=True, check=True
    )
    assert completed.stderr.splitlines()[0] == f"foreword {__version__}: {first}"
    assert first not in completed.stdout and completed.stdout


def test_interrupted_begin_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose start was interrupted cannot be joined."""

    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    line = StartupLine()
    monkeypatch.setattr(threading.Thread, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        line.begin("loading", at_once=False)
    line.end()
    assert not line.is_shown


def test_line_comes_before_heavy_imports() -> None:
    """And before any module of the command: the wait is for those."""
    code = (
        "import sys; from foreword.cli import startup, main\n"
        "heavy = {'torch', 'fastapi', 'numpy'}\n"
        "startup.StartupLine.begin = lambda self, text: sys.exit(bool(heavy & set(sys.modules)))\n"
        "sys.argv = ['foreword', 'serve']; main.main()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "1 s"), (74.7, "75 s"), (300, "5 min"), (6000, "1 h 40 min")]
)
def test_time_left_is_rounded(seconds: float, text: str) -> None:
    assert startup.format_seconds(seconds) == text
