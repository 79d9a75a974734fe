"""The harness: rounds of all modes, claims that are checked, and what an interrupt leaves."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from foreword.bench.measurement import (
    AUTO,
    OFF,
    BenchCase,
    BenchRepetition,
    Measurement,
    Mode,
    PairedRun,
    Pairs,
    RequestResult,
    applicable_modes,
    compared_modes,
    expected_weight,
    has_equal_outputs,
    with_all_drafters,
)
from foreword.bench.workloads import Conversation
from foreword.config.options import Config
from foreword.core.params import Speculation

TALK = (Conversation(("the thing",), max_tokens=8),)


@pytest.mark.parametrize(
    ("drafters", "modes"),
    [
        ((), ("off",)),
        (("trigram",), ("off", "trigram")),
        (("grammar", "prediction", "suffix"), ("off", "auto")),
        (("prediction", "suffix", "draft"), ("off", "suffix", "draft", "auto")),
    ],
)
def test_compared_modes_omit_drafters_without_input(
    drafters: tuple[str, ...], modes: tuple[str, ...]
) -> None:
    assert tuple(mode.name for mode in compared_modes(drafters)) == modes


def test_demo_gets_its_draft_model() -> None:
    assert with_all_drafters(Config()).drafter_names() == ("grammar", "prediction", "suffix", "text", "draft")
    other = with_all_drafters(Config(model="other"))
    assert other.drafter_names() == ("grammar", "prediction", "suffix", "text")
    assert with_all_drafters(Config(speculate="off")).drafter_names() == ()


def test_expected_weight_counts_steps() -> None:
    assert expected_weight(100, 1) == 100
    assert expected_weight(100, 1, prompt_tokens=160) == 110
    assert 25 < expected_weight(100, 4) < 100, "four at once share steps, which take longer"


def run_of(*output: int) -> BenchRepetition:
    return BenchRepetition((RequestResult(0, 0, output=output, num_tokens=len(output)),), 1.0, {}, {})


class FakeTarget:
    """Answers the number of the round."""

    runs_per_mode = 1.0

    def run_pairs(self, case: BenchCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        return {mode.name: PairedRun(run_of(number), run_of(number)) for mode in modes}


def summarize(case: BenchCase, modes: Sequence[Mode], pairs: Pairs) -> dict[str, Any]:
    rounds = [pair.other.outputs for pair in pairs[AUTO.name]]
    return {"case": case.name, "rounds": rounds}


def plan(*categories: str) -> Measurement:
    measurement = Measurement(FakeTarget(), (AUTO,), 2, summarize)
    measurement.add([BenchCase(name, 1, lambda variant: TALK) for name in categories], lambda _: 1.0)
    return measurement


def test_first_round_is_not_counted() -> None:
    measurement = plan("chat")
    assert [step.label for step in measurement.steps] == [
        "chat x1, warm-up",
        "chat x1, round 1 of 2",
        "chat x1, round 2 of 2",
    ]
    for step in measurement.steps:
        step.run()
    assert measurement.cells == [{"case": "chat x1", "rounds": [((1,),), ((2,),)]}]


def test_interrupted_case_counts_its_complete_rounds_unless_it_failed() -> None:
    measurement = plan("chat", "json", "code")
    for number in (0, 1, 3, 4, 6):  # one round of the first two cases, none of the last
        measurement.steps[number].run()
    assert measurement.cells == []
    assert measurement.end({"json x1": "failed"}) == [{"case": "chat x1", "rounds": [((1,),)]}]


def test_answers_are_compared_over_modes_and_rounds() -> None:
    same, other = PairedRun(run_of(1), run_of(1)), PairedRun(run_of(1), run_of(2))
    assert has_equal_outputs({OFF.name: [same], AUTO.name: [same, same]})
    assert not has_equal_outputs({AUTO.name: [same, other]})
    later = PairedRun(run_of(2), run_of(2))
    assert not has_equal_outputs({AUTO.name: [same, later]}), "equal within each round alone"


def test_drafter_without_input_is_no_mode() -> None:
    modes = (Mode("prediction", speculation=Speculation("prediction")), AUTO)
    assert applicable_modes(modes, BenchCase("chat", 1, lambda variant: TALK)) == (AUTO,)
    predicted = (Conversation(("the thing",), prediction="the thing"),)
    assert applicable_modes(modes, BenchCase("chat", 1, lambda variant: predicted)) == modes
