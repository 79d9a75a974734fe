"""A request that goes on in another engine: its caller gets each token once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foreword.core.outputs import DraftResult, ErrorEvent, TokenEvent, TokenLogprob
from foreword.core.params import SamplingParams
from foreword.core.repetition import Repetition
from foreword.core.request import Request
from foreword.engine_client.inflight_request import REPLAY_CHECK_TOKENS, InflightRequest
from foreword.errors import RequestFailed

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


def test_request_without_delivered_tokens_is_sent_as_it_was() -> None:
    request = replace(make_request("a", prompt_logprobs=2), queue_deadline_s=1.0, deadline_s=9.0)
    live = InflightRequest(request)
    assert live.make_resume_request("a~1") == replace(request, id="a~1")
    live.has_run = True
    ran = live.make_resume_request("a~1")
    assert (ran.queue_deadline_s, ran.deadline_s) == (None, 9.0), "it does not wait to start"


def test_all_tokens_of_a_short_answer_are_sampled_again() -> None:
    live = InflightRequest(make_request("a"))
    live.on_event(said("a", 0, 1))
    resumed = live.make_resume_request("a~1")
    assert resumed.is_resumed and not resumed.resume_output_ids


def test_events_have_the_id_of_the_request() -> None:
    live = InflightRequest(make_request("a"))
    live.on_event(said("a", 0, 6))
    assert live.on_event(said("a", 6, 8)._replace(request_id="a~1")) == said("a", 6, 8)
    failed = live.on_event(said("a", 9, 12)._replace(request_id="a~1"))
    assert isinstance(failed, ErrorEvent) and failed.request_id == "a"


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
    resumed = live.make_resume_request("a~1")
    assert resumed.resume_output_ids == (7, 8, _answer("a", 0), _answer("a", 1))
    assert resumed.id == "a~1" and resumed.is_resumed
    assert resumed.params.prompt_logprobs is None, "already delivered"
    assert (resumed.queue_deadline_s, resumed.deadline_s) == (None, 9.0), "only the queue deadline is dropped"
    few = InflightRequest(replace(make_request("a"), resume_output_ids=(7, 8)))
    few.on_event(said("a", 0, REPLAY_CHECK_TOKENS - 1)._replace(index=2))
    assert few.make_resume_request("a~1").resume_output_ids == (7, 8), "the caller's own output is kept"


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
