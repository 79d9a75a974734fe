"""Pictures over HTTP: they reach the engine, or a 4xx says why not; what they take is bounded, and given back on every path."""

from __future__ import annotations

import gc
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
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
from foreword.multimodal.qwen_vl import QwenVLProcessor
from foreword.server.image_intake import MAX_CONCURRENT_IMAGES
from foreword.server.middleware import BodyLimitMiddleware
from foreword.server.protocol.chat import ChatBody
from tests.server.conftest import MODEL, RunningServer, run_server
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

BYTES = 3 * SIDE * SIDE  # of the pixels of any picture
TEXT = {"type": "text", "text": "What is it?"}
CHAT = "/v1/chat/completions"


def serving(config: Config | None = None, max_model_len: int = 512) -> Any:
    client = FakeEngineClient(info=engine_info(max_model_len))
    return run_server(config, client, tokenizer=image_tokenizer(), processor=image_processor())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("pictures")
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
    """Bytes that pictures take."""
    looking = server.app.state.server.looking
    return int(looking.memory.held)


def wait_until_free(server: RunningServer) -> None:
    server.wait_until_idle()
    deadline = time.monotonic() + 5
    while held(server):
        assert time.monotonic() < deadline, "what pictures took was not given back"
        time.sleep(0.005)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def post(server: RunningServer, path: str = CHAT, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def refused(reply: httpx.Response, status: int = 400) -> tuple[str, str]:
    """(param, message) of an error."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    return error["param"], error["message"]


def test_pictures_reach_the_engine_once_for_all_choices(served: RunningServer) -> None:
    first, second = image_part(png("red")), image_part(png("blue", (10, 90)))
    answer = served.chat(messages=user(first, TEXT, second), n=3)
    assert len(answer.choices) == 3
    requests = served.client.submitted
    pictures = requests[0].pictures
    assert all(
        request.pictures is pictures and request.prompt_ids is requests[0].prompt_ids for request in requests
    )
    assert [picture.size for picture in pictures] == [(30, 40), (90, 10)]
    for picture in pictures:
        assert picture.pixels is not None and len(picture.pixels) == BYTES
        assert requests[0].prompt_ids[picture.start : picture.end] == (PLACEHOLDER,) * TOKENS
    assert requests[0].prompt_ids.count(PLACEHOLDER) == 2 * TOKENS
    text = bytes(token for token in requests[0].prompt_ids if token < 256)
    assert text == b"user\nWhat is it?\nassistant\n"


def test_usage_counts_what_was_seen(served: RunningServer) -> None:
    plain = served.chat(messages=user(TEXT))
    seen = served.chat(messages=user(image_part(), TEXT), n=2)
    assert seen.usage.prompt_tokens == plain.usage.prompt_tokens + TOKENS
    assert seen.usage.prompt_tokens_details.image_tokens == TOKENS
    assert not hasattr(plain.usage.prompt_tokens_details, "image_tokens")
    assert seen.usage.completion_tokens == 2 * plain.usage.completion_tokens
    chunks = list(
        served.chat(messages=user(image_part(), TEXT), stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == TOKENS


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_bytes_say_what_it_is(served: RunningServer, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), "green").save(file, kind)
    served.chat(messages=user({"type": "image_url", "image_url": data_url(file.getvalue())}))
    assert len(served.client.submitted[0].pictures) == 1


def test_files_and_hosts_that_are_allowed(served: RunningServer) -> None:
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
    by_file = served.client.submitted[-1].pictures[0].digest
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        threading.Thread(target=host.serve_forever).start()
        served.chat(
            messages=user({"type": "image_url", "image_url": f"http://127.0.0.1:{host.server_port}/x"})
        )
        host.shutdown()
    assert served.client.submitted[-1].pictures[0].digest == by_file


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "messages[0].content[1].image_url.url",
        ),
        ({"type": "image_url", "image_url": "data:image/png"}, "messages[0].content[1].image_url"),
        (
            {"type": "image_url", "image_url": {"url": "ftp://x/y.png"}},
            "messages[0].content[1].image_url.url",
        ),
        (
            {"type": "image_url", "image_url": {"url": "http://example.org/y.png"}},
            "messages[0].content[1].image_url.url",
        ),
        (
            {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
            "messages[0].content[1].image_url.url",
        ),
        (
            {"type": "image_url", "image_url": {"url": data_url()[:-40]}},
            "messages[0].content[1].image_url.url",
        ),
        (
            {"type": "image_url", "image_url": {"url": data_url(), "detail": "most"}},
            "messages[0].content[1].image_url.detail",
        ),
        ({"type": "image_url"}, "messages[0].content[1].image_url"),
        ({"type": "image", "image": "/etc/hostname"}, "messages[0].content[1]"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "messages[0].content[1]"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "messages[0].content[1]"),
    ],
)
def test_what_is_no_picture_is_named(served: RunningServer, part: dict[str, Any], param: str) -> None:
    found, message = refused(post(served, messages=user(TEXT, part)))
    assert found == param and message.startswith(param)
    assert held(served) == 0 and not served.client.submitted


def test_too_many_pictures(served: RunningServer) -> None:
    param, message = refused(post(served, messages=[*user(*[image_part()] * 2), *user(*[image_part()] * 2)]))
    assert param == "messages" and "4 pictures, of at most 3 (--max-images)" in message


def test_only_the_user_shows_pictures(served: RunningServer) -> None:
    param, _ = refused(post(served, messages=[{"role": "assistant", "content": [image_part()]}, *user(TEXT)]))
    assert param == "messages[0].content"


def test_a_text_that_looks_like_a_picture(served: RunningServer) -> None:
    for content in ("an <image> here", [TEXT, {"type": "text", "text": "<image>"}]):
        param, message = refused(post(served, messages=[{"role": "user", "content": content}]))
        assert param == "messages[0].content" and "stands for a picture" in message
    split = user(image_part(), {"type": "text", "text": "<im"}, {"type": "text", "text": "age>"})
    message = refused(post(served, messages=split))[1]
    assert (
        "template" not in message
        and "there are 1; '<image>' stands for a picture wherever it is written" in message
    )
    for prompt in ("an <image> here", [97, PLACEHOLDER], ["fine", "<image>"]):
        param, message = refused(post(served, "/v1/completions", prompt=prompt))
        assert param == "prompt" and "stands for a picture" in message
    for given in ("<image>", [97, PLACEHOLDER]):
        param, message = refused(post(served, "/v1/embeddings", input=given))
        assert param == "input" and "stands for a picture" in message


def test_a_prompt_that_is_too_long_tells_what_pictures_take(served: RunningServer) -> None:
    long = {"type": "text", "text": "x" * 600}
    param, message = refused(post(served, messages=user(image_part(), long, image_part())))
    assert param == "messages" and f", {2 * TOKENS} of them for 2 pictures;" in message
    param, _ = refused(post(served, messages=user(image_part(), TEXT), truncate_prompt_tokens=10))
    assert param == "truncate_prompt_tokens"


def test_a_prompt_with_pictures_is_counted(served: RunningServer) -> None:
    plain = post(served, "/tokenize", messages=user(TEXT)).json()["count"]
    assert post(served, "/tokenize", messages=user(image_part(), TEXT)).json()["count"] == plain + TOKENS
    assert held(served) == 0


def test_the_log_tells_how_much_was_seen_and_not_what(
    served: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "foreword")
    served.chat(
        messages=user(
            {"type": "image_url", "image_url": (served.app.state.folder / "here.png").as_uri()}, TEXT
        )
    )
    wait_until_free(served)
    post(served, messages=user(TEXT, {"type": "image_url", "image_url": "file:///secret.png"}))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if f"(0 cached, {TOKENS} for 1 picture)" in line]
    assert not [line for line in lines if "file:" in line or ".png" in line or "base64" in line]


# What pictures take.


@pytest.fixture(scope="module")
def narrow() -> Iterator[RunningServer]:
    """There is memory for three pictures."""
    with serving(Config(image_memory=str(3 * BYTES), max_body_mb=8)) as server:
        yield server


def hanging(server: RunningServer, count: int, *pictures: bytes) -> list[threading.Thread]:
    """Open requests with one picture each, or those that are given."""
    server.set_output(FakeOutput(hang_after=1))
    content = [image_part(data) for data in pictures or (png(),)]

    def ask() -> None:
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            server.chat(messages=user(*content), n=2)

    before = len(server.client.live)
    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(server.client.live) < before + 2 * count:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return threads


def end(server: RunningServer, threads: list[threading.Thread]) -> None:
    for request_id in list(server.client.live):
        server.app.state.server.generating[request_id].abort(request_id, RequestFailed("the test is over"))
    for thread in threads:
        thread.join(10)
    wait_until_free(server)


def test_open_pictures_are_bounded(narrow: RunningServer) -> None:
    threads = hanging(narrow, 3)
    assert held(narrow) == 3 * BYTES, "once for a request, however many choices it has"
    reply = post(narrow, messages=user(image_part()))
    assert "--image-memory" not in refused(reply, 429)[1] and int(reply.headers["Retry-After"]) >= 1
    assert b'rejected_total{reason="image_memory"} 1.0' in narrow.http.get("/metrics").content
    narrow.set_output(FakeOutput())
    assert post(narrow, messages=user(TEXT)).status_code == 200, "texts go on"
    end(narrow, threads)
    assert post(narrow, messages=user(*[image_part()] * 3)).status_code == 200


def test_small_pictures_need_little_room() -> None:
    """Of a model that would take pictures of more than all of the memory."""
    eyes = QwenVLProcessor(PLACEHOLDER, PLACEHOLDER_TEXT, 28, 28 * 28, 4_000_000, Resampling.BICUBIC)
    config = Config(image_memory=str(4 * BYTES))
    with run_server(
        config, FakeEngineClient(info=engine_info(512)), tokenizer=image_tokenizer(), processor=eyes
    ) as server:
        assert server.app.state.server.looking.memory.room(0) < eyes.max_pixel_bytes
        with ThreadPoolExecutor(3) as pool:
            replies = list(
                pool.map(
                    lambda _: post(server, messages=user(image_part(png("red", (28, 28))))).status_code,
                    range(12),
                )
            )
        assert replies == [200] * 12
        refused(post(server, messages=user(image_part(png("red", (280, 280))))), 413)
        wait_until_free(server)


class Stuck:
    """Workers that are busy until `go` is set; `asked` tells how often they were asked."""

    def __init__(self, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.asked = threading.Event(), 0
        monkeypatch.setattr(server.app.state.server.looking._pictures._workers, "measure", self._measure)

    def _measure(self, data: bytes, where: str) -> int:
        self.asked += 1
        assert self.go.wait(20)
        return BYTES


def until(told: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not told():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asking(server: RunningServer, count: int) -> socket.socket:
    """A connection on which a request with so many pictures was sent."""
    content = httpx.Request("POST", server.url, json={"messages": user(*[image_part()] * count)}).content
    connection = socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port or 80))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_who_leaves_while_pictures_are_read_has_no_more_read(
    narrow: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission, looking = narrow.app.state.server.admission, narrow.app.state.server.looking
    stuck = Stuck(narrow, monkeypatch)
    connections = [asking(narrow, 3) for _ in range(6)]
    until(lambda: stuck.asked == 2 and admission.open == 6)
    for connection in connections:
        connection.close()
    until(lambda: looking._open == 0)
    assert looking._turns.num_waiting == 0 and admission.open == 0 and held(narrow) == 0
    begun = stuck.asked  # whoever leaves first makes room for those who have not left yet
    assert begun <= MAX_CONCURRENT_IMAGES
    stuck.go.set()
    assert post(narrow, messages=user(image_part())).status_code == 200
    assert stuck.asked == begun + 1, "of 18 pictures no more than was begun, and the last"


def test_reading_pictures_takes_a_place(narrow: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow.app.state.server.admission, "_max_requests", 2)
    stuck = Stuck(narrow, monkeypatch)
    connections = [asking(narrow, 1) for _ in range(2)]
    until(lambda: stuck.asked == 2)
    assert "2 requests are open of at most 2" in refused(post(narrow, messages=user(TEXT)), 429)[1]
    stuck.go.set()
    for connection in connections:
        assert b"200 OK" in connection.recv(100)
        connection.close()
    wait_until_free(narrow)
    assert post(narrow, messages=user(image_part()), n=2).status_code == 200, (
        "its own place is not in its way"
    )


def test_one_request_may_be_too_much_alone(narrow: RunningServer) -> None:
    param, message = refused(post(narrow, messages=user(*[image_part()] * 4)), 413)
    assert param == "messages" and "(--image-memory)" in message
    assert held(narrow) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_gives_everything_back(narrow: RunningServer, stream: bool) -> None:
    narrow.set_output(FakeOutput(hang_after=1))
    body = httpx.Request("POST", narrow.url + CHAT, json={"messages": user(image_part()), "stream": stream})
    with socket.create_connection(
        (httpx.URL(narrow.url).host, httpx.URL(narrow.url).port or 80)
    ) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body.content)}\r\n\r\n"
        connection.sendall(head.encode() + body.content)
        deadline = time.monotonic() + 10
        while not narrow.client.live:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert held(narrow) == BYTES
    wait_until_free(narrow)


@pytest.mark.parametrize("script", [FakeOutput(fail_after=0), FakeOutput(fail_after=2), FakeOutput()])
@pytest.mark.parametrize("stream", [False, True])
def test_every_end_gives_everything_back(narrow: RunningServer, script: FakeOutput, stream: bool) -> None:
    narrow.set_output(script)
    post(narrow, messages=user(image_part()), stream=stream)
    wait_until_free(narrow)


def test_a_refusal_behind_the_pictures_gives_everything_back(
    narrow: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(post(narrow, messages=user(image_part(), {"type": "text", "text": "x" * 600})))
    assert held(narrow) == 0
    refused(post(narrow, messages=user(image_part()), bad_words=[""]))
    assert held(narrow) == 0
    refused(post(narrow, messages=user(image_part(), image_part(b"none"))))
    assert held(narrow) == 0
    monkeypatch.setattr(narrow.app.state.server.admission, "_max_tokens", 3)
    refused(post(narrow, messages=user(image_part())))
    assert held(narrow) == 0


def test_what_was_sent_is_not_kept_while_its_answer_is_waited_for(narrow: RunningServer) -> None:
    noise = Image.effect_noise((1200, 1200), 100)
    file = io.BytesIO()
    noise.save(file, "PNG")
    threads = hanging(narrow, 2, file.getvalue())
    gc.collect()
    alive = gc.get_objects()
    assert not [one for one in alive if type(one) is ChatBody], "the parsed body"
    kept = [vars(one).keys() for one in alive if type(one) is Request and one.url.path == CHAT]
    assert len(kept) >= 2 and not any({"_body", "_json"} & names for names in kept), "the body itself"
    (limit,) = (one for one in alive if type(one) is BodyLimitMiddleware and owns(narrow, one))
    assert limit.held_bytes == 0
    end(narrow, threads)


def owns(server: RunningServer, layer: BodyLimitMiddleware) -> bool:
    """Whether the layer is one of this server's."""
    found = server.app.middleware_stack
    while found is not None and found is not layer:
        found = getattr(found, "app", None) or getattr(found, "_app", None)
    return found is layer


def test_a_model_without_eyes(served: RunningServer) -> None:
    with run_server() as blind:
        param, message = refused(post(blind, messages=user(TEXT, image_part())))
        assert param == "messages[0].content[1]" and "this model takes none" in message
        assert MODEL in blind.http.get("/v1/models").text
