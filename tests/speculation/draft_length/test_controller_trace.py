"""Recording and replaying decisions."""

from pathlib import Path

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.controller_trace import RecordingController, replay
from foreword.speculation.draft_length.cost_model import Calibration
from foreword.speculation.draft_length.policy import PrefillLoad
from tests.support.controller_simulation import (
    STEP,
    SimulatedMachine,
    SimulatedOutput,
    SimulatedServer,
    constant_acceptance,
    mixed_acceptance,
    swinging_bandwidth,
)

NOISY = SimulatedMachine("CPU", 14, swinging_bandwidth, 0.05)


@pytest.mark.parametrize(("proposing", "share"), [(0.01, 0.0), (0.5, 0.0), (0.01, 0.1)])
def test_record_can_be_replayed(tmp_path: Path, proposing: float, share: float) -> None:
    path = tmp_path / "decisions.jsonl"
    outputs = [SimulatedOutput(60, mixed_acceptance(i), i % 2 == 0) for i in range(6)]
    outputs += [SimulatedOutput(200, constant_acceptance(0.0))] * 2
    server = SimulatedServer(NOISY, outputs, 3, proposing, share)
    server.run(RecordingController(path, server.machine.calibration(), 32, server.passes()))
    lines = path.read_text().splitlines()
    assert sum(1 for _ in replay(lines)) > 60
    assert proposing < 0.1 or any("record_plain_step" in line for line in lines), "a long backoff"
    decided = next(i for i, line in enumerate(lines) if '"decided": [[' in line and '"suffix"' in line)
    lines[decided] = lines[decided].replace('"suffix"', '"other"', 1)
    with pytest.raises(AssertionError, match="recorded"):
        list(replay(lines))


def test_record_reduces_params_to_sampler_classes(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    controller = RecordingController(path, Calibration({1: STEP}, {1: STEP}), 4)
    for i, params in enumerate(
        [{}, {"top_p": 0.3}, {"logit_bias": {7: 1.0}}, {"logprobs": 3, "max_tokens": 9}]
    ):
        state = RequestState(Request(f"r{i}", (1, 2), SamplingParams(**params), 0), 0, 100)  # type: ignore[arg-type]
        controller.start(state)
        controller.max_draft_len(state)
    controller.select([], PrefillLoad())
    assert len(list(replay(path.read_text().splitlines()))) == 9
