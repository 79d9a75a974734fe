"""/v1/responses with a fake engine: items in, items out, streams, the store, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from foreword.config.options import Config
from foreword.errors import EngineDead
from foreword.server.apis.responses import routes as routes
from foreword.server.apis.responses.body import ResponsesBody
from foreword.server.apis.responses.items import ItemConversation, encode_reasoning
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info
from tests.support.images import data_url, image_processor, image_tokenizer, png
from tests.support.responses_events import check_response, read_stream, without_ids
from tests.support.tool_checkpoint import WEATHER

PATH = "/v1/responses"
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "price",
    "description": "Price of an item",
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
        "additionalProperties": False,
    },
    "strict": True,
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"\*\*\* [a-z ]+"},
}
CALL_TEXT = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
PATCH_TEXT = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** add \\"x\\""}}\n</tool_call>'


def post(server: RunningServer, **body: Any) -> httpx.Response:
    return server.http.post(PATH, json=body)


def create(server: RunningServer, **body: Any) -> dict[str, Any]:
    reply = post(server, **body)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    check_response(response)
    return response


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    return dict(reply.json()["error"])


def messages_of(items: Any, takes_images: bool = True, **fields: Any) -> list[dict[str, Any]]:
    body = ResponsesBody.model_validate({"input": items, **fields})
    conversation = ItemConversation(takes_images)
    if body.instructions:
        conversation.add_instructions(body.instructions)
    conversation.add(body.items()[0])
    conversation.finish()
    return conversation.messages


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "|".join(part.get("text", "IMAGE") for part in content)


def outline(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], text_of(message)) for message in messages]


# Whole and streamed


def test_answer_through_the_client(served: RunningServer) -> None:
    served.set_output(FakeOutput("Héllo wörld 😀", (2, 5, 1), num_cached=3))
    response = served.openai.responses.create(model=MODEL, input="Hi")
    assert response.id.startswith("resp_") and response.status == "completed" and response.model == MODEL
    assert response.output_text == "Héllo wörld 😀"
    assert response.usage is not None
    prompt, answer = len(served.client.submitted[0].prompt_ids), len("Héllo wörld 😀".encode()) + 1
    assert (response.usage.input_tokens, response.usage.output_tokens) == (prompt, answer)
    assert response.usage.total_tokens == prompt + answer
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    check_response(create(served, input="Hi"))


def test_stream_equals_the_whole_answer(fake: RunningServer) -> None:
    """tests/server/apis/responses/test_writer.py has all cuts."""
    text = f"<think>\nhm\n</think>\n\nI ask.\n{CALL_TEXT}\n{PATCH_TEXT} Done 😀"
    fake.set_output(FakeOutput(text, (2, 5, 1)))
    body: dict[str, Any] = {
        "input": "Hi",
        "tools": [FUNCTION, PATCH],
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = create(fake, **body)
    _, streamed = read_stream(fake.http, **body)
    assert without_ids(streamed) == without_ids(whole)
    assert [item["type"] for item in whole["output"]] == [
        *("reasoning", "message", "function_call", "custom_tool_call", "message")
    ]
    reasoning, message, call, patch, _ = whole["output"]
    assert reasoning["content"][0]["text"].strip() == "hm" and reasoning["encrypted_content"]
    assert message["content"][0]["text"].strip() == "I ask."
    assert (call["name"], json.loads(call["arguments"])) == ("price", {"item": "lamp"})
    assert (patch["name"], patch["input"]) == ("apply_patch", '*** add "x"')
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    spelled = b"".join(bytes(entry["bytes"]) for entry in message["content"][0]["logprobs"])
    assert "I ask." in spelled.decode() and b"lamp" not in spelled
    assert {len(entry["top_logprobs"]) for entry in message["content"][0]["logprobs"]} == {2}


def test_logprobs_of_a_text_that_begins_like_a_call(fake: RunningServer) -> None:
    text = "Write <tool_call> as usual."
    fake.set_output(FakeOutput(text, (2, 5, 1)))
    body: dict[str, Any] = {"input": "Hi", "tools": [FUNCTION], "include": ["message.output_text.logprobs"]}
    whole = create(fake, **body)
    _, streamed = read_stream(fake.http, **body)
    assert without_ids(streamed) == without_ids(whole)
    (part,) = whole["output"][0]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"] == text


def test_stream_through_the_client(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(f"I ask.\n{CALL_TEXT}", (3,)))
    with fake.openai.responses.stream(model=MODEL, input="Hi", tools=[FUNCTION]) as stream:  # type: ignore[list-item]
        events = list(stream)
        final = stream.get_final_response()
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads(snapshots[-1]) == {"item": "lamp"}
    assert final.output_text == "I ask."
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].parsed_arguments == {"item": "lamp"}  # type: ignore[union-attr]


def test_parse_through_the_client(served: RunningServer) -> None:
    class Job(BaseModel):
        name: str

    served.set_output(FakeOutput('{"name": "Ada"}'))
    response = served.openai.responses.parse(model=MODEL, input="Hi", text_format=Job)
    assert response.output_parsed == Job(name="Ada")
    structured = served.client.submitted[0].params.structured
    assert structured is not None and structured.field == "text.format.schema"
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema" and response.text.format.name == "Job"


def test_compact_is_refused_with_a_sentence(served: RunningServer) -> None:
    error = error_of(served.http.post("/v1/responses/compact", json={"input": "Hi"}), 404)
    assert "the client compacts its conversation" in error["message"]


def test_runaway_answer_is_incomplete(served: RunningServer) -> None:
    served.set_output(FakeOutput("ab" * 900))
    response = post(served, input="Hi", on_runaway="stop").json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "repetition"})


def test_error_in_mid_stream_is_response_failed(served: RunningServer) -> None:
    served.set_output(FakeOutput("Hello", fail_after=2, error=EngineDead("the engine died")))
    events, response = read_stream(served.http, input="Hi")
    assert events[-1]["type"] == "response.failed"
    assert response["error"] == {"code": "server_error", "message": "the engine died"}
    assert response["usage"]["output_tokens"] == 2 and response["output"][0]["type"] == "message"
    served.set_output(FakeOutput("Hello", fail_after=0, error=EngineDead("the engine died")))
    assert error_of(post(served, input="Hi", stream=True), 503)["code"] == "engine_dead"


def test_metrics_are_an_extension(served: RunningServer) -> None:
    served.set_output(FakeOutput("Hello", (3,)))
    assert "metrics" not in create(served, input="Hi")
    for response in (
        create(served, input="Hi", metrics=True),
        read_stream(served.http, input="Hi", metrics=True)[1],
    ):
        assert response["metrics"]["verify_steps"] == 2 and response["metrics"]["seed"] is not None


def test_fields_are_repeated(served: RunningServer) -> None:
    given = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
        "temperature": 0.5,
        "top_p": 0.9,
        "tool_choice": "none",
        "tools": [FUNCTION],
        "truncation": "auto",
    }
    response = create(served, input="Hi", **given)
    assert {name: response[name] for name in given} == given
    assert (response["background"], response["service_tier"], response["store"]) == (False, "default", True)
    bare = create(served, input="Hi", tools=[{"type": "function", "name": "f"}], store=False)
    assert bare["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
    ]
    assert (bare["tool_choice"], bare["store"], bare["metadata"]) == ("auto", False, {})


def test_parameters_reach_the_engine(served: RunningServer) -> None:
    create(
        served,
        input="Hi",
        temperature=0.5,
        top_k=7,
        seed=42,
        stop=["x"],
        priority=3,
        speculation={"method": "off"},
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "auto"},
    )
    request = served.client.submitted[0]
    params = request.params
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.5, 7, ("x",), 5)
    assert (request.seed, request.priority, params.speculation.method) == (42, 3, "off")


# Items in


def test_items_of_one_turn_are_one_message() -> None:
    messages = messages_of(
        [
            {"role": "user", "content": "What is the price?"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look "}]},
            {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("it up.")},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
            {"type": "function_call", "call_id": "c1", "name": "price", "arguments": '{"item": "lamp"}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "***"},
            {"type": "message", "role": "assistant", "content": " Wait."},
            {"type": "function_call_output", "call_id": "c1", "output": "125"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "ok"}],
            },
            {"type": "message", "role": "assistant", "content": "First"},
            {"type": "message", "role": "assistant", "content": "Second"},
        ]
    )
    assert outline(messages) == [
        ("user", "What is the price?"),
        ("assistant", "I ask. Wait."),
        ("tool", "125"),
        ("tool", "ok"),
        ("assistant", "First\nSecond"),
    ]
    assert messages[1]["reasoning_content"] == "Look it up."
    assert messages[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}},
        {"id": "c2", "type": "function", "function": {"name": "apply_patch", "arguments": {"input": "***"}}},
    ]
    assert [message["tool_call_id"] for message in messages[2:4]] == ["c1", "c2"]


def test_prefix_of_a_conversation_never_changes() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "developer", "content": "late"},
        {"role": "user", "content": "V"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "R"},
        {"role": "system", "content": "reminder"},
    ]
    whole = "\n".join(f"{role}: {text}" for role, text in outline(messages_of(items)))
    for length in range(1, len(items)):
        start = outline(messages_of(items[:length]))
        assert whole.startswith("\n".join(f"{role}: {text}" for role, text in start)), length


def test_images_of_results_are_shown_by_the_user() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "original"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}, image]},
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ]
    messages = messages_of(items)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    expected = {"type": "image_url", "image_url": {"url": image["image_url"], "detail": "high"}}
    assert messages[0]["content"][1] == expected and messages[3]["content"] == [expected]
    assert (
        outline(messages_of(items[1:], takes_images=False))[1:]
        == [
            ("user", ""),
            ("assistant", ""),
            ("tool", "(an image, which this model cannot see)"),
        ][2:]
    )


def test_image_reaches_the_engine() -> None:
    client = FakeEngineClient(info=engine_info(512))
    with run_server(client=client, tokenizer=image_tokenizer(), processor=image_processor()) as server:
        image = {"type": "input_image", "image_url": data_url(png("red"))}
        parts = [{"type": "input_text", "text": "What is it?"}, image]
        response = create(server, input=[{"role": "user", "content": parts}])
        assert len(client.submitted[0].images) == 1
        create(server, input="And now?", previous_response_id=response["id"])
        assert len(client.submitted[1].images) == 1
        reply = server.http.post(f"{PATH}/input_tokens", json={"input": [{"role": "user", "content": parts}]})
        assert reply.json()["input_tokens"] == response["usage"]["input_tokens"]
        bad = error_of(post(server, input=[{"role": "user", "content": [{**image, "image_url": "data:,x"}]}]))
        assert bad["param"].startswith("input[0]")
        server.wait_until_idle()


def test_empty_input_is_a_probe(served: RunningServer) -> None:
    for body in ({}, {"input": ""}, {"input": []}, {"instructions": "I", "input": []}):
        assert create(served, **body, max_output_tokens=1)["status"] == "incomplete"


@pytest.mark.parametrize(
    ("item", "param", "text"),
    [
        ({"type": "nonsense"}, "input[0].type", "must be one of message, reasoning"),
        ({"role": "tool", "content": "x"}, "input[0].role", "must be one of user, assistant"),
        ({"role": "user", "content": 1}, "input[0].content", "a text or a list of parts"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0]", "'input_file'"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text", "a text"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url", "required"),
        (
            {"role": "assistant", "content": [{"type": "input_image"}]},
            "input[0].content[0]",
            "without images",
        ),
        ({"type": "function_call", "name": "f"}, "input[0].call_id", "is required"),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
            "input[0].arguments",
            "a JSON text",
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "x" * (1 << 20) + "x"},
            "input[0].arguments",
            "limit is 1048576",
        ),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id", "is required"),
        ({"type": "reasoning", "summary": "x"}, "input[0].summary", "a list of parts"),
        (
            {"type": "reasoning", "summary": [], "encrypted_content": "foreword-1:?"},
            "input[0].encrypted_content",
            "damaged",
        ),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].id", "no stored response or item 'msg_1'"),
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "input[0]", "the id of no call"),
    ],
)
def test_malformed_items_are_refused_by_name(
    served: RunningServer, item: dict[str, Any], param: str, text: str
) -> None:
    reply = post(served, input=[item])
    error = error_of(reply, 404 if item.get("type") == "item_reference" else 400)
    assert error["param"] == param and text in error["message"], error


def test_broken_arguments_in_the_history_are_refused(fake: RunningServer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": '}
    for arguments in ('{"x": ', "[1]", "1"):
        items = [{"role": "user", "content": "Hi"}, {**call, "arguments": arguments}]
        error = error_of(post(fake, input=items))
        assert error["param"] == "input[1].arguments" and "a JSON object" in error["message"], error


def test_reasoning_of_other_servers_is_taken() -> None:
    foreign = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]}
    for item in (foreign, {**foreign, "encrypted_content": "gAAAAAB"}):
        assert messages_of([item])[0]["reasoning_content"] == "S"
    own = {**foreign, "encrypted_content": encode_reasoning("wörtlich")}
    assert messages_of([own])[0]["reasoning_content"] == "wörtlich"


# Tools


def test_tools_of_other_servers_are_skipped_and_named(fake: RunningServer) -> None:
    reply = post(
        fake,
        input=[
            {"role": "user", "content": "Hi"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
        tools=[{"type": "web_search"}, FUNCTION, {"type": "mcp", "server_label": "x", "server_url": "y"}],
        tool_choice={
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "web_search"}, {"type": "function", "name": "price"}],
        },
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Foreword-Ignored-Fields"] == (
        "input[1].web_search_call, tools[0].web_search, tools[2].mcp"
    )
    assert [tool["name"] for tool in reply.json()["tools"]] == ["price"]
    structured = fake.client.submitted[0].params.structured
    assert structured is not None and "price" in structured.text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ('"tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "x": NaN}}]', "tools"),
        (
            '"tools": [{"type": "function", "name": "f"}], "tool_choice": {"name": "f", "x": 1e999}',
            "tool_choice",
        ),
    ],
)
def test_numbers_without_json_are_refused(fake: RunningServer, fields: str, field: str) -> None:
    """The response repeats these fields."""
    body = f'{{"input": "Hi", {fields}}}'
    reply = fake.http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert error_of(reply)["param"].startswith(field)


@pytest.mark.parametrize("choice", [{"type": "web_search"}, "required"])
def test_choice_of_a_hosted_tool_is_auto(fake: RunningServer, choice: Any) -> None:
    reply = post(fake, input="Hi", tools=[{"type": "web_search"}], tool_choice=choice)
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Foreword-Ignored-Fields"] == "tools[0].web_search, tool_choice"
    for other in ({"type": "web_search"}, {"type": ["web_search"]}):
        assert post(fake, input="Hi", tools=[FUNCTION], tool_choice=other).status_code == 400


def test_tools_of_a_namespace(fake: RunningServer) -> None:
    space = {"type": "namespace", "name": "shop", "description": "A shop", "tools": [FUNCTION]}
    fake.set_output(FakeOutput(CALL_TEXT.replace("price", "shop.price")))
    response = create(fake, input="Hi", tools=[space])
    (call,) = response["output"]
    assert (call["namespace"], call["name"]) == ("shop", "price")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "125"}
    create(fake, input=[{"role": "user", "content": "Hi"}, call, output], tools=[space])
    assert '"name": "shop.price"' in fake.last_prompt()


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        (
            {"tools": [{**FUNCTION, "parameters": {"type": "string"}}]},
            "tools[0].parameters",
            'of type "object"',
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0].type",
            "must be function or custom",
        ),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format", '"lark" or "regex"'),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "file_search"}, "tools": [FUNCTION]}, "tool_choice", "must be"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "must be one of none"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens", "at least 0"),
        ({"include": ["all"]}, "include[0]", "must be one of reasoning.encrypted_content"),
        ({"top_logprobs": 3}, "top_logprobs", "message.output_text.logprobs"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "keys of 64"),
        ({"background": True}, "background", "it may only be false"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"n": 2}, "n", "one answer"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}},
            "text.format.json_schema",
            '{"type": "json_schema", "name": ..., "schema": ...}',
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]", "form of chat; this API"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools[0]", "form of Messages; this API takes"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex", "cannot both"),
        ({"messages": [{"role": "user"}]}, "messages", "use input"),
    ],
)
def test_bad_fields_are_refused_by_name(
    fake: RunningServer, fields: dict[str, Any], param: str, text: str
) -> None:
    error = error_of(post(fake, **{"input": "Hi", **fields}))
    assert error["param"] == param and text in error["message"], error


def test_keywords_of_strict_tools_are_refused_by_name(fake: RunningServer) -> None:
    schema = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    error = error_of(post(fake, input="Hi", tools=[{"type": "web_search"}, {**tool, "strict": True}]))
    assert error["param"] == "tools[1].parameters" and "not" in error["message"], error
    assert post(fake, input="Hi", tools=[tool]).status_code == 200


# The store


def test_conversation_continues_by_the_response_id(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(f"<think>\nhm\n</think>\n\n{CALL_TEXT}"))
    first = create(fake, input="Price?", tools=[FUNCTION], instructions="First instructions")
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "125"}
    fake.set_output(FakeOutput("125 euro"))
    second = create(fake, input=[output], previous_response_id=first["id"], tools=[FUNCTION])
    by_id = fake.last_prompt()
    assert second["previous_response_id"] == first["id"] and "First instructions" not in by_id
    create(fake, input=[{"role": "user", "content": "Price?"}, *first["output"], output], tools=[FUNCTION])
    assert fake.last_prompt() == by_id
    create(fake, input="Thanks", previous_response_id=second["id"])
    assert "125 euro" in fake.last_prompt() and fake.last_prompt().count("Price?") == 1


def test_stored_response_is_read_and_deleted(served: RunningServer) -> None:
    served.set_output(FakeOutput("Hello"))
    for response in (create(served, input="Hi"), read_stream(served.http, input="Hi")[1]):
        url = f"{PATH}/{response['id']}"
        assert served.http.get(url).json() == response
        assert error_of(served.http.get(url, params={"stream": True}))["param"] == "stream"
        assert served.http.delete(url).json() == {
            "id": response["id"],
            "object": "response",
            "deleted": True,
        }
        for method in ("GET", "DELETE"):
            assert error_of(served.http.request(method, url), 404)["code"] == "response_not_found"
        error = error_of(post(served, input="Hi", previous_response_id=response["id"]), 404)
        assert error["param"] == "previous_response_id" and "was deleted" in error["message"]


def test_store_false_is_honoured(served: RunningServer) -> None:
    num_stored = len(served.app.state.models.response_store)
    response = create(served, input="Hi", store=False)
    assert response["store"] is False
    error_of(served.http.get(f"{PATH}/{response['id']}"), 404)
    assert len(served.app.state.models.response_store) == num_stored


def test_input_items_come_in_pages(served: RunningServer) -> None:
    texts = [f"text {i}" for i in range(5)]
    response = create(served, input=[{"role": "user", "content": text} for text in texts])
    pages = served.openai.responses.input_items.list(response["id"], order="asc", limit=2)
    assert [item.content[0].text for item in pages] == texts  # type: ignore[union-attr]
    newest = served.openai.responses.input_items.list(response["id"], limit=1)
    assert newest.has_more and newest.data[0].content[0].text == texts[-1]  # type: ignore[union-attr]
    assert error_of(served.http.get(f"{PATH}/{response['id']}/input_items?limit=0"))["param"] == "limit"


def test_item_reference_is_the_stored_item(served: RunningServer) -> None:
    served.set_output(FakeOutput("Stored text"))
    response = create(served, input="Hi")
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    for item in (reference, {"id": reference["id"]}):
        create(served, input=[item, {"role": "user", "content": "Go on"}])
        assert "Stored text" in served.last_prompt()


def test_stored_items_are_bounded_by_their_sum() -> None:
    """3 KB of references to one item made 4 MB of a prompt, and 48 KB half a gigabyte."""
    with run_server(Config(max_body_mb=1)) as server:
        server.set_output(FakeOutput("Stored text"))
        reference = {"type": "item_reference", "id": create(server, input="Hi")["output"][0]["id"]}
        error = error_of(post(server, input=[reference, {"role": "user", "content": "a"}, reference]))
        assert error["param"] == "input[2].id" and "once more" in error["message"]
        previous = None
        for _ in range(2):
            response = post(server, input="a" * 600_000, truncation="auto", previous_response_id=previous)
            previous = response.json().get("id")
        assert previous is None and error_of(response)["code"] == "context_length_exceeded"
        server.wait_until_idle()


def test_store_can_be_switched_off() -> None:
    with run_server(Config(response_store_mb=0)) as server:
        response = create(server, input="Hi")
        assert response["store"] is False
        error = error_of(post(server, previous_response_id=response["id"]), 404)
        assert "--response-store-mb 0" in error["message"]
        server.wait_until_idle()


def test_nothing_is_left_of_responses_that_do_not_end(served: RunningServer) -> None:
    store = served.app.state.models.response_store
    before = (len(store), store.num_bytes)
    served.set_output(FakeOutput("Hello", fail_after=2))
    read_stream(served.http, input="Hi")
    served.set_output(FakeOutput("Hello", hang_after=2))
    served.disconnect(PATH, {"input": "Hi", "stream": True}, lambda: served.client.submitted[1:])
    served.wait_until_idle()
    assert (len(store), store.num_bytes) == before


# Other routes and clients


def test_input_tokens_are_those_of_the_request(fake: RunningServer) -> None:
    body: dict[str, Any] = {"input": "Hi", "instructions": "I", "tools": [FUNCTION]}
    response = create(fake, **body)
    count = fake.openai.responses.input_tokens.count(**body)
    assert count.input_tokens == response["usage"]["input_tokens"] > 20
    more = fake.http.post(
        f"{PATH}/input_tokens", json={"input": "More", "previous_response_id": response["id"]}
    )
    assert more.json()["object"] == "response.input_tokens" and more.json()["input_tokens"] > 20


def test_truncation_drops_the_oldest_turns() -> None:
    client = FakeEngineClient(info=engine_info(400))
    with run_server(client=client) as server:
        turns = [
            item
            for i in range(10)
            for item in (
                {"role": "user", "content": f"question {i} " + "x" * 40},
                {"role": "assistant", "content": f"answer {i}"},
            )
        ]
        body = {"input": [*turns, {"role": "user", "content": "last"}], "instructions": "Be brief."}
        assert error_of(post(server, **body))["code"] == "context_length_exceeded"
        create(server, **body, truncation="auto", max_output_tokens=50)
        prompt = server.last_prompt()
        assert "Be brief." in prompt and "last" in prompt and "question 9" in prompt
        assert "question 0" not in prompt and len(client.submitted[0].prompt_ids) <= 350
        kept = [i for i in range(10) if f"question {i} " in prompt]
        assert kept == list(range(kept[0], 10)) and len(client.submitted[0].prompt_ids) > 350 - 100
        server.wait_until_idle()


def test_error_after_truncation_names_the_item_that_was_sent() -> None:
    with run_server(client=FakeEngineClient(info=engine_info(400))) as server:
        turns = [
            item
            for _ in range(10)
            for item in ({"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "y"})
        ]
        image = {"type": "input_image", "image_url": "data:image/png;base64,xx"}
        body = {"input": [*turns, {"role": "user", "content": [image]}], "truncation": "auto"}
        error = error_of(post(server, **body, instructions="Be brief."))
        assert error["param"].startswith("input[20]") and error["message"].startswith("input[20]")


@pytest.mark.full
def test_truncation_copies_a_conversation_only_to_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    replace = routes.replace

    def record(task: Any, **changes: Any) -> Any:
        copies.append(len(changes.get("messages", ())))
        return replace(task, **changes)

    monkeypatch.setattr(routes, "replace", record)
    with run_server(client=FakeEngineClient(info=engine_info(400))) as server:
        turns = [{"role": role, "content": "Hi"} for role in ("user", "assistant")] * 1000
        create(server, input=[*turns, {"role": "user", "content": "last"}], truncation="auto")
        assert sum(size > 0 for size in copies) <= 12 and max(copies) <= 400
        assert "last" in server.last_prompt()
        server.wait_until_idle()


class CodexReader:
    """Reads a stream as the Codex CLI does: items count once they are done, and the end must be named."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.text = ""
        self.reasoning: dict[int, str] = {}
        self.usage: dict[str, int] | None = None
        self.error: str | None = None

    def read(self, lines: Iterator[str]) -> None:
        """Raises ConnectionError for a stream that ends without response.completed: Codex would retry."""
        for line in lines:
            if not line.startswith("data:"):
                continue
            event = json.loads(line[5:])
            kind = event["type"]
            if kind == "response.output_item.done":
                self.items.append(event["item"])
            elif kind == "response.output_text.delta":
                self.text += event["delta"]
            elif kind == "response.reasoning_text.delta":
                index = event["content_index"]
                self.reasoning[index] = self.reasoning.get(index, "") + event["delta"]
            elif kind == "response.completed":
                response = event["response"]
                names = ("input_tokens", "output_tokens", "total_tokens")
                assert response["id"]
                self.usage = {name: response["usage"][name] for name in names}
                return
            elif kind == "response.failed":
                self.error = event["response"]["error"]["code"]
                return
        raise ConnectionError("stream closed before response.completed")


