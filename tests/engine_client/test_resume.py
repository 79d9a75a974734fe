"""Open requests across engine crashes: callers get one complete answer, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.images import PromptImage
from foreword.core.outputs import (
    DraftResult,
    EmbeddingEvent,
    ErrorEvent,
    Event,
    StepStats,
    TokenEvent,
    TokenLogprob,
)
from foreword.core.params import SamplingParams
from foreword.core.repetition import Repetition
from foreword.core.request import Request
from foreword.engine_client.messages import DropImage
from foreword.engine_client.resume import (
    REPLAY_CHECK_TOKENS,
    CrashResult,
    InflightRequest,
    InflightRequests,
)
from foreword.errors import DeadlineExceeded, EngineDead, Overloaded, RequestFailed

LENGTH = 20  # tokens of every answer


def make_request(name: str, **params: Any) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(**params), seed=0)


def said(request_id: str, start: int, stop: int, **fields: Any) -> TokenEvent:
    """An event with tokens [start, stop) of the request's only possible answer."""
    ids = tuple(_answer(request_id, position) for position in range(start, stop))
    logprobs = tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in ids)
    reason = "length" if stop == LENGTH else None
    return TokenEvent(request_id, start, ids, logprobs, logits_hashes=ids, finish_reason=reason, **fields)


def _answer(request_id: str, position: int) -> int:
    return ord(request_id[0]) * 1000 + position


def test_request_without_delivered_tokens_is_resent() -> None:
    request = make_request("a", prompt_logprobs=2)
    assert InflightRequest(request).make_resume_request() is request


def test_request_with_a_delivered_token_is_resumed() -> None:
    live = InflightRequest(make_request("a"))
    assert not live.make_resume_request().is_resumed
    live.on_event(said("a", 0, 1))
    assert live.make_resume_request().is_resumed and not live.make_resume_request().resume_output_ids, (
        "all tokens are sampled again"
    )


def test_queue_deadline_is_dropped_after_a_run() -> None:
    requests = InflightRequests()
    for name in "ab":
        requests.add(replace(make_request(name), queue_deadline_s=1.0, deadline_s=9.0))
    requests.pop_pending()
    requests.on_crash([0])
    ran, waited = requests.pop_pending()
    assert (ran.queue_deadline_s, ran.deadline_s) == (None, 9.0) and waited.queue_deadline_s == 1.0
    assert [failed.request_id for failed in requests.expire(2.0, is_responsive=False, busy_arrivals=())] == [
        "b"
    ]


def test_delivered_tokens_are_resume_output() -> None:
    live = InflightRequest(
        replace(
            make_request("a", prompt_logprobs=2),
            resume_output_ids=(7, 8),
            queue_deadline_s=1.0,
            deadline_s=9.0,
        )
    )
    live.on_event(said("a", 0, 6)._replace(index=2))
    resumed = live.make_resume_request()
    assert resumed.resume_output_ids == (7, 8, _answer("a", 0), _answer("a", 1))
    assert resumed.params.prompt_logprobs is None, "already delivered"
    assert (resumed.queue_deadline_s, resumed.deadline_s) == (None, 9.0), "only the queue deadline is dropped"
    few = InflightRequest(replace(make_request("a"), resume_output_ids=(7, 8)))
    few.on_event(said("a", 0, REPLAY_CHECK_TOKENS - 1)._replace(index=2))
    assert few.make_resume_request().resume_output_ids == (7, 8), "the caller's own resume output is kept"


def test_replayed_tokens_are_not_delivered_twice() -> None:
    live = InflightRequest(make_request("a"))
    assert live.on_event(said("a", 0, 6)) == said("a", 0, 6)
    assert live.on_event(said("a", 2, 4)) is None
    use = DraftResult("suffix", num_drafted=4, num_accepted=3)
    new = live.on_event(said("a", 4, 8, draft=use))
    assert new == said("a", 6, 8, draft=DraftResult("suffix", 2, 1))
    assert live.on_event(said("a", 8, LENGTH)) == said("a", 8, LENGTH)


@pytest.mark.parametrize(
    "event", [said("a", 2, 5)._replace(token_ids=(1, 2, 3)), said("a", 7, 8), said("b", 4, 7)]
)
def test_different_tokens_after_a_crash_fail_the_request(event: TokenEvent) -> None:
    live = InflightRequest(make_request("a"))
    live.on_event(said("a", 0, 6))
    failed = live.on_event(event)
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, RequestFailed)
        and "same tokens" in failed.error.message
    )


def test_first_timing_and_repetition_are_kept() -> None:
    live = InflightRequest(make_request("a"))
    first = live.on_event(said("a", 0, 6, num_cached=2, scheduled_s=5.0, repetition=Repetition(6, 3)))
    assert isinstance(first, TokenEvent) and first.repetition is not None
    again = live.on_event(said("a", 2, 8, num_cached=0, scheduled_s=8.0, repetition=Repetition(4, 3)))
    assert again == said("a", 6, 8, num_cached=2, scheduled_s=5.0), (
        "no second warning for the same repetition"
    )


