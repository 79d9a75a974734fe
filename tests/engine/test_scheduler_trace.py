"""Traces: replay reproduces every schedule without the model."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.engine.scheduler_trace import RecordingScheduler, replay
from foreword.errors import Unsatisfiable
from foreword.kv_cache.block_pool import BlockPool
from foreword.speculation.draft_length.controller_trace import replay as replay_decisions
from tests.support.checkpoints import write_checkpoint
from tests.support.scheduler_simulation import (
    FaultFunction,
    SchedulerSimulation,
    make_request,
    no_fault,
    noisy_drafter,
)


def _traced_run(path: Path, fault_fn: FaultFunction = no_fault) -> tuple[list[str], int]:
    simulation = SchedulerSimulation(8, 2, 14, noisy_drafter(5, 4, 0.3), fault_fn)
    simulation.scheduler = RecordingScheduler(path / "trace", BlockPool(8), 2, 4, 16, True)
    for number in range(6):
        pooling = "mean" if number == 4 else None
        request = make_request(str(number), [1, 2, 3], number % 2, number % 3, pooling, logit_bias={3: 1.5})
        simulation.add(replace(request, fairness_key="ab"[number % 2]))
        simulation.step()
    simulation.scheduler.remove("5")
    simulation.run()
    return (path / "trace").read_text().splitlines(), simulation.num_steps


def test_replay_yields_the_recorded_schedules(tmp_path: Path) -> None:
    lines, num_steps = _traced_run(tmp_path)
    assert len(list(replay(lines))) == num_steps
    assert any(json.loads(line).get("decided", {}).get("preempted") for line in lines), (
        "the trace should contain a preemption"
    )


@pytest.mark.parametrize("seed", range(5))
def test_faults_are_replayed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    lines, num_steps = _traced_run(tmp_path, lambda: chance.choice(["pass", "commit", *[None] * 20]))
    assert len(list(replay(lines))) == num_steps


def test_replay_rejects_a_changed_schedule(tmp_path: Path) -> None:
    lines, _ = _traced_run(tmp_path)
    index = next(i for i, line in enumerate(lines) if '"work"' in line)
    record = json.loads(lines[index])
    record["decided"]["work"][0][2] += 1
    lines[index] = json.dumps(record)
    with pytest.raises(AssertionError, match="recorded"):
        list(replay(lines))


def test_engine_trace_is_replayed(tmp_path: Path) -> None:
    """`--trace FILE` of a real engine."""
    llm = LLM(
        str(write_checkpoint(tmp_path / "model", seed=5)),
        trace=str(tmp_path / "trace"),
        threads=1,
        draft_length="fixed",
    )
    llm.generate(
        {"prompt_token_ids": [40, 41, 42, 40, 41]},
        SamplingParams(max_tokens=20, n=3, seed=1, ignore_eos=True),
    )
    with pytest.raises(Unsatisfiable):
        stuck = SamplingParams(allowed_token_ids=(40,), stop_token_ids=(40,), min_tokens=2)
        llm.generate({"prompt_token_ids": [40, 41]}, stuck)
    schedules = list(replay((tmp_path / "trace").read_text().splitlines()))
    assert len(schedules) == llm.stats.step
    assert any(work[-1] for schedule in schedules for work in schedule["work"])


def test_engine_trace_with_states_is_replayed(tmp_path: Path) -> None:
    """Prompts end at anchors, and later requests find them: the replay makes the same schedules."""
    model = write_checkpoint(tmp_path / "model", "lfm2", seed=6)
    options: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 100, "speculate": "ngram"}
    llm = LLM(str(model), trace=str(tmp_path / "trace"), threads=1, draft_length="fixed", **options)
    prompts = [{"prompt_token_ids": [*range(40, 200), *range(3 + i, 90)]} for i in range(3)]
    llm.generate(prompts * 2, SamplingParams(max_tokens=70, seed=1, ignore_eos=True))
    schedules = list(replay((tmp_path / "trace").read_text().splitlines()))
    assert len(schedules) == llm.stats.step
    starts = [work[1] for schedule in schedules for work in schedule["work"]]
    assert starts.count(0) < len(prompts * 2), "no prompt was found in the prefix cache"


def test_draft_decisions_are_traced(tmp_path: Path) -> None:
    llm = LLM(str(write_checkpoint(tmp_path / "model", seed=5)), trace=str(tmp_path / "trace"), threads=1)
    llm.generate(
        {"prompt_token_ids": [40, 41, 42, 40, 41]},
        SamplingParams(max_tokens=40, n=3, seed=1, ignore_eos=True),
    )
    decisions = list(replay_decisions((tmp_path / "trace.drafts").read_text().splitlines()))
    assert len(decisions) > 20
