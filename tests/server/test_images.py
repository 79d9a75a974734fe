"""Images over HTTP: they reach the engine or a 4xx says why; their memory is bounded and released."""

from __future__ import annotations

import gc
import io
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from PIL.Image import Resampling
from starlette.requests import Request

from foreword.config.options import Config
from foreword.errors import RequestFailed
from foreword.multimodal.qwen_vl_processor import QwenVLProcessor
from foreword.server.apis.chat.body import ChatBody
from foreword.server.http.middleware import BodyLimitMiddleware
from tests.server.conftest import RunningServer, json_post, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, engine_info
from tests.support.images import (
    PLACEHOLDER,
    PLACEHOLDER_TEXT,
    SIDE,
    TOKENS,
    data_url,
    image_part,
    image_processor,
    image_tokenizer,
    png,
)
from tests.support.waiting import WAIT_S, wait_until

BYTES = 3 * SIDE * SIDE  # bytes of the pixels of any image
TEXT = {"type": "text", "text": "What is it?"}
CHAT = "/v1/chat/completions"


def serving(config: Config | None = None, max_model_len: int = 512) -> Any:
    client = FakeEngineClient(info=engine_info(max_model_len))
    return run_server(config, client, tokenizer=image_tokenizer(), processor=image_processor())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("images")
    (folder / "here.png").write_bytes(png("blue"))
    config = Config(
        max_images=3, allowed_local_media_path=str(folder), allowed_media_domains="127.0.0.1,localhost"
    )
    with serving(config) as server:
        server.app.state.folder = folder
        yield server


@pytest.fixture
def served(shared: RunningServer) -> Iterator[RunningServer]:
    shared.client.script = FakeOutput()
    shared.client.submitted.clear()
    yield shared
    wait_until_free(shared)


def held(server: RunningServer) -> int:
    """Image memory in use, in bytes."""
    intake = server.app.state.models.loaded[0].image_intake
    return int(intake.memory.held_bytes)


