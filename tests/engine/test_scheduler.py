"""The scheduler without a model: every request gets its own tokens, with sharing, preemption and drafts."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.request import RequestState
from tests.support.budget import examples
from tests.support.scheduler_simulation import (
    VOCAB,
    SchedulerSimulation,
    expected_output,
    make_image,
    make_request,
    next_token,
    noisy_drafter,
)

arrivals = st.lists(
    st.tuples(
        st.integers(1, 14),  # length of the prompt
        st.integers(0, 2),  # which prompt: prefixes are shared
        st.integers(0, 3),  # seed
        st.integers(0, 2),  # priority
        st.one_of(st.none(), st.integers(1, 12)),  # max_tokens
        st.booleans(),  # ignore_eos
        st.integers(0, 3),  # steps before the next arrival
        st.integers(0, 9),  # 0: aborted after some steps
        st.sampled_from([None, None, None, "last", "mean", "cls"]),  # pooling
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(300))
@given(
    arrivals=arrivals,
    num_blocks=st.integers(6, 14),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(4, 24),
    draft_tokens=st.integers(0, 6),
    error_rate=st.sampled_from([0.0, 0.3, 1.0]),
    prefix_caching=st.booleans(),
)
def test_every_request_gets_its_own_tokens(
    arrivals, num_blocks, block_size, budget, draft_tokens, error_rate, prefix_caching
) -> None:
    max_model_len = min(num_blocks * block_size, 20)
    simulation = SchedulerSimulation(
        num_blocks,
        block_size,
        max_model_len,
        noisy_drafter(len(arrivals), draft_tokens, error_rate),
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    requests, aborted = [], set()
    for number, (length, which, seed, priority, max_tokens, ignore_eos, pause, fault, pooling) in enumerate(
        arrivals
    ):
        prompt = [(which * 5 + i) % VOCAB for i in range(min(length, max_model_len - (pooling is None)))]
        request = make_request(
            str(number), prompt, seed, priority, pooling, max_tokens=max_tokens, ignore_eos=ignore_eos
        )
        requests.append(request)
        simulation.add(request)
        for _ in range(pause):
            simulation.step()
        if fault == 0 and simulation.remove(request.id):
            aborted.add(request.id)
    simulation.run()
    for request in requests:
        if request.pooling is not None:
            pooled = request.prompt_ids[:1] if request.pooling == "cls" else request.prompt_ids
            assert simulation.vectors.get(request.id, bytes(pooled)) == bytes(pooled)
            assert request.id in aborted or request.id in simulation.vectors
            continue
        expected = expected_output(request, max_model_len)
        if request.id in aborted:
            assert simulation.outputs[request.id] == expected[: len(simulation.outputs[request.id])]
        else:
            assert simulation.outputs[request.id] == expected


@settings(max_examples=examples(200))
@given(
    arrivals=arrivals,
    num_blocks=st.integers(6, 14),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(4, 24),
    seed=st.integers(0, 99),
    fault_rate=st.sampled_from([0.02, 0.2]),
)
def test_faults_change_no_other_request(arrivals, num_blocks, block_size, budget, seed, fault_rate) -> None:
    """Faults in a pass or in its update; a block that was not computed is never shared."""
    chance = random.Random(seed)

    def fault() -> str | None:
        return chance.choice(["pass", "commit"]) if chance.random() < fault_rate else None

    max_model_len = min(num_blocks * block_size, 20)
    propose = noisy_drafter(seed, 4, 0.3)
    simulation = SchedulerSimulation(
        num_blocks, block_size, max_model_len, propose, fault, max_num_batched_tokens=budget
    )
    requests = []
    for number, (length, which, own, priority, max_tokens, ignore_eos, pause, _, pooling) in enumerate(
        arrivals
    ):
        prompt = [(which * 5 + i) % VOCAB for i in range(min(length, max_model_len - (pooling is None)))]
        request = make_request(
            str(number), prompt, own, priority, pooling, max_tokens=max_tokens, ignore_eos=ignore_eos
        )
        requests.append(replace(request, fairness_key="abc"[which]))
        simulation.add(requests[-1])
        for _ in range(pause):
            simulation.step()
    simulation.run()
    for request in requests:
        output = simulation.outputs[request.id]
        if request.id in simulation.failed:
            assert output == expected_output(request, max_model_len)[: len(output)]
        elif request.pooling is None:
            assert output == expected_output(request, max_model_len)
        else:
            assert request.id in simulation.vectors


image_arrivals = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 7)), min_size=1, max_size=3
        ),  # text, image, tokens
        st.integers(0, 2),  # text after the last image
        st.integers(0, 2),  # seed
        st.integers(0, 1),  # priority
        st.integers(0, 3),  # steps before the next arrival
        st.integers(0, 9),  # 0: aborted after some steps
        st.booleans(),  # the same ids without images
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(250))
@given(
    arrivals=image_arrivals,
    num_blocks=st.integers(8, 20),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(4, 24),
    max_num_seqs=st.integers(1, 4),
    memory=st.sampled_from([0, 3, 100]),
    prefix_caching=st.booleans(),
)
def test_image_requests_get_their_own_tokens(
    arrivals, num_blocks, block_size, budget, max_num_seqs, memory, prefix_caching
) -> None:
    max_model_len = min(num_blocks * block_size, 40)
    simulation = SchedulerSimulation(
        num_blocks,
        block_size,
        max_model_len,
        noisy_drafter(len(arrivals), 3, 0.3),
        cache_features=memory,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
    )
    requests, aborted = [], set()
    for number, (parts, text_after, seed, priority, pause, fault, is_text) in enumerate(arrivals):
        prompt, images = [], []
        for text, which, num_tokens in parts:
            prompt += [5] * text
            if len(prompt) + num_tokens < max_model_len:
                images.append(make_image(which, len(prompt), num_tokens))
                prompt += [VOCAB] * num_tokens
        request = make_request(
            str(number),
            [*prompt, *[6] * text_after][: max_model_len - 1] or [5],
            seed,
            priority,
            max_tokens=6,
        )
        requests.append(request if is_text else replace(request, images=tuple(images)))
        simulation.add(requests[-1])
        for _ in range(pause):
            simulation.step()
        if fault == 0 and simulation.remove(request.id):
            aborted.add(request.id)
    simulation.run()
    assert simulation.encoder.cache.num_bytes <= 4 * memory
    for request in requests:
        expected = expected_output(request, max_model_len)
        output = simulation.outputs[request.id]
        assert output == (expected[: len(output)] if request.id in aborted else expected)


def test_preemption_takes_the_worst_rank() -> None:
    simulation = SchedulerSimulation(num_blocks=4, block_size=2, max_model_len=8)
    for name in "abc":
        simulation.add(make_request(name, [1, 2], seed=ord(name), ignore_eos=True))
    preempted = [name for _ in range(6) for name in simulation.step().preempted_ids]
    assert preempted
    assert "a" not in preempted
    simulation.run()
    assert simulation.scheduler.num_preemptions >= 1
    for name in "abc":
        assert len(simulation.outputs[name]) == 6


def test_better_priority_preempts() -> None:
    simulation = SchedulerSimulation(num_blocks=4, block_size=2, max_model_len=8, max_num_seqs=1)
    simulation.add(make_request("slow", [1, 2], priority=1, ignore_eos=True))
    simulation.step()
    simulation.add(make_request("urgent", [3, 4], priority=0, ignore_eos=True))
    scheduled = simulation.step()
    assert scheduled.preempted_ids == ("slow",)
    assert [request.state.id for request in scheduled.requests] == ["urgent"]
    simulation.run()
    assert len(simulation.outputs["slow"]) == len(simulation.outputs["urgent"]) == 6


def test_accepted_drafts_save_steps() -> None:
    """Correct drafts of four tokens: five tokens per step after the first."""

    def right(state: RequestState) -> list[int]:
        history = list(state.tokens)
        for _ in range(4):
            history.append(next_token(history, state.request.seed))
        return history[-4:]

    simulation = SchedulerSimulation(num_blocks=16, block_size=4, max_model_len=50, draft_fn=right)
    simulation.add(make_request("a", [1, 2], max_tokens=31, ignore_eos=True))
    simulation.run()
    assert simulation.num_steps == 1 + 30 // 5


def test_drafts_never_preempt() -> None:
    """All blocks are in use: drafts shrink to the blocks of their request."""
    simulation = SchedulerSimulation(
        num_blocks=4,
        block_size=4,
        max_model_len=8,
        draft_fn=noisy_drafter(1, 8, 0.0),
        max_num_batched_tokens=64,
    )
    for name in "ab":
        simulation.add(make_request(name, [1, 2, 3], seed=ord(name), ignore_eos=True))
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0


def test_equal_prompts_are_computed_once() -> None:
    """n choices: the first computes the prompt, the others wait for its blocks and share them."""
    simulation = SchedulerSimulation(
        num_blocks=32, block_size=4, max_model_len=40, max_num_batched_tokens=8, max_num_seqs=8
    )
    prompt = [i % VOCAB for i in range(17)]
    for seed in range(4):
        simulation.add(make_request(f"x-{seed}", prompt, seed=seed, max_tokens=3, ignore_eos=True))
    prompt_rows = 0
    while not simulation.scheduler.idle:
        prompt_rows += sum(
            request.num_tokens for request in simulation.step().requests if request.start < len(prompt)
        )
    assert prompt_rows == 17 + 3 * 1
    assert simulation.scheduler.prefix_hits == 3 * 16


def test_full_prefix_hit_recomputes_the_last_token() -> None:
    simulation = SchedulerSimulation(num_blocks=16, block_size=4, max_model_len=32)
    for name in "ab":
        simulation.add(make_request(name, list(range(8)), max_tokens=2, ignore_eos=True))
        simulation.run()
    assert simulation.scheduler.prefix_hits == 4
    assert simulation.outputs["a"] == simulation.outputs["b"]


def test_cache_salts_do_not_share_blocks() -> None:
    simulation = SchedulerSimulation(num_blocks=16, block_size=4, max_model_len=32)
    simulation.add(make_request("a", list(range(9)), max_tokens=2))
    simulation.run()
    state = RequestState(make_request("b", list(range(9)), max_tokens=2), 9, 32)
    object.__setattr__(state.request, "cache_salt", "other")
    simulation.outputs["b"] = []
    simulation.scheduler.add(state)
    simulation.run()
    assert simulation.scheduler.prefix_hits == 0


@pytest.mark.parametrize("limit", [15, 16, 17])
def test_output_ends_exactly_at_the_context_limit(limit: int) -> None:
    """Without max_tokens and with ignore_eos, for limits around a block boundary."""
    for draft_tokens, together in itertools.product((0, 1, 2, 5, 16), (1, 16)):
        simulation = SchedulerSimulation(
            5, 4, limit, noisy_drafter(3, draft_tokens, 0.2), max_num_seqs=16, max_num_batched_tokens=64
        )
        for number in range(together):
            simulation.add(make_request(str(number), [1, 2, 3], seed=number, ignore_eos=True))
        simulation.run()
        assert {len(output) for output in simulation.outputs.values()} == {limit - 3}, draft_tokens
        assert set(simulation.reasons.values()) == {"length"}


def test_long_prompt_leaves_a_row_for_every_request() -> None:
    simulation = SchedulerSimulation(
        num_blocks=64, block_size=4, max_model_len=100, max_num_batched_tokens=8, max_num_seqs=4
    )
    simulation.add(make_request("long", [i % VOCAB for i in range(60)], max_tokens=2, ignore_eos=True))
    simulation.step()
    simulation.add(make_request("short", [1], max_tokens=8, ignore_eos=True))
    for _ in range(4):
        simulation.step()
    assert len(simulation.outputs["short"]) >= 3
    simulation.run()


def test_draft_is_cut_to_the_remaining_output() -> None:
    state = RequestState(make_request("a", [1, 2], max_tokens=4, ignore_eos=True), 0, 100)
    state.set_draft([1] * 9, "fake")
    assert len(state.draft) == 3
    state.append([5, 5, 5])
    state.set_draft([1] * 9, "fake")
    assert state.draft == [] and state.drafter == ""


def test_choices_do_not_slow_prefill() -> None:
    """Choices that wait for the prompt's blocks leave it the whole step."""
    steps = []
    for num in (1, 4):
        simulation = SchedulerSimulation(
            num_blocks=64, block_size=4, max_model_len=100, max_num_batched_tokens=8, max_num_seqs=8
        )
        for seed in range(num):
            simulation.add(
                make_request(
                    f"x-{seed}", [i % VOCAB for i in range(64)], seed=seed, max_tokens=1, ignore_eos=True
                )
            )
        while not simulation.outputs["x-0"]:
            simulation.step()
        steps.append(simulation.num_steps)
    assert steps[0] == steps[1] == 8


