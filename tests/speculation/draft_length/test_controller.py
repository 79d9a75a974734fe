"""The controller on simulated machines, in simulated time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.backoff import MAX_MISSES, MISSES_BEFORE_BACKOFF
from foreword.speculation.draft_length.controller import DraftLengthController
from foreword.speculation.draft_length.cost_model import Calibration, PassCost
from foreword.speculation.draft_length.exploration import (
    EXPLORATION_SHARE,
    FIRST_EXPLORE_STEP,
    FIRST_SAVED_STEPS,
)
from foreword.speculation.draft_length.policy import PrefillLoad, Proposal, RequestStep, StepRecord
from foreword.speculation.draft_length.regression_watchdog import RegressionWatchdog
from foreword.speculation.draft_length.row_selection import NEAR_BEST
from foreword.speculation.engine_drafter import DraftRequest, OnePass
from tests.support.controller_simulation import (
    CPU,
    GPU,
    LENGTHS,
    NOISY,
    SMALL_CPU,
    STEP,
    SimulatedMachine,
    SimulatedOutput,
    SimulatedServer,
    SimulationCase,
    SimulationResult,
    constant_acceptance,
    mixed_acceptance,
)

MAX_EXPLORING, FIRST_EXPLORING_S = EXPLORATION_SHARE, FIRST_SAVED_STEPS * STEP


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("machine", [GPU, CPU, SMALL_CPU, *NOISY], ids=lambda m: m.name)
def test_no_loss_where_nothing_can_be_drafted(machine: SimulatedMachine, concurrency: int) -> None:
    cell = SimulationCase(
        machine, [SimulatedOutput(200, constant_acceptance(0.0))] * (2 * concurrency), concurrency
    )
    assert cell.gain >= 0.99
    assert cell.exploring <= MAX_EXPLORING + FIRST_EXPLORING_S / cell.auto.seconds
    if not machine.noise:
        assert cell.slowest >= 0.98


@pytest.mark.parametrize(("ridge_rows", "chance", "gain"), [(2, 0.5, 0.94), (2, 0.6, 0.94), (4, 0.75, 1.4)])
def test_drafts_must_beat_plain_steps_with_warm_caches(ridge_rows: int, chance: float, gain: float) -> None:
    """Every step that proposes takes 30 % longer; the first two would gain 8 and 20 % over such steps."""
    machine = SimulatedMachine("cold caches", ridge_rows, cold=0.3)
    outputs = [SimulatedOutput(200, constant_acceptance(chance), draft_share=0.9)] * 20
    assert SimulationCase(machine, outputs, 1, asking=0.4).gain >= gain


@pytest.mark.full
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("machine", "concurrency"),
    [(GPU, 1), (GPU, 16), (CPU, 1), (CPU, 4), (SMALL_CPU, 1), (SMALL_CPU, 16), (NOISY[1], 1), (NOISY[1], 4)],
    ids=lambda part: str(getattr(part, "name", part)),
)
def test_as_good_as_the_best_fixed_length(machine: SimulatedMachine, concurrency: int, chance: float) -> None:
    cell = SimulationCase(
        machine, [SimulatedOutput(400, constant_acceptance(chance))] * max(6, concurrency), concurrency
    )
    near = [k for k in LENGTHS if concurrency * (k + 1) <= 4 * machine.ridge_rows]
    assert cell.gain >= 0.96 * NEAR_BEST * cell.best_fixed(near)
    assert cell.exploring <= MAX_EXPLORING + FIRST_EXPLORING_S / cell.auto.seconds


@pytest.mark.full
@pytest.mark.parametrize("reported", [False, True], ids=["confidence unknown", "confidence reported"])
@pytest.mark.parametrize("machine", [GPU, CPU, SMALL_CPU], ids=lambda m: m.name)
def test_easy_and_hard_positions_in_one_text(machine: SimulatedMachine, reported: bool) -> None:
    cell = SimulationCase(machine, [SimulatedOutput(400, mixed_acceptance(i), reported) for i in range(8)], 4)
    best = cell.best_fixed((1, 2, 3, 4, 6, 8, 16))
    assert cell.gain >= 0.97 * best
    if reported and machine is CPU:
        assert cell.gain >= 1.02 * best, "confidence must identify the rows that pay"


@pytest.mark.parametrize("together", [True, False], ids=["all at once", "one after the other"])
def test_mixed_requests_gain_and_none_slows_down(together: bool) -> None:
    count = 16 if together else 48
    cell = SimulationCase(
        GPU, [SimulatedOutput(200, constant_acceptance(0.95 if i % 2 else 0.02)) for i in range(count)], 16
    )
    assert cell.gain >= 1.3 or together
    assert cell.slowest >= 0.97


@pytest.mark.parametrize("machine", [CPU, SMALL_CPU], ids=lambda m: m.name)
@pytest.mark.parametrize("concurrency", [4, 16])
def test_no_request_slows_down_where_rows_are_expensive(machine: SimulatedMachine, concurrency: int) -> None:
    cell = SimulationCase(
        machine,
        [SimulatedOutput(200, constant_acceptance(0.95 if i % 2 else 0.02)) for i in range(2 * concurrency)],
        concurrency,
    )
    assert cell.gain >= 0.985
    assert cell.slowest >= 0.97


@pytest.mark.parametrize(
    ("machine", "concurrency", "share"), [(CPU, 8, 0.0), (SMALL_CPU, 2, 0.0), (CPU, 4, 0.15), (GPU, 1, 0.4)]
)
def test_expensive_rows_are_mostly_accepted(
    machine: SimulatedMachine, concurrency: int, share: float
) -> None:
    cell = SimulationCase(
        machine, [SimulatedOutput(300, constant_acceptance(0.7))] * (2 * concurrency), concurrency, 0.0, share
    )
    assert cell.gain > 1.05
    assert cell.auto.efficiency > 0.5


def pace(outcome: SimulationResult, start: int, count: int) -> float:
    """Tokens per step over `count` steps from output token `start` on."""
    emitted = 0
    for index, (_, tokens, _) in enumerate(outcome.steps):
        if emitted >= start:
            part = outcome.steps[index : index + count]
            return sum(step[1] for step in part) / len(part)
        emitted += tokens
    raise AssertionError("the text is shorter")


@pytest.mark.parametrize("machine", [GPU, CPU, SMALL_CPU], ids=lambda m: m.name)
def test_recovers_within_100_steps_of_a_switch(machine: SimulatedMachine) -> None:
    """No draft is right for 400 tokens, then nearly all are."""
    cell = SimulationCase(machine, [SimulatedOutput(2000, lambda index: 0.0 if index < 400 else 0.9)], 1)
    steady_pace = pace(cell.auto, 1200, 40)
    assert pace(cell.auto, 300, 40) == pytest.approx(1.0)
    emitted = next(i for i, _ in enumerate(cell.auto.steps) if sum(s[1] for s in cell.auto.steps[:i]) >= 400)
    soon = cell.auto.steps[emitted + 60 : emitted + 100]
    assert sum(step[1] for step in soon) / len(soon) >= 0.7 * steady_pace


@pytest.mark.parametrize("machine", [GPU, CPU, SMALL_CPU], ids=lambda m: m.name)
def test_stops_soon_after_a_switch(machine: SimulatedMachine) -> None:
    """Nearly all drafts are right up to token 400, then none."""
    cell = SimulationCase(machine, [SimulatedOutput(800, lambda index: 0.9 if index < 400 else 0.0)], 1)
    lost = sum(seconds - STEP for seconds, tokens, _ in cell.auto.steps if tokens == 1) / STEP
    assert lost < 0.02 * 400
    assert cell.gain > 1.5


@pytest.mark.full
@pytest.mark.parametrize("share", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("chance", [0.0, 0.8, 0.95])
def test_draft_model_cost_is_considered(share: float, chance: float) -> None:
    cell = SimulationCase(GPU, [SimulatedOutput(600, constant_acceptance(chance))] * 4, 1, 0.0, share)
    assert cell.gain >= 0.97 * cell.best_fixed((1, 2, 3, 4, 6, 8, 12, 16))
    assert cell.gain >= 0.99
    assert cell.exploring <= MAX_EXPLORING + FIRST_EXPLORING_S / cell.auto.seconds


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("machine", [GPU, CPU], ids=lambda m: m.name)
def test_draft_model_does_not_slow_a_hard_request_beside_easy_ones(
    machine: SimulatedMachine, share: float
) -> None:
    """It lost up to 28 %: the mean over requests said that drafts pay for it."""
    easy = [SimulatedOutput(400, mixed_acceptance(seed), has_confidence=True) for seed in range(3)]
    hard = SimulatedOutput(400, constant_acceptance(0.05), has_confidence=True)
    assert SimulationCase(machine, [*easy, hard] * 2, 4, 0.0, share).slowest >= 0.93


@pytest.mark.parametrize("machine", [GPU, CPU], ids=lambda m: m.name)
@pytest.mark.parametrize(("asking", "share"), [(0.05, 0.0), (0.2, 0.0), (0.0, 0.15)])
def test_request_without_speculation_pays_no_drafting_of_others(
    machine: SimulatedMachine, asking: float, share: float
) -> None:
    """It lost up to 14 % to proposals, and 9 % to trials of a draft model."""
    easy = [SimulatedOutput(3000, constant_acceptance(0.95))] * 3
    plain = SimulatedOutput(600, constant_acceptance(0.0), speculates=False)
    cell = SimulationCase(machine, [*easy, plain], 4, asking, share)
    assert cell.off.latencies[3] / cell.auto.latencies[3] >= 0.975


def speed_of(cell: SimulationCase, indices: Sequence[int]) -> float:
    """Mean speedup of these outputs."""
    ratios = [cell.off.latencies[index] / cell.auto.latencies[index] for index in indices]
    return sum(ratios) / len(ratios)


@pytest.mark.parametrize(("machine", "num_easy"), [(GPU, 15), (CPU, 3)], ids=["16 at once", "4 at once"])
def test_cheap_proposals_go_on_beside_a_request_without_speculation(
    machine: SimulatedMachine, num_easy: int
) -> None:
    """Verified drafts use up its whole budget, also what a proposal would need."""
    easy = [SimulatedOutput(400, constant_acceptance(0.8))] * num_easy
    plain = SimulatedOutput(400, constant_acceptance(0.0), speculates=False)
    cell = SimulationCase(machine, [*easy, plain], num_easy + 1, 0.01)
    assert speed_of(cell, range(num_easy)) > 1.5
    assert cell.slowest > 0.96


def test_draft_model_goes_on_after_a_request_without_speculation() -> None:
    easy = [SimulatedOutput(3000, constant_acceptance(0.95))] * 3
    plain = SimulatedOutput(600, constant_acceptance(0.0), speculates=False)
    cell = SimulationCase(CPU, [*easy, plain], 4, 0.0, 0.15)
    assert cell.gain > 1.7


@pytest.mark.parametrize(
    ("machine", "concurrency", "share", "prompt"), [(CPU, 4, 0.15, 8), (GPU, 1, 0.15, 1000)]
)
def test_draft_model_is_tried_again_after_hard_requests(
    machine: SimulatedMachine, concurrency: int, share: float, prompt: int
) -> None:
    """Trials ask the budgets of others only: those of the tried requests may be spent by their prompts."""
    hard = [SimulatedOutput(60, constant_acceptance(0.0), num_prompt_tokens=prompt)] * 60
    easy = [SimulatedOutput(60, constant_acceptance(0.9), num_prompt_tokens=prompt)] * 160
    cell = SimulationCase(machine, [*hard, *easy], concurrency, 0.0, share)
    assert speed_of(cell, range(180, 220)) > 1.3


def test_trials_of_a_draft_model_that_cannot_pay_delay_nobody() -> None:
    """Its drafts are right, but too dear for 16 at once: the slowest request lost 20 % to trials."""
    cell = SimulationCase(CPU, [SimulatedOutput(600, constant_acceptance(0.95))] * 32, 16, 0.0, 0.4)
    assert cell.slowest >= 0.98


def test_short_hard_answers_are_known_by_those_before() -> None:
    """Beside a long easy one, whose drafts are nearly all that is learned from, the last ones lost 15 %."""
    easy = SimulatedOutput(40 * 3 * 20, constant_acceptance(0.8), num_prompt_tokens=64)
    hard = SimulatedOutput(20, constant_acceptance(0.0), num_prompt_tokens=1000)
    cell = SimulationCase(GPU, [easy, *[hard] * 40], 2, 0.0, 0.2)
    last = [cell.off.latencies[index] / cell.auto.latencies[index] for index in range(21, 41)]
    assert sum(last) / len(last) >= 0.9


def test_draft_model_resumes_when_it_pays() -> None:
    cell = SimulationCase(
        GPU, [SimulatedOutput(2000, lambda index: 0.0 if index < 300 else 0.9)], 1, 0.0, 0.05
    )
    assert pace(cell.auto, 500, 100) > 3.0


def test_wrong_calibration_loses_briefly() -> None:
    """Calibrated: rows are free. Actual: four rows cost one more step."""
    truth = SimulatedMachine("CPU", 4, noise=0.02)
    texts = [SimulatedOutput(1500, constant_acceptance(0.3))] * 2
    off = SimulatedServer(truth, texts, 1).run(None)
    controller = DraftLengthController(SimulatedMachine("GPU", 96).calibration(), 32)
    auto = SimulatedServer(truth, texts, 1).run(controller)
    assert auto.rate / off.rate >= 1.15


def test_disturbed_calibration_heals() -> None:
    """Calibrated: one more row costs six steps. Actual: fourteen rows are free."""
    texts = [SimulatedOutput(3000, constant_acceptance(0.8))]
    off = SimulatedServer(CPU, texts, 1).run(None)
    disturbed = Calibration({rows: STEP * (1.0 if rows == 1 else 6.0) for rows in (1, 2, 4, 8, 16)}, {})
    auto = SimulatedServer(CPU, texts, 1).run(DraftLengthController(disturbed, 32))
    assert pace(auto, 2000, 100) > 3.0
    assert auto.rate > off.rate


# Single decisions


def state_of(name: str = "a", **params: object) -> RequestState:
    return RequestState(Request(name, (1,) * 8, SamplingParams(temperature=0.0, **params), 0), 0, 10_000)  # type: ignore[arg-type]


def controller_of(machine: SimulatedMachine = GPU) -> DraftLengthController:
    return DraftLengthController(machine.calibration(), 32)


def started(machine: SimulatedMachine = GPU) -> tuple[DraftLengthController, RequestState]:
    """A controller with one request."""
    controller, state = controller_of(machine), state_of()
    controller.start(state)
    return controller, state


def step(
    controller: DraftLengthController,
    states: Sequence[RequestState],
    seconds: float = STEP,
    drafting: float = 0.0,
    num_draft: int = 0,
) -> None:
    """A step whose `num_draft` draft tokens of each request are right."""
    served = tuple(RequestStep(s, 1, num_draft, True, num_draft + 1, len(s.tokens)) for s in states)
    controller.record_step(StepRecord(served, {"forward": seconds, "draft": drafting}))


def offered(controller: DraftLengthController, state: RequestState, *drafts: Draft) -> Draft | None:
    """One step for one request."""
    wanted = DraftRequest(state)
    if not controller.max_draft_len(wanted.state):
        return controller.select([], PrefillLoad()) and None
    (draft,) = controller.select([Proposal(wanted, list(drafts))], PrefillLoad())
    return draft


@pytest.mark.parametrize("bound", [0, 3])
def test_request_bound_is_honoured(bound: int) -> None:
    controller = controller_of()
    state = state_of(speculation=Speculation(max_draft_tokens=bound))
    controller.start(state)
    assert controller.max_draft_len(state) == bound


def test_better_of_two_drafts_is_selected() -> None:
    controller, state = started()
    step(controller, [state])
    sure, unsure = Draft((1,) * 4, "suffix", (0.99,) * 4), Draft((2,) * 4, "ngram", (0.2,) * 4)
    assert offered(controller, state, unsure, sure) == sure
    assert offered(controller, state, sure, unsure) == sure


@pytest.mark.parametrize("context", [20, 4000])
def test_rows_of_a_long_context_have_their_price(context: int) -> None:
    """A further row of 4,000 tokens takes 0.4 s more, beside a step of 1.4 s: some pay, and go on to pay."""
    seconds = {rows: 1 + 0.05 * (rows - 1) for rows in (1, 2, 4, 8, 16)}
    controller = DraftLengthController(Calibration(seconds, {}, 1e-4, 1e-4), 8)
    state = RequestState(Request("a", (1,) * context, SamplingParams(), 0), 0, 8192)
    controller.start(state)
    lengths = []
    for _ in range(12):
        draft = offered(controller, state, Draft((1,) * 8, "suffix", (0.9,) * 8))
        count = len(draft.token_ids) if draft else 0
        served = RequestStep(state, 1, count, True, count + 1, context + count)
        took_s = 1 + 0.05 * count + 1e-4 * context * (1 + count)
        controller.record_step(StepRecord((served,), {"forward": took_s}))
        lengths.append(count)
    later = lengths[3:]  # the first ones have no rate to compare with
    assert set(later) == {8} if context == 20 else min(later) > 0 and sum(later) < 7 * len(later)


def asked_when_nothing_is_offered(
    controller: DraftLengthController, state: RequestState, drafting: float
) -> list[bool]:
    """Whether the request could draft, by step; each step spends `drafting` seconds."""
    asked: list[bool] = []
    for _ in range(64):
        asked.append(controller.max_draft_len(state) > 0)
        controller.select([Proposal(DraftRequest(state))] if asked[-1] else [], PrefillLoad())
        step(controller, [state], drafting=drafting)
    return asked


def test_backoff_grows_without_drafts() -> None:
    controller, state = started()
    asked = asked_when_nothing_is_offered(controller, state, 0.07 * STEP)
    assert all(asked[:2])
    assert sum(asked[-32:]) == 1, "proposing takes 7 % of a step, above the limit of 0.4 %"
    assert set(controller.stats().no_draft_counts) == {"no_candidate", "backoff"}


def test_no_backoff_where_proposing_is_cheap() -> None:
    controller, state = started()
    assert all(asked_when_nothing_is_offered(controller, state, 0.003 * STEP))


def test_proposing_costs_the_lost_overlap() -> None:
    controller, state = controller_of(), state_of()
    controller.enable_overlap()
    controller.start(state)
    assert sum(asked_when_nothing_is_offered(controller, state, 0.003 * STEP)[-32:]) <= 2


def test_draft_must_beat_an_overlapped_step() -> None:
    slow = Draft((1,), "suffix", (0.9,))
    for ahead, taken in ((False, True), (True, False)):
        controller, state = controller_of(CPU), state_of()
        if ahead:
            controller.enable_overlap()
        controller.exploration.next_probe_step = 100
        controller.start(state)
        for _ in range(60):
            step(controller, [state], CPU.calibration().all_rows_sampled[1])
            if ahead:
                facts = StepRecord(
                    (RequestStep(state, 1, 0, True, 1, 8),),
                    {"forward": CPU.calibration().all_rows_sampled[1] / 2},
                )
                controller.record_plain_step(facts)
        assert (offered(controller, state, slow) is not None) == taken, (
            "two tokens per step pay unless an overlapped step takes half as long"
        )


def test_proposer_skips_while_all_back_off() -> None:
    """A request is asked again when its backoff ends."""
    controller, state = started()
    spells = []
    for _ in range(40):
        assert controller.max_draft_len(state)
        controller.select([Proposal(DraftRequest(state))], PrefillLoad())
        spells.append(controller.num_steps_to_skip())
        controller.record_skipped(spells[-1], spells[-1])
        step(controller, [state], drafting=0.07 * STEP)
    assert spells[0] == 0 and spells[-1] == 31
    controller.requests[state.id].skip_until = 10**6
    for _ in range(400):
        controller.backoff.record_hit(controller.requests[state.id])
    controller.start(state_of("b"))
    controller.max_draft_len(state)
    controller.select([], PrefillLoad())
    assert controller.num_steps_to_skip() == 0, "a request that was not asked yet may draft at any time"


def test_new_request_waits_where_nothing_pays() -> None:
    """What others have learned: it proposes with them, not in a step of its own."""
    controller, state = controller_of(), state_of()
    assert controller.start(state) == 0, "nothing is known yet"
    asked_when_nothing_is_offered(controller, state, 0.07 * STEP)
    for _ in range(8):
        controller.backoff.finish(controller.requests[state.id])
    new = state_of("new")
    waits = controller.start(new)
    assert 8 <= waits <= 32
    assert controller.max_draft_len(new) == 0
    controller.backoff.record_hit(controller.requests[state.id])
    for _ in range(8):
        controller.backoff.finish(controller.requests[state.id])
    assert controller.start(state_of("hopeful")) == 0


def test_short_requests_inherit_what_others_learned() -> None:
    """Where a step takes twice as long as proposing; then the traffic changes to what can be drafted."""
    outputs = [SimulatedOutput(57, constant_acceptance(0.0), draft_share=0.5)] * 40
    outputs += [SimulatedOutput(170, constant_acceptance(0.9))] * 6
    off = SimulatedServer(SMALL_CPU, outputs, 1).run(None).latencies
    controller = DraftLengthController(SMALL_CPU.calibration(), 32)
    auto = SimulatedServer(SMALL_CPU, outputs, 1, asking=0.5).run(controller).latencies
    assert sum(off[i] for i in range(10, 40)) >= 0.985 * sum(auto[i] for i in range(10, 40))
    assert off[40] >= 1.2 * auto[40]
    assert sum(off[i] for i in range(41, 46)) >= 2.2 * sum(auto[i] for i in range(41, 46))


def test_proposing_is_a_cost_of_drafts() -> None:
    """A draft that saves less than proposing takes is not verified, and one that saves little pays little."""
    draft = Draft((1,) * 3, "suffix", (0.9,) * 3)
    taken, misses = [], []
    for share in (0.01, 0.2, 3.0):
        controller, state = started()
        controller.exploration.next_probe_step = 100
        for _ in range(3):
            controller.max_draft_len(state)
            controller.select([Proposal(DraftRequest(state))], PrefillLoad())
            step(controller, [state], drafting=share * STEP)
        request = controller.requests[state.id]
        request.misses, request.skip_until = 14.0, 0
        taken.append(offered(controller, state, draft) is not None)
        misses.append(request.misses)
    assert taken == [True, True, False]
    assert misses[0] == 0.0 < misses[1] < misses[2]


def test_prompt_steps_say_nothing_about_proposing() -> None:
    """A step with only a prompt calls neither max_draft_len() nor select()."""
    controller, state, late = controller_of(), state_of(), state_of("late")
    controller.start(state)
    controller.max_draft_len(state)
    controller.select([Proposal(DraftRequest(state))], PrefillLoad())
    step(controller, [state], drafting=0.1 * STEP)
    cost = controller.backoff.proposal_cost
    controller.start(late)
    for _ in range(4):
        chunk = RequestStep(late, 512, 0, False, 0, 512)
        controller.record_step(StepRecord((chunk,), {"forward": 8 * STEP, "draft": 0.0}))
    assert controller.backoff.proposal_cost == cost > 0.0


def test_draft_that_loses_time_counts_a_bounded_number_of_misses() -> None:
    """Its cost may be that of thousands of proposals; a later draft that pays must be able to settle it."""
    controller, state = started()
    request = controller.requests[state.id]
    controller.backoff.record_hit(request, -5000.0)
    assert MISSES_BEFORE_BACKOFF < request.misses <= MAX_MISSES
    controller.backoff.record_hit(request, 50.0)
    assert request.misses == 0.0


def test_proposing_is_no_part_of_model_passes() -> None:
    price = STEP / 20
    costs = {"draft": PassCost.from_seconds({1: price, 100: price})}
    controller, state = DraftLengthController(GPU.calibration(), 8, costs), state_of()
    controller.start(state)
    proposing = 2 * price
    for has_passes in (False,) * 8 + (True,) * 200:
        request = controller.requests[state.id]
        request.skip_until, controller.draft_planner.no_plan_until["draft"] = 0, 0
        wanted = DraftRequest(state, 8)
        controller.max_draft_len(state)
        if has_passes:
            controller.plan_draft_model([Proposal(wanted)], PrefillLoad(), "draft", [1])
        factor = controller.cost_model.draft_cost("draft", 1, 1, 1) / price
        passes = controller.next_step.draft_cost / factor
        controller.select([Proposal(wanted)], PrefillLoad())
        step(controller, [state], drafting=proposing + passes)
    assert factor == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("longest", [5, 7, 15])
def test_draft_in_one_pass_is_planned_as_long_as_it_can_be(longest: int) -> None:
    """More tokens do not come, and the last ones cost little."""
    seconds = {1: STEP / 10, 100: STEP / 8}
    costs = {"draft": PassCost.from_seconds(seconds, OnePass(longest, 1))}
    controller, state = DraftLengthController(GPU.calibration(), 32, costs), state_of()
    controller.start(state)
    lengths = []
    for _ in range(60):
        request = controller.requests[state.id]
        request.skip_until, controller.draft_planner.no_plan_until["draft"] = 0, 0
        wanted = DraftRequest(state, controller.max_draft_len(state))
        ((length, _),) = controller.plan_draft_model([Proposal(wanted)], PrefillLoad(), "draft", [1])
        lengths.append(length)
        draft = Draft((1,) * length, "draft", (0.97,) * length)
        (chosen,) = controller.select([Proposal(wanted, [draft] * (length > 0))], PrefillLoad())
        num_draft = len(chosen.token_ids) if chosen else 0
        if chosen is not None:
            controller.record_acceptance(state, chosen, (1,) * (num_draft + 1))
        step(controller, [state], drafting=STEP / 10 * (length > 0), num_draft=num_draft)
    assert max(lengths) == lengths[-1] == longest


def test_baseline_beside_a_draft_model_is_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes were made before the step was chosen to be plain."""
    ratios: list[float] = []
    record_plain = RegressionWatchdog.record_plain

    def record(watchdog: RegressionWatchdog, ratio: float) -> None:
        ratios.append(ratio)
        record_plain(watchdog, ratio)

    monkeypatch.setattr(RegressionWatchdog, "record_plain", record)
    SimulationCase(GPU, [SimulatedOutput(6000, constant_acceptance(0.8))], 1, 0.0, 0.15)
    assert len(ratios) >= 5