CODEX_REQUEST: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: on"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Price?"}]},
    ],
    "tools": [
        {**FUNCTION, "strict": False},
        PATCH,
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
        {
            "type": "namespace",
            "name": "mcp__docs",
            "description": "Tools of the MCP server docs",
            "tools": [
                {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "low"},
}


def codex(server: RunningServer, **changes: Any) -> CodexReader:
    reader = CodexReader()
    with server.http.stream("POST", PATH, json={**CODEX_REQUEST, **changes}) as reply:
        assert reply.status_code == 200, reply.read()
        reader.read(reply.iter_lines())
    return reader


def test_codex_runs_its_loop(fake: RunningServer) -> None:
    fake.set_output(FakeOutput(f"<think>\nhm\n</think>\n\n{CALL_TEXT}\n{PATCH_TEXT}", (5,)))
    first = codex(fake)
    assert [item["type"] for item in first.items] == ["reasoning", "function_call", "custom_tool_call"]
    assert first.reasoning[0].strip() == "hm" and first.usage is not None
    # Codex sends the items back without their content, and results after them.
    sent = [{**first.items[0], "content": None}, *first.items[1:]]
    results = [
        {"type": "function_call_output", "call_id": first.items[1]["call_id"], "output": "125"},
        {"type": "custom_tool_call_output", "call_id": first.items[2]["call_id"], "output": "Done"},
    ]
    fake.set_output(FakeOutput("It is 125.", (5,)))
    second = codex(fake, input=[*CODEX_REQUEST["input"], *sent, *results])
    assert second.text == "It is 125." and [item["type"] for item in second.items] == ["message"]
    prompt = fake.last_prompt()
    assert "<think>\nhm" in prompt and "Sandbox: on" in prompt and "mcp__docs.find" in prompt
    fake.set_output(FakeOutput("Hello", fail_after=2))
    assert codex(fake).error == "server_error"
    error = error_of(fake.http.post(PATH, json={**CODEX_REQUEST, "instructions": "x" * 5000}))
    assert error["code"] == "context_length_exceeded"


LOOP: dict[str, Any] = {
    "tools": [{"type": "function", **WEATHER["function"]}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0.8,
    "seed": 3,
    "max_output_tokens": 200,
    "reasoning": {"effort": "none"},
}


def test_tool_loop_with_and_without_the_store(hermes: RunningServer) -> None:
    """Each turn's prompt is the same by previous_response_id and by the whole history, and it is cached."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Bonn?"}]
    new, previous_id = items, None
    for turn in range(3):
        stored = create(hermes, **LOOP, input=new, previous_response_id=previous_id)
        whole = create(hermes, **LOOP, input=items, store=False)
        assert whole["usage"]["input_tokens"] == stored["usage"]["input_tokens"]
        assert without_ids(whole)["output"] == without_ids(stored)["output"]
        assert turn == 0 or stored["usage"]["input_tokens_details"]["cached_tokens"] > 0
        kind, call_id = stored["output"][-1]["type"], stored["output"][-1]["call_id"]
        new = [{"type": f"{kind}_output", "call_id": call_id, "output": "12 degrees"}]
        items = [*items, *stored["output"], *new]
        previous_id = stored["id"]