def test_request_waiting_for_a_prefix_preempts_none() -> None:
    simulation = SchedulerSimulation(
        num_blocks=64, block_size=4, max_model_len=100, max_num_batched_tokens=8, max_num_seqs=2
    )
    prompt = [i % VOCAB for i in range(64)]
    simulation.add(make_request("bystander", [1, 2], priority=5, ignore_eos=True))
    simulation.step()
    for seed in range(2):
        simulation.add(
            make_request(f"x-{seed}", prompt, seed=seed, priority=1, max_tokens=30, ignore_eos=True)
        )
    simulation.run()
    assert simulation.scheduler.num_preemptions <= 1


def test_prefix_hits_after_preemption_are_not_counted() -> None:
    simulation = SchedulerSimulation(num_blocks=8, block_size=2, max_model_len=16, max_num_seqs=4)
    for name in "abc":
        simulation.add(make_request(name, [1, 2, 3, 4, ord(name) % VOCAB], seed=ord(name), ignore_eos=True))
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.scheduler.prefix_queries == 3 * 5


def test_resumed_request_counts_no_prefix_queries() -> None:
    simulation = SchedulerSimulation(num_blocks=16, block_size=4, max_model_len=32)
    request = make_request("a", range(9), max_tokens=8, ignore_eos=True)
    simulation.add(replace(request, is_resumed=True))  # no output was delivered
    simulation.run()
    assert (simulation.scheduler.prefix_queries, simulation.scheduler.prefix_hits) == (0, 0)