def test_draft_model_whose_drafts_are_never_verified_is_paused() -> None:
    """It is to pay by the mean of its drafts, but none of them is worth a row."""
    costs = {"draft": PassCost.from_seconds({1: STEP / 10, 100: STEP / 8})}
    controller, state = DraftLengthController(GPU.calibration(), 8, costs), state_of()
    controller.start(state)
    num_planned = 0
    for _ in range(400):
        request = controller.requests[state.id]
        request.skip_until, controller.draft_planner.no_plan_until["draft"] = 0, 0
        proposal = Proposal(DraftRequest(state, 8))
        if controller.max_draft_len(state) and controller.may_propose("draft", PrefillLoad()):
            ((length, _),) = controller.plan_draft_model([proposal], PrefillLoad(), "draft", [1])
            num_planned += length > 0
        drafting = controller.next_step.draft_cost
        controller.select([proposal], PrefillLoad())
        step(controller, [state], drafting=drafting)
    assert 16 <= num_planned <= 80
    stats = controller.stats()
    assert stats.realised_seconds > 1.05 * stats.plain_seconds > 0.0, "what it cost is reported"


def test_draft_model_that_finds_no_token_is_given_up() -> None:
    """As where a grammar allows none of a head's vocabulary: an empty draft is a miss."""
    costs = {"draft": PassCost.from_seconds({1: 0.3 * STEP, 100: 0.4 * STEP})}
    controller, state = DraftLengthController(GPU.calibration(), 8, costs), state_of()
    controller.start(state)
    num_planned = 0
    for _ in range(FIRST_EXPLORE_STEP - 1):
        request = controller.requests[state.id]
        request.skip_until, controller.draft_planner.no_plan_until["draft"] = 0, 0
        proposal = Proposal(DraftRequest(state, 8))
        if controller.max_draft_len(state) and controller.may_propose("draft", PrefillLoad()):
            ((length, _),) = controller.plan_draft_model([proposal], PrefillLoad(), "draft", [1])
            if length:
                num_planned += 1
                controller.record_acceptance(state, Draft((), "draft"), ())
        drafting = controller.next_step.draft_cost
        controller.select([proposal], PrefillLoad())
        step(controller, [state], drafting=drafting)
    assert 4 <= num_planned <= 16


