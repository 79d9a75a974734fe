"""Large bodies are read by a worker: equal answers and errors, limits in proportion to their bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from foreword.config.options import Config
from foreword.errors import InvalidRequest, OverBudget
from foreword.server import intake as module
from foreword.server import intake_worker
from foreword.server.apis.body import StrictModel
from foreword.server.apis.chat.body import ChatBody
from foreword.server.apis.completions import CompletionBody
from foreword.server.apis.messages.body import MessagesBody
from foreword.server.apis.ranking import RerankBody
from foreword.server.apis.responses.body import ResponsesBody
from foreword.server.app import ROUTERS
from foreword.server.auth.keys import KeyPermissions
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.intake import Intake, IntakeRoute
from foreword.server.intake_worker import read_body
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient
from tests.support.waiting import WAIT_S

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hi"}]
LARGE = {"type": "object", "description": "d" * 1_100_000}  # larger than any constraint may be
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$defs": {"a": {}}}}}
# Bodies that are answered, refused by pydantic, by the parser of JSON, or by the routes.
BODIES: list[tuple[str, Any]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "x"}]}),
    (
        CHAT,
        {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", "stop": ["x"], "logit_bias": {"5": 1}},
    ),
    (CHAT, {"messages": HELLO, "unknown": {"a": [1]}}),
    (CHAT, {"messages": HELLO, "rid": "r-1", "maxtokens": 3}),
    (CHAT, {"messages": [{"role": 5, "content": "Hi"}, {"content": "Hi"}], "max_tokens": "2"}),
    (CHAT, {"messages": HELLO, "min_p": None, "temperature": 1e999}),
    (CHAT, {"prompt": "Hi"}),
    (CHAT, {"messages": HELLO, "beam_width": 5, "use_beam_search": True}),
    (CHAT, {"messages": HELLO, "\ud800": 1}),
    (CHAT, []),
    (CHAT, b'{"messages": ['),
    (CHAT, b'{"messages": "\xff"}'),
    (CHAT, b"[" * 200_000),
    (CHAT, b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "max_tokens": 2}'),
    ("/v1/completions", {"prompt": ["Hi", [65, 66]], "max_tokens": 1}),
    ("/v1/completions", {"prompt": 5}),
    (RESPONSES, {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2, "store": False}),
    (RESPONSES, {"input": {"role": "user"}}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 2, "stop_sequences": ["x"]}),
    (MESSAGES, {"messages": HELLO, "thinking": {"type": "no"}}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [72, 105]}),
    ("/detokenize", {"tokens": [1.5]}),
]


@asynccontextmanager
async def open_client() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        open_app(FakeEngineClient(), Config(max_body_mb=1, seed=1)) as app,
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m", timeout=WAIT_S) as client,
    ):
        yield client


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with open_client() as client:
        yield client


def without_ids(response: httpx.Response) -> tuple[int, Any, str | None]:
    """What two equal requests have in common."""
    body = response.json()
    for name in ("id", "created", "created_at", "completed_at", "request_id", "metrics"):
        body.pop(name, None)
    for item in body.get("output", ()):
        item.pop("id", None)
    return response.status_code, body, response.headers.get("X-Foreword-Ignored-Fields")


async def test_worker_reads_bodies_as_the_event_loop_does(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[type] = []
    read_in_worker = Intake._read

    def spy(self: Intake, body_class: type, *args: Any) -> Any:
        read.append(body_class)
        return read_in_worker(self, body_class, *args)

    monkeypatch.setattr(Intake, "_read", spy)
    for path, body in BODIES:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        answers = []
        for num_bytes in (1 << 30, 0):
            monkeypatch.setattr(module, "INLINE_BYTES", num_bytes)
            answers.append(await http.post(path, content=content, headers=headers))
        assert without_ids(answers[0]) == without_ids(answers[1]), content[:200]
    assert len(read) == len(BODIES)


async def test_small_body_of_many_objects_is_read_by_a_worker(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KB of empty items took 0.25 s of the event loop."""
    read: list[int] = []
    read_in_worker = Intake._read
    monkeypatch.setattr(Intake, "_read", lambda *args: read.append(1) or read_in_worker(*args))
    for count in (module.INLINE_OBJECTS - 1, module.INLINE_OBJECTS):
        response = await http.post(RESPONSES, json={"input": [{}] * count})
        assert response.status_code == 400 and len(read) == (count == module.INLINE_OBJECTS)


