"""Targets of fuzz_parsers.py that read network traffic, and the files of `run-batch`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.fuzz_mutate import change_bytes, change_lines
from benchmarks.fuzz_targets import FuzzTarget
from foreword.bench.measurement import AUTO
from foreword.bench.remote import run_conversation
from foreword.bench.workloads import Conversation
from foreword.cli.batch_file import BatchLine, BatchOutput, read_lines
from foreword.cli.client import HTTPBackend
from foreword.cli.run_batch import BatchClient, BatchSummary, answer_all
from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.errors import ConfigError, ForewordError
from tests.support.apps import open_app
from tests.support.fakes import FakeEngineClient
from tests.support.images import image_part, image_processor, image_tokenizer, png

URL = "http://box"
PARAMS = SamplingParams(max_tokens=4)
CHAT = "/v1/chat/completions"


def traffic_targets() -> Mapping[str, Callable[[], FuzzTarget]]:
    """Constructors by name."""
    return {"bodies": _bodies, "batch": _batch, "stream": _stream, "reply": _reply}


class _Application:
    """The server's application for a vision model, with a fake engine, in its own event loop."""

    def __init__(self) -> None:
        self.client = FakeEngineClient()
        config = Config(max_body_mb=1)
        self.loop = asyncio.new_event_loop()
        self._opened = open_app(
            self.client, config, ("fake",), tokenizer=image_tokenizer(), processor=image_processor()
        )
        self.app = self.loop.run_until_complete(self._opened.__aenter__())
        self.http = httpx.AsyncClient(base_url=URL, transport=httpx.ASGITransport(self.app))

    def ask(self, path: str, body: bytes) -> None:
        """Post a body: an answer or a refusal in the envelope, with nothing left open."""
        reply = self.loop.run_until_complete(self._post(path, body))
        assert reply.status_code < 500, f"{reply.status_code} {reply.text:.200}"
        if reply.status_code >= 400 and path in PATHS:
            assert reply.json()["error"]["message"], reply.text
        assert not self.client.live, "the engine still works"
        assert self.app.state.models.admission.num_open == 0, "requests are still counted as open"
        assert self.app.state.models.loaded[0].image_intake.memory.held_bytes == 0, "images are still held"
        for log in (self.client.submitted, self.client.finished, self.client.aborted):
            log.clear()

    def close(self) -> None:
        self.loop.run_until_complete(self.http.aclose())
        self.loop.run_until_complete(self._opened.__aexit__(None, None, None))
        self.loop.close()

    async def _post(self, path: str, body: bytes) -> httpx.Response:
        return await self.http.post(path, content=body, headers={"Content-Type": "application/json"})


PATHS = (CHAT, "/v1/completions", "/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank", "/v1/score")


def _bodies() -> FuzzTarget:
    """A path in the first line, then a body."""
    application = _Application()

    def run(data: bytes, folder: Path) -> None:
        path, _, body = data.partition(b"\n")
        known = path.decode("ascii", "replace")
        application.ask(known if known in PATHS else CHAT, body)

    message = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    picture = image_part(png(size=(3, 2)))
    other = {"type": "image_url", "image_url": "file:///x.png", "video_url": {"url": "http://127.0.0.1/"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat: dict[str, Any] = {
        "messages": [message],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat),
        (
            CHAT,
            {
                "messages": [message],
                "n": 2,
                "logprobs": True,
                "top_logprobs": 2,
                "stop": ["o"],
                "seed": 1,
                "top_k": 3,
            },
        ),
        (
            CHAT,
            {
                "messages": [message],
                "tools": [tool],
                "chat_template_kwargs": {"a": 1},
                "metrics": True,
                "logit_bias": {"5": 1},
            },
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": [picture, {"type": "text", "text": "?"}]}],
                "n": 2,
                "max_tokens": 2,
            },
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": [picture, other]}, message],
                "stream": True,
                "max_tokens": 2,
            },
        ),
        (
            CHAT,
            {
                "messages": [message],
                "prediction": {"type": "content", "content": "x"},
                "speculation": {"method": "off"},
            },
        ),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 2, "suffix": None},
        ),
        (
            "/v1/completions",
            {"prompt": [1, 2, 3], "min_p": 0.1, "bad_words": ["x"], "prompt_logprobs": 1, "stream": True},
        ),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": False}),
        ("/tokenize", {"messages": [message], "return_token_strs": True}),
        ("/detokenize", {"tokens": [72, 105]}),
        ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 2, "encoding_format": "base64"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 1}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ]
    seeds = [f"{path}\n{json.dumps(body)}".encode() for path, body in bodies]
    modules = ("server/", "core/params.py", "tokenizer/", "multimodal/")
    return FuzzTarget(seeds, run, (), modules, change_lines, 0.5, application.close)