def test_improbable_tokens_are_cut_where_rows_cost() -> None:
    """On the machine without free rows they could never pay; one step must have been planned."""
    draft = Draft((1,) * 16, "suffix", (0.8,) * 16)
    lengths = []
    for machine in (GPU, SimulatedMachine("no free rows", 1)):
        controller, state = started(machine)
        step(controller, [state])
        offered(controller, state, draft)
        request = controller.requests[state.id]
        lengths.append(len(controller.verify_planner.best_candidate(0, request, [draft]).prefix_probs))
    assert lengths[0] == 16 and 1 <= lengths[1] < 8


def test_paying_draft_resets_backoff() -> None:
    controller, state = started()
    step(controller, [state])
    for _ in range(64):
        offered(controller, state)
    while not offered(controller, state, Draft((1,), "suffix")):
        pass
    assert all(controller.max_draft_len(state) for _ in range(3))


def test_nonspeculative_requests_limit_the_others() -> None:
    """One more row costs 1/8 of a step of eight; requests without drafts bear only 2 %."""
    controller, state = controller_of(SimulatedMachine("", 1)), state_of()
    strangers = [state_of(f"off{i}") for i in range(7)]
    controller.start(state)
    draft = Draft((1,), "suffix", (0.999,))
    for drafted in [0, 0, *[1] * 200]:
        given = drafted and offered(controller, state, draft)
        served = [RequestStep(state, 1, int(bool(given)), True, 2 if given else 1, 9)]
        served += [RequestStep(stranger, 1, 0, True, 1, 9) for stranger in strangers]
        controller.record_step(StepRecord(tuple(served), {"forward": STEP * (9 if given else 8)}))
    assert 200 / 8 * 0.02 < controller.stats().draft_length_counts["suffix"][1] / 8 < 200 * 0.02 + 0.64


