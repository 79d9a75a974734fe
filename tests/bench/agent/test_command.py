"""`foreword bench agent`, run small: equal answers, ratios by mode, and claims that are checked."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.bench.agent.command import _cached, _mode_result
from foreword.bench.agent.engine import AgentSession, check_sessions
from foreword.bench.agent.workload import AgentScript, AgentStep
from foreword.bench.measurement import AUTO, BenchRepetition, PairedRun, RequestResult
from foreword.bench.regime import RegimeError
from foreword.chat_formats.events import ContentText
from foreword.cli.main import main
from tests.support.checkpoints import write_checkpoint

SMALL = ["--concurrency", "2", "--rounds", "1"]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "agent", *words])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.full
def test_offline_replay_counts_what_drafters_find(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--offline", "--contexts", "2048", "--concurrency", "1,2", "--rounds", "1", "--set", "held-out"]
    first, second = (bench(capsys, *flags, "--modes", "suffix") for _ in range(2))
    assert first[0] == 0 and first[1]["cells"] == second[1]["cells"], "figures are counts"
    for cell in first[1]["cells"]:
        of = cell["modes"]["suffix"]
        assert of["speed"] > 1 and of["tokens"] == sum(tally["tokens"] for tally in of["by_place"].values())
        assert of["accepted"] == sum(tally["accepted"] for tally in of["by_place"].values())
        assert of["accepted"] == sum(tally["accepted"] for tally in of["by_drafter"].values())


@pytest.mark.full
def test_recorded_sessions_are_equal_in_all_modes(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(capsys, "--contexts", "2048", "--concurrency", "1", "--rounds", "1")
    assert (code, result["equal"], result["model"]) == (0, True, "recorded answers, 27m")
    (cell,) = result["cells"]
    assert cell["sessions"] == 1 and cell["steps"] >= 9
    assert cell["plain"]["reused"] > 0.97 and set(cell["modes"]) == {"suffix", "auto"}
    assert cell["modes"]["suffix"]["acceptance"] > 0


@pytest.mark.full
def test_model_answers_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    flags = ["--model", str(model), "--kv-cache-memory", "4000tokens", "--modes", "suffix"]
    code, result = bench(capsys, "--contexts", "512", *SMALL, *flags)
    assert (code, result["equal"], result["model"]) == (0, True, str(model))
    assert set(result["cells"][0]["modes"]) == {"suffix"}


@pytest.mark.full
@pytest.mark.parametrize("flags", [["--contexts", "0"], ["--contexts", "90000"], ["--modes", "fast"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agent", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def repetition(seconds: float, events: str = "done") -> BenchRepetition:
    """A session of two steps: the second prompt repeats the first one and its answer."""
    first = RequestResult(
        0, 0, prompt_ids=(1,) * 8, output=(2,) * 4, num_tokens=4, ttft_s=0.1, total_s=seconds
    )
    second = RequestResult(0, 1, prompt_ids=(1,) * 16, output=(2,), num_tokens=1, ttft_s=0.1, total_s=seconds)
    second.num_cached, second.events = 12, (ContentText(events),)
    return BenchRepetition((first, second), 2 * seconds, {}, {})


def test_session_time_is_the_sum_of_its_steps() -> None:
    figures = _mode_result([PairedRun(repetition(3.0), repetition(2.0))])
    assert figures["session"]["ratio"] == pytest.approx(1.5) == figures["slowest_session"]["ratio"]
    assert figures["session_s"] == pytest.approx(4.0) and figures["equal"]


def test_cached_shares() -> None:
    shares = _cached([repetition(1.0)])
    assert shares == {"cached": 12 / 24, "cached_after_result": 12 / 16, "reused": 12 / 12}


def test_other_events_are_not_equal() -> None:
    assert not _mode_result([PairedRun(repetition(1.0), repetition(1.0, "other"))])["equal"]


def test_lost_call_voids_the_figures() -> None:
    step = AgentStep("I read.", "read_file", {"path": "a.py"}, "text")
    session = AgentSession(("task", "text"), script=AgentScript("", "task", (step,), "done"))
    with pytest.raises(RegimeError, match="calls parsed: 0, not 1"):
        check_sessions(AUTO, [session], repetition(1.0))
