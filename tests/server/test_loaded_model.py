"""Chat templates are rendered in few threads, so that a slow template does not stall the server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.server.intake import NUM_WORKERS
from foreword.tokenizer.chat_template import ChatTemplate
from tests.server.conftest import run_server
from tests.support.fakes import FakeEngineClient, byte_tokenizer

SLOW = "{% for i in range(100000) %}{{ 'a' if i % 7 == 8 }}{% endfor %}x"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_slow_template_uses_few_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []  # thread and number of concurrent renders
    render, running = ChatTemplate.render, threading.Semaphore(1000)

    def count(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        with running:
            seen.append((threading.current_thread().name, 1000 - running._value))
            return render(self, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", count)
    with run_server(Config(), FakeEngineClient(), tokenizer=byte_tokenizer(SLOW)) as server:
        seen.clear()  # renderings while loading
        with ThreadPoolExecutor(8) as clients:
            replies = list(clients.map(lambda _: server.http.post(path, json=BODY), range(8)))
        assert {reply.status_code for reply in replies} == {200}
        assert len(seen) == 8 and threading.main_thread().name not in dict(seen)
        assert max(count for _, count in seen) <= NUM_WORKERS - 1  # of one key
