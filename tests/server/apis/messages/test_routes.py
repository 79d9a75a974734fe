"""Anthropic's API through Anthropic's own SDK: every event is one of the SDK's types, strictly."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from foreword.config.options import Config
from foreword.errors import InvalidRequest
from foreword.server.apis.messages.body import MessagesBody
from foreword.server.apis.messages.conversation import MessagesConversation, omit_text
from tests.server.conftest import MODEL, RunningServer, json_post_head, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info
from tests.support.images import TOKENS, image_processor, image_tokenizer, png
from tests.support.waiting import WAIT_S
from tests.support.wires import check_known, message_events

PATH = "/v1/messages"
USER: Any = [{"role": "user", "content": "Hi"}]
SDK_FIELDS = frozenset(inspect.signature(anthropic.resources.Messages.create).parameters)
REMINDER = "<system-reminder>Be careful.</system-reminder>"


def client_of(server: RunningServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key=key, max_retries=0, timeout=WAIT_S, _strict_response_validation=True
    )


def ask(server: RunningServer, **fields: Any) -> Message:
    fields = {"model": MODEL, "max_tokens": 64, "messages": USER, **fields}
    with client_of(server) as client:
        message = client.messages.create(**sdk_fields(fields))
    check_known(message)
    return message


def sdk_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the SDK's methods; fields that it does not know go beside them."""
    known = {name: value for name, value in body.items() if name in SDK_FIELDS}
    return {**known, "extra_body": {name: value for name, value in body.items() if name not in SDK_FIELDS}}


def stream(server: RunningServer, **fields: Any) -> tuple[list[dict[str, Any]], Message]:
    """All events, each checked by its type, and the SDK's sum of them."""
    body = {"model": MODEL, "max_tokens": 64, "messages": USER, **fields}
    events = message_events(server.http, body)
    with client_of(server) as client, client.messages.stream(**sdk_fields(body)) as accumulated:
        return events, accumulated.get_final_message()


def error_of(reply: httpx.Response) -> tuple[int, str, str]:
    """(status, type, message) of Anthropic's envelope."""
    body = reply.json()
    assert body["type"] == "error" and body["request_id"] == reply.headers["request-id"]
    return reply.status_code, body["error"]["type"], body["error"]["message"]


def conversation(messages: Any, takes_images: bool = False, **fields: Any) -> MessagesConversation:
    return MessagesBody.model_validate({"messages": messages, **fields}).conversation(takes_images)


