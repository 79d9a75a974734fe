"""A plugged-in drafter may take the time that its drafts save: simulated machines, in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from foreword import Draft, Drafter, RequestView, SamplingParams
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.controller import TRIAL_STEPS, DrafterAccount, DraftLengthController
from foreword.speculation.draft_length.controller_trace import RecordingController, replay
from foreword.speculation.draft_length.exploration import EXPLORATION_SHARE
from foreword.speculation.draft_length.policy import Policy, PrefillLoad, Proposal, RequestStep, StepRecord
from foreword.speculation.engine_drafter import DraftRequest
from foreword.speculation.plugin import DrafterAdapter
from tests.support.controller_simulation import (
    GPU,
    STEP,
    DraftablePositions,
    SimulatedOutput,
    SimulatedServer,
    SimulationResult,
    constant_acceptance,
)

NUM_TOKENS = 1000


class SimulatedPlugin(Drafter):
    """A drafter whose call takes `call_steps` plain steps, and whose tokens are right with `chance`."""

    def __init__(self, server: SimulatedServer, call_steps: float, chance: float) -> None:
        self.server = server
        self.call_s = call_steps * STEP
        self.text = SimulatedOutput(NUM_TOKENS, constant_acceptance(chance))
        self.positions: dict[str, DraftablePositions] = {}
        self.num_calls = 0

    def start(self, request: RequestView) -> None:
        self.positions[request.id] = DraftablePositions.sample(self.text, 7)

    def propose(self, requests: Sequence[RequestView]) -> list[list[int]]:
        self.num_calls += 1
        self.server.now += self.call_s
        starts = [len(request.tokens) - request.num_prompt_tokens for request in requests]
        return [
            [int(right) for right in self.positions[request.id].right[start : start + request.max_tokens]]
            for request, start in zip(requests, starts, strict=True)
        ]


def simulate(
    call_steps: float | None, chance: float, concurrency: int = 1, suffix_chance: float | None = None
) -> tuple[SimulationResult, int]:
    """The result with a plug-in (None: without), and the number of its calls."""
    texts = [SimulatedOutput(NUM_TOKENS, constant_acceptance(suffix_chance or 0.0))] * concurrency
    server = SimulatedServer(GPU, texts, concurrency, asking=0.001)
    plugin = SimulatedPlugin(server, call_steps or 0.0, chance)
    server.hosts = server.hosts if suffix_chance is not None else []
    if call_steps is not None:
        server.hosts.append(DrafterAdapter("own", plugin, 2))
    policy = DraftLengthController(server.machine.calibration(), 32, earning=["own"])
    return server.run(policy), plugin.num_calls


def plain_seconds(concurrency: int) -> float:
    texts = [SimulatedOutput(NUM_TOKENS, constant_acceptance(0.0))] * concurrency
    return SimulatedServer(GPU, texts, concurrency).run(None).seconds


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize(
    ("call_steps", "chance"), [(0.05, 0.0), (0.5, 0.0), (5.0, 0.0), (5.0, 0.75), (2.0, 0.3)]
)
def test_slow_drafter_is_given_up(call_steps: float, chance: float, concurrency: int) -> None:
    result, num_calls = simulate(call_steps, chance, concurrency)
    limit = EXPLORATION_SHARE + (TRIAL_STEPS + call_steps) / NUM_TOKENS
    assert result.seconds <= (1 + limit) * plain_seconds(concurrency)
    assert num_calls
    if not chance:
        assert num_calls * call_steps <= NUM_TOKENS * EXPLORATION_SHARE + TRIAL_STEPS + 2 * call_steps


@pytest.mark.parametrize(
    ("call_steps", "chance", "speedup"),
    [(0.01, 0.8, 4.0), (0.5, 0.9, 5.0), (0.3, 0.6, 1.8), (2.0, 0.9, 2.5), (5.0, 0.9, 1.3)],
)
def test_drafter_that_pays_is_called(call_steps: float, chance: float, speedup: float) -> None:
    result, _ = simulate(call_steps, chance)
    assert plain_seconds(1) >= speedup * result.seconds


@pytest.mark.parametrize("call_steps", [0.05, 0.5, 5.0])
def test_slow_drafter_does_not_disturb_the_others(call_steps: float) -> None:
    """Its time must not make the controller back off from lookups, which cost nothing."""
    alone, _ = simulate(None, 0.0, suffix_chance=0.7)
    beside, num_calls = simulate(call_steps, 0.0, suffix_chance=0.7)
    assert num_calls
    num_steps = alone.seconds / STEP
    assert beside.seconds <= alone.seconds * (1.03 + (TRIAL_STEPS + call_steps) / num_steps)


def test_account_recovers_a_share_of_the_time() -> None:
    account = DrafterAccount(1.0)
    assert account.can_afford_call
    account.charge(2 * TRIAL_STEPS)
    steps = 0
    while not account.can_afford_call:
        account.earn(0.0, 1.0, 1.0)
        steps += 1
    assert steps == pytest.approx(2 * TRIAL_STEPS / EXPLORATION_SHARE, rel=0.01)


def test_savings_pay_for_calls() -> None:
    account = DrafterAccount(1.0)
    for _ in range(1000):
        assert account.can_afford_call
        account.charge(0.5)
        account.earn(0.6, 1.0, 1.0)
    for _ in range(20):
        account.charge(0.5)
        account.earn(-0.1, 1.0, 1.0)
    assert not account.can_afford_call, "savings of long ago pay for a few steps only"


def test_decisions_on_plugins_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    server = SimulatedServer(GPU, [SimulatedOutput(100, constant_acceptance(0.0))] * 2, 2)
    server.hosts.append(DrafterAdapter("own", SimulatedPlugin(server, 0.5, 0.8), 2))
    policy: Policy = RecordingController(path, server.machine.calibration(), 32, server.passes(), ["own"])
    server.run(policy)
    lines = path.read_text().splitlines()
    assert sum('"may_propose"' in line for line in lines) > 20
    assert sum(1 for _ in replay(lines)) > 60


def test_token_accepted_beside_a_prompt_saves_a_decode_step_only() -> None:
    """Not a step of the prompt's length, which plain decoding would run once too."""
    controller = DraftLengthController(GPU.calibration(), 8, earning=["own"])
    states = [RequestState(Request(name, (1,) * 8, SamplingParams(), 0), 0, 100) for name in "ab"]
    for state in states:
        controller.start(state)
    load = PrefillLoad(960, 0)  # ten times the cost of a decode step on this machine
    proposal = Proposal(DraftRequest(states[0], 4), [Draft((1,), "own", (0.99,))])
    controller.max_draft_len(proposal.request.state)
    for _ in range(2):
        controller.record_proposing("own", TRIAL_STEPS * STEP)
    assert controller.select([proposal], load) == proposal.drafts
    served = RequestStep(states[0], 1, 1, True, 2, 9), RequestStep(states[1], 960, 0, False, 0, 960)
    controller.record_step(StepRecord(served, {"forward": 10 * STEP}))
    (account,) = controller.accounts.by_drafter.values()
    debt = TRIAL_STEPS * STEP
    assert account.balance == pytest.approx(STEP - debt, abs=0.2 * STEP)