def _batch() -> FuzzTarget:
    """Lines of requests, and the same as lines of answers."""

    def run(data: bytes, folder: Path) -> None:
        source, output = folder / "in", folder / "out"
        source.write_bytes(data)
        output.write_bytes(data)
        items = list(read_lines(source))
        with BatchOutput(output) as answers:
            sum(answers.contains(item) for item in items)

    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}
    answer = {
        "id": "x",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {}},
        "error": None,
    }
    bad = {"id": "x", "custom_id": None, "response": None, "error": {"code": "c", "message": "m", "line": 2}}
    seeds = [
        b"".join(json.dumps(one).encode() + b"\n" for one in lines)
        for lines in ([line, line | {"custom_id": "b"}], [answer, bad])
    ]
    return FuzzTarget(seeds, run, (ConfigError,), ("cli/batch_file.py",), change_lines)


def _stream() -> FuzzTarget:
    """A server's stream to all clients, in pieces that depend on its bytes."""
    loop = asyncio.new_event_loop()

    def run(data: bytes, folder: Path) -> None:
        transport = httpx.MockTransport(lambda request: _stream_of(request, data))
        loop.run_until_complete(_stream_to_bench(transport))
        for prompt in ("x", [{"role": "user", "content": "x"}]):
            try:
                list(HTTPBackend(URL, None, "m", transport).stream(prompt, PARAMS))
            except ForewordError as error:
                assert str(error)

    ours = [
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": "ü"},
                    "tokens": [["ü", True], ["x", False]],
                    "token_ids": [1, 2],
                }
            ]
        }
    ]
    ours.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    ours.append({"choices": [], "usage": {"completion_tokens": 2}})
    text = [
        {"choices": [{"text": "a", "token_ids": [3], "finish_reason": "length"}]},
        {"error": {"message": "gone"}},
    ]
    seeds = [
        "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in of) + "data: [DONE]\n\n"
        for of in (ours, text)
    ]
    seeds += [seeds[0].replace("\n", "\r\n"), ": hello\nevent: x\nid: 1\ndata:{\ndata: }\n\n"]
    modules = ("cli/client.py", "bench/remote.py")
    return FuzzTarget([seed.encode() for seed in seeds], run, (), modules, change_bytes, 0.5, loop.close)


async def _stream_to_bench(transport: httpx.MockTransport) -> None:
    script = Conversation(("x",), max_tokens=4)
    async with httpx.AsyncClient(base_url=URL, transport=transport) as http:
        await run_conversation(http, "m", 0, script, AUTO)


def _stream_of(request: httpx.Request, data: bytes) -> httpx.Response:
    return httpx.Response(200, stream=_ChunkedStream(data))


class _ChunkedStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Bytes in pieces of 1 to 64."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._seed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    def __iter__(self) -> Iterator[bytes]:
        random, place = Random(self._seed), 0
        while place < len(self._data):
            size = random.choice((1, 2, 7, 64)) * (1 + len(self._data) // 4096)
            yield self._data[place : place + size]
            place += size

    async def __aiter__(self) -> Any:
        for piece in self:
            yield piece


def _reply() -> FuzzTarget:
    """A status in the first line, then a server's answer to non-streaming clients."""
    loop = asyncio.new_event_loop()

    def run(data: bytes, folder: Path) -> None:
        head, _, body = data.partition(b"\n")
        status = int(head) if head.isdigit() and head in (b"200", b"400", b"404") else 200
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
        try:
            remote = HTTPBackend(URL, None, None, transport)
        except ForewordError:
            remote = HTTPBackend(URL, None, "m", transport)
        try:
            remote.answer("x", PARAMS)
        except ForewordError as error:
            assert str(error)
        loop.run_until_complete(_ask_batch(transport, folder / "out"))

    choice = {"message": {"content": "a"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    bodies = [
        {"choices": [choice], "usage": usage, "metrics": {"seed": 1}},
        {"data": [{"id": "m"}]},
        {"error": {"message": "no"}},
    ]
    seeds = [
        f"{200 if number < 2 else 400}\n{json.dumps(body)}".encode() for number, body in enumerate(bodies)
    ]
    return FuzzTarget(seeds, run, (), ("cli/client.py", "cli/run_batch.py"), change_lines, 0.5, loop.close)


async def _ask_batch(transport: httpx.MockTransport, output: Path) -> None:
    output.unlink(missing_ok=True)
    async with httpx.AsyncClient(base_url=URL, transport=transport) as http:
        with BatchOutput(output) as answers:
            await answer_all(
                BatchClient(http), iter([BatchLine(1, "a", CHAT, {})]), answers, BatchSummary(), 1
            )