def wait_until_free(server: RunningServer) -> None:
    server.wait_until_idle()
    wait_until(lambda: not held(server))  # image memory is released


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def post(server: RunningServer, path: str = CHAT, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def error_of(reply: httpx.Response, status: int = 400) -> tuple[str, str]:
    """(param, message) of an error."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    return error["param"], error["message"]


def test_images_are_shared_by_all_choices(served: RunningServer) -> None:
    first, second = image_part(png("red")), image_part(png("blue", (10, 90)))
    answer = served.chat(messages=user(first, TEXT, second), n=3)
    assert len(answer.choices) == 3
    requests = served.client.submitted
    images = requests[0].images
    assert all(
        request.images is images and request.prompt_ids is requests[0].prompt_ids for request in requests
    )
    assert [image.original_size for image in images] == [(30, 40), (90, 10)]
    for image in images:
        assert image.pixels is not None and len(image.pixels) == BYTES
        assert requests[0].prompt_ids[image.start : image.end] == (PLACEHOLDER,) * TOKENS
    assert requests[0].prompt_ids.count(PLACEHOLDER) == 2 * TOKENS
    text = bytes(token for token in requests[0].prompt_ids if token < 256)
    assert text == b"user\nWhat is it?\nassistant\n"


def test_usage_counts_image_tokens(served: RunningServer) -> None:
    plain = served.chat(messages=user(TEXT))
    seen = served.chat(messages=user(image_part(), TEXT), n=2)
    assert seen.usage.prompt_tokens == plain.usage.prompt_tokens + TOKENS
    assert seen.usage.prompt_tokens_details.image_tokens == TOKENS
    assert getattr(plain.usage.prompt_tokens_details, "image_tokens", None) is None
    assert seen.usage.completion_tokens == 2 * plain.usage.completion_tokens
    chunks = list(
        served.chat(messages=user(image_part(), TEXT), stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == TOKENS


def test_allowed_files_and_hosts(served: RunningServer) -> None:
    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png("blue"))

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    folder: Path = served.app.state.folder
    served.chat(
        messages=user(
            {"type": "image_url", "image_url": {"url": (folder / "here.png").as_uri(), "detail": "low"}}
        )
    )
    by_file = served.client.submitted[-1].images[0].digest
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        threading.Thread(target=host.serve_forever).start()
        served.chat(
            messages=user({"type": "image_url", "image_url": f"http://127.0.0.1:{host.server_port}/x"})
        )
        host.shutdown()
    assert served.client.submitted[-1].images[0].digest == by_file


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "ftp://x/y.png"}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": "http://example.org/y.png"}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": data_url()[:-40]}}, ".image_url.url"),
        ({"type": "image_url", "image_url": "data:image/png"}, ".image_url"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, ""),
    ],
)
def test_invalid_image_is_named(served: RunningServer, part: dict[str, Any], field: str) -> None:
    param = "messages[0].content[1]" + field
    found, message = error_of(post(served, messages=user(TEXT, part)))
    assert found == param and message.startswith(param)
    assert held(served) == 0 and not served.client.submitted


def test_too_many_images(served: RunningServer) -> None:
    param, message = error_of(post(served, messages=[*user(*[image_part()] * 2), *user(*[image_part()] * 2)]))
    assert param == "messages" and "4 images, of at most 3 (--max-images)" in message


def test_only_user_messages_have_images(served: RunningServer) -> None:
    param, _ = error_of(
        post(served, messages=[{"role": "assistant", "content": [image_part()]}, *user(TEXT)])
    )
    assert param == "messages[0].content"


def test_placeholder_text_is_refused(served: RunningServer) -> None:
    for content in ("an <image> here", [TEXT, {"type": "text", "text": "<image>"}]):
        param, message = error_of(post(served, messages=[{"role": "user", "content": content}]))
        assert param == "messages[0].content" and "represents an image" in message
    split = user(image_part(), {"type": "text", "text": "<im"}, {"type": "text", "text": "age>"})
    message = error_of(post(served, messages=split))[1]
    assert "template" not in message and "got 1; '<image>' represents an image" in message
    for prompt in ("an <image> here", [97, PLACEHOLDER], ["fine", "<image>"]):
        param, message = error_of(post(served, "/v1/completions", prompt=prompt))
        assert param == "prompt" and "represents an image" in message
    for given in ("<image>", [97, PLACEHOLDER]):
        param, message = error_of(post(served, "/v1/embeddings", input=given))
        assert param == "input" and "represents an image" in message


def test_too_long_prompt_reports_image_tokens(served: RunningServer) -> None:
    long = {"type": "text", "text": "x" * 600}
    param, message = error_of(post(served, messages=user(image_part(), long, image_part())))
    assert param == "messages" and f", {2 * TOKENS} of them for 2 images;" in message
    param, _ = error_of(post(served, messages=user(image_part(), TEXT), truncate_prompt_tokens=10))
    assert param == "truncate_prompt_tokens"


def test_tokenize_counts_image_tokens(served: RunningServer) -> None:
    plain = post(served, "/tokenize", messages=user(TEXT)).json()["count"]
    assert post(served, "/tokenize", messages=user(image_part(), TEXT)).json()["count"] == plain + TOKENS
    assert held(served) == 0


def test_log_has_image_tokens_and_no_content(served: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "foreword")
    served.chat(
        messages=user(
            {"type": "image_url", "image_url": (served.app.state.folder / "here.png").as_uri()}, TEXT
        )
    )
    wait_until_free(served)
    post(served, messages=user(TEXT, {"type": "image_url", "image_url": "file:///secret.png"}))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if f"(0 cached, {TOKENS} for 1 image)" in line]
    assert not [line for line in lines if "file:" in line or ".png" in line or "base64" in line]


# Image memory


@pytest.fixture(scope="module")
def small_server() -> Iterator[RunningServer]:
    """A server with memory for three images."""
    with serving(Config(image_memory=str(3 * BYTES), max_body_mb=8)) as server:
        yield server


def open_requests(server: RunningServer, count: int, *images: bytes) -> list[threading.Thread]:
    """Open requests with one image each, or with the given bodies."""
    server.set_output(FakeOutput(hang_after=1))
    content = [image_part(data) for data in images or (png(),)]

    def ask() -> None:
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            server.chat(messages=user(*content), n=2)

    before = len(server.client.live)
    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.client.live) >= before + 2 * count)
    return threads


def end(server: RunningServer, threads: list[threading.Thread]) -> None:
    for request_id in list(server.client.live):
        generation = server.app.state.models.generations.get(request_id)
        if generation is not None:  # it ends with the first of its choices
            generation.abort(request_id, RequestFailed("the test is over"))
    for thread in threads:
        thread.join(WAIT_S)
    wait_until_free(server)


def test_image_memory_is_bounded(small_server: RunningServer) -> None:
    threads = open_requests(small_server, 3)
    assert held(small_server) == 3 * BYTES, "once per request, not per choice"
    reply = post(small_server, messages=user(image_part()))
    assert "--image-memory" not in error_of(reply, 429)[1] and int(reply.headers["Retry-After"]) >= 1
    assert (
        b'rejected_total{model="fake-model",reason="image_memory"} 1.0'
        in small_server.http.get("/metrics").content
    )
    small_server.set_output(FakeOutput())
    assert post(small_server, messages=user(TEXT)).status_code == 200, "text requests are not blocked"
    end(small_server, threads)
    assert post(small_server, messages=user(*[image_part()] * 3)).status_code == 200


def test_small_images_reserve_little() -> None:
    """The model's largest image is larger than all of the memory."""
    eyes = QwenVLProcessor(PLACEHOLDER, PLACEHOLDER_TEXT, 28, 28 * 28, 4_000_000, Resampling.BICUBIC)
    config = Config(image_memory=str(4 * BYTES))
    with run_server(
        config, FakeEngineClient(info=engine_info(512)), tokenizer=image_tokenizer(), processor=eyes
    ) as server:
        assert server.app.state.models.loaded[0].image_intake.memory._limit_bytes < eyes.max_pixel_bytes
        with ThreadPoolExecutor(3) as pool:
            replies = list(
                pool.map(
                    lambda _: post(server, messages=user(image_part(png("red", (28, 28))))).status_code,
                    range(12),
                )
            )
        assert replies == [200] * 12
        error_of(post(server, messages=user(image_part(png("red", (280, 280))))), 413)
        wait_until_free(server)


class StuckWorkers:
    """Workers that block until `go` is set; `asked` counts their calls."""

    def __init__(self, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.num_calls = threading.Event(), 0
        monkeypatch.setattr(
            server.app.state.models.loaded[0].image_intake._loader, "pixel_bytes", self._measure
        )

    def _measure(self, data: bytes, where: str) -> int:
        self.num_calls += 1
        assert self.go.wait(WAIT_S)
        return BYTES


def start_request(server: RunningServer, count: int) -> socket.socket:
    """A connection that has sent a request with `count` images."""
    connection = server.connect()
    connection.sendall(json_post(CHAT, {"messages": user(*[image_part()] * count)}))
    return connection


def test_reading_images_counts_as_open(small_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_server.app.state.models.admission, "_max_requests", 2)
    stuck = StuckWorkers(small_server, monkeypatch)
    connections = [start_request(small_server, 1) for _ in range(2)]
    wait_until(lambda: stuck.num_calls == 2)
    assert "2 requests are open of at most 2" in error_of(post(small_server, messages=user(TEXT)), 429)[1]
    stuck.go.set()
    for connection in connections:
        assert b"200 OK" in connection.recv(100)
        connection.close()
    wait_until_free(small_server)
    assert post(small_server, messages=user(image_part()), n=2).status_code == 200, (
        "a request's own reservation does not refuse it"
    )


def test_one_request_may_exceed_the_memory(small_server: RunningServer) -> None:
    param, message = error_of(post(small_server, messages=user(*[image_part()] * 4)), 413)
    assert param == "messages" and "(--image-memory)" in message
    assert held(small_server) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_releases_image_memory(small_server: RunningServer, stream: bool) -> None:
    small_server.set_output(FakeOutput(hang_after=1))
    body = {"messages": user(image_part()), "stream": stream}
    small_server.disconnect(CHAT, body, lambda: small_server.client.live and held(small_server) == BYTES)
    wait_until_free(small_server)


@pytest.mark.parametrize("script", [FakeOutput(fail_after=0), FakeOutput(fail_after=2), FakeOutput()])
@pytest.mark.parametrize("stream", [False, True])
def test_every_end_releases_image_memory(
    small_server: RunningServer, script: FakeOutput, stream: bool
) -> None:
    small_server.set_output(script)
    post(small_server, messages=user(image_part()), stream=stream)
    wait_until_free(small_server)


def test_refusal_after_images_releases_memory(
    small_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_of(post(small_server, messages=user(image_part(), {"type": "text", "text": "x" * 600})))
    assert held(small_server) == 0
    error_of(post(small_server, messages=user(image_part()), bad_words=[""]))
    assert held(small_server) == 0
    error_of(post(small_server, messages=user(image_part(), image_part(b"none"))))
    assert held(small_server) == 0
    monkeypatch.setattr(small_server.app.state.models.admission, "_max_tokens", 3)
    error_of(post(small_server, messages=user(image_part())))
    assert held(small_server) == 0


@pytest.mark.full
def test_body_is_freed_during_the_answer(small_server: RunningServer) -> None:
    noise = Image.effect_noise((1200, 1200), 100)
    file = io.BytesIO()
    noise.save(file, "PNG")
    threads = open_requests(small_server, 2, file.getvalue())
    gc.collect()
    alive = gc.get_objects()
    assert not [one for one in alive if type(one) is ChatBody], "the parsed body"
    kept = [vars(one).keys() for one in alive if type(one) is Request and one.url.path == CHAT]
    assert len(kept) >= 2 and not any({"_body", "_json"} & names for names in kept), "the body itself"
    (limit,) = (one for one in alive if type(one) is BodyLimitMiddleware and belongs_to(small_server, one))
    assert limit.held_bytes == 0
    end(small_server, threads)


def belongs_to(server: RunningServer, layer: BodyLimitMiddleware) -> bool:
    """Whether this middleware belongs to this server."""
    found = server.app.middleware_stack
    while found is not None and found is not layer:
        found = getattr(found, "app", None) or getattr(found, "_app", None)
    return found is layer