def test_no_draft_reasons_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    controller, state = controller_of(), state_of("chat-1")
    controller.start(state)
    step(controller, [state])
    with caplog.at_level(logging.DEBUG, DraftLengthController.__module__):
        offered(controller, state)
    assert "request chat-1: no draft: no_candidate" in caplog.text


def test_stats_compare_prediction_and_reality() -> None:
    cell = SimulationCase(CPU, [SimulatedOutput(300, constant_acceptance(0.8))] * 2, 1)
    stats = cell.controller.stats()
    assert stats.predicted_seconds == pytest.approx(stats.realised_seconds, rel=0.05)
    assert sum(stats.draft_length_counts["suffix"].values()) > 50


def test_unrecorded_step_leaves_no_draft_cost() -> None:
    """The next step's drafting is compared with its own cost only."""
    price = STEP / 20
    controller, state = (
        DraftLengthController(GPU.calibration(), 8, {"draft": PassCost.from_seconds({1: price, 100: price})}),
        state_of(),
    )
    controller.start(state)
    for number in range(40):
        wanted = DraftRequest(state, 8)
        controller.max_draft_len(wanted.state)
        ((length, _),) = controller.plan_draft_model([Proposal(wanted, [])], PrefillLoad(), "draft", [1])
        drafts = [Draft((1,) * length, "draft", (0.9,) * length)] if length else []
        controller.select([Proposal(wanted, drafts)], PrefillLoad())
        assert controller.next_step.draft_cost == pytest.approx(length * price)
        if number < 30:  # until the exploration budget pays for a model pass
            step(controller, [state], drafting=controller.next_step.draft_cost)
    assert length > 0


