"""Calls of families with state, each in its own format and by a real engine: enforced, streamed, replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest

from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_engine
from tests.support.budget import some_of
from tests.support.checkpoints import EOS
from tests.support.tool_checkpoint import WEATHER, call_bias, write_tool_checkpoint
from tests.support.wires import WIRES, Answer, Question

FORMATS: Mapping[str, str] = {"lfm2": "lfm2.5", "qwen3_5_text": "qwen3.5", "qwen3_next": "hermes"}
TYPED = {
    "type": "function",
    "function": {
        "name": "put",
        "parameters": {
            "type": "object",
            "properties": {
                "on": {"type": "boolean"},
                "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["on", "sizes", "unit"],
            "additionalProperties": False,
        },
    },
}
TOOLS = (TYPED, {"type": "function", "function": {"name": "get_time"}})
SCHEMAS = {"put": TYPED["function"]["parameters"], "get_time": {"type": "object"}}  # type: ignore[index]
SAMPLING: Mapping[str, Any] = {"temperature": 0.8, "seed": 3}
CHAT = WIRES["chat"]


@pytest.fixture(scope="module", params=some_of(FORMATS, 2))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server, and the name of the format of its model."""
    name = FORMATS[request.param]
    path = write_tool_checkpoint(tmp_path_factory.mktemp(request.param), name, model_type=request.param)
    config = Config(
        model=str(path), kv_cache_memory="20000tokens", log_level="warning", threads=1, max_num_seqs=4
    )
    with run_engine(config) as server:
        yield server, name


def ask(server: RunningServer, **fields: Any) -> Answer:
    """The same answer whole and streamed, with and without drafts; its arguments are of their schemas."""
    question = Question(**{"tools": TOOLS, "thinks": False, "max_tokens": 400, **fields})
    answer = CHAT.ask(server.http, question, **SAMPLING, speculation="off")
    assert CHAT.ask(server.http, question, **SAMPLING) == answer
    assert CHAT.stream(server.http, question, **SAMPLING) == answer
    for called, arguments in answer.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])
    return answer


def test_calls_are_enforced(served: tuple[RunningServer, str]) -> None:
    server, name = served
    required = ask(server, choice="required", parallel=False)
    assert len(required.calls) == 1 and required.end == "calls" and not required.content
    for tool in SCHEMAS:
        assert [called for called, _ in ask(server, choice=tool).calls] == [tool]
    bias = call_bias(name) | {EOS: -100.0}
    if name == "lfm2.5":  # a comma is between the calls of its list
        bias = call_bias(name, end=2.0) | {ord(","): 6.0}
    several = ask(server, logit_bias=bias, max_tokens=900)
    assert len(several.calls) > 1
    assert len(ask(server, logit_bias=bias, parallel=False).calls) == 1


def test_call_follows_reasoning(served: tuple[RunningServer, str]) -> None:
    server, name = served
    answer = ask(server, thinks=True, budget=5, choice="put")
    assert [called for called, _ in answer.calls] == ["put"]
    if name == "qwen3.5":  # its prompt opens the reasoning
        assert 0 < answer.num_reasoning_tokens <= 5 + 2
        assert answer.reasoning
    assert "<think>" not in answer.reasoning + answer.content


def test_tool_loop_keeps_its_prefix(served: tuple[RunningServer, str]) -> None:
    server, _ = served
    fields = {"tools": [TYPED, WEATHER], "temperature": 0.0, "max_tokens": 200, "think": False}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Bonn?"}]
    choice = {"type": "function", "function": {"name": "put"}}
    first = server.chat(messages=messages, **fields, tool_choice=choice)
    message = first.choices[0].message.model_dump(exclude_none=True)
    (call,) = message["tool_calls"]
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    second = server.chat(messages=messages, **fields, tool_choice="none")
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached > first.usage.prompt_tokens - 64, "up to an anchor"
    assert second.choices[0].message.content
