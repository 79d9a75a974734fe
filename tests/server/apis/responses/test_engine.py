"""/v1/responses with a real engine: what is enforced, and that speculation changes no event."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from foreword.checkpoint import prepare_checkpoint
from foreword.config.drafters import DRAFTERS
from foreword.config.options import Config
from foreword.engine_client.process_client import ProcessClient
from tests.server.conftest import RunningServer, run_server
from tests.support.budget import is_full
from tests.support.responses_events import check_response, read_stream, without_ids
from tests.support.tool_checkpoint import WEATHER, call_bias, reasoning_bias, write_tool_checkpoint

PATH = "/v1/responses"
NAMES = tuple(name for name in DRAFTERS if name not in ("draft", "replay"))  # that need no further files
FUNCTION = {"type": "function", **WEATHER["function"]}
PATCH_PATTERN = re.compile(r'\*\*\* Begin\n([+-][a-f"]{1,5}\n)+\*\*\* End')
PATCH_LARK = """start: begin line+ end
begin: "*** Begin" LF
line: /[+-][a-f"]{1,5}/ LF
end: "*** End"
%import common.LF
"""
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change a file",
    "format": {"type": "grammar", "syntax": "regex", "definition": PATCH_PATTERN.pattern},
}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Random weights, and the markers as tokens."""
    path = write_tool_checkpoint(tmp_path_factory.mktemp("hermes"), "hermes")
    prepared = prepare_checkpoint(
        Config(
            model=str(path),
            kv_cache_memory="60000tokens",
            log_level="warning",
            threads=1,
            speculate=",".join(NAMES),
        )
    )
    client = ProcessClient(prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
    with run_server(prepared.config, client, tokenizer=prepared.tokenizer) as server:
        yield server


def bias(values: Mapping[int, float]) -> dict[str, float]:
    return {str(token_id): value for token_id, value in values.items()}


def sampled(**fields: Any) -> dict[str, Any]:
    """A request that a random model answers at length."""
    return {
        "input": "Weather in Bonn?",
        "temperature": 0.8,
        "seed": 3,
        "max_output_tokens": 200,
        "reasoning": {"effort": "none"},
        **fields,
    }


def create(server: RunningServer, **body: Any) -> dict[str, Any]:
    reply = server.http.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    check_response(response)
    return response


CASES: Mapping[str, dict[str, Any]] = {
    "text": sampled(include=["message.output_text.logprobs"], top_logprobs=1),
    "auto": sampled(tools=[FUNCTION, PATCH], logit_bias=bias(call_bias())),
    "required": sampled(tools=[FUNCTION, PATCH], tool_choice="required", parallel_tool_calls=False),
    "custom": sampled(tools=[FUNCTION, PATCH], tool_choice={"type": "custom", "name": "apply_patch"}),
    "reasoning": sampled(
        logit_bias=bias(reasoning_bias()),
        include=["reasoning.encrypted_content"],
        reasoning={"max_tokens": 9},
    ),
    "format": sampled(
        text={"format": {"type": "json_schema", "name": "x", "schema": WEATHER["function"]["parameters"]}}
    ),
}


@pytest.mark.parametrize("drafter", (*NAMES, "auto") if is_full() else ("auto",))
@pytest.mark.parametrize("case", CASES)
def test_speculation_and_stream_change_no_event(hermes: RunningServer, case: str, drafter: str) -> None:
    fields = {"store": False, "prediction": {"type": "content", "content": "the an thing on"}, **CASES[case]}
    plain = without_ids(create(hermes, **fields, speculation="off"))
    _, streamed = read_stream(hermes.http, **fields, speculation={"method": drafter})
    for response in (streamed, create(hermes, **fields, speculation={"method": drafter})):
        answer = without_ids(response)
        answer["usage"].pop("input_tokens_details")  # the prompt is cached by then
        assert answer == {**plain, "usage": answer["usage"]}
        assert answer["usage"]["output_tokens"] == plain["usage"]["output_tokens"]


@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_custom_tools_input_follows_its_grammar(hermes: RunningServer, syntax: str) -> None:
    definition = PATCH_PATTERN.pattern if syntax == "regex" else PATCH_LARK
    tool = {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    fields = {**CASES["custom"], "tools": [FUNCTION, tool], "parallel_tool_calls": False}
    for seed in range(4):
        response = create(hermes, **{**fields, "seed": seed, "max_output_tokens": 600})
        (call,) = response["output"]
        assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
        assert PATCH_PATTERN.fullmatch(call["input"]), call["input"]


def test_required_calls_have_the_tools_schema(hermes: RunningServer) -> None:
    choice = {"type": "function", "name": "get_weather"}
    for seed in range(4):
        response = create(
            hermes,
            **sampled(tools=[FUNCTION, PATCH], tool_choice=choice, seed=seed, parallel_tool_calls=False),
        )
        assert response["status"] == "completed"
        (call,) = response["output"]
        arguments = json.loads(call["arguments"])
        assert call["name"] == "get_weather" and len(arguments["city"]) <= 8


def test_reasoning_has_a_budget(hermes: RunningServer) -> None:
    response = create(hermes, **CASES["reasoning"])
    texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "reasoning"]
    assert texts and response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    unlimited = create(hermes, **{**CASES["reasoning"], "reasoning": {}})
    longest = max(
        len(item["content"][0]["text"]) for item in unlimited["output"] if item["type"] == "reasoning"
    )
    assert max(map(len, texts)) < longest


def test_logprobs_spell_the_text(hermes: RunningServer) -> None:
    response = create(hermes, **CASES["text"], skip_special_tokens=False)
    part = response["output"][-1]["content"][0]
    spelled = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode("utf-8", "replace")
    assert spelled.strip() == part["text"].strip()


def test_tool_loop_with_and_without_the_store(hermes: RunningServer) -> None:
    """Each turn's prompt is the same by previous_response_id and by the whole history, and it is cached."""
    fields = {name: value for name, value in CASES["required"].items() if name != "input"}
    items: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Bonn?"}]
    new, previous_id = items, None
    for turn in range(3):
        stored = create(hermes, **fields, input=new, previous_response_id=previous_id)
        whole = create(hermes, **fields, input=items, store=False)
        assert whole["usage"]["input_tokens"] == stored["usage"]["input_tokens"]
        assert without_ids(whole)["output"] == without_ids(stored)["output"]
        assert turn == 0 or stored["usage"]["input_tokens_details"]["cached_tokens"] > 0
        kind, call_id = stored["output"][-1]["type"], stored["output"][-1]["call_id"]
        new = [{"type": f"{kind}_output", "call_id": call_id, "output": "12 degrees"}]
        items = [*items, *stored["output"], *new]
        previous_id = stored["id"]