def test_step_whose_drafting_requests_were_preempted_is_recorded() -> None:
    """A prompt of better priority took their place: its first chunk bears the passes, the next does not."""
    costs = {"draft": PassCost.from_seconds({1: STEP / 10, 100: STEP / 8})}
    controller, state, prompt = DraftLengthController(GPU.calibration(), 8, costs), state_of(), state_of("b")
    controller.start(state)
    controller.start(prompt)
    step(controller, [state])
    wanted = DraftRequest(state, 8)
    controller.max_draft_len(state)
    ((length, _),) = controller.plan_draft_model([Proposal(wanted)], PrefillLoad(), "draft", [1])
    passes = controller.next_step.draft_cost
    controller.select([Proposal(wanted, [Draft((1,) * length, "draft")])], PrefillLoad())
    assert length and passes > 0.0
    chunk = RequestStep(prompt, 32, 0, False, 0, 32)
    budget = controller.requests["b"].delay_budget
    for drafting in (passes, 0.0):
        ahead_s = budget.ahead_s
        controller.record_step(StepRecord((chunk,), {"forward": STEP, "draft": drafting}))
        assert controller.next_step.draft_cost == 0.0
        assert ahead_s - budget.ahead_s == pytest.approx(drafting)
    stats = controller.stats()
    assert stats.realised_seconds == pytest.approx(STEP + passes), "only the first"


