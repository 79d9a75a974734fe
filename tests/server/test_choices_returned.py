"""Missing choices are an error, and returned choices are counted."""

from __future__ import annotations

import json
from collections.abc import Callable

import openai
import pytest

from foreword.core.request import Request
from tests.server.conftest import RunningServer, json_post
from tests.support.fakes import FakeOutput

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def returned(server: RunningServer) -> int:
    return int(server.metrics()["foreword_choices_returned_total",])


def fail_choice(index: int, others: FakeOutput) -> Callable[[Request], FakeOutput]:
    return lambda request: FakeOutput(fail_after=2) if request.id.endswith(f"-{index}") else others


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_all_choices_are_counted(served: RunningServer, n: int, stream: bool) -> None:
    before = returned(served)
    answer = served.chat(n=n, stream=stream)
    if stream:
        assert len({chunk.choices[0].index for chunk in answer}) == n
    else:
        assert len(answer.choices) == n
    assert returned(served) - before == n


def test_failed_choice_fails_the_whole_answer(served: RunningServer) -> None:
    before = returned(served)
    served.set_output(fail_choice(1, FakeOutput("abc")))
    with pytest.raises(openai.InternalServerError):
        served.chat(n=3)
    assert returned(served) == before


def test_failed_choice_is_the_last_event_of_a_stream(served: RunningServer) -> None:
    before = returned(served)
    served.set_output(fail_choice(1, FakeOutput("abc")))
    reply = served.http.post(
        CHAT, json={"messages": USER, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    )
    events = [
        json.loads(line.removeprefix("data: "))
        for line in reply.text.split("\n\n")
        if line and not line.endswith("[DONE]")
    ]
    ends = [
        choice["index"] for event in events for choice in event.get("choices", ()) if choice["finish_reason"]
    ]
    assert sorted(ends) == [0, 2] and "error" in events[-1]
    assert not any(event.get("usage") for event in events), "usage would hide the missing choice"
    assert returned(served) - before == 2
    served.set_output(fail_choice(0, FakeOutput("abc")))
    with pytest.raises(openai.APIError):
        list(served.chat(n=2, stream=True))


def test_disconnected_client_counts_finished_choices(served: RunningServer) -> None:
    before = returned(served)
    served.set_output(
        lambda request: FakeOutput("abc") if request.id.endswith("-0") else FakeOutput(hang_after=2)
    )
    with served.connect() as connection:
        connection.sendall(json_post(CHAT, {"messages": USER, "n": 3, "stream": True}))
        heard = b""
        while b'"finish_reason":"stop"' not in heard:
            heard += connection.recv(65_536)
    served.wait_until_idle()
    assert returned(served) - before == 1
