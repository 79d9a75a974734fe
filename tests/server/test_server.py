"""Operators' routes, request ids, keys, body limits, and disconnects."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from foreword.config.options import Config
from foreword.server import intake
from foreword.server.routes import tokenize
from foreword.tokenizer.tokenizer import Tokenizer
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.counted_work import record_threads
from tests.support.fakes import FakeEngineClient, FakeOutput, byte_tokenizer
from tests.support.waiting import WAIT_S, wait_until

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
SLOW = FakeOutput("Hello world", (1,), hang_after=3)


def test_api_process_does_not_import_torch() -> None:
    code = "import sys, foreword.server.app; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models(served: RunningServer) -> None:
    cards = served.openai.models.list().data
    assert [card.id for card in cards] == [MODEL]
    assert served.openai.models.retrieve(MODEL).max_model_len == 2048


def test_live_and_version(served: RunningServer) -> None:
    assert served.http.get("/live").json() == {"status": "ok"}
    assert served.http.get("/version").json()["version"]


def test_loading_engine_is_a_503(served: RunningServer) -> None:
    info, served.client.info = served.client.info, None
    try:
        assert served.http.post(CHAT, json={"messages": USER}).status_code == 503
        assert served.http.get("/v1/models").status_code == 200
    finally:
        served.client.info = info


def test_schema_describes_every_route(served: RunningServer) -> None:
    api = served.http.get("/openapi.json").json()
    assert CHAT in api["paths"] and "ChatBody" in api["components"]["schemas"]
    assert all(facts.get("description") for path in api["paths"].values() for facts in path.values())


@pytest.mark.parametrize("special", [True, False])
def test_tokenize(served: RunningServer, special: bool) -> None:
    reply = served.http.post(
        "/tokenize", json={"prompt": "aé<|eos|>", "return_token_strs": True, "add_special_tokens": special}
    )
    assert reply.json() == {
        "count": 4,
        "max_model_len": 2048,
        "tokens": [97, 195, 169, 257],
        "token_strs": ["a", "Ã", "©", "<|eos|>"],
    }
    assert served.http.post("/detokenize", json={"tokens": [97, 195, 169, 257]}).json() == {
        "prompt": "aé<|eos|>"
    }


def test_many_tokens_are_named_in_a_thread(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of 2 MB held the event loop for 1.2 s."""
    on_loop = record_threads(monkeypatch, Tokenizer, "id_to_token")
    monkeypatch.setattr(tokenize, "INLINE_IDS", 3)
    answers = [
        served.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        for text in ("abc", "abcd")
    ]
    assert [answer["token_strs"] for answer in answers] == [list("abc"), list("abcd")]
    assert on_loop == [True] * 3 + [False] * 4