def tool_turns(*results: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """A question, a call, and its results."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
    given = results or ({"type": "tool_result", "tool_use_id": "toolu_1", "content": "text", **fields},)
    return [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": list(given)}]


def contents(value: MessagesConversation) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in value.messages]


def texts(*items: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": item} for item in items]


# Answers


def test_message_is_whole_and_streamed(served: RunningServer) -> None:
    served.set_output(FakeOutput(text="Hello, wörld", bursts=(1, 3), num_cached=16))
    message = ask(served)
    assert message.content[0].type == "text" and message.content[0].text == "Hello, wörld"
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, MODEL)
    assert message.id.startswith("msg_") and message._request_id
    num_prompt = len(served.client.submitted[-1].prompt_ids)
    num_added = message.usage.cache_creation_input_tokens
    block_size = served.client.info.resolved.block_size
    assert num_added == num_prompt - num_prompt % block_size - 16, "the other whole blocks"
    assert message.usage.input_tokens == num_prompt - 16 - num_added, "cached tokens are counted apart"
    assert (message.usage.cache_read_input_tokens, message.usage.output_tokens) == (16, 14)
    events, final = stream(served)
    assert [event["type"] for event in events][:3] == ["message_start", "ping", "content_block_start"]
    assert [event["type"] for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 16
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert final.model_dump(exclude={"id"}, warnings=False)["content"][0]["text"] == "Hello, wörld"
    assert (final.stop_reason, final.usage) == (message.stop_reason, message.usage)


def test_stop_reasons_and_blank_answers(served: RunningServer) -> None:
    """Reasons of this API alone. A blank answer has no block: Anthropic's API refuses blank texts."""
    served.set_output(FakeOutput())
    message = ask(served, stop_sequences=["or", "x"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "or")
    served.set_output(FakeOutput(text=" \n"))
    assert not ask(served).content and not stream(served)[1].content
    served.set_output(FakeOutput(text="x" * 4000))
    assert ask(served, max_tokens=32_000).stop_reason == "model_context_window_exceeded"


def test_max_tokens_0_fills_the_cache(served: RunningServer) -> None:
    message = ask(served, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert served.client.submitted[-1].params.max_tokens == 1


def test_last_assistant_message_is_continued(served: RunningServer) -> None:
    ask(served, messages=[*USER, {"role": "assistant", "content": "The answer"}])
    prompt = bytes(token for token in served.client.submitted[-1].prompt_ids if token < 256)
    assert prompt.endswith(b"assistant\nThe answer")


def test_count_tokens_is_the_length_of_the_prompt(served: RunningServer) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "messages": USER}
    ask(served, **fields)
    with client_of(served) as client:
        count = client.messages.count_tokens(model=MODEL, **fields)
    assert count.input_tokens == len(served.client.submitted[-1].prompt_ids)
    assert len(served.client.submitted) == 1, "nothing is generated"


def test_parameters_reach_the_engine(served: RunningServer) -> None:
    ask(
        served,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=7,
        speculation="off",
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    params = served.client.submitted[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 5, 7)
    assert params.speculation.method == "off"


def test_metrics_are_added_on_request(served: RunningServer) -> None:
    reply = served.http.post(PATH, json={"messages": USER, "max_tokens": 8, "seed": 3, "metrics": True})
    assert reply.json()["seed"] == 3 and reply.json()["metrics"]


def test_output_format_constrains_the_answer(served: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    served.set_output(FakeOutput(text='{"a": 1}'))
    ask(served, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    structured = served.client.submitted[-1].params.structured
    assert structured is not None and json.loads(structured.text)["required"] == ["a"]
    reply = served.http.post(PATH, json={"messages": USER, "output_format": {"type": "json_schema"}})
    assert error_of(reply)[2] == "output_format.schema is required"


# Errors


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"messages": []}, anthropic.BadRequestError, "messages must hold"),
        ({"model": "claude"}, anthropic.NotFoundError, "the model 'claude' does not exist"),
        (
            {"messages": [{"role": "user", "content": "x" * 3000}]},
            anthropic.BadRequestError,
            "prompt is too long: 3019 tokens > 2047 maximum",
        ),
        ({"stop_sequences": ["x"] * 65}, anthropic.BadRequestError, "stop_sequences may hold at most 64"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            anthropic.BadRequestError,
            "messages[0].role must",
        ),
        ({"messages": [{"role": "user"}]}, anthropic.BadRequestError, "messages[0].content must be a text"),
        ({"system": 3}, anthropic.BadRequestError, "system must be a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            anthropic.BadRequestError,
            "messages[0].content[0].source must be of type base64 or url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
            anthropic.BadRequestError,
            "messages[0].content[0].source must be of type text or content",
        ),
        ({"messages": [*USER, *tool_turns()[1:2]]}, anthropic.BadRequestError, "messages[1] ends with"),
        ({"thinking": {"type": "enabled"}}, anthropic.BadRequestError, "thinking.budget_tokens must be"),
        ({"tools": [{"name": "a"}]}, anthropic.BadRequestError, "tools[0].input_schema is required"),
        ({"tool_choice": {"type": "tool"}}, anthropic.BadRequestError, "tool_choice.name belongs to"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice asks for a call"),
        ({"n": 2}, anthropic.BadRequestError, "n is refused"),
    ],
)
def test_refusal(
    served: RunningServer, fields: dict[str, Any], error: type[anthropic.APIStatusError], message: str
) -> None:
    """The envelope and the SDK's exception; the message begins with the field."""
    body = {"model": MODEL, "max_tokens": 9, "messages": USER, **fields}
    status, kind, text = error_of(served.http.post(PATH, json=body))
    assert text.startswith(message), text
    with client_of(served) as client, pytest.raises(error) as raised:
        client.post(PATH, body=body, cast_to=Message)
    assert (raised.value.status_code, raised.value.type) == (status, kind)
    assert raised.value.request_id


def test_errors_before_the_route_have_the_envelope() -> None:
    with run_server(Config(api_key="secret", max_body_mb=1, max_waiting=1)) as server:
        with client_of(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model=MODEL, max_tokens=9, messages=USER)
        assert refused.value.type == "authentication_error"
        server.http.headers["x-api-key"] = "secret"
        large = server.http.post(PATH, content=b" " * 1_100_000)
        assert error_of(large)[:2] == (413, "request_too_large")
        headers = {"Content-Type": "application/json"}
        assert error_of(server.http.post(PATH, content=b"{", headers=headers))[:2] == (
            400,
            "invalid_request_error",
        )
        assert error_of(server.http.get(PATH))[:2] == (405, "invalid_request_error")
        assert error_of(server.http.post(f"{PATH}/batches"))[:2] == (404, "not_found_error")
        admission = server.app.state.models.admission
        admission.num_open += 1
        busy = server.http.post(PATH, json={"messages": USER})
        admission.num_open -= 1
        assert error_of(busy)[:2] == (429, "rate_limit_error") and int(busy.headers["retry-after"]) >= 1
        assert '"type":"error"' in answer_to_broken_body(server), "the connection's own error too"
        assert f'route="{PATH}"' in server.http.get("/metrics").text


def answer_to_broken_body(server: RunningServer) -> str:
    head = json_post_head(PATH, 100).replace("Content-Length: 100", "Transfer-Encoding: chunked")
    with server.connect() as raw:
        raw.sendall(head.replace("Host: x", "Host: x\r\nx-api-key: secret").encode() + b"no size\r\n")
        return b"".join(iter(lambda: raw.recv(4096), b"")).decode()


def test_unknown_models_map_to_the_served_one() -> None:
    with run_server(Config(any_model_name=True)) as server:
        assert ask(server, model="claude-sonnet-5").model == MODEL
        body = {"model": "gpt-9", "messages": USER}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == [MODEL]
        assert server.http.get("/v1/models/claude-sonnet-5").json()["id"] == MODEL


def test_request_headers_are_accepted(served: RunningServer) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x-2026", "authorization": "Bearer k"}
    reply = served.http.post(f"{PATH}?beta=true", json={"messages": USER, "max_tokens": 2}, headers=headers)
    assert reply.status_code == 200 and reply.headers["request-id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]", "input_schema"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools[0]", "input_schema"),
        ({"tools": [{"name": "f", "parameters": {}}]}, "tools[0]", "input_schema"),
        (
            {"output_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "output_format.json_schema",
            '{"type": "json_schema", "schema": ...}',
        ),
        ({"include_reasoning": False}, "include_reasoning", "use thinking"),
    ],
)
def test_refusals_show_the_form_of_this_api(
    served: RunningServer, fields: dict[str, Any], param: str, part: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "include_reasoning": True}
    reply = served.http.post("/v1/messages", json={**body, **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["message"].startswith(param) and part in error["message"]


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}])
def test_choice_of_a_skipped_tool_is_auto(served: RunningServer, choice: dict[str, Any]) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]  # as Claude Code asks
    body = {"messages": USER, "max_tokens": 2, "tools": tools, "tool_choice": choice}
    reply = served.http.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-foreword-ignored-fields"] == "tools[0].web_search_20250305, tool_choice"
    body["tool_choice"] = {"type": "tool", "name": "other"}
    assert served.http.post(PATH, json=body).status_code == 400