@pytest.mark.parametrize(("others", "credit"), [((), 1.0), ((0.9, 0.9), 0.5), ((0.9,) * 4, 0.0)])
def test_tokens_that_another_drafter_has_too_earn_nothing(others: tuple[float, ...], credit: float) -> None:
    """Four tokens were right; the share of them that only this drafter proposed counts."""
    controller = DraftLengthController(GPU.calibration(), 8, earning=["own"])
    state = RequestState(Request("a", (1,) * 8, SamplingParams(), 0), 0, 100)
    controller.start(state)
    (account,) = controller.accounts.by_drafter.values()
    drafts = [Draft((1,) * 4, "own", (0.9,) * 4), Draft((1,) * len(others), "suffix", others)]
    chosen = None
    while chosen is None:  # some steps measure plain decoding
        account.balance = 0.0
        controller.max_draft_len(state)
        proposal = Proposal(DraftRequest(state, 4), drafts[: 1 + bool(others)])
        (chosen,) = controller.select([proposal], PrefillLoad())
        num_drafted = 4 if chosen else 0
        served = RequestStep(state, 1, num_drafted, True, 1 + num_drafted, 9)
        controller.record_step(StepRecord((served,), {"forward": STEP}))
    assert chosen == drafts[0]
    earned = account.balance - EXPLORATION_SHARE * STEP
    assert earned == pytest.approx(credit * 4 * STEP, abs=0.3 * STEP)
