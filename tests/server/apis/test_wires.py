"""One table of texts that a model writes, and their answers in three APIs, whole and streamed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.server.conftest import RunningServer
from tests.support.budget import some_of
from tests.support.fakes import FakeOutput
from tests.support.tool_checkpoint import WEATHER
from tests.support.wires import WIRES, Answer, Question

TIME = {"type": "function", "function": {"name": "get_time"}}
ASKED = Question(tools=(WEATHER, TIME), thinks=True)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
CALL_OTHER = CALL_TIME.replace("get_time", "other")
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
WEATHER_CALL = ("get_weather", '{"city": "Köln", "days": 2}')
# The text of the model, the question, and the answer.
CASES: dict[str, tuple[str, Question, Answer]] = {
    "text": ("Héllo wörld 😀", Question(), Answer("Héllo wörld 😀")),
    "reasoning": (f"{THOUGHT}Yes.", Question(thinks=True), Answer("Yes.", "It may rain.")),
    "calls": (
        f"{THOUGHT}Let me see.\n{CALL}\n{CALL_TIME}",
        ASKED,
        Answer("Let me see.", "It may rain.", (WEATHER_CALL, ("get_time", "{}")), "calls"),
    ),
    "call without text": (CALL, ASKED, Answer("", "", (WEATHER_CALL,), "calls")),
    "unknown tool": (CALL_OTHER, ASKED, Answer(CALL_OTHER)),
    "marker in a text": ("I would <tool_call> but", ASKED, Answer("I would <tool_call> but")),
    "no tools": (CALL, Question(), Answer(CALL)),
    "tool choice none": (CALL, replace(ASKED, choice="none"), Answer(CALL)),
    "stop string": ("one STOP two", Question(stop=("STOP", "x")), Answer("one ", end="STOP")),
    "stop string in content alone": (
        f"{THOUGHT}See:\n{CALL}\nIt may rain, she said",
        replace(ASKED, stop=("rain", "Köln")),
        Answer("See:\nIt may ", "It may rain.", (WEATHER_CALL,), "calls"),
    ),
    "stop string that spans a call": (
        f"ab{CALL}cd",
        replace(ASKED, stop=("bc",)),
        Answer("abcd", "", (WEATHER_CALL,), "calls"),
    ),
    "length": ("Hello world", Question(max_tokens=3), Answer("Hel", end="length")),
    "blank": (" \n", Question(), Answer("")),
}
CUTS = (3, 13, 40, len(CALL.encode()) - 5)  # within the marker, before and behind the name, within the end


def bare(answer: Answer) -> tuple[Any, ...]:
    """The answer without its end and counts; whitespace around content is the API's."""
    calls = tuple((name, json.loads(arguments)) for name, arguments in answer.calls)
    return answer.content.strip(), answer.reasoning, calls


@pytest.mark.parametrize("burst", some_of((3, 1, 200), 3))  # tests/tokenizer has all cuts of events
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("case", CASES)
def test_answer_is_whole_and_streamed(fake: RunningServer, case: str, wire: str, burst: int) -> None:
    text, question, expected = CASES[case]
    fake.set_output(FakeOutput(text, (burst, burst + 1)))
    whole = WIRES[wire].ask(fake.http, question)
    assert bare(whole) == bare(expected)
    if wire == "responses" and expected.end in question.stop:
        assert whole.end == "stop"  # OpenAI's Responses API has no stop strings
    else:
        assert whole.end == expected.end or (expected.calls and whole.end in question.stop)
    streamed = WIRES[wire].stream(fake.http, question)
    assert bare(streamed) == bare(whole)
    assert replace(streamed, calls=()) == replace(whole, calls=()), "with its counts"
    assert (whole.num_reasoning_tokens > 0) == bool(expected.reasoning)
    assert whole.num_tokens > whole.num_reasoning_tokens


@pytest.mark.parametrize("num_tokens", CUTS)
@pytest.mark.parametrize("wire", WIRES)
def test_no_piece_of_a_cut_call_is_content(fake: RunningServer, wire: str, num_tokens: int) -> None:
    fake.set_output(FakeOutput(CALL, (3,)))
    question = replace(ASKED, choice="required", max_tokens=num_tokens)
    whole, streamed = WIRES[wire].ask(fake.http, question), WIRES[wire].stream(fake.http, question)
    for answer in (whole, streamed):
        assert (answer.content, answer.end, answer.num_tokens) == ("", "length", num_tokens)
        assert [name for name, _ in answer.calls] == ["get_weather"] * (num_tokens > 40)
    for _, arguments in streamed.calls if wire != "messages" else ():  # there a cut call's input is {}
        assert WEATHER_CALL[1].startswith(arguments) and arguments.startswith('{"city": "K')


@pytest.mark.parametrize("wire", WIRES)
def test_arguments_stream_as_they_come(fake: RunningServer, wire: str) -> None:
    fake.set_output(FakeOutput(CALL.replace("Köln", "x" * 500), (4,)))
    body = {**WIRES[wire].body(ASKED), "stream": True}
    events = fake.http.post(WIRES[wire].path, json=body).text.split("\n\n")
    assert sum("xx" in event for event in events) > 50


@pytest.mark.parametrize("wire", WIRES)
def test_prompt_describes_tools_that_may_not_be_called(fake: RunningServer, wire: str) -> None:
    """The cached prefix stays the same."""
    for choice in ("auto", "none"):
        WIRES[wire].ask(fake.http, replace(ASKED, choice=choice))
    first, second = fake.client.submitted
    assert first.prompt_ids == second.prompt_ids
    assert b'"name": "get_weather"' in bytes(token for token in first.prompt_ids if token < 256)


@pytest.mark.parametrize("wire", WIRES)
def test_error_in_mid_stream_is_the_last_event(fake: RunningServer, wire: str) -> None:
    fake.set_output(FakeOutput("Hello", fail_after=2))
    body = {**WIRES[wire].body(Question()), "stream": True}
    reply = fake.http.post(WIRES[wire].path, json=body)
    events = reply.text.strip().split("\n\n")
    if wire == "chat":
        assert events.pop() == "data: [DONE]"
    last = events[-1]
    assert reply.status_code == 200 and "the script says so" in last and "error" in last
    fake.set_output(FakeOutput("Hello", fail_after=0))
    assert fake.http.post(WIRES[wire].path, json=body).status_code == 500, "no event was sent before"
