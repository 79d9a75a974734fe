"""Every benchmark keeps result files, figures of an interrupted run, and cells beside a failed one."""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from foreword.bench.result_file import ResultFile
from foreword.bench.session import BenchSession, BenchStep, _TimeLeft
from foreword.errors import ConfigError, InvalidRequest
from tests.support.waiting import WAIT_S


def arguments(json_path: object = None, plot: object = None) -> argparse.Namespace:
    texts = [None if path is None else str(path) for path in (json_path, plot)]
    return argparse.Namespace(bench="test", json=texts[0], plot=texts[1])


def steps_of(*calls: Any) -> list[BenchStep]:
    return [BenchStep(f"cell {number}", f"cell {number}", 1.0, call) for number, call in enumerate(calls)]


def interrupt() -> None:
    raise KeyboardInterrupt


def finish(session: BenchSession, finished: int = 1, **more: Any) -> int:
    def show(result: Mapping[str, Any]) -> None:
        print("the table")

    return session.finish({"figure": 1.5}, show, finished=finished, passed=True, **more)


def test_result_replaces_an_earlier_one_only_when_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("earlier")
    with BenchSession(arguments(file)):
        assert file.read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"], "no partial file stays"
    with BenchSession(arguments(file)) as session:
        assert finish(session) == 0
    assert json.loads(file.read_text())["figure"] == 1.5
    assert len(list(tmp_path.iterdir())) == 1


def test_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("earlier")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    ResultFile("--json", str(link)).write(lambda path: path.write_text("new"))
    assert link.is_symlink() and (tmp_path / "target").read_text() == "new"


@pytest.mark.parametrize("name", ["", "no/such/folder.json", "file/x.json", "null\0byte"])
@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_path_that_cannot_be_written_is_named_at_once(tmp_path: Path, name: str, flag: str) -> None:
    (tmp_path / "file").write_text("")
    path = f"{tmp_path}/{name}"
    with pytest.raises(ConfigError, match=f"^{flag} "):
        BenchSession(
            arguments(path if flag == "--json" else tmp_path / "ok", path if flag == "--plot" else None)
        )
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_device_is_written_directly(capsys: pytest.CaptureFixture[str]) -> None:
    with BenchSession(arguments("/dev/null")) as session:
        assert finish(session) == 0
    assert Path("/dev/null").is_char_device()


def test_interrupt_keeps_what_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    file = tmp_path / "result.json"
    with BenchSession(arguments(file)) as session:
        steps = steps_of(
            lambda: done.append("a"), lambda: done.append("b"), interrupt, lambda: done.append("c")
        )
        session.run(steps, "four cells")
        assert finish(session, finished=len(done)) == 130
    assert done == ["a", "b"]
    out, err = capsys.readouterr()
    assert out.splitlines()[-2] == "the table"
    assert json.loads(out.splitlines()[-1])["complete"] is False
    assert json.loads(file.read_text())["complete"] is False
    assert err.splitlines()[-1] == "bench test: interrupted; only what was complete is shown"


def test_interrupt_before_a_cell_leaves_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text("earlier")
    with BenchSession(arguments(file)) as session:
        session.run(steps_of(interrupt), "one cell")
        assert finish(session, finished=0) == 130
    assert file.read_text() == "earlier"
    assert capsys.readouterr().out == ""


def test_sigterm_is_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with BenchSession(arguments()) as session:
        session.run(steps_of(lambda: signal.raise_signal(signal.SIGTERM)), "one cell")
        assert not session.complete
    assert signal.getsignal(signal.SIGTERM) == before


def test_cancelled_step_is_an_interrupt() -> None:
    def cancel() -> None:
        raise asyncio.CancelledError

    with BenchSession(arguments()) as session:
        session.run(steps_of(cancel), "one cell")
        assert not session.complete


def test_failed_cell_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    def fail() -> None:
        raise InvalidRequest("too long", "prompt")

    with BenchSession(arguments()) as session:
        first, second = steps_of(fail, lambda: done.append("second"))
        session.run([first, second, first], "two cells")
        assert finish(session) == 1
    assert (done, session.errors) == (["second"], {"cell 0": "too long"})
    out, err = capsys.readouterr()
    assert "cell 0 failed: too long" in err
    assert json.loads(out.splitlines()[-1])["errors"] == {"cell 0": "too long"}


def test_json_is_written_before_a_plot_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "result.json", tmp_path / "plot.png"
    plot.write_text("earlier")

    def draw(result: Mapping[str, Any], path: Path) -> None:
        assert json.loads(file.read_text())["figure"] == result["figure"]
        path.write_text("half")
        raise RuntimeError("no font")

    with BenchSession(arguments(file, plot)) as session:
        assert finish(session, draw=draw) == 1
    out, err = capsys.readouterr()
    assert "the table" in out
    assert f"--plot {plot} was not written: RuntimeError: no font" in err
    assert plot.read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "result.json"]


def test_json_is_on_stdout_unless_it_is_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with BenchSession(arguments()) as session:
        finish(session)
        assert capsys.readouterr().out.splitlines()[-1].startswith("{")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        finish(session)
        assert capsys.readouterr().out.splitlines()[-1] == "the table"
    with BenchSession(arguments("-")) as session:
        finish(session)
        out, err = capsys.readouterr()
    assert json.loads(out)["figure"] == 1.5
    assert "the table" in err


def test_long_step_repeats_its_line_where_stderr_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.cli.startup.REPEAT_S", 0.0)
    monkeypatch.setattr("foreword.cli.startup.REFRESH_S", 0.001)
    shown: list[str] = []

    def last_until_repeated() -> None:
        deadline_s = time.monotonic() + WAIT_S
        while "".join(shown).count("1/1: cell 0;") < 3 and time.monotonic() < deadline_s:
            shown.append(capfd.readouterr().err)

    with BenchSession(arguments()) as session:
        session.run(steps_of(last_until_repeated), "one cell")
    assert "".join(shown).count("1/1: cell 0;") >= 3


def test_nan_becomes_null(capsys: pytest.CaptureFixture[str]) -> None:
    with BenchSession(arguments("-")) as session:
        session.finish({"a": [float("nan"), 2.0]}, lambda _: None, finished=1, passed=True)
    assert json.loads(capsys.readouterr().out)["a"] == [None, 2.0]


def test_estimate_and_progress_are_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.bench.session.LINE_INTERVAL_S", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr("foreword.bench.session.time.monotonic", lambda: float(next(clock) // 10 * 30))
    with BenchSession(arguments()) as session:
        calls = [lambda: [next(clock) for _ in range(10)]] * 3  # a step takes 30 s, not 1 s
        session.run(steps_of(*calls), "three cells")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "bench test: three cells; Ctrl-C keeps what is complete"
    assert lines[1] == "1/3: cell 0; measuring the speed first"
    assert lines[2] == "2/3: cell 1; about 60 s left"


def test_time_left_follows_the_same_cell_first() -> None:
    """The warm-up of a cell tells its rounds' time, and the other cells' by all that ran."""
    steps = [BenchStep(cell, cell, 1.0, lambda: None) for cell in ("a", "a", "b", "b")]
    left = _TimeLeft(steps)
    left.add(steps[0], 10.0, ())
    assert str(left) == "about 30 s left"
    left.add(steps[2], 2.0, ())
    assert str(left) == "about 12 s left"
    left.add(steps[1], 10.0, ())
    assert str(left) == "about 2 s left"
