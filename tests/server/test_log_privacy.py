"""Log lines above level debug hold no prompt, answer or key."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from foreword.config.options import Config
from foreword.errors import InvalidRequest, Overloaded
from foreword.utils.logging import RedactingFormatter, set_up_logging
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput, byte_tokenizer

CHAT = "/v1/chat/completions"
KEY, WRONG, PROMPT, ANSWER, STOP = (
    "sentinel-key",
    "sentinel-wrong",
    "sentinel-prompt",
    "sentinel-answer",
    "sentinel-stop",
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception(m.content) }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def logged() -> Iterator[tuple[RunningServer, io.StringIO]]:
    """A server, and its log at level info in the format of `foreword serve`."""
    kept, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(kept)
    handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = Config(api_key=KEY, max_waiting=4, max_body_mb=1)
        with run_server(config, FakeEngineClient(), key=KEY, tokenizer=byte_tokenizer(TEMPLATE)) as server:
            yield server, kept
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def post(server: RunningServer, key: str = KEY, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": PROMPT}], **fields}
    return server.http.post(f"{path}?key={KEY}", json=body, headers={"Authorization": f"Bearer {key}"})


def fail(error: BaseException) -> Callable[[Any], Any]:
    def submit(_: Any) -> Any:
        raise error

    return submit


def test_log_has_no_prompt_or_answer(
    logged: tuple[RunningServer, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, kept = logged
    server.set_output(FakeOutput(ANSWER))
    for stream in (False, True):
        reply = post(
            server,
            stream=stream,
            stop=STOP,
            bad_words=[PROMPT],
            prediction={"type": "content", "content": ANSWER},
        )
        assert reply.status_code == 200
    assert post(server, temperature=PROMPT).status_code == 400
    assert post(server, key=WRONG).status_code == 401
    assert post(server, n=5).status_code == 400
    assert post(server, messages=[{"role": "assistant", "content": PROMPT}]).status_code == 400
    assert (
        post(
            server, response_format={"type": "json_schema", "json_schema": {"name": PROMPT, "schema": 5}}
        ).status_code
        == 400
    )
    assert (
        server.http.get(f"/nothing?{PROMPT}", headers={"Authorization": f"Bearer {KEY}"}).status_code == 404
    )
    for error, status in ((InvalidRequest(PROMPT, "prompt"), 400), (Overloaded(PROMPT), 429)):
        server.set_output(FakeOutput(ANSWER, fail_after=0, error=error))
        assert post(server).status_code == status
        server.set_output(FakeOutput(ANSWER, fail_after=2, error=error))
        assert post(server, stream=True).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(server.client, "submit", fail(RuntimeError(PROMPT)))
        assert post(server).status_code == 500
        try:
            raise ValueError(ANSWER)
        except ValueError as cause:
            chained = RuntimeError(PROMPT)
            chained.__cause__ = cause
        patch.setattr(server.client, "submit", fail(chained))
        assert post(server, stream=True).status_code == 500
    server.set_output(FakeOutput(ANSWER, hang_after=2))
    body, headers = (
        {"messages": [{"role": "user", "content": PROMPT}], "stream": True},
        {"Authorization": f"Bearer {KEY}"},
    )
    with server.http.stream("POST", CHAT, json=body, headers=headers) as left:
        next(left.iter_lines())
    server.wait_until_idle()
    log_text = kept.getvalue()
    assert "sentinel" not in log_text, [line for line in log_text.splitlines() if "sentinel" in line]
    assert "Traceback" in log_text and "RuntimeError" in log_text and "ValueError" in log_text, (
        "server faults are logged"
    )
    assert "in submit" in log_text, "with their location"
    assert log_text.count("request chatcmpl-") >= 5 and "stop=..." in log_text


@pytest.mark.parametrize(("level", "told"), [("info", False), ("debug", True)])
def test_exception_texts_are_logged_at_debug_only(
    level: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    set_up_logging(level, "%(message)s")
    try:
        raise KeyError(PROMPT)
    except KeyError:
        logging.getLogger("foreword.test").exception("it failed")
    assert "it failed" in stream.getvalue() and "KeyError" in stream.getvalue()
    assert (PROMPT in stream.getvalue()) == told