# Conversations


def test_billing_header_is_dropped() -> None:
    system = texts("x-anthropic-billing-header: cc_version=1; cch=ab1;", "You are Claude Code.", "Rules")
    assert contents(conversation(USER, system=system)) == [
        ("system", texts("You are Claude Code.", "Rules")),
        ("user", "Hi"),
    ]


def test_late_system_messages_stay_in_place() -> None:
    late = {"role": "system", "content": "10 tokens left"}
    messages = [late, *tool_turns(), late, {"role": "assistant", "content": "Done"}, late]
    assert contents(conversation(messages, system="Rules")) == [
        ("system", texts("Rules", "10 tokens left")),
        ("user", "Hi"),
        ("assistant", ""),
        ("tool", texts("text", "10 tokens left")),
        ("assistant", "Done"),
        ("user", "10 tokens left"),
    ]


def test_reminder_after_a_result_joins_it() -> None:
    """A question after a result is a turn of the user; a reminder of the client is not."""
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": texts("a", "b")}
    assert contents(conversation(tool_turns(result, *texts(REMINDER))))[2:] == [
        ("tool", texts("a", "b", REMINDER))
    ]
    assert contents(conversation(tool_turns(result, *texts("And now?", REMINDER))))[2:] == [
        ("tool", texts("a", "b")),
        ("user", texts("And now?", REMINDER)),
    ]