def test_many_ids_are_decoded_in_a_thread(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop = record_threads(monkeypatch, Tokenizer, "decode")
    monkeypatch.setattr(intake, "INLINE_WORK_BYTES", 100)
    for count in (10, 100):
        assert served.http.post("/detokenize", json={"tokens": [97] * count}).json() == {
            "prompt": "a" * count
        }
    assert on_loop == [True, False]


def test_prompts_far_beyond_the_context_are_refused_by_a_part(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte took seconds and 200 MB before its tokens were counted."""
    text = "a" * 100_000
    messages = [{"role": "user", "content": text}]
    for route, body, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        (CHAT, {"messages": messages}, "messages"),
        ("/v1/responses", {"input": text}, "input"),
        ("/v1/embeddings", {"input": [text]}, "input[0]"),
    ):
        error = served.http.post(route, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert f"{param} is too long: its first 65536 characters have" in error["message"]
        assert "the limit is 2048" in error["message"]
    body = {"prompt": text, "truncate_prompt_tokens": 4, "max_tokens": 1}
    assert served.http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 4
    assert served.http.post("/tokenize", json={"prompt": text}).json()["count"] == len(text)


def test_tokenize_a_conversation(served: RunningServer) -> None:
    tokens = served.http.post("/tokenize", json={"messages": USER}).json()["tokens"]
    served.chat()
    assert tuple(tokens) == served.client.submitted[0].prompt_ids


def test_tokenize_a_conversation_by_how_it_reasons() -> None:
    source = "{{ 'default' if enable_thinking is not defined else 'on' if enable_thinking else 'off' }}"
    with run_server(tokenizer=byte_tokenizer(source)) as server:
        for fields, text in (({}, "default"), ({"think": True}, "on"), ({"reasoning_effort": "none"}, "off")):
            answer = server.http.post("/tokenize", json={"messages": USER, **fields}).json()
            assert bytes(answer["tokens"]).decode() == text


def test_ids_of_a_text_beyond_the_context_are_decoded(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [97] * 3000
    assert served.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "a" * 3000}
    monkeypatch.setattr(tokenize, "MAX_TEXT_TOKENS", 2999)
    error = served.http.post("/detokenize", json={"tokens": ids}).json()["error"]
    assert error["param"] == "tokens" and "at most 2999" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_tokenize_errors(served: RunningServer, path: str, body: Any, param: str) -> None:
    reply = served.http.post(path, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_request_ids(served: RunningServer) -> None:
    assert served.http.get("/live", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    drawn = {served.http.get("/live").headers["X-Request-Id"] for _ in range(2)}
    assert len(drawn) == 2
    assert len(served.http.get("/live", headers={"X-Request-Id": "x" * 999}).headers["X-Request-Id"]) == 32


# Disconnects


@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_from_a_stream_frees_the_engine(served: RunningServer, n: int) -> None:
    served.set_output(SLOW)
    with served.http.stream("POST", CHAT, json={"messages": USER, "stream": True, "n": n}) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_until(lambda: len(served.client.live) == n)
    served.wait_until_idle()
    assert len(served.client.aborted) == n


def test_disconnect_before_an_answer_frees_the_engine(served: RunningServer) -> None:
    served.set_output(SLOW)
    served.disconnect(CHAT, {"messages": USER, "n": 2}, lambda: len(served.client.live) == 2)
    served.wait_until_idle()
    assert len(served.client.aborted) == 2


def test_failed_request_leaves_others_running(served: RunningServer) -> None:
    served.set_output(
        lambda request: FakeOutput(
            "good answer", (1,), delay_s=0.01, fail_after=2 if request.prompt_ids[0] == ord("x") else None
        )
    )
    with (
        pytest.raises(openai.InternalServerError),
        served.http.stream("POST", "/v1/completions", json={"prompt": "y", "stream": True}) as good,
    ):
        lines = good.iter_lines()
        next(lines)
        try:
            served.complete("x")
        finally:
            rest = list(lines)
            assert rest[-2] == "data: [DONE]" and '"finish_reason":"stop"' in rest[-4]


# Limits


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[RunningServer]:
    config = Config(
        api_key="alpha, beta", cors_origins="https://a.example", max_body_mb=1, max_waiting=3, seed=11
    )
    with run_server(config, FakeEngineClient(FakeOutput("ok")), key="beta") as server:
        yield server


def key_headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys(keyed_server: RunningServer) -> None:
    assert keyed_server.chat().choices[0].message.content == "ok"
    for headers in ({}, key_headers("alph")):
        reply = keyed_server.http.post(CHAT, json={"messages": USER}, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key" and "X-Request-Id" in reply.headers
    for path in ("/health", "/live", "/version", "/metrics"):
        assert keyed_server.http.get(path).status_code == 200
    assert keyed_server.http.get("/v1/models").status_code == 401


def test_server_seed(keyed_server: RunningServer) -> None:
    assert (keyed_server.chat().seed, keyed_server.chat(seed=5).seed) == (11, 5)


def test_cors_origins(keyed_server: RunningServer) -> None:
    asking = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    assert (
        keyed_server.http.options(CHAT, headers=asking).headers["access-control-allow-origin"]
        == "https://a.example"
    )
    refused = keyed_server.http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert (
        refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    )
    assert (
        "access-control-allow-origin"
        not in keyed_server.http.get("/live", headers={"Origin": "https://b.example"}).headers
    )


def megabytes(count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield b"x" * 1_000_000


def test_large_body_is_refused_while_reading(keyed_server: RunningServer) -> None:
    for content in (b"x" * 50_000_000, megabytes(50)):
        reply = keyed_server.http.post(CHAT, content=content, headers=key_headers("alpha"))
        assert reply.status_code == 413
        assert reply.json()["error"]["message"] == "the body is larger than 1000000 bytes"
    assert keyed_server.chat().choices[0].message.content == "ok"


def test_large_body_is_refused_by_its_length(keyed_server: RunningServer) -> None:
    with keyed_server.connect() as raw:
        raw.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer beta\r\n".encode()
            + b"Content-Length: 50000000\r\n\r\n"
        )
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("framing", ["Content-Length: 5000000", "Transfer-Encoding: chunked"])
def test_sending_client_gets_the_refusal(keyed_server: RunningServer, framing: str) -> None:
    part = b"x" * 50_000 if framing.startswith("Content") else b"c350\r\n" + b"x" * 50_000 + b"\r\n"
    with keyed_server.connect() as raw:
        raw.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer beta\r\n{framing}\r\n\r\n".encode()
        )
        for _ in range(100):
            raw.sendall(part)
            time.sleep(0.001)
        raw.sendall(b"" if framing.startswith("Content") else b"0\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


def test_body_below_the_limit_is_read(keyed_server: RunningServer) -> None:
    reply = keyed_server.http.post(
        CHAT, json={"messages": [{"role": "user", "content": "x" * 200_000}]}, headers=key_headers("beta")
    )
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


# Concurrency


def test_many_concurrent_requests(served: RunningServer) -> None:
    served.set_output(lambda request: FakeOutput(bytes(request.prompt_ids), (3, 1)))

    async def one(client: httpx.AsyncClient, i: int) -> str:
        stream = bool(i % 2)
        reply = await client.post(
            "/v1/completions", json={"prompt": f"text {i}", "stream": stream, "max_tokens": 100}
        )
        if not stream:
            return str(reply.json()["choices"][0]["text"])
        chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async def send_all() -> list[str]:
        async with httpx.AsyncClient(
            base_url=served.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=32)
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(100)))

    assert asyncio.run(send_all()) == [f"text {i}" for i in range(100)]
