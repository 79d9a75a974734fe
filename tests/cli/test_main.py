"""The command line: help of every command, errors of one line, light imports."""

import argparse
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from foreword.cli import main as cli
from foreword.errors import CheckpointError, ConfigError


def fake_command(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--log-level", default="info")

    def run(args: argparse.Namespace) -> int:
        if error is not None:
            raise error
        return 0

    module = types.ModuleType("fake_command")
    module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setattr(cli, "COMMANDS", (cli.Subcommand("fake", "fake_command", "pretend"),))


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["nonsense"]])
def test_without_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == (0 if words and words[0].startswith("--") else 2)
    if caught.value.code:
        assert capsys.readouterr().err.count("\n") == 1


def test_success(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch)
    assert cli.main(["fake"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("port is odd"), 2), (CheckpointError("no weights"), 2), (KeyboardInterrupt(), 130)],
)
def test_errors_are_one_line(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, error)
    assert cli.main(["fake"]) == code
    printed = capsys.readouterr().err
    assert printed == (f"foreword fake: {error}\n" if str(error) else "")


def test_unknown_flag_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch)
    with pytest.raises(SystemExit) as caught:
        cli.main(["fake", "--wrong"])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "--wrong" in printed


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fake_command(monkeypatch, ConfigError("port is odd"))
    assert cli.main(["fake", "--log-level", "debug"]) == 2
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"foreword {command}" in capsys.readouterr().out


def test_command_line_imports_little() -> None:
    """`foreword --help` imports neither torch nor the server's libraries."""
    code = "import sys, foreword.cli.main; print({'torch', 'fastapi', 'rich', 'numpy'} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "set()"


@pytest.mark.parametrize("module", ["cli.serve", "cli.chat", "cli.generate", "bench.command", "bench.serve"])
def test_light_commands_import_no_torch(module: str) -> None:
    code = f"import sys, foreword.{module}; print('torch' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "False"


def test_python_m_foreword_runs() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "foreword", "--version"], capture_output=True, text=True, check=True
    )
    assert completed.stdout.startswith("foreword ")


@pytest.mark.full
def test_broken_pipe_is_no_traceback() -> None:
    command = [sys.executable, "-m", "foreword", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (1, b"")


@pytest.mark.parametrize(("name", "code"), [("serve", 0), ("chat", -signal.SIGTERM)])
def test_sigterm_during_imports_exits_with_0(name: str, code: int, tmp_path: Path) -> None:
    """Imports take seconds, and nothing has started that needs a cleanup."""
    (tmp_path / "heavy.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)")
    start = (
        "from foreword.cli import main as cli; "
        f"cli.COMMANDS = (cli.Subcommand({name!r}, 'heavy', 'pretend'),); cli.main([{name!r}])"
    )
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    command = [sys.executable, "-c", start]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == (b"", b"") and process.returncode == code


def test_signal_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--no-such-option"])
    assert signal.getsignal(signal.SIGTERM) is before
