"""Servers with a target model, a draft model and an encoder, all under load."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from tests.support.checkpoints import write_checkpoint
from tests.support.embedding_checkpoints import write_encoder
from tests.support.waiting import WAIT_S, wait_until

# tests/embedding has the encoder's restart, apis/embeddings both models' routes
pytestmark = pytest.mark.full
PROMPT = "the thing in the thing in the"
TEXTS = [f"text {number} of the thing in the {'other ' * (number % 9)}" for number in range(24)]
GENERATE = {
    "model": "tiny",
    "max_tokens": 90,
    "ignore_eos": True,
    "temperature": 0.8,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("embedding")
    tiny = write_checkpoint(folder / "tiny", seed=5)
    write_encoder(folder / "bert")
    config = Config(
        model=str(tiny),
        draft_model=str(tiny),
        embedding_model=str(folder / "bert"),
        speculate="suffix,draft",
        draft_length="fixed",
        num_speculative_tokens=3,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=256,
        threads=1,
    )
    with ServerProcess(config) as running:
        yield running
        assert running.stop() == 0, running.read_log()[-5:]


def vectors(server: ServerProcess, model: str, texts: list[str], **fields: Any) -> list[list[float]]:
    body = {"model": model, "input": texts, **fields}
    reply = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=WAIT_S)
    assert reply.status_code == 200, reply.text
    return [item["embedding"] for item in reply.json()["data"]]


def tokens(server: ServerProcess, seed: int) -> list[int]:
    """Token ids of a stream."""
    body = {**GENERATE, "prompt": PROMPT, "seed": seed, "stream": True}
    found: list[int] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    return found


def test_models_serve_concurrently(server: ServerProcess) -> None:
    """Speculative streams and vectors of both models have the same bits as on an idle server."""
    asked: dict[str, Callable[[], Any]] = {
        **{f"tokens {seed}": lambda seed=seed: tokens(server, seed) for seed in range(4)},
        **{f"{p}": lambda p=p: vectors(server, "tiny", TEXTS, pooling=p) for p in ("last", "mean", "cls")},
        **{f"bert {size}": lambda size=size: vectors(server, "bert", TEXTS[:size]) for size in (1, 24)},
    }
    quiet = {name: ask() for name, ask in asked.items()}
    with ThreadPoolExecutor(2 * len(asked)) as pool:
        busy = {(name, turn): pool.submit(ask) for turn in range(3) for name, ask in asked.items()}
    for (name, _), answer in busy.items():
        assert answer.result() == quiet[name], name
    scraped = httpx.get(f"{server.url}/metrics").text
    assert 'foreword_spec_drafter_errors_total{drafter="draft",model="tiny"} 0.0' in scraped
    drafted = next(
        line
        for line in scraped.splitlines()
        if line.startswith('foreword_spec_draft_tokens_total{drafter="draft",model="tiny"}')
    )
    assert float(drafted.split()[-1]) > 100
    (line,) = [line for line in server.banner_lines if line.startswith("encoder: ")]
    assert line.startswith("encoder: bert (bert, ") and "48 values" in line


def test_disconnected_clients_free_everything(server: ServerProcess) -> None:
    """Disconnects amid long lists; afterwards all blocks are free and the engine's idle check has passed."""

    def leave(model: str) -> None:
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/embeddings", json={"model": model, "input": TEXTS * 80}, timeout=0.15
            )

    threads = [threading.Thread(target=leave, args=(model,)) for model in ("tiny", "bert", "tiny", "bert")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    idle = [
        f'foreword_{name}{{model="tiny"}} 0.0'
        for name in ("kv_cache_usage_ratio", "requests_running", "requests_waiting")
    ]
    wait_until(lambda: all(line in httpx.get(f"{server.url}/metrics").text for line in idle))
    assert vectors(server, "bert", TEXTS[:2]) and vectors(server, "tiny", TEXTS[:2])
