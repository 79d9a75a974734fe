"""Usage of a real server with mixed clients, whose engine and whose API process are killed."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from foreword.server.auth.usage_db import Usage, read_usage
from tests.cli.test_serve import engine_pid
from tests.server.auth.test_keys import key_of, keyed, write
from tests.server.test_usage import answer_usage, without_drafts
from tests.support.client_answers import is_gone
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.full

CLIENTS = ("ann", "ben", "cat", "dan", "eve", "fay")
QUESTION = "What is speculative decoding, and why does it not change the answer?"
USER = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 24
LARGEST = 300  # tokens of the largest request below, with its prompt
# A stream that was cut raises the HTTP library's own error, whichever of both a client has.
CUT = tuple(importlib.import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name))
USAGE_IN_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def ask(http: httpx.Client, url: str, key: str, number: int) -> Usage:
    """Tokens of one whole answer; the endpoints and SDKs take turns. Raises if it is not whole."""
    name, kind = f"{key} {number}: {QUESTION}", number % 8
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client,
        anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=WAIT_S) as claude,
    ):
        if kind == 0:
            chunks = client.chat.completions.create(
                model="demo",
                messages=USER,
                max_tokens=MAX_TOKENS,
                n=2,
                **USAGE_IN_STREAM,  # type: ignore[call-overload]
            )
            (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
            details = usage.prompt_tokens_details
            return Usage(1, usage.prompt_tokens, details.cached_tokens, usage.completion_tokens)
        if kind == 1:
            with claude.messages.stream(model="demo", messages=USER, max_tokens=MAX_TOKENS) as stream:  # type: ignore[arg-type]
                message = stream.get_final_message().usage
            cached = message.cache_read_input_tokens or 0
            num_prompt = message.input_tokens + cached + (message.cache_creation_input_tokens or 0)
            return Usage(1, num_prompt, cached, message.output_tokens)
    path, body = (
        ("/v1/chat/completions", {"messages": USER, "max_tokens": MAX_TOKENS, "stop": ["the"]}),
        ("/v1/completions", {"prompt": [name, "Foreword"], "n": 2, "max_tokens": MAX_TOKENS}),
        ("/v1/responses", {"input": name, "stream": True, "max_output_tokens": MAX_TOKENS}),
        ("/v1/embeddings", {"input": [name, QUESTION]}),
        ("/v1/rerank", {"query": name, "documents": [QUESTION, "Foreword"]}),
        ("/v1/completions", {"prompt": name, "max_tokens": MAX_TOKENS, **USAGE_IN_STREAM}),
    )[kind - 2]
    answer = http.post(url + path, json={"model": "demo", **body}, headers=keyed(key))
    answer.raise_for_status()
    return answer_usage(answer)


@contextmanager
def serve(folder: Path) -> Iterator[ServerProcess]:
    write(folder / "keys.yaml", *map(key_of, CLIENTS), key_of("root", admin=True))
    files = ("--api-key-file", str(folder / "keys.yaml"), "--usage-db", str(folder / "usage.db"))
    with ServerProcess(Config(threads=1), files) as server:
        yield server


def stored(folder: Path) -> dict[str, Usage]:
    return {group[0]: without_drafts(usage) for group, usage in read_usage(folder / "usage.db", ("key",))}


def run_clients(url: str, goes_on: Callable[[int], bool], counts: list[int]) -> dict[str, Usage]:
    """Sums of whole answers by key. A client ends at the first answer that fails, or if `goes_on` says so."""

    def run(index: int) -> Usage:
        total = Usage()
        with httpx.Client(timeout=WAIT_S) as http:
            for number in count(index):
                if not goes_on(number):
                    return total
                try:
                    total = total.plus(ask(http, url, CLIENTS[index], number))
                except (*CUT, openai.APIError, anthropic.APIError, ValueError):
                    return total
                counts[index] += 1
        raise AssertionError

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        return dict(zip(CLIENTS, pool.map(run, range(len(CLIENTS))), strict=True))


def test_usage_is_the_sum_of_all_answers_when_the_engine_is_killed(tmp_path: Path) -> None:
    counts = [0] * len(CLIENTS)
    with serve(tmp_path) as server:

        def disturb() -> None:
            for target in (1, 2):
                wait_until(lambda target=target: min(counts) >= target)
                engine = engine_pid(server)
                os.kill(engine, signal.SIGKILL)
                wait_until(lambda engine=engine: is_gone(engine))

        killer = threading.Thread(target=disturb)
        killer.start()
        sums = run_clients(server.url, lambda number: number < 16, counts)
        killer.join()
        assert [counts[i] for i in range(len(CLIENTS))] == [16 - i for i in range(len(CLIENTS))], (
            "none failed"
        )
        assert stored(tmp_path) == sums
        restarts = [
            line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if "restarts_total{" in line
        ]
        assert restarts and restarts[0].endswith(" 2.0")


def test_killed_server_loses_no_whole_answer(tmp_path: Path) -> None:
    """Of the one answer of each client that the kill cut off, the file has a part."""
    counts = [0] * len(CLIENTS)
    with serve(tmp_path) as server:

        def kill() -> None:
            wait_until(lambda: min(counts) >= 3)
            os.kill(server.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        whole = run_clients(server.url, lambda number: True, counts)
        killer.join()
        assert server.wait(WAIT_S) == -signal.SIGKILL
    found = stored(tmp_path)
    for key in CLIENTS:
        cut = Usage(*(have - got for have, got in zip(found[key], whole[key], strict=True)))
        assert whole[key].requests == counts[CLIENTS.index(key)] >= 3
        assert cut.requests in (0, 1), "it was committed, and its last byte was not sent"
        assert min(cut) >= 0 and cut.errors == 0 and cut.tokens <= LARGEST, f"{key}: {cut}"
    with serve(tmp_path) as server:  # the file is as good as before
        again = run_clients(server.url, lambda number: number < 8, [0] * len(CLIENTS))
        assert stored(tmp_path) == {key: found[key].plus(again[key]) for key in CLIENTS}
