"""Ctrl-C and SIGTERM during a benchmark of a real process: what is complete is kept, children are ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.waiting import wait_until

# The command with a line of progress for every step.
SCRIPT = """
import sys
from foreword.bench import session
from foreword.cli.main import main
session.LINE_INTERVAL_S = 0.0
sys.exit(main())
"""
ENDLESS = ["--rounds", "20000", "--max-tokens", "4", "--kv-cache-memory", "3000tokens"]
REQUESTS = ["--num-requests", "2", "--concurrency", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("interrupt") / "tiny"))


def interrupt(words: list[str], wait_for: str, number: int) -> tuple[int, str, list[str], list[int]]:
    """Send a signal when a line of stderr has `wait_for`; exit code, stdout, stderr and children's ids.

    SIGINT goes to the children as well, as from a terminal.
    """
    command = [sys.executable, "-c", SCRIPT, "bench", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if wait_for in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        out, err = process.communicate()
    return process.returncode, out, [*lines, *err.splitlines()], list(map(int, children))


@pytest.mark.full
def test_terminated_run_shows_complete_rounds(model: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["serve", *REQUESTS, *ENDLESS, "--model", model, "--speculate", "ngram", "--json", str(file)]
    code, out, err, children = interrupt(words, "round 2 of", signal.SIGTERM)
    assert code == 130, err[-20:]
    result = json.loads(file.read_text())
    assert not result["complete"]
    assert 1 <= result["rounds"] < 20000
    assert json.loads(out.splitlines()[-1]) == result
    assert "above 1 is faster" in " ".join(out.split())
    assert err[-1] == "bench serve: interrupted; only what was complete is shown"
    assert not [line for line in err if "Traceback" in line]
    assert children
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


@pytest.mark.full
def test_interrupt_while_loading_leaves_an_earlier_result(model: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("earlier")
    words = ["serve", "--model", model, "--json", str(file)]
    code, out, err, children = interrupt(words, "starting a server", signal.SIGINT)
    assert (code, out, file.read_text()) == (130, "", "earlier")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert not [line for line in err if "Traceback" in line]
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
