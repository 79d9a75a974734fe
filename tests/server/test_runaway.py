"""Repetition detection over HTTP: `on_runaway`, the finish reason, and its metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from foreword.config.options import Config
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeOutput

LOOP = "Well:" + "so on " * 200  # one-byte tokens; six in a pattern
CUT = 5 + 6 + 256  # tokens up to the detection
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def stopping_server() -> Iterator[RunningServer]:
    with run_server(Config(on_runaway="stop", default_max_tokens=700)) as server:
        yield server


def script_loop(served: RunningServer, bursts: tuple[int, ...] = (1,)) -> RunningServer:
    served.set_output(FakeOutput(LOOP, bursts=bursts))
    return served


@pytest.mark.parametrize("bursts", [(1,), (5,), (3, 1, 8)])
def test_stop_cuts_both_endpoints_at_the_same_character(
    served: RunningServer, bursts: tuple[int, ...]
) -> None:
    script_loop(served, bursts)
    chat = served.chat(on_runaway="stop")
    assert (chat.choices[0].finish_reason, chat.choices[0].stop_reason) == ("repetition", None)
    assert chat.choices[0].message.content == LOOP[:CUT] and chat.usage.completion_tokens == CUT
    text = served.complete(on_runaway="stop", max_tokens=2000).choices[0]
    assert (text.finish_reason, text.text) == ("repetition", LOOP[:CUT])


def test_streams_report_repetition(served: RunningServer) -> None:
    chunks = list(script_loop(served, (7,)).chat(on_runaway="stop", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == LOOP[:CUT]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "repetition"
    chunks = list(served.complete(on_runaway="stop", stream=True, max_tokens=2000))
    assert "".join(chunk.choices[0].text for chunk in chunks) == LOOP[:CUT]
    assert chunks[-1].choices[0].finish_reason == "repetition"


def test_warn_is_the_default_and_off_is_silent(
    served: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = script_loop(served).metrics()["foreword_runaway_requests_total",]
    with caplog.at_level(logging.WARNING, logger="foreword.metrics"):
        answer = served.chat(metrics=True)
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == LOOP
        assert answer.metrics["repeating_tokens"] == 6
        silent = served.chat(on_runaway="off", metrics=True)
        assert silent.choices[0].message.content == LOOP and "repeating_tokens" not in silent.metrics
    assert served.metrics()["foreword_runaway_requests_total",] == before + 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"request {answer.id}-0: repetitive output, pattern length 6, after {CUT} tokens; "
        "continuing (on_runaway warn)"
    )
    assert "so on" not in caplog.text


def test_repetition_is_counted_during_the_answer(served: RunningServer) -> None:
    before = served.metrics()["foreword_runaway_requests_total",]
    served.set_output(FakeOutput(LOOP, hang_after=CUT + 1))
    with served.chat(stream=True) as stream:  # a first chunk, then one per token
        for _ in range(CUT + 1):
            next(stream)
        assert served.metrics()["foreword_runaway_requests_total",] == before + 1


def test_reasons_are_counted(stopping_server: RunningServer) -> None:
    script_loop(stopping_server)
    before = stopping_server.metrics()
    assert before["foreword_requests_finished_total", "repetition"] == 0
    assert stopping_server.chat(n=2).choices[1].finish_reason == "repetition", "the server's default"
    assert stopping_server.chat(on_runaway="warn").choices[0].finish_reason == "length", (
        "a request may override it"
    )
    after = stopping_server.metrics()
    assert after["foreword_requests_finished_total", "repetition"] == 2
    assert after["foreword_runaway_requests_total",] == 3


def test_missing_max_tokens_takes_the_default(stopping_server: RunningServer) -> None:
    stopping_server.set_output(FakeOutput("a", bursts=(64,)))
    endless = stopping_server.chat(ignore_eos=True, on_runaway="off")
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 700)
    assert (
        stopping_server.chat(ignore_eos=True, on_runaway="off", max_tokens=800).usage.completion_tokens == 800
    )
    assert (
        stopping_server.chat(ignore_eos=True, on_runaway="off", min_tokens=900).usage.completion_tokens == 900
    )
    assert stopping_server.complete(ignore_eos=True, on_runaway="off").usage.completion_tokens == 16, (
        "OpenAI's default of /v1/completions"
    )


def test_default_max_tokens_leaves_room_for_the_prompt(served: RunningServer) -> None:
    """The default exceeds the context of 2048, and must not truncate the prompt."""
    assert (
        served.chat(
            messages=[{"role": "user", "content": "x" * 5000}], truncate_prompt_tokens=-1
        ).usage.prompt_tokens
        == 2047
    )


@pytest.mark.parametrize("value", ["loud", "", 5, True])
def test_invalid_on_runaway_is_refused(served: RunningServer, value: Any) -> None:
    answer = served.http.post("/v1/chat/completions", json={"messages": USER, "on_runaway": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "on_runaway"


def test_best_of_ranks_repetitions_last(served: RunningServer) -> None:
    """Even if the loop is likelier."""
    served.set_output(
        lambda request: (
            FakeOutput("brief", logprob=-5.0) if request.seed == 8 else FakeOutput(LOOP, logprob=-0.01)
        )
    )
    answer = served.complete(best_of=3, seed=7, on_runaway="stop", max_tokens=600)
    assert [choice.text for choice in answer.choices] == ["brief"]
    answer = served.complete(n=2, best_of=3, seed=7, on_runaway="stop", max_tokens=600)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "repetition"]


def test_client_without_the_finish_reason(served: RunningServer) -> None:
    """OpenAI's helpers pass an unknown reason through."""
    script_loop(served)
    options: dict[str, Any] = {"model": MODEL, "messages": USER, "extra_body": {"on_runaway": "stop"}}
    completion = served.openai.chat.completions.parse(**options)
    assert completion.choices[0].finish_reason == "repetition"
    with served.openai.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.done" in kinds and final.choices[0].message.content == LOOP[:CUT]
    assert final.choices[0].finish_reason == "repetition"
    assert json.loads(completion.model_dump_json())["choices"][0]["finish_reason"] == "repetition"


def test_real_engine_ends_loops_alike_for_all_drafters(demo: RunningServer) -> None:
    """allowed_token_ids has one token, so the answer is a loop."""
    endless = {
        "temperature": 1.0,
        "seed": 4,
        "ignore_eos": True,
        "max_tokens": 600,
        "on_runaway": "stop",
        "return_token_ids": True,
    }
    found = [
        demo.complete(**endless, allowed_token_ids=[40], speculation={"method": method}).choices[0]
        for method in ("auto", "suffix", "off")
    ]
    assert {(choice.finish_reason, len(choice.token_ids)) for choice in found} == {("repetition", 257)}
    before = demo.metrics()["foreword_requests_finished_total", "repetition"]
    chunks = list(demo.complete(**endless, allowed_token_ids=[40], stream=True))
    assert chunks[-1].choices[0].finish_reason == "repetition"
    assert demo.metrics()["foreword_requests_finished_total", "repetition"] == before + 1
