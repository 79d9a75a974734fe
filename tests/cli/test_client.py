"""HTTPBackend: requests sent, streams parsed, errors translated."""

import json
from collections.abc import Callable

import httpx
import pytest

from foreword.chat_formats.events import CallArguments, CallStart
from foreword.cli.client import ChatPiece, ChatResult, HTTPBackend, finish_note, request_body
from foreword.core.params import SamplingParams, Speculation
from foreword.errors import ForewordError

MESSAGES = [{"role": "user", "content": "hello"}]
Handler = Callable[[httpx.Request], httpx.Response]


def remote(handler: Handler, **more: str | None) -> HTTPBackend:
    return HTTPBackend(
        "http://box/v1/", more.get("api_key"), more.get("model", "m"), httpx.MockTransport(handler)
    )


def stream_of(*chunks: dict[str, object]) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text=": a comment\n\n" + "".join(lines) + "data: [DONE]\n\n")


def test_chat_stream() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert request.url.path == "/v1/chat/completions"
        assert (body["stream"], body["messages"], body["model"]) == (True, MESSAGES, "m")
        empty: dict[str, object] = {"choices": [{"delta": {"role": "assistant"}}]}
        return stream_of(
            empty, {"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {"content": "b"}}]}
        )

    assert list(remote(handler).stream(MESSAGES, SamplingParams())) == [ChatPiece("a"), ChatPiece("b")]


def test_foreword_server_reports_draft_tokens() -> None:
    chunk: dict[str, object] = {
        "choices": [{"delta": {"content": "abc"}, "tokens": [["a", False], ["bc", True], ["", True]]}]
    }
    got = remote(lambda _: stream_of(chunk)).stream(MESSAGES, SamplingParams())
    assert list(got) == [ChatPiece("a"), ChatPiece("bc", is_drafted=True)]


def test_calls_of_tools_are_streamed() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]

    def handler(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["tools"] == tools
        parts: list[dict[str, object]] = [
            {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"a": 1}'}},
            {"index": 1, "id": None, "function": {"name": "g", "arguments": "{}"}},
        ]
        deltas = [{"content": "a"}, *({"tool_calls": [part]} for part in parts), {"tool_calls": None}]
        return stream_of(*({"choices": [{"delta": delta}]} for delta in deltas))

    assert list(remote(handler).stream(MESSAGES, SamplingParams(), tools)) == [
        ChatPiece("a"),
        ChatPiece("", call=CallStart(0, "x", "f")),
        ChatPiece("", call=CallArguments(0, '{"a": 1}')),
        ChatPiece("", call=CallStart(1, "call_1", "g")),
        ChatPiece("", call=CallArguments(1, "{}")),
    ]


@pytest.mark.parametrize(
    "calls", [3, {"index": 0}, [1], [{}], [{"index": "0", "function": {}}], [{"index": 0}]]
)
def test_invalid_calls_raise(calls: object) -> None:
    with pytest.raises(ForewordError, match="invalid call"):
        list(
            remote(lambda _: stream_of({"choices": [{"delta": {"tool_calls": calls}}]})).stream(
                MESSAGES, SamplingParams()
            )
        )


def test_completion_stream() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        return stream_of(
            {"choices": [{"text": "x"}]}, {"choices": [{"text": "", "finish_reason": "repetition"}]}
        )

    assert list(remote(handler).stream("once", SamplingParams())) == [
        ChatPiece("x"),
        ChatPiece("", finish_reason="repetition"),
    ]


def test_whole_answer() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        choice = {"message": {"content": "hi"}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "metrics": {"seed": 1}})

    assert remote(handler).answer(MESSAGES, SamplingParams()) == ChatResult("hi", "stop", None, {"seed": 1})


def test_model_and_key() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer one"
        return httpx.Response(200, json={"data": [{"id": "served"}]})

    assert remote(handler, api_key="one,two", model=None).name == "served"


