"""Requests through the deaths of engines: what callers see is one answer, whole and in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.events import DraftUse, Embedded, Event, Failed, StepStats, TokenLogprob, Tokens
from foreword.core.params import SamplingParams
from foreword.core.pictures import Picture
from foreword.core.request import Request
from foreword.core.runaway import Repetition
from foreword.engine.live import CHECKED, Aftermath, LiveRequest, LiveRequests
from foreword.engine.messages import Forget
from foreword.errors import DeadlineExceeded, EngineDead, Overloaded, RequestFailed

LENGTH = 20  # tokens of every answer


def make_request(name: str, **params: Any) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(**params), seed=0)


def said(request_id: str, start: int, stop: int, **fields: Any) -> Tokens:
    """Tokens [start, stop) of the one answer that a request has."""
    ids = tuple(_answer(request_id, position) for position in range(start, stop))
    logprobs = tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in ids)
    reason = "length" if stop == LENGTH else None
    return Tokens(request_id, start, ids, logprobs, hashes=ids, finish_reason=reason, **fields)


def _answer(request_id: str, position: int) -> int:
    return ord(request_id[0]) * 1000 + position


def test_a_request_of_which_nothing_was_delivered_is_sent_as_it_came() -> None:
    request = make_request("a", prompt_logprobs=2)
    assert LiveRequest(request).resumed() is request


def test_one_delivered_token_makes_it_resumed() -> None:
    live = LiveRequest(make_request("a"))
    assert not live.resumed().resumed
    live.take(said("a", 0, 1))
    assert live.resumed().resumed and not live.resumed().delivered_ids, "all of it is sampled again"


def test_who_ran_need_not_begin_in_time_again() -> None:
    requests = LiveRequests()
    for name in "ab":
        requests.add(replace(make_request(name), start_by_s=1.0, deadline_s=9.0))
    requests.due()
    requests.died([0])
    ran, waited = requests.due()
    assert (ran.start_by_s, ran.deadline_s) == (None, 9.0) and waited.start_by_s == 1.0
    assert [failed.request_id for failed in requests.end_late(2.0, answers=False, at_work=())] == ["b"]


def test_what_was_delivered_returns_as_output_and_the_last_of_it_is_checked() -> None:
    live = LiveRequest(replace(make_request("a", prompt_logprobs=2), delivered_ids=(7, 8), start_by_s=1.0, deadline_s=9.0))
    live.take(replace(said("a", 0, 6), index=2))
    resumed = live.resumed()
    assert resumed.delivered_ids == (7, 8, _answer("a", 0), _answer("a", 1))
    assert resumed.params.prompt_logprobs is None, "they were delivered"
    assert (resumed.start_by_s, resumed.deadline_s) == (None, 9.0), "it ran, and its time goes on"
    few = LiveRequest(replace(make_request("a"), delivered_ids=(7, 8)))
    few.take(replace(said("a", 0, CHECKED - 1), index=2))
    assert few.resumed().delivered_ids == (7, 8), "what the caller brought is not sampled again"


def test_what_comes_again_is_not_delivered_twice() -> None:
    live = LiveRequest(make_request("a"))
    assert live.take(said("a", 0, 6)) == said("a", 0, 6)
    assert live.take(said("a", 2, 4)) is None
    use = DraftUse("suffix", drafted=4, accepted=3)
    new = live.take(said("a", 4, 8, draft=use))
    assert new == said("a", 6, 8, draft=DraftUse("suffix", 2, 1))
    assert live.take(said("a", 8, LENGTH)) == said("a", 8, LENGTH)


@pytest.mark.parametrize("event", [replace(said("a", 2, 5), token_ids=(1, 2, 3)), said("a", 7, 8), said("b", 4, 7)])
def test_other_tokens_than_before_end_the_request(event: Tokens) -> None:
    live = LiveRequest(make_request("a"))
    live.take(said("a", 0, 6))
    failed = live.take(event)
    assert isinstance(failed, Failed) and isinstance(failed.error, RequestFailed) and "same tokens" in failed.error.message


def test_usage_and_warnings_are_those_of_the_first_engine() -> None:
    live = LiveRequest(make_request("a"))
    first = live.take(said("a", 0, 6, num_cached=2, scheduled_s=5.0, repeating=Repetition(6, 3)))
    assert isinstance(first, Tokens) and first.repeating is not None
    again = live.take(said("a", 2, 8, num_cached=0, scheduled_s=8.0, repeating=Repetition(4, 3)))
    assert again == said("a", 6, 8, num_cached=2, scheduled_s=5.0), "the same token is not found to repeat twice"


def test_vectors_and_errors_pass() -> None:
    requests = LiveRequests()
    requests.add(make_request("a"))
    requests.add(make_request("b"))
    vector, failed = Embedded("a", b"1234"), Failed("b", RequestFailed("no"))
    assert requests.take(vector) is vector and requests.take(failed) is failed
    assert len(requests) == 0 and requests.take(vector) is None


def test_all_fail_when_no_engine_comes_back() -> None:
    requests = LiveRequests()
    for name in "ab":
        requests.add(make_request(name))
    error = EngineDead("gone")
    assert requests.fail(error) == [Failed("a", error), Failed("b", error)]
    assert not requests.due() and len(requests) == 0


def test_who_ended_is_not_sent_again_and_the_others_in_order() -> None:
    requests = LiveRequests()
    for name in "abc":
        requests.add(make_request(name))
    assert [request.id for request in requests.due()] == ["a", "b", "c"] and not requests.due()
    requests.take(said("b", 0, LENGTH))
    requests.add(make_request("d"))
    requests.add(make_request("e"))
    requests.remove("e")
    assert requests.died([0]) == Aftermath([], blamed=True)
    assert [request.id for request in requests.due()] == ["a", "c", "d"]


def test_an_engine_in_doubt_gets_nothing_before_it_has_proven_itself() -> None:
    requests = LiveRequests()
    requests.add(make_request("a"))
    requests.prove(make_request("proof"))
    assert [request.id for request in requests.due()] == ["proof"] and not requests.due()
    requests.add(make_request("b"))
    assert not requests.due() and len(requests) == 2
    assert requests.take(Failed("proof", RequestFailed("an answer"))) is None
    assert [request.id for request in requests.due()] == ["a", "b"]


def test_a_death_is_nobodys_fault_only_if_nobody_was_worked_on() -> None:
    requests = LiveRequests()
    assert requests.died([]) == Aftermath([], blamed=False)
    requests.add(make_request("a"))
    requests.prove(make_request("proof"))
    requests.due()
    assert requests.died([0]) == Aftermath([], blamed=False), "the proof is ours"
    assert [request.id for request in requests.due()] == ["a"]
    requests.remove("a")
    assert requests.died([0]).blamed, "it has gone since"


def test_who_is_late_ends_here_where_the_engine_cannot_end_it() -> None:
    requests = LiveRequests()
    for name in "ab":
        requests.add(replace(make_request(name), start_by_s=5.0, deadline_s=9.0))
    requests.due()
    requests.add(replace(make_request("c"), start_by_s=5.0))
    assert requests.end_late(4.0, answers=False, at_work=()) == []
    assert [one.request_id for one in requests.end_late(5.0, answers=True, at_work=())] == ["c"], "the engine has not got it"
    late = requests.end_late(5.0, answers=False, at_work=(0,))
    assert [one.request_id for one in late] == ["b"] and isinstance(late[0].error, Overloaded)
    late = requests.end_late(9.0, answers=True, at_work=())
    assert [one.request_id for one in late] == ["a"] and isinstance(late[0].error, DeadlineExceeded)


def test_open_requests_age_and_wait_while_nothing_is_said() -> None:
    requests = LiveRequests()
    for name, arrival_s in zip("abc", (10.0, 20.0, 30.0), strict=True):
        requests.add(replace(make_request(name), arrival_s=arrival_s))
    requests.take(said("b", 0, 6))
    hung = requests.stats(50.0, StepStats(step=9, requests_running=2, oldest_running_seconds=3.0), running=True)
    assert hung == StepStats(9, requests_running=2, requests_waiting=1, longest_running_tokens=6, oldest_running_seconds=40.0)
    gone = requests.stats(50.0, StepStats(), running=False)
    assert (gone.requests_running, gone.requests_waiting, gone.oldest_running_seconds) == (0, 3, 40.0)


@dataclass
class Engine:
    """Says what it is asked to say, as an incarnation of an engine would: from the delivered tokens of a request on."""

    said: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.numbers[request.id] = len(self.numbers)
            self.said[request.id] = len(request.delivered_ids)
            assert request.delivered_ids == said(request.id, 0, len(request.delivered_ids)).token_ids

    def step(self, request_id: str, burst: int) -> Tokens:
        start = self.said[request_id]
        stop = min(start + burst, LENGTH)
        self.said[request_id] = stop
        if stop == LENGTH:
            del self.said[request_id]
        return said(request_id, start, stop, draft=DraftUse("suffix", burst, stop - start - 1))


class Service:
    """LiveRequests between callers and engines that die."""

    def __init__(self, poison: frozenset[str] = frozenset()) -> None:
        self.requests = LiveRequests()
        self.engine = Engine()
        self.poison = poison
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.drafted = 0
        self.deaths = 0

    def submit(self, name: str) -> None:
        self.answers[name] = []
        self.requests.add(make_request(name))
        self.engine.submit(self.requests.due())

    def step(self, burst: int, lost: bool = False) -> None:
        """Each request gets a burst, unless the engine dies of one; `lost`: the report does not arrive, for it dies just then."""
        running = list(self.engine.said)
        if lost or self.poison & set(running):
            self.die(running)
            return
        for name in running:
            self.take(self.engine.step(name, burst))
        self.engine.submit(self.requests.due())

    def take(self, event: Event) -> None:
        new = self.requests.take(event)
        if new is None:
            return
        assert isinstance(new, Tokens) and new.index == len(self.answers[new.request_id])
        assert tuple(one.token_id for one in new.logprobs) == new.token_ids == new.hashes
        self.answers[new.request_id] += new.token_ids
        if new.finish_reason:
            self.ends[new.request_id] = new.finish_reason

    def die(self, at_work: list[str]) -> None:
        self.deaths += 1
        for failed in self.requests.died([self.engine.numbers[name] for name in at_work]).failed:
            self.ends[failed.request_id] = "failed"
        self.engine = Engine()
        self.engine.submit(self.requests.due())

    def run_to_the_end(self) -> None:
        for _ in range(1000):
            if not len(self.requests):
                return
            self.step(3)
        raise AssertionError("somebody waits for ever")


def test_streams_that_merely_live_through_deaths_are_not_suspected() -> None:
    service = Service()
    for name in "abc":
        service.submit(name)
    while len(service.requests):
        service.step(CHECKED + 1)
        service.die(list(service.engine.said))
        assert service.requests.alone is None
    assert service.ends == dict.fromkeys("abc", "length")


events = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 7)),
    st.tuples(st.just("die"), st.integers(1, 7)),
    st.tuples(st.just("idle death"), st.just(0)),
    st.tuples(st.just("submit"), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
)


@given(st.lists(events, max_size=40))
@settings(deadline=None)
def test_answers_are_whole_whatever_happens_to_the_engines(script: list[tuple[str, int]]) -> None:
    service = Service()
    names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    service.submit(next(names))
    aborted = set()
    for what, number in script:
        if what == "step":
            service.step(number)
        elif what == "die":
            if service.requests.alone is None:  # the death of one that runs alone is its fault, twice
                service.step(number, lost=True)
        elif what == "idle death":
            service.die([])
        elif what == "submit":
            service.submit(next(names))
        else:
            name = list(service.answers)[number % len(service.answers)]
            aborted.add(name)
            service.requests.remove(name)
            service.engine.said.pop(name, None)
            service.engine.submit(service.requests.due())
    service.run_to_the_end()
    for name, answer in service.answers.items():
        if name not in aborted:
            assert answer == list(said(name, 0, LENGTH).token_ids) and service.ends[name] == "length"


@given(st.sets(st.sampled_from("abcdef"), max_size=3), st.lists(st.integers(1, 4), max_size=8))
@settings(deadline=None)
def test_who_kills_engines_is_refused_and_nobody_else_is(poison: set[str], bursts: list[int]) -> None:
    service = Service(frozenset(poison))
    for name in "abcdef":
        service.submit(name)
    for burst in bursts:
        service.step(burst)
    service.run_to_the_end()
    assert service.deaths <= 4 * len(poison)
    for name in "abcdef":
        whole = list(said(name, 0, LENGTH).token_ids)
        assert (service.ends[name], service.answers[name]) == (("failed", []) if name in poison else ("length", whole))


def test_pictures_are_held_as_long_as_a_request_has_them() -> None:
    picture = Picture(b"x" * 16, 1, (1, 1, 1), (1, 1), (1, 3, 1, 1), b"abc", 0)
    requests = LiveRequests()
    for name in "ab":
        requests.add(replace(make_request(name), pictures=(picture,)))
    first, second = requests.due()
    assert [len(requests.gallery.messages(one)) for one in (first, second)] == [2, 1]
    requests.take(said("a", 0, LENGTH))
    requests.take(said("b", 0, 3))
    requests.died([1])
    (resumed,) = requests.due()
    assert resumed.resumed and len(requests.gallery.messages(resumed)) == 2, "the next engine has not seen it"
    assert requests.gallery.forgotten() == []
    requests.fail(EngineDead("over"))
    assert requests.gallery.forgotten() == [Forget(picture.digest)]
