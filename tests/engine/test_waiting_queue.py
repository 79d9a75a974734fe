"""Queues of waiting requests: images, and grammars."""

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.structured_output import RequestGrammar
from foreword.engine.waiting_queue import PendingGrammar, PendingGrammars, UnencodedImages, WaitingQueue
from tests.support.budget import examples
from tests.support.scheduler_simulation import (
    VOCAB,
    FakeVisionEncoder,
    SchedulerSimulation,
    expected_output,
    make_image,
    make_request,
)

LENGTH = 24


class StuckEncoder(FakeVisionEncoder):
    """A vision encoder too slow to finish during a test."""

    def encode(self, image: PromptImage) -> Generator[int, None, torch.Tensor]:
        for _ in range(10_000):
            yield 1
        return (yield from super().encode(image))


def image_request(name: str, which: int, num_tokens: int, seed: int = 0, **changes: object) -> Request:
    prompt = [5, *[VOCAB] * num_tokens, 6]
    request = make_request(name, prompt, seed, max_tokens=2, ignore_eos=True)
    return replace(request, images=(make_image(which, 1, num_tokens),), **changes)  # type: ignore[arg-type]


def waiting_state(name: str, arrival: int, **changes: object) -> RequestState:
    return RequestState(image_request(name, arrival, 3, **changes), arrival, LENGTH)


@settings(max_examples=examples(150))
@given(
    images=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 10), st.integers(1, 3)), max_size=12
    ),  # image, tokens, choices
    before=st.integers(0, 3),  # steps before the text request
    two_flows=st.booleans(),
    max_num_seqs=st.integers(2, 6),
    budget=st.integers(6, 24),
    prefix_caching=st.booleans(),
)
def test_text_starts_despite_waiting_image_requests(
    images, before, two_flows, max_num_seqs, budget, prefix_caching
) -> None:
    """It has its first token in a few steps, though no image is encoded meanwhile."""
    simulation = SchedulerSimulation(
        200,
        4,
        LENGTH,
        cache_features=100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    simulation.encoder._encoder = StuckEncoder()
    requests = [
        image_request(
            f"{number}-{choice}",
            which,
            num_tokens,
            choice,
            fairness_key="ab"[number % 2] if two_flows else "",
        )
        for number, (which, num_tokens, choices) in enumerate(images)
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
    simulation.encoder._encoder, simulation.encoder._job = FakeVisionEncoder(), None
    simulation.run()
    for request in requests:
        assert simulation.outputs[request.id] == expected_output(request, LENGTH)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_image_requests_finish_despite_steady_text(max_num_seqs: int) -> None:
    simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100, max_num_seqs=max_num_seqs)
    for number in range(8):
        simulation.add(image_request(f"{number}", number, 10))
    for step in range(200):
        simulation.add(
            make_request(f"text {step}", [1, 2, step % VOCAB], step, max_tokens=2, ignore_eos=True)
        )
        simulation.step()
    assert {f"{number}" for number in range(8)} <= simulation.reasons.keys()
    simulation.run()


def test_image_request_of_better_priority_starts_first() -> None:
    simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100, max_num_seqs=4)
    simulation.encoder._encoder = StuckEncoder()
    for number in range(4):
        simulation.add(image_request(f"{number}", number, 4, priority=1))
    simulation.step()
    simulation.add(image_request("urgent", 5, 4))
    simulation.step()
    assert [state.id for state in simulation.scheduler.running] == ["urgent", "0", "1"]


def test_blocked_image_requests_are_not_rescanned() -> None:
    """The lookups of a step do not grow with the number of blocked requests."""
    lookups = []
    for num in (5, 50):
        simulation = SchedulerSimulation(200, 4, LENGTH, cache_features=100)
        simulation.encoder._encoder = StuckEncoder()
        for number in range(num):
            simulation.add(image_request(f"{number}", number % 10, 10, seed=number))
        for _ in range(3):
            simulation.step()
        before = simulation.num_image_lookups
        simulation.step()
        lookups.append(simulation.num_image_lookups - before)
    assert lookups[0] == lookups[1]


def test_blocked_requests_stay_in_the_queue_by_rank() -> None:
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


def test_unencoded_images_block_later_requests() -> None:
    first, second, third = (waiting_state(f"{number}", number) for number in range(3))
    urgent = waiting_state("urgent", 9, priority=-1)
    computable = {"0": 1, "1": 5, "2": 1}  # of five tokens: the second request has all its images
    unencoded = UnencodedImages([first, second, third], lambda state, start: computable[state.id])
    last = waiting_state("last", 7)
    assert unencoded.blocks(last, max_tokens=8, max_slots=9)
    assert not unencoded.blocks(last, max_tokens=9, max_slots=9)
    assert unencoded.blocks(last, max_tokens=99, max_slots=2)
    assert not unencoded.blocks(last, max_tokens=99, max_slots=3)
    assert not unencoded.blocks(second, max_tokens=5, max_slots=9)
    assert unencoded.blocks(second, max_tokens=4, max_slots=9)
    assert not unencoded.blocks(urgent, max_tokens=1, max_slots=1)
    same = UnencodedImages([first, third], lambda state, start: 1)
    fewer = UnencodedImages([first], lambda state, start: 1)
    assert unencoded.entries == same.entries != fewer.entries


def test_pending_grammars_are_popped_once() -> None:
    def make_pending(name: str, arrival: int) -> PendingGrammar:
        grammar: Future[RequestGrammar] = Future()
        return PendingGrammar(Request(name, (1,), SamplingParams(), 0), arrival, grammar)

    a, b, c = make_pending("a", 0), make_pending("b", 1), make_pending("c", 2)
    grammars = PendingGrammars({pending.request.id: pending for pending in (a, b, c)})
    assert grammars.pop_ready(block=True) == [] and len(grammars) == 3
    assert a.grammar.set_running_or_notify_cancel() and grammars.running_arrivals() == [0]
    a.grammar.set_exception(ValueError())
    assert grammars.cancel("b") and b.grammar.cancelled() and not grammars.cancel("b")
    assert grammars.pop_ready(block=False) == [a]
    assert list(grammars) == ["c"]
