"""Who waits for pictures keeps nobody else waiting, and is not forgotten."""

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.request import Request, RequestState
from foreword.engine.queue import PendingImages, WaitingQueue
from tests.support.scheduler_simulation import (
    VOCAB,
    FakeVisionTower,
    SchedulerSimulation,
    expected_output,
    make_image,
    make_request,
)

LENGTH = 24


class Patient(FakeVisionTower):
    """So slow that no picture of a test is seen while others are served."""

    def encode(self, image: PromptImage) -> Generator[int, None, torch.Tensor]:
        for _ in range(10_000):
            yield 1
        return (yield from super().encode(image))


def seeing(name: str, which: int, num_tokens: int, seed: int = 0, **changes: object) -> Request:
    prompt = [5, *[VOCAB] * num_tokens, 6]
    request = make_request(name, prompt, seed, max_tokens=2, ignore_eos=True)
    return replace(request, pictures=(make_image(which, 1, num_tokens),), **changes)  # type: ignore[arg-type]


def waiting_state(name: str, arrival: int, **changes: object) -> RequestState:
    return RequestState(seeing(name, arrival, 3, **changes), arrival, LENGTH)


@settings(max_examples=150, deadline=None)
@given(
    pictures=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 10), st.integers(1, 3)), max_size=12
    ),  # which, tokens, choices
    before=st.integers(0, 3),  # steps before the text comes
    accounts=st.booleans(),
    max_num_seqs=st.integers(2, 6),
    budget=st.integers(6, 24),
    prefix_caching=st.booleans(),
)
def test_text_is_not_kept_out_by_any_number_of_pictures(
    pictures, before, accounts, max_num_seqs, budget, prefix_caching
) -> None:
    """Nor by how many of them wait: it has its first token in a few steps, though no picture is ever seen meanwhile."""
    simulation = SchedulerSimulation(
        200,
        4,
        LENGTH,
        cache_features=100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    simulation.encoder._tower = Patient()
    requests = [
        seeing(f"{number}-{choice}", which, num_tokens, choice, account="ab"[number % 2] if accounts else "")
        for number, (which, num_tokens, choices) in enumerate(pictures)
        for choice in range(choices)
    ]
    for request in requests:
        simulation.add(request)
    for _ in range(before if requests else 0):
        simulation.step()
    simulation.add(make_request("text", [1, 2, 3], max_tokens=4, ignore_eos=True))
    for _ in range(6):
        simulation.step()
    assert simulation.outputs["text"]
    simulation.encoder._tower, simulation.encoder._job = FakeVisionTower(), None
    simulation.run()
    for request in requests:
        assert simulation.outputs[request.id] == expected_output(request, LENGTH)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_pictures_are_not_kept_out_by_any_amount_of_text(max_num_seqs: int) -> None:
    simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100, max_num_seqs=max_num_seqs)
    for number in range(8):
        simulation.add(seeing(f"{number}", number, 10))
    for step in range(200):
        simulation.add(
            make_request(f"text {step}", [1, 2, step % VOCAB], step, max_tokens=2, ignore_eos=True)
        )
        simulation.step()
    assert {f"{number}" for number in range(8)} <= simulation.reasons.keys()
    simulation.run()


def test_pictures_of_a_better_priority_need_not_wait_for_a_worse_one() -> None:
    simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100, max_num_seqs=4)
    simulation.encoder._tower = Patient()
    for number in range(4):
        simulation.add(seeing(f"{number}", number, 4, priority=1))
    simulation.step()
    simulation.add(seeing("urgent", 5, 4))
    simulation.step()
    assert [state.id for state in simulation.scheduler.running] == ["urgent", "0", "1"]


def test_nobody_looks_in_vain_at_those_that_wait_for_pictures() -> None:
    """What a plan asks does not grow with their number, until a picture is seen."""
    asked = []
    for num in (5, 50):
        simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100)
        simulation.encoder._tower = Patient()
        for number in range(num):
            simulation.add(seeing(f"{number}", number % 10, 10, seed=number))
        for _ in range(3):
            simulation.step()
        reach, calls = simulation.scheduler.computable_until, []

        def counted(state: RequestState, start: int, reach=reach, calls=calls) -> int:
            calls.append(state.id)
            return reach(state, start)

        simulation.scheduler.computable_until = counted
        simulation.step()
        asked.append(len(calls))
    assert asked[0] == asked[1]


def test_who_is_apart_is_still_there_by_rank() -> None:
    waiting = WaitingQueue()
    states = [waiting_state(f"{number}", number) for number in range(5)]
    for state in reversed(states):
        waiting.add(state)
    waiting.block(3)
    waiting.block(0)
    assert waiting.ready == [states[1], states[2], states[4]] and waiting.blocked_on_images == [
        states[0],
        states[3],
    ]
    assert list(waiting) == states and len(waiting) == 5 and all(state in waiting for state in states)
    waiting.remove(states[3])
    states[0].virtual_start = 9
    waiting.resort()
    assert waiting.ready == [states[1], states[2], states[4], states[0]] and not waiting.blocked_on_images
    waiting.block(0)
    waiting.unblock_all()
    assert waiting.ready == [states[1], states[2], states[4], states[0]] and not waiting.blocked_on_images


def test_a_crowd_is_those_with_something_to_see() -> None:
    first, second, third = (waiting_state(f"{number}", number) for number in range(3))
    urgent = waiting_state("urgent", 9, priority=-1)
    reach = {"0": 1, "1": 5, "2": 1}  # of five tokens: the second has seen all
    crowd = PendingImages([first, second, third], lambda state, start: reach[state.id])
    last = waiting_state("last", 7)
    assert crowd.blocks(last, max_tokens=8, max_slots=9) and not crowd.blocks(last, max_tokens=9, max_slots=9)
    assert crowd.blocks(last, max_tokens=99, max_slots=2) and not crowd.blocks(
        last, max_tokens=99, max_slots=3
    )
    assert not crowd.blocks(second, max_tokens=5, max_slots=9) and crowd.blocks(
        second, max_tokens=4, max_slots=9
    )
    assert not crowd.blocks(urgent, max_tokens=1, max_slots=1)
    assert (
        crowd
        == PendingImages([first, third], lambda state, start: 1)
        != PendingImages([first], lambda state, start: 1)
    )