def test_vectors_and_errors_are_delivered() -> None:
    requests = InflightRequests()
    requests.add(make_request("a"))
    requests.add(make_request("b"))
    vector, failed = EmbeddingEvent("a", b"1234"), ErrorEvent("b", RequestFailed("no"))
    assert requests.on_event(vector) is vector and requests.on_event(failed) is failed
    assert len(requests) == 0 and requests.on_event(vector) is None


def test_fail_all_ends_every_request() -> None:
    requests = InflightRequests()
    for name in "ab":
        requests.add(make_request(name))
    error = EngineDead("gone")
    assert requests.fail_all(error) == [ErrorEvent("a", error), ErrorEvent("b", error)]
    assert not requests.pop_pending() and len(requests) == 0


def test_open_requests_are_resent_in_order() -> None:
    requests = InflightRequests()
    for name in "abc":
        requests.add(make_request(name))
    assert [request.id for request in requests.pop_pending()] == [
        "a",
        "b",
        "c",
    ] and not requests.pop_pending()
    requests.on_event(said("b", 0, LENGTH))
    requests.add(make_request("d"))
    requests.add(make_request("e"))
    requests.remove("e")
    assert requests.on_crash([0]) == CrashResult([], had_requests=True)
    assert [request.id for request in requests.pop_pending()] == ["a", "c", "d"]


def test_engine_gets_only_the_probe_before_it_answers() -> None:
    requests = InflightRequests()
    requests.add(make_request("a"))
    requests.set_probe(make_request("proof"))
    assert [request.id for request in requests.pop_pending()] == ["proof"] and not requests.pop_pending()
    requests.add(make_request("b"))
    assert not requests.pop_pending() and len(requests) == 2
    assert requests.on_event(ErrorEvent("proof", RequestFailed("an answer"))) is None
    assert [request.id for request in requests.pop_pending()] == ["a", "b"]


def test_had_requests_ignores_the_probe() -> None:
    requests = InflightRequests()
    assert requests.on_crash([]) == CrashResult([], had_requests=False)
    requests.add(make_request("a"))
    requests.set_probe(make_request("proof"))
    requests.pop_pending()
    assert requests.on_crash([0]) == CrashResult([], had_requests=False), "the probe is no user's request"
    assert [request.id for request in requests.pop_pending()] == ["a"]
    requests.remove("a")
    assert requests.on_crash([0]).had_requests, "closed since then"


def test_expire_ends_late_requests() -> None:
    requests = InflightRequests()
    for name in "ab":
        requests.add(replace(make_request(name), queue_deadline_s=5.0, deadline_s=9.0))
    requests.pop_pending()
    requests.add(replace(make_request("c"), queue_deadline_s=5.0))
    assert requests.expire(4.0, is_responsive=False, busy_arrivals=()) == []
    assert [one.request_id for one in requests.expire(5.0, is_responsive=True, busy_arrivals=())] == ["c"], (
        "not sent to the engine"
    )
    late = requests.expire(5.0, is_responsive=False, busy_arrivals=(0,))
    assert [one.request_id for one in late] == ["b"] and isinstance(late[0].error, Overloaded)
    late = requests.expire(9.0, is_responsive=True, busy_arrivals=())
    assert [one.request_id for one in late] == ["a"] and isinstance(late[0].error, DeadlineExceeded)


def test_stats_without_a_responsive_engine() -> None:
    requests = InflightRequests()
    for name, arrival_s in zip("abc", (10.0, 20.0, 30.0), strict=True):
        requests.add(replace(make_request(name), arrival_s=arrival_s))
    requests.on_event(said("b", 0, 6))
    hung = requests.stats(
        50.0, StepStats(step=9, requests_running=2, oldest_running_seconds=3.0), is_running=True
    )
    assert hung == StepStats(
        9, requests_running=2, requests_waiting=1, longest_running_tokens=6, oldest_running_seconds=40.0
    )
    gone = requests.stats(50.0, StepStats(), is_running=False)
    assert (gone.requests_running, gone.requests_waiting, gone.oldest_running_seconds) == (0, 3, 40.0)


@dataclass
class Engine:
    """A fake engine that continues each request after its resume output."""

    said: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.numbers[request.id] = len(self.numbers)
            self.said[request.id] = len(request.resume_output_ids)
            assert request.resume_output_ids == said(request.id, 0, len(request.resume_output_ids)).token_ids

    def step(self, request_id: str, burst: int) -> TokenEvent:
        start = self.said[request_id]
        stop = min(start + burst, LENGTH)
        self.said[request_id] = stop
        if stop == LENGTH:
            del self.said[request_id]
        return said(request_id, start, stop, draft=DraftResult("suffix", burst, stop - start - 1))