def test_error_message_of_the_server_is_kept() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            401, content=iter([b'{"error": ', b'{"message": "no key"}}'])
        )  # unread, as from a socket

    with pytest.raises(ForewordError, match="401: no key"):
        list(remote(handler).stream(MESSAGES, SamplingParams()))
    with pytest.raises(ForewordError, match="401: no key; the key is that of --api-key or FOREWORD_API_KEY"):
        remote(handler).answer(MESSAGES, SamplingParams())


def test_error_within_a_stream() -> None:
    with pytest.raises(ForewordError, match="engine died"):
        list(
            remote(lambda _: stream_of({"error": {"message": "the engine died"}})).stream(
                "x", SamplingParams()
            )
        )


def test_unreachable_server() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ForewordError, match="refused"):
        remote(handler).answer("x", SamplingParams())


def test_bytes_that_are_no_text_are_refused() -> None:
    """An argument of the command line may have them."""
    backend = HTTPBackend("http://127.0.0.1:1", None, "m")
    with pytest.raises(ForewordError, match="not valid Unicode"):
        next(backend.stream("a\udcff", SamplingParams()))
    with pytest.raises(ForewordError, match="not valid Unicode"):
        backend.answer([{"role": "user", "content": "\udcff"}], SamplingParams())


@pytest.mark.parametrize(
    ("max_tokens", "defaults", "limit"),
    [
        (7, {}, "--max-tokens 7 or the end of the context"),
        (7, {"max_tokens": 9}, "--max-tokens 7 or the end of the context"),
        (9, {"max_tokens": 9}, "the checkpoint's max_new_tokens 9 (--max-tokens N sets another) or the end"),
        (None, {}, "cut off at the end of the context"),
    ],
)
def test_note_of_a_length_names_its_limit(
    max_tokens: int | None, defaults: dict[str, int], limit: str
) -> None:
    note = finish_note("length", SamplingParams(max_tokens=max_tokens), defaults)
    assert note is not None and limit in note


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1/", "127.0.0.1:1/v1"])
def test_address_without_a_scheme_is_one_of_http(url: str) -> None:
    with pytest.raises(ForewordError, match=r"http://127\.0\.0\.1:1: .* `foreword serve` starts one"):
        HTTPBackend(url, None, "m").answer("x", SamplingParams())


def test_parameters_reach_the_body() -> None:
    params = SamplingParams(
        temperature=0.0, top_k=5, stop="end", seed=3, speculation=Speculation("off"), prediction="old"
    )
    _, body = request_body("m", "x", params)
    assert json.loads(json.dumps(body)) == {
        "model": "m", "prompt": "x", "temperature": 0.0, "top_k": 5, "stop": ["end"],
        "seed": 3, "speculation": {"method": "off"},
        "prediction": {"type": "content", "content": "old"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [3]}',
        b'{"choices": [{"message": 1}]}',
        b"[" * 100_000,
    ],
)
def test_invalid_answers_raise(reply: bytes) -> None:
    with pytest.raises(ForewordError, match="cannot be read"):
        remote(lambda _: httpx.Response(200, content=reply)).answer("x", SamplingParams())


@pytest.mark.parametrize("reply", [b"{}", b'{"data": []}', b'{"data": [{"id": "\\ud800"}]}'])
def test_invalid_model_list_raises(reply: bytes) -> None:
    with pytest.raises(ForewordError, match="cannot be read"):
        remote(lambda _: httpx.Response(200, content=reply), model=None)


@pytest.mark.parametrize("tokens", [[1], [["a"]], [["a", 1]], [[None, True]]])
def test_invalid_tokens_raise(tokens: object) -> None:
    with pytest.raises(ForewordError, match="an invalid token"):
        list(
            remote(lambda _: stream_of({"choices": [{"text": "a", "tokens": tokens}]})).stream(
                "x", SamplingParams()
            )
        )
