"""Invalid requests: a 4xx in OpenAI's envelope that names field and limit."""

import json
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from foreword.server.http.errors import add_error_handlers, validation_error
from tests.server.conftest import RunningServer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def post(served: RunningServer, fields: dict[str, Any], path: str = CHAT) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"messages": USER, **fields})
    reply = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "X-Request-Id" in reply.headers
    assert not served.client.submitted
    return reply.status_code, error


# One of each kind: tests/core/test_params.py has every sampling field.
@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"n": 1.5}, "n", "must be an integer"),
        ({"best_of": 2}, "best_of", "may only be 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens", "above max_tokens 2"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"logprobs": 5}, "logprobs", "must be true or false"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "ends at 259"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "must be a number"),
        ({"stop": 5}, "stop", "must be a text or a list"),
        ({"stop": ["x"] * 65}, "stop", "at most 64"),
        ({"stop": "x" * 1025}, "stop", "at most 1024"),
        ({"stop": ["x" * 1000] * 5}, "stop", "5000 characters; the limit is 4096"),
        ({"bad_words": "no"}, "bad_words", "must be a list"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": True}, "stream_options", "must be an object"),
        ({"speculation": "medusa"}, "speculation.method", "auto, off, grammar, prediction, suffix"),
        ({"speculation": 5}, "speculation", "must be an object or a text"),
        ({"tool_choice": 5}, "tool_choice", "must be a text or an object"),
        ({"\ud800": 1}, r"\ud800", "lone surrogate"),
        ({"messages": [{**USER[0], "x\udfff": 1}]}, r"messages[0].x\udfff", "lone surrogate"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "Hi"}, "messages", "must be a list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "one of system, developer"),
        ({"messages": [*USER, {"role": "user"}]}, "messages[1].content", "text or a list of parts"),
        ({"request_id": "a b"}, "request_id", "must be 1 to 128 visible ASCII characters"),
        (
            {"messages": [*USER, {"role": "assistant", "content": "x", "refusal": "y"}]},
            "messages[1].refusal",
            "in place of content",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "2048 tokens long"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set"),
    ],
)
def test_invalid_values_are_named(
    served: RunningServer, fields: dict[str, Any], param: str, limit: str
) -> None:
    status, error = post(served, fields)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert limit in error["message"] and " should " not in error["message"], error["message"]
    assert param.rpartition(".")[2] in error["message"] or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("mirostat", 2, "state"),
        ("mirostat_tau", 3.0, "typical_p"),
        ("use_beam_search", True, "best_of"),
        ("length_penalty", 1.2, "beam search"),
        ("early_stopping", True, "beam search"),
        ("logits_processors", ["x"], "logit_bias"),
        ("samplers", ["top_k"], "order"),
        ("repeat_last_n", 64, "dry_penalty_last_n"),
    ],
)
def test_refused_fields_have_a_reason(served: RunningServer, field: str, value: Any, reason: str) -> None:
    status, error = post(served, {field: value})
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", field)
    assert error["message"].startswith(f"{field} is refused: ") and reason in error["message"]


def test_image_for_a_text_model_is_named(served: RunningServer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    status, error = post(served, {"messages": [{"role": "user", "content": [part]}]})
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "messages[0].content[0]")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"messages": [}',
        b"[]",
        b'"text"',
        b"1",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
    ],
)
def test_invalid_bodies(served: RunningServer, content: bytes) -> None:
    reply = served.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_json_error_has_its_position(served: RunningServer) -> None:
    reply = served.http.post(CHAT, content=b'{"n": 1,}', headers={"Content-Type": "application/json"})
    assert (
        "not valid JSON" in reply.json()["error"]["message"]
        and "character 8" in reply.json()["error"]["message"]
    )


def test_body_without_json_content_type(served: RunningServer) -> None:
    reply = served.http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert reply.status_code == 400 and "application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_nan_and_infinity_are_refused(served: RunningServer, value: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "temperature": {value}}}'
    reply = served.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "temperature"