def test_exploration_that_is_reported_never_falls() -> None:
    """A probe of the draft model that hit is refunded, one that ended without a score is not."""
    controller, state = controller_of(), state_of()
    controller.start(state)
    request, exploration = controller.requests[state.id], controller.exploration
    exploration.budget.earn(100.0)
    spent = [0.0]
    for settle in (lambda: exploration.settle_probe(request, 1), lambda: None, lambda: None):
        assert exploration.probe_draft_model([request], 0.01)
        settle()
        spent.append(controller.stats().exploring_seconds)
    controller.finish(state.id)
    spent.append(controller.stats().exploring_seconds)
    assert spent == pytest.approx([0.0, 0.0, 0.0, 0.01, 0.02])


def test_finished_requests_leave_no_state() -> None:
    cell = SimulationCase(GPU, [SimulatedOutput(60, constant_acceptance(0.8))] * 8, 4, 0.01, 0.05)
    assert (
        not cell.controller.requests
        and not cell.controller.next_step.sampler_classes
        and not cell.controller.next_step.requests
    )


def test_prefill_does_not_delay_for_a_baseline() -> None:
    """The watchdog needs a plain step first; on a busy server all steps may have prefill."""
    controller, state = DraftLengthController(SimulatedMachine("GPU", 96).calibration(), 8), state_of("a")
    controller.start(state)
    draft = Draft((1,) * 4, "suffix", (0.99,) * 4)
    controller.max_draft_len(state)
    (admitted,) = controller.select([Proposal(DraftRequest(state, 8), [draft])], PrefillLoad(num_rows=20))
    assert admitted is not None


@pytest.mark.parametrize(("ridge", "pays"), [(1, False), (4, True)])
def test_prompt_in_the_step_makes_no_row_cheap(ridge: int, pays: bool) -> None:
    """Its time is spent with or without drafts, and accepted tokens save decode steps only."""
    calibration = SimulatedMachine("", ridge).calibration()
    controller, state = DraftLengthController(calibration, 8, max_slowdown=0.5), state_of()
    controller.start(state)
    step(controller, [state])
    controller.max_draft_len(state)
    proposal = Proposal(DraftRequest(state, 8), [Draft((1,), "suffix", (0.9,))])
    (draft,) = controller.select([proposal], PrefillLoad(num_rows=20))
    assert (draft is not None) == pays


def test_new_request_backs_off_where_no_proposal_pays() -> None:
    """A request of 60 tokens ends before it could learn this itself."""
    controller, early = controller_of(), state_of("early")
    controller.start(early)
    for _ in range(4):
        asked_when_nothing_is_offered(controller, early, 0.07 * STEP)
    controller.finish("early")
    late = state_of("late")
    controller.start(late)
    asked = asked_when_nothing_is_offered(controller, late, 0.07 * STEP)
    assert not all(asked[:4]) and sum(asked) < 10