async def test_other_content_types_are_refused_as_before(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INLINE_BYTES", 0)
    content = json.dumps({"messages": HELLO}).encode()
    response = await http.post(CHAT, content=content, headers={"Content-Type": "text/plain"})
    assert response.status_code == 400 and "Content-Type: application/json" in response.text


def test_every_route_with_a_body_is_read_by_the_intake() -> None:
    """The operator's too: they are read before permissions are checked."""
    others = {
        route.path
        for router in ROUTERS
        for route in router.routes
        if getattr(route, "body_field", None) is not None and not isinstance(route, IntakeRoute)
    }
    assert not others


@pytest.mark.parametrize(
    ("body_class", "field"),
    [(ChatBody, "messages"), (ChatBody, "stop"), (ResponsesBody, "input"), (RerankBody, "documents")],
)
def test_validation_of_a_list_ends_at_its_first_wrong_item(body_class: type[StrictModel], field: str) -> None:
    """64 KB of wrong items took 0.43 to 1.3 s of the event loop."""
    given = {"model": "m", "query": "a", field: [0] * 1000}
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(body_class).validate_python(given)
    assert caught.value.error_count() <= 3


@pytest.fixture(scope="module")
def intake() -> Iterator[Intake]:
    intake = Intake(1_000_000, lambda reason: None)
    yield intake
    intake._pool.close()


def test_parts_are_counted_before_the_body_comes_back(intake: Intake) -> None:
    body = json.dumps({"messages": HELLO * 30}).encode()
    with pytest.raises(InvalidRequest, match=r"holds 30 messages.*context is 29 tokens") as caught:
        intake._read(ChatBody, body, 29)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    made = intake._read(ChatBody, body, 30)
    assert isinstance(made, ChatBody) and made == read_body(ChatBody, body)


@pytest.mark.parametrize(
    ("body_class", "field", "fields"),
    [
        (ChatBody, "response_format", {"response_format": {"type": "structural_tag", "format": LARGE}}),
        (ChatBody, "guided_json", {"guided_json": LARGE}),
        (MessagesBody, "output_format.schema", {"output_format": {"type": "json_schema", "schema": LARGE}}),
        (
            ResponsesBody,
            "text.format.schema",
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": LARGE}}},
        ),
    ],
)
def test_large_constraints_are_refused_before_the_body_comes_back(
    intake: Intake, body_class: type[StrictModel], field: str, fields: dict[str, Any]
) -> None:
    """65,536 tags were written as JSON on the event loop, which was silent for 0.6 s."""
    given = {"messages": HELLO, "input": HELLO, "max_tokens": 1, **fields}
    names = {info.alias or name for name, info in body_class.model_fields.items()}
    body = json.dumps({name: value for name, value in given.items() if name in names}).encode()
    with pytest.raises(InvalidRequest, match=r"has 11\d+ bytes; the limit is 1048576") as caught:
        intake._read(body_class, body, None)
    assert caught.value.param == field


def test_cpu_time_is_limited_by_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the limit of this body."""
    monkeypatch.setattr(module, "CPU_S", 0.001)
    monkeypatch.setattr(module, "CPU_S_PER_MB", 0.02)
    intake = Intake(1_000_000, lambda reason: None)
    body = json.dumps({"messages": [{"role": "user", "content": [{"type": "text"}] * 8}] * 2000}).encode()
    limit = f"it takes more than {0.001 + 0.02 * len(body) / 1e6:.3g} s of CPU time to read"
    try:
        with pytest.raises(OverBudget, match=f"the body of {len(body)} bytes cannot be read: {limit}"):
            intake._read(ChatBody, body, None)
        monkeypatch.undo()
        intake._pool.limits = replace(intake._pool.limits, cpu_s=1.0, cpu_s_per_mb=2.0)
        assert isinstance(intake._read(ChatBody, body, None), ChatBody)  # by the next worker
    finally:
        intake._pool.close()


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER_BYTES", 1 << 20)
    intake = Intake(1000, lambda reason: None)
    try:
        with pytest.raises(OverBudget, match="ran out of memory"):
            intake._read(ChatBody, b'{"messages": [' + b"[]," * 2_000_000 + b"[]]}", None)
    finally:
        intake._pool.close()


def test_lists_and_objects_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB of empty lists were made again by the server in 2 s, in which its event loop was silent."""
    monkeypatch.setattr(intake_worker, "MAX_CONTAINERS", 4)
    assert isinstance(read_body(CompletionBody, b'{"prompt": [[1], {}, "[[{"]}'), CompletionBody)
    with pytest.raises(OverBudget, match="the body holds more than 4 lists and objects"):
        read_body(CompletionBody, b'{"prompt": [[1], {"a": {}}]}')


def test_body_that_pickle_cannot_write_is_refused(intake: Intake) -> None:
    """7 KB ended the worker, and the answer said that it ran out of memory."""
    deep = b"[" * 495 + b"]" * 495
    body = b'{"messages": [], "chat_template_kwargs": {"a": ' + deep + b"}}"
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        intake._read(ChatBody, body, None)
    process = next(worker.process for worker in intake._pool.workers if worker.process is not None)
    assert process.poll() is None


@pytest.mark.full
async def test_over_budget_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_S", 0.001)
    monkeypatch.setattr(module, "CPU_S_PER_MB", 0.0)
    async with open_client() as http:
        response = await http.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}] * 8000})
        assert response.status_code == 400 and response.json()["error"]["code"] == "over_budget"
        metrics = (await http.get("/metrics")).text
        assert any('reason="over_budget"' in line and line.endswith(" 1.0") for line in metrics.splitlines())
        assert (await http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(("size", "elsewhere"), [(100, False), (100_000, True)])
async def test_large_prompt_is_tokenized_in_a_thread(intake: Intake, size: int, elsewhere: bool) -> None:
    access = KeyPermissions("", "", UsageMeter())
    request = Request({"type": "http", "state": {"body_bytes": size, "access": access}})
    thread = await intake.offload_if_large(request, threading.get_ident)
    assert (thread != threading.get_ident()) == elsewhere
