"""Runaways over HTTP: the field, the reason, the count, and clients that do not know the reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword.config.options import Config
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeOutput

LOOP = "Well:" + "so on " * 200  # of one-byte tokens; six in a pattern
CUT = 5 + 6 + 256  # tokens up to the one with which it is found
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def stopping() -> Iterator[RunningServer]:
    with run_server(Config(on_runaway="stop", default_max_tokens=700)) as server:
        yield server


def looping(served: RunningServer, bursts: tuple[int, ...] = (1,)) -> RunningServer:
    served.set_output(FakeOutput(LOOP, bursts=bursts))
    return served


def series(served: RunningServer) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("bursts", [(1,), (5,), (3, 1, 8)])
def test_stop_cuts_chat_and_completions_at_the_same_character(
    served: RunningServer, bursts: tuple[int, ...]
) -> None:
    looping(served, bursts)
    chat = served.chat(on_runaway="stop")
    assert (chat.choices[0].finish_reason, chat.choices[0].stop_reason) == ("repetition", None)
    assert chat.choices[0].message.content == LOOP[:CUT] and chat.usage.completion_tokens == CUT
    text = served.complete(on_runaway="stop", max_tokens=2000).choices[0]
    assert (text.finish_reason, text.text) == ("repetition", LOOP[:CUT])


def test_streams_say_so_too(served: RunningServer) -> None:
    chunks = list(looping(served, (7,)).chat(on_runaway="stop", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == LOOP[:CUT]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "repetition"
    chunks = list(served.complete(on_runaway="stop", stream=True, max_tokens=2000))
    assert "".join(chunk.choices[0].text for chunk in chunks) == LOOP[:CUT]
    assert chunks[-1].choices[0].finish_reason == "repetition"


def test_warn_is_the_default_and_off_is_silent(
    served: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = series(looping(served))["foreword_runaway_requests_total",]
    with caplog.at_level(logging.WARNING, logger="foreword.metrics"):
        answer = served.chat(metrics=True)
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == LOOP
        assert answer.metrics["repeating_tokens"] == 6
        silent = served.chat(on_runaway="off", metrics=True)
        assert silent.choices[0].message.content == LOOP and "repeating_tokens" not in silent.metrics
    assert series(served)["foreword_runaway_requests_total",] == before + 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"request {answer.id}-0 runs away: {CUT} tokens so far, and their end repeats a pattern of length 6; "
        "it goes on (on_runaway warn)"
    )
    assert "so on" not in caplog.text


def test_it_is_counted_while_the_answer_runs(served: RunningServer) -> None:
    before = series(served)["foreword_runaway_requests_total",]
    served.set_output(FakeOutput(LOOP, hang_after=CUT + 1))
    with served.chat(stream=True) as stream:  # a chunk that opens it, then one for each token
        for _ in range(CUT + 1):
            next(stream)
        assert series(served)["foreword_runaway_requests_total",] == before + 1


def test_reasons_are_counted(stopping: RunningServer) -> None:
    looping(stopping)
    before = series(stopping)
    assert before["foreword_requests_finished_total", "repetition"] == 0
    assert stopping.chat(n=2).choices[1].finish_reason == "repetition", "the server's default"
    assert stopping.chat(on_runaway="warn").choices[0].finish_reason == "length", "which a request may change"
    after = series(stopping)
    assert after["foreword_requests_finished_total", "repetition"] == 2
    assert after["foreword_runaway_requests_total",] == 3


def test_requests_that_bring_no_max_tokens_get_the_default(stopping: RunningServer) -> None:
    stopping.set_output(FakeOutput("a", bursts=(64,)))
    endless = stopping.chat(ignore_eos=True, on_runaway="off")
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 700)
    assert stopping.chat(ignore_eos=True, on_runaway="off", max_tokens=800).usage.completion_tokens == 800
    assert stopping.chat(ignore_eos=True, on_runaway="off", min_tokens=900).usage.completion_tokens == 900
    assert stopping.complete(ignore_eos=True, on_runaway="off").usage.completion_tokens == 16, (
        "as OpenAI has it"
    )


def test_the_default_takes_no_room_from_the_prompt(served: RunningServer) -> None:
    """It is above the context of 2048: a prompt cut to leave room for it would be nothing at all."""
    assert (
        served.chat(
            messages=[{"role": "user", "content": "x" * 5000}], truncate_prompt_tokens=-1
        ).usage.prompt_tokens
        == 2047
    )


@pytest.mark.parametrize("value", ["loud", "", 5, True])
def test_what_it_may_be(served: RunningServer, value: Any) -> None:
    answer = served.http.post("/v1/chat/completions", json={"messages": USER, "on_runaway": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "on_runaway"


def test_best_of_prefers_an_answer_to_a_loop(served: RunningServer) -> None:
    """However likely the loop is."""
    served.set_output(
        lambda request: (
            FakeOutput("brief", logprob=-5.0) if request.seed == 8 else FakeOutput(LOOP, logprob=-0.01)
        )
    )
    answer = served.complete(best_of=3, seed=7, on_runaway="stop", max_tokens=600)
    assert [choice.text for choice in answer.choices] == ["brief"]
    answer = served.complete(n=2, best_of=3, seed=7, on_runaway="stop", max_tokens=600)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "repetition"]


def test_a_client_that_does_not_know_the_reason(served: RunningServer) -> None:
    """OpenAI's helpers pass it through; what they parse is the caller's to check, as with any answer that was cut."""
    looping(served)
    options: dict[str, Any] = {"model": MODEL, "messages": USER, "extra_body": {"on_runaway": "stop"}}
    completion = served.openai.chat.completions.parse(**options)
    assert completion.choices[0].finish_reason == "repetition"
    with served.openai.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.done" in kinds and final.choices[0].message.content == LOOP[:CUT]
    assert final.choices[0].finish_reason == "repetition"
    assert json.loads(completion.model_dump_json())["choices"][0]["finish_reason"] == "repetition"


def test_a_real_engine_ends_a_loop_at_the_same_token_whoever_guesses(demo: RunningServer) -> None:
    """There is but one token that it may say."""
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
    before = series(demo)["foreword_requests_finished_total", "repetition"]
    chunks = list(demo.complete(**endless, allowed_token_ids=[40], stream=True))
    assert chunks[-1].choices[0].finish_reason == "repetition"
    assert series(demo)["foreword_requests_finished_total", "repetition"] == before + 1