def test_consecutive_turns_of_one_role_are_one() -> None:
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
    messages = [
        *USER,
        *USER,
        {"role": "assistant", "content": [thinking, *texts("I read")]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
    ]
    found = conversation(messages).messages
    assert [message["role"] for message in found] == ["user", "assistant", "tool"]
    assert found[1] == {
        "role": "assistant",
        "content": "I read",
        "reasoning_content": "Hm",
        "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "read", "arguments": {}}}],
    }
    assert found[2] == {"role": "tool", "content": "", "tool_call_id": "toolu_1"}


def test_hidden_thinking_comes_back_in_its_signature() -> None:
    for signature, expected in ((omit_text("Hm, ö"), "Hm, ö"), ("text:!", None), ("other", None)):
        block = {"type": "thinking", "thinking": "", "signature": signature}
        found = conversation([*USER, {"role": "assistant", "content": [block, *texts("So")]}, *USER])
        assert found.messages[1].get("reasoning_content") == expected


def test_failed_result_says_so() -> None:
    assert contents(conversation(tool_turns(is_error=True)))[2] == ("tool", texts("Error:", "text"))
    failed = {"is_error": True, "content": "<tool_use_error>no file</tool_use_error>"}
    assert contents(conversation(tool_turns(**failed)))[2] == ("tool", failed["content"])


def test_documents_and_search_results_are_texts() -> None:
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "data": "D", "media_type": "x"}},
        {"type": "document", "source": {"type": "content", "content": texts("E")}},
        {"type": "search_result", "title": "F", "source": "url", "content": texts("G")},
    ]
    found = contents(conversation([{"role": "user", "content": blocks}]))
    assert found == [("user", texts("T", "D", "E", "F (url)", "G"))]


def test_deferred_tool_is_described_where_it_is_referred_to() -> None:
    schema = {"type": "object", "properties": {}}
    tools = [
        {"name": name, "input_schema": schema, "defer_loading": name != "read"} for name in ("read", "b", "c")
    ]
    reference = {"type": "tool_reference", "tool_name": "b"}
    body = MessagesBody.model_validate({"messages": tool_turns(content=[reference]), "tools": tools})
    found = body.conversation(False)
    assert json.loads(found.messages[2]["content"])["function"] == {
        "name": "b",
        "description": "",
        "parameters": schema,
    }
    use = body.tool_use(found.referenced)[0]
    assert [tool.name for tool in use.tools] == ["read", "b"], "c is not known yet"
    assert [tool.name for tool in use.listed_tools] == ["read"], "the prompt's head does not change"


def test_deferred_tools_are_described_once_and_checked_first() -> None:
    tools = [
        {"name": name, "input_schema": {"type": "object"}, "description": "x" * size, "defer_loading": True}
        for name, size in (("a", 600_000), ("b", 600_000), ("c", 2_000_000))
    ]

    def read(*names: str) -> int:
        content = [{"type": "tool_reference", "tool_name": name} for name in names]
        body = MessagesBody.model_validate({"messages": tool_turns(content=content), "tools": tools})
        return sum(len(part["text"]) for part in body.conversation(False).messages[2]["content"])

    assert read("a", *"a" * 1000) < 602_000, "later references are its name"
    for names, field in (("ab", "tool_reference"), ("c", "tools")):
        with pytest.raises(InvalidRequest, match=field):
            read(*names)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", (), True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", (), False)),
        ({"type": "any"}, ("required", (), True)),
        ({"type": "tool", "name": "read"}, ("required", ("read",), False)),  # exactly one call
        ({"type": "none"}, ("none", (), True)),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[Any, ...]) -> None:
    tools = [{"name": "read", "input_schema": {"type": "object"}, "strict": True, "cache_control": {}}]
    body = MessagesBody.model_validate({"messages": USER, "tools": tools, "tool_choice": choice})
    use, _ = body.tool_use(())
    assert (use.choice, use.allowed, use.parallel) == expected and use.tools[0].strict


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, None, None)),
        ({"thinking": {"type": "disabled"}}, (False, None, None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, (True, None, 2000)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, (True, "max", None)),
    ],
)
def test_thinking_is_off_unless_asked_for(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    options = MessagesBody.model_validate({"messages": USER, **fields}).reasoning()
    assert (options.enabled, options.effort, options.budget_tokens) == expected


# Images


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    client = FakeEngineClient(info=engine_info(512))
    with run_server(client=client, tokenizer=image_tokenizer(), processor=image_processor()) as server:
        yield server


def image_block(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


def test_image_reaches_the_engine(seeing: RunningServer) -> None:
    content: Any = [image_block(png("red")), *texts("What is it?")]
    message = ask(seeing, messages=[{"role": "user", "content": content}])
    request = seeing.client.submitted[-1]
    usage = message.usage
    num_input = usage.input_tokens + usage.cache_creation_input_tokens
    assert len(request.images) == 1 and num_input == len(request.prompt_ids) > TOKENS
    with client_of(seeing) as client:
        count = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": content}])
    assert count.input_tokens == len(request.prompt_ids)


def test_bad_image_names_its_message(seeing: RunningServer) -> None:
    body = {"messages": [*USER, {"role": "user", "content": [image_block(b"no image")]}], "system": "Rules"}
    status, _, text = error_of(seeing.http.post(PATH, json=body))
    assert status == 400 and text.startswith("messages[0]"), text
