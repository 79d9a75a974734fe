"""Templates that take long are rendered away from everybody else, and few at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.server.context import MAX_RENDER_THREADS
from foreword.tokenizer.chat_template import ChatTemplate
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import CHATML, FakeEngineClient, byte_tokenizer

SLOW = "{% for i in range(100000) %}{{ 'a' if i % 7 == 8 }}{% endfor %}x"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@contextmanager
def told(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunningServer, list[tuple[str, int]]]]:
    """A server, and for each rendering its thread and how many were under way with it."""
    seen: list[tuple[str, int]] = []
    render, under_way = ChatTemplate.render, threading.Semaphore(1000)

    def noting(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        with under_way:
            seen.append((threading.current_thread().name, 1000 - under_way._value))
            return render(self, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", noting)
    with run_server(Config(), FakeEngineClient(), tokenizer=byte_tokenizer(template)) as server:
        yield server, seen


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_slow_template_leaves_the_loop_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with told(SLOW, monkeypatch) as (server, seen):
        with ThreadPoolExecutor(8) as callers:
            replies = list(callers.map(lambda _: server.http.post(path, json=BODY), range(8)))
        assert {reply.status_code for reply in replies} == {200}
        assert len(seen) == 8 and all(name.startswith("asyncio") for name, _ in seen)
        assert max(count for _, count in seen) <= MAX_RENDER_THREADS


def test_a_quick_one_stays_in_it_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with told(CHATML, monkeypatch) as (server, seen):
        for _ in range(3):
            assert server.http.post("/tokenize", json=BODY).status_code == 200
        assert [name.startswith("asyncio") for name, _ in seen] == [True, False, False]
