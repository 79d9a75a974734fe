"""`foreword serve --models` as a process: three models of which two are in memory at a time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from tests.cli.test_serve import children, engine_pid
from tests.support.checkpoints import write_checkpoint
from tests.support.waiting import WAIT_S, wait_until

NAMES = ("one", "two", "three")
NUM_TOKENS = 800  # so that an engine is killed in the middle
LONG = {"prompt": "the thing in the", "max_tokens": NUM_TOKENS, "seed": 3, "extra_body": {"ignore_eos": True}}
MODELS = """
max_loaded_models: 2
max_swap_wait: 0.2
defaults: {threads: 1, kv_cache_memory: 4000tokens, max_model_len: 1000, speculate: off}
models:
  one: {model: FOLDER/one, variants: {brief: {max_tokens: 3}}}
  two: {model: FOLDER/two}
  three: {model: FOLDER/three}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        write_checkpoint(folder / name, seed=seed, max_position_embeddings=1000)
    (folder / "models.yaml").write_text(MODELS.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(Config(), ["--models", str(folder / "models.yaml")]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def cards(server: ServerProcess) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}


def loads(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f'foreword_model_loads_total{{model="{name}"}}')]
    return float(line.split()[-1])


@pytest.mark.full
def test_openai_client_uses_all_models(server: ServerProcess, client: openai.OpenAI) -> None:
    answers: dict[str, set[tuple[str, str | None]]] = {name: set() for name in NAMES}
    for name in (*NAMES, *NAMES):
        answer = client.completions.create(model=name, **LONG)
        assert (answer.model, answer.usage and answer.usage.completion_tokens) == (name, NUM_TOKENS)
        answers[name].add((answer.choices[0].text, answer.system_fingerprint))
    # A model that was loaded again gives the same tokens.
    assert [len(answers[name]) for name in NAMES] == [1, 1, 1]
    assert len({text for given in answers.values() for text, _ in given}) == 3
    assert all(loads(server, name) == 2 for name in NAMES)
    brief = client.chat.completions.create(model="one:brief", messages=[{"role": "user", "content": "Hi"}])
    assert brief.model == "one:brief" and brief.usage and brief.usage.completion_tokens == 3
    vectors = [client.embeddings.create(model=name, input="the thing") for name in ("two", "three")]
    assert [vector.model for vector in vectors] == ["two", "three"]
    assert vectors[0].data[0].embedding != vectors[1].data[0].embedding
    with pytest.raises(openai.NotFoundError, match="serves 'one' and 'one:brief' and 'two' and 'three'"):
        client.completions.create(model="four", prompt="x")
    states = sorted(card["status"] for name, card in cards(server).items() if name in NAMES)
    assert states == ["loaded", "loaded", "unloaded"]


def test_killed_engine_resumes_its_stream_while_others_answer(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    whole = {name: client.completions.create(model=name, **LONG).choices[0].text for name in ("two", "one")}
    pid = engine_pid(server)  # of the model that was loaded last, or else of any
    is_begun = threading.Barrier(3, timeout=WAIT_S)

    def stream(name: str) -> str:
        chunks = client.completions.create(model=name, stream=True, **LONG)
        text = next(chunks).choices[0].text
        is_begun.wait()
        return text + "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    with ThreadPoolExecutor() as pool:
        streams = {name: pool.submit(stream, name) for name in whole}
        is_begun.wait()
        os.kill(pid, signal.SIGKILL)
        assert {name: text.result(WAIT_S) for name, text in streams.items()} == whole
    assert any("1 open requests wait for a restart" in line for line in server.read_log())


@pytest.mark.full
def test_models_are_swapped_under_load(server: ServerProcess, client: openai.OpenAI) -> None:
    prompts = ["the thing in", "an other", "in the end"]

    def ask(number: int) -> tuple[str, str, str]:
        name, prompt = NAMES[number % 3], prompts[number // 3 % 3]
        chunks = client.completions.create(model=name, prompt=prompt, max_tokens=40, seed=1, stream=True)
        return name, prompt, "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    before = sum(loads(server, name) for name in NAMES)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(54)))
    assert len(set(answers)) == 9, "an answer depends on what else the server did"
    assert sum(loads(server, name) for name in NAMES) > before


def test_sigterm_ends_all_engines(server: ServerProcess, client: openai.OpenAI) -> None:
    """The last test of this server."""
    for name in ("one", "two"):
        client.completions.create(model=name, prompt="x", max_tokens=1)
    wait_until(lambda: not any(card["open_requests"] for card in cards(server).values()))
    (fork_server,) = [child for child in children(server.pid) if children(child)]
    engines = children(fork_server)
    assert len(engines) == 2
    assert server.stop() == 0
    for pid in (fork_server, *engines):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