def test_context_limit_has_its_code(served: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        served.chat(messages=[{"role": "user", "content": "x" * 100_000}])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"


def test_unknown_model(served: RunningServer) -> None:
    status, error = post(served, {"model": "gpt-9"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)]
)
def test_unknown_routes(served: RunningServer, method: str, path: str, status: int) -> None:
    reply = served.http.request(method, path)
    assert reply.status_code == status
    assert path in reply.json()["error"]["message"] and "X-Request-Id" in reply.headers
    assert status == 404 or reply.json()["error"]["message"].endswith(f"use {reply.headers['Allow']}")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1", "/v1 as their base URL"),
        ("/v1/", "/v1 as their base URL"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/completions", "did you mean /v1/completions?"),
        ("/embeddings", "did you mean /v1/embeddings?"),
        ("/models", "did you mean /v1/models?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/api/chat", "use /v1/chat/completions"),
        ("/api/generate", "use /v1/completions"),
        ("/completion", "use /v1/completions"),
        ("/v1/messages/batches", "run-batch"),
        ("/pooling", "use /v1/embeddings"),
        ("/v2/embed", "use /v1/embeddings"),
        ("/invocations", "use /v1/chat/completions"),
        ("/tokenizer_info", "tokenizer="),
    ],
)
def test_unknown_route_names_the_one_to_use(served: RunningServer, path: str, hint: str) -> None:
    reply = served.http.post(path, json={})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "not_found") and hint in error["message"]


@pytest.mark.parametrize(
    ("path", "given", "missing", "route"),
    [
        (CHAT, "prompt", "messages", "/v1/completions"),
        (CHAT, "input", "messages", "/v1/embeddings"),
        ("/v1/completions", "messages", "prompt", CHAT),
        ("/v1/completions", "input", "prompt", "/v1/embeddings"),
        ("/v1/embeddings", "prompt", "input", "/v1/completions"),
    ],
)
def test_field_of_another_route_names_the_route(
    served: RunningServer, path: str, given: str, missing: str, route: str
) -> None:
    error = served.http.post(path, json={given: "Hi"}).json()["error"]
    assert error["param"] == missing and error["message"].startswith(f"{missing} is required: ")
    assert given in error["message"] and route in error["message"]


def test_unknown_route_without_a_similar_one(served: RunningServer) -> None:
    for path in ("/nope", "/admin/key", "/" + "v1/chat/completions" * 100):
        assert "did you mean" not in served.http.get(path).json()["error"]["message"]


def test_unexpected_exception_is_a_500_in_the_envelope(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.client, "submit", broken)
    reply = served.http.post(CHAT, json={"messages": USER}, headers={"X-Request-Id": "mine"})
    assert reply.status_code == 500 and reply.headers["X-Request-Id"] == "mine"
    assert reply.json()["error"]["type"] == "server_error" and "secret" not in reply.text


def test_errors_show_short_values(served: RunningServer) -> None:
    _, error = post(served, {"temperature": "x" * 10_000})
    assert len(error["message"]) < 300


def test_long_names_are_left_out(served: RunningServer) -> None:
    """A key of 8 MB made an error of 16 MB."""
    for fields, param in (
        ({"logit_bias": {"a" * 10_000: "x"}}, "logit_bias"),
        ({"a" * 10_000: [{}] * 33_000}, "a" * 64),
    ):
        status, error = post(served, fields)
        assert (status, error["param"]) == (400, param) and len(error["message"]) < 300


def test_first_of_equally_deep_errors_is_named(served: RunningServer) -> None:
    """The longest path was taken: stop[10]."""
    errors = [
        {"type": "string_type", "loc": ("body", "stop", *rest), "input": 0, "msg": ""}
        for rest in (("str",), *(("list[str]", i) for i in range(12)))
    ]
    assert validation_error(errors).param == "stop[0]"
    assert post(served, {"stop": [0] * 12})[1]["param"] == "stop[0]"


RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{}] * 2100}]}
PARTS = [{"role": "user", "content": [{"type": "text", "text": ""}] * 2100}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER * 2100}, "messages"),
        (CHAT, {"messages": PARTS}, "messages"),
        ("/tokenize", {"messages": USER * 2100}, "messages"),
        ("/v1/messages", {"messages": USER * 2100, "max_tokens": 1}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [RESULT]}, "messages"),
        ("/v1/responses", {"input": USER * 2100}, "input"),
        ("/v1/responses/input_tokens", {"input": USER * 2100}, "input"),
    ],
)
def test_more_parts_than_the_context_has_tokens_are_refused_before_conversion(
    served: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    reply = served.http.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and "each is at least one token" in error["message"]
    if not path.startswith("/v1/messages"):  # its envelope has no more
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"].startswith(param)


def test_list_of_too_many_objects_is_refused_before_validation(served: RunningServer) -> None:
    for fields in ({"messages": [{}] * 32_769}, {"messages": [{"role": "user", "content": [{}] * 32_769}]}):
        status, error = post(served, fields)
        assert status == 400 and "32769 objects; the limit is 32768" in error["message"]


async def test_missing_query_parameter_is_named() -> None:
    app = FastAPI()
    add_error_handlers(app)
    app.get("/x")(lambda needed: needed)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/x")
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "needed is required"
    assert answer.json()["error"]["param"] == "needed"
