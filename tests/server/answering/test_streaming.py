"""Responses of many log-probabilities: where they are written, counted and stored, and how they end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from foreword.config.options import Config
from foreword.errors import Overloaded
from foreword.server.answering.streaming import INLINE_LOGPROBS
from foreword.server.apis.responses.store import ResponseStore
from foreword.server.apis.responses.writer import ResponsesWriter
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient, engine_info

NUM_TOKENS = INLINE_LOGPROBS + 10
BODY: Mapping[str, Any] = {
    "input": "a",
    "max_output_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    client = FakeEngineClient(info=engine_info(2048))
    async with open_app(client, Config()) as app, app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            yield app, http


def parsed(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split(b"data: ")[1]) for block in stream.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_large_response_is_written_in_a_thread_and_stored_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It counts among held log-probabilities until it is written."""
    async with served() as (app, http):
        held = app.state.models.admission.held_logprobs
        writing: set[threading.Thread] = set()
        storing: list[tuple[threading.Thread, int]] = []
        response, complete = ResponsesWriter._response, ResponseStore.complete

        def write(self: ResponsesWriter, status: str, **changes: Any) -> dict[str, Any]:
            if status != "in_progress":
                writing.add(threading.current_thread())
            return response(self, status, **changes)

        def store(self: ResponseStore, *args: Any) -> None:
            storing.append((threading.current_thread(), held.num_held))
            complete(self, *args)

        monkeypatch.setattr(ResponsesWriter, "_response", write)
        monkeypatch.setattr(ResponseStore, "complete", store)
        reply = await http.post("/v1/responses", json={**BODY, "stream": stream})
        assert reply.status_code == 200
        answer = parsed(reply.content)[-1]["response"] if stream else reply.json()
        assert len(answer["output"][0]["content"][0]["logprobs"]) == NUM_TOKENS
        assert writing and threading.current_thread() not in writing
        assert storing == [(threading.current_thread(), 3 * NUM_TOKENS)]
        stored = await http.get(f"/v1/responses/{answer['id']}")
        assert stored.json() == answer and held.num_held == 0


@pytest.mark.parametrize("last", ["response.in_progress", "response.output_text.done"])
async def test_response_that_is_not_read_ends_with_an_error(last: str) -> None:
    """Also where its engine has finished, and before its last event."""
    async with served() as (app, _):
        models = app.state.models
        sent = b""
        is_requested = False

        async def receive() -> dict[str, Any]:
            nonlocal is_requested
            if is_requested:
                await asyncio.Event().wait()
            is_requested = True
            return {"type": "http.request", "body": json.dumps({**BODY, "stream": True}).encode()}

        async def send(message: dict[str, Any]) -> None:
            nonlocal sent
            sent += message.get("body", b"")
            if b"event: " + last.encode() not in message.get("body", b""):
                return
            (generation,) = models.generations.values()
            while not generation.outputs[0].finished:
                await asyncio.sleep(0)
            assert models.admission.held_logprobs.num_held == 3 * NUM_TOKENS
            assert generation.end(Overloaded("too many log-probabilities", "logprobs", 1.0))
            assert not generation.end(Overloaded("too many log-probabilities"))

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "query_string": b"",
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "server": ("server", 80),
            "client": ("client", 1),
        }
        await app(scope, receive, send)
        events = parsed(sent)
        types = [event["type"] for event in events]
        assert types[-1] == "response.failed" and len(types) - types.index(last) <= 5
        assert not {"response.completed", "response.incomplete"} & {*types}
        failed = events[-1]["response"]
        assert failed["error"]["code"] == "rate_limit_exceeded"
        parts = [part for item in failed["output"] for part in item.get("content", ())]
        assert not any(part["logprobs"] for part in parts)
        assert len(models.response_store) == 0 and models.admission.held_logprobs.num_held == 0
