"""uvicorn on a free port of the loopback, with a fake or a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from foreword.checkpoint import prepare_checkpoint
from foreword.cli.listener import bind_unix
from foreword.config.options import Config
from foreword.engine_client.base import EngineClient
from foreword.engine_client.make_client import make_engine_client
from foreword.multimodal.image_processor import ImageProcessor
from foreword.server.http.bounded_connections import uvicorn_config
from foreword.server.http.request_log import RequestLog
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.apps import open_app
from tests.support.asgi_client import InProcessEngineClient
from tests.support.fakes import FakeEngineClient, FakeOutput
from tests.support.waiting import WAIT_S, wait_until

MODEL = "fake-model"


@dataclass
class RunningServer:
    """A server in a thread."""

    url: str
    client: Any
    http: httpx.Client
    openai: openai.OpenAI
    app: Any

    def set_output(self, script: FakeOutput | Callable[[Any], FakeOutput]) -> None:
        self.client.script = script

    def chat(self, **fields: Any) -> Any:
        fields.setdefault("messages", [{"role": "user", "content": "Hi"}])
        extra = {name: fields.pop(name) for name in list(fields) if name not in CHAT_FIELDS}
        return self.openai.chat.completions.create(model=MODEL, extra_body=extra, **fields)

    def complete(self, prompt: Any = "Hi", **fields: Any) -> Any:
        extra = {name: fields.pop(name) for name in list(fields) if name not in COMPLETION_FIELDS}
        return self.openai.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **fields)

    def idle(self) -> bool:
        return not self.client.live and self.app.state.models.admission.num_open == 0

    def wait_until_idle(self) -> None:
        wait_until(self.idle)

    def disconnect(self, path: str, body: dict[str, Any], when: Callable[[], object]) -> None:
        """POST a body and close the connection once `when` is true."""
        with self.connect() as raw:
            raw.sendall(json_post(path, body))
            wait_until(when)

    def connect(self) -> socket.socket:
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port or 80), timeout=WAIT_S)

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Series by (name, *values of labels), without the label `model`."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        labels = [[text for label, text in sample.labels.items() if label != "model"] for sample in samples]
        return {(each.name, *texts): each.value for each, texts in zip(samples, labels, strict=True)}

    def last_prompt(self) -> str:
        """What the newest prompt says, without its special tokens."""
        return bytes(token for token in self.client.submitted[-1].prompt_ids if token < 256).decode()


CHAT_FIELDS = frozenset(inspect.signature(openai.resources.chat.Completions.create).parameters)
COMPLETION_FIELDS = frozenset(inspect.signature(openai.resources.Completions.create).parameters)


def json_post(path: str, body: dict[str, Any]) -> bytes:
    """A POST over a raw socket."""
    content = json.dumps(body).encode()
    return json_post_head(path, len(content)).encode() + content


def json_post_head(path: str, length: int) -> str:
    """Head of a POST over a raw socket."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )


class QuickServer(uvicorn.Server):
    """uvicorn that ends at once: hundreds of servers in this suite would wait for 0.2 s each."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.001)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@contextlib.contextmanager
def run_server(
    config: Config | None = None,
    client: EngineClient | None = None,
    key: str = "none",
    tokenizer: Tokenizer | None = None,
    encoder: Any = None,
    processor: ImageProcessor | None = None,
    aliases: tuple[str, ...] = (),
    request_log: RequestLog | None = None,
) -> Iterator[RunningServer]:
    config, client = config or Config(), client or FakeEngineClient()
    request_log = request_log or RequestLog(config.access_log)
    resources = contextlib.ExitStack()
    if config.uds is None:
        # asyncio turns Nagle's algorithm off where a socket names TCP: else each answer waits for 40 ms.
        listener = resources.enter_context(socket.socket(proto=socket.IPPROTO_TCP))
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    else:
        listener, url = resources.enter_context(bind_unix(Path(config.uds))), "http://localhost"
    transport = httpx.HTTPTransport(uds=config.uds)
    running: list[tuple[QuickServer, FastAPI]] = []

    async def main() -> None:
        names = (MODEL, *aliases)
        async with open_app(client, config, names, tokenizer, processor, encoder, None, request_log) as app:
            running.append((QuickServer(uvicorn_config(app, config, request_log)), app))
            await running[0][0].serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        while not running or not running[0][0].started:
            time.sleep(0.005)
            assert thread.is_alive()
        server, app = running[0]
        with (
            httpx.Client(base_url=url, timeout=WAIT_S, transport=transport) as http,
            openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=WAIT_S) as talker,
        ):
            yield RunningServer(url, client, http, talker, app)
    finally:
        for server, _ in running:
            server.should_exit = True
        thread.join(WAIT_S)
        resources.close()
    assert not thread.is_alive()


@contextlib.contextmanager
def run_engine(config: Config) -> Iterator[RunningServer]:
    """A server whose engine steps in its event loop: no process has to start."""
    prepared = prepare_checkpoint(config)
    client = InProcessEngineClient(prepared)
    with run_server(prepared.config, client, tokenizer=prepared.tokenizer) as server:
        yield server
    client.local.check()


@contextlib.contextmanager
def run_engine_process(config: Config) -> Iterator[RunningServer]:
    """A server with its engine in a process."""
    prepared = prepare_checkpoint(config)
    client = make_engine_client(
        prepared.config, prepared.never_sampled_ids, prepared.tokenizer.engine_vocabulary
    )
    with run_server(prepared.config, client, tokenizer=prepared.tokenizer) as server:
        yield server


@pytest.fixture
async def resources() -> AsyncIterator[contextlib.AsyncExitStack]:
    """Contexts that end with the test."""
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def shared() -> Iterator[RunningServer]:
    with run_server() as server:
        yield server


@pytest.fixture
def served(shared: RunningServer) -> Iterator[RunningServer]:
    """The shared server without recorded requests; afterwards it must be idle."""
    client = shared.client
    client.script = FakeOutput()
    for log in (client.submitted, client.finished, client.aborted):
        log.clear()
    yield shared
    shared.wait_until_idle()


@pytest.fixture(scope="session")
def demo() -> Iterator[RunningServer]:
    """The bundled model, with the default drafters."""
    config = Config(kv_cache_memory="60000tokens", log_level="warning", threads=1, max_waiting=512)
    with run_engine_process(config) as server:
        yield server