def test_block_is_indexed_once_its_last_token_is_computed() -> None:
    """After 7 prompt tokens and a sampled one the second block is full, but lacks the KV of the last."""
    simulation = SchedulerSimulation(num_blocks=16, block_size=4, max_model_len=32)
    simulation.add(make_request("a", range(7), max_tokens=8, ignore_eos=True))
    simulation.step()
    (state,) = simulation.scheduler.running
    simulation.scheduler.prefix_cache.hash_blocks(state)
    first, second = state.block_hashes
    assert simulation.scheduler.pool.cached_prefix([first, second]) == [first]
    simulation.step()
    assert simulation.scheduler.pool.cached_prefix([first, second]) == [first, second]
    simulation.run()


def test_draft_takes_no_new_block_while_requests_wait() -> None:
    """Two of four blocks are free: a draft may use them unless a request waits."""

    def num_drafted(waiting: bool) -> int:
        simulation = SchedulerSimulation(
            4, 4, 16, noisy_drafter(1, 6, 0.0), max_num_seqs=1, max_num_batched_tokens=64
        )
        simulation.add(make_request("a", [1, 2, 3, 4, 5], ignore_eos=True))
        simulation.step()
        (state,) = simulation.scheduler.running
        state.set_draft([next_token(state.tokens, 0)] * 6, "fake")
        if waiting:
            simulation.add(make_request("b", [1], seed=7))
        (request,) = simulation.scheduler.schedule().requests
        return request.num_draft_tokens

    assert num_drafted(waiting=False) == 6
    assert num_drafted(waiting=True) == 2


def test_preempted_request_waits_until_others_can_grow() -> None:
    """Without spare blocks it would be preempted again and again (9 times here)."""
    simulation = SchedulerSimulation(num_blocks=12, block_size=2, max_model_len=20)
    for number in range(6):
        simulation.add(make_request(str(number), [number] * 3, seed=number, ignore_eos=True))
    simulation.run()
    assert simulation.scheduler.num_preemptions <= 7
