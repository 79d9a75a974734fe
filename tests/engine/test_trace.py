"""A trace reproduces every plan without the model."""

import io
import json

import pytest

from foreword.cache.blocks import BlockPool
from foreword.engine.trace import TracedScheduler, replay
from tests.engine.simulation import Simulation, make_request
from tests.engine.test_scheduler import noisy_guess


def _traced_run() -> tuple[list[str], int]:
    simulation = Simulation(8, 2, 14, noisy_guess(5, 4, 0.3))
    file = io.StringIO()
    simulation.scheduler = TracedScheduler(file, BlockPool(8), 2, 4, 16, True)
    for number in range(6):
        simulation.add(make_request(str(number), [1, 2, 3], seed=number % 2, priority=number % 3, logit_bias={3: 1.5}))
        simulation.step()
    simulation.scheduler.remove("5")
    simulation.run()
    return file.getvalue().splitlines(), simulation.num_steps


def test_replay_yields_the_recorded_plans() -> None:
    lines, num_steps = _traced_run()
    assert len(list(replay(lines))) == num_steps
    assert any(json.loads(line).get("preempted") for line in lines), "the trace should hold a preemption"


def test_a_changed_plan_is_noticed() -> None:
    lines, _ = _traced_run()
    index = next(i for i, line in enumerate(lines) if '"plan"' in line)
    record = json.loads(lines[index])
    record["work"][0][2] += 1
    lines[index] = json.dumps(record)
    with pytest.raises(AssertionError, match="recorded"):
        list(replay(lines))