class Service:
    """InflightRequests between callers and crashing engines."""

    def __init__(self, poison: frozenset[str] = frozenset()) -> None:
        self.requests = InflightRequests()
        self.engine = Engine()
        self.poison = poison
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.drafted = 0
        self.crashes = 0

    def submit(self, name: str) -> None:
        self.answers[name] = []
        self.requests.add(make_request(name))
        self.engine.submit(self.requests.pop_pending())

    def step(self, burst: int, lost: bool = False) -> None:
        """A burst for each request, unless one crashes the engine; lost: it crashes before its report."""
        running = list(self.engine.said)
        if lost or self.poison & set(running):
            self.crash(running)
            return
        for name in running:
            self.take(self.engine.step(name, burst))
        self.engine.submit(self.requests.pop_pending())

    def take(self, event: Event) -> None:
        new = self.requests.on_event(event)
        if new is None:
            return
        assert isinstance(new, TokenEvent) and new.index == len(self.answers[new.request_id])
        assert tuple(one.token_id for one in new.logprobs) == new.token_ids == new.logits_hashes
        self.answers[new.request_id] += new.token_ids
        if new.finish_reason:
            self.ends[new.request_id] = new.finish_reason

    def crash(self, busy_ids: list[str]) -> None:
        self.crashes += 1
        for failed in self.requests.on_crash([self.engine.numbers[name] for name in busy_ids]).failed:
            self.ends[failed.request_id] = "failed"
        self.engine = Engine()
        self.engine.submit(self.requests.pop_pending())

    def run_to_the_end(self) -> None:
        for _ in range(1000):
            if not len(self.requests):
                return
            self.step(3)
        raise AssertionError("a request never ends")


def test_requests_with_progress_are_no_suspects() -> None:
    service = Service()
    for name in "abc":
        service.submit(name)
    while len(service.requests):
        service.step(REPLAY_CHECK_TOKENS + 1)
        service.crash(list(service.engine.said))
        assert service.requests.quarantined is None
    assert service.ends == dict.fromkeys("abc", "length")


events = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 7)),
    st.tuples(st.just("crash"), st.integers(1, 7)),
    st.tuples(st.just("idle crash"), st.just(0)),
    st.tuples(st.just("submit"), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
)


@given(st.lists(events, max_size=40))
def test_answers_are_complete_after_any_crashes(script: list[tuple[str, int]]) -> None:
    service = Service()
    names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    service.submit(next(names))
    aborted = set()
    for event, number in script:
        if event == "step":
            service.step(number)
        elif event == "crash":
            if service.requests.quarantined is None:  # a crash while alone is blamed on the suspect
                service.step(number, lost=True)
        elif event == "idle crash":
            service.crash([])
        elif event == "submit":
            service.submit(next(names))
        else:
            name = list(service.answers)[number % len(service.answers)]
            aborted.add(name)
            service.requests.remove(name)
            service.engine.said.pop(name, None)
            service.engine.submit(service.requests.pop_pending())
    service.run_to_the_end()
    for name, answer in service.answers.items():
        if name not in aborted:
            assert answer == list(said(name, 0, LENGTH).token_ids) and service.ends[name] == "length"


@given(st.sets(st.sampled_from("abcdef"), max_size=3), st.lists(st.integers(1, 4), max_size=8))
def test_only_poison_requests_are_refused(poison: set[str], bursts: list[int]) -> None:
    service = Service(frozenset(poison))
    for name in "abcdef":
        service.submit(name)
    for burst in bursts:
        service.step(burst)
    service.run_to_the_end()
    assert service.crashes <= 4 * len(poison)
    for name in "abcdef":
        whole = list(said(name, 0, LENGTH).token_ids)
        assert (service.ends[name], service.answers[name]) == (
            ("failed", []) if name in poison else ("length", whole)
        )


def test_images_are_kept_for_open_requests() -> None:
    image = PromptImage(b"x" * 16, 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), b"abc", 0)
    requests = InflightRequests()
    for name in "ab":
        requests.add(replace(make_request(name), images=(image,)))
    first, second = requests.pop_pending()
    assert [len(requests.image_refs.to_messages(one)) for one in (first, second)] == [2, 1]
    requests.on_event(said("a", 0, LENGTH))
    requests.on_event(said("b", 0, 3))
    requests.on_crash([1])
    (resumed,) = requests.pop_pending()
    assert resumed.is_resumed and len(requests.image_refs.to_messages(resumed)) == 2, (
        "a new engine has no images"
    )
    assert requests.image_refs.pop_released() == []
    requests.fail_all(EngineDead("over"))
    assert requests.image_refs.pop_released() == [DropImage(image.digest)]
