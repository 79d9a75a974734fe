"""A record of decisions, replayed."""

from pathlib import Path

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.drafting.base import Ask
from foreword.drafting.control.costs import Calibration
from foreword.drafting.control.decisions import TracedController, replay
from foreword.drafting.policy import Load
from tests.drafting.control.simulation import STEP, Machine, Text, World, swinging, two_sorts

NOISY = Machine("CPU", 14, swinging, 0.05)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_record_of_decisions_can_be_replayed(tmp_path: Path, share: float) -> None:
    path = tmp_path / "decisions.jsonl"
    world = World(NOISY, [Text(60, two_sorts(i), i % 2 == 0) for i in range(6)], 3, 0.01, share)
    world.run(TracedController(path, world.machine.calibration(), 32, world.passes()))
    lines = path.read_text().splitlines()
    assert sum(1 for _ in replay(lines)) > 60
    admitted = next(i for i, line in enumerate(lines) if '"admit"' in line and '"decided": [["suffix", ' in line)
    lines[admitted] = lines[admitted].replace('"decided": [["suffix", ', '"decided": [["suffix", 9')
    with pytest.raises(AssertionError, match="recorded"):
        list(replay(lines))


def test_a_record_holds_parameters_by_class_alone(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    controller = TracedController(path, Calibration({1: STEP}, {1: STEP}), 4)
    for i, params in enumerate([{}, {"top_p": 0.3}, {"logit_bias": {7: 1.0}}, {"logprobs": 3, "max_tokens": 9}]):
        state = RequestState(Request(f"r{i}", (1, 2), SamplingParams(**params), 0), 0, 100)  # type: ignore[arg-type]
        controller.start(state)
        controller.bound(Ask(state))
    controller.admit([], Load())
    assert len(list(replay(path.read_text().splitlines()))) == 5
