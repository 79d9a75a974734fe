"""Sampling defaults of the checkpoint over HTTP."""

from collections.abc import Iterator
from typing import Any

import pytest

from foreword.cli.client import HTTPBackend
from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.tokenizer.generation_config import GenerationConfig
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import byte_tokenizer

DEFAULTS = {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    tokenizer = byte_tokenizer()
    tokenizer.generation_config = GenerationConfig(DEFAULTS, max_tokens=40)
    with run_server(Config(), tokenizer=tokenizer) as running:
        yield running


def params_of(server: RunningServer, path: str, **body: Any) -> SamplingParams:
    """What the engine gets for a body."""
    server.client.submitted.clear()
    prompt = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = server.http.post(f"/v1/{path}", json={"model": MODEL, **prompt, **body})
    assert answer.status_code == 200, answer.text
    return server.client.submitted[0].params


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("absent", [{}, dict.fromkeys(DEFAULTS)])
def test_fields_not_given_have_the_defaults(server: RunningServer, path: str, absent: dict[str, Any]) -> None:
    params = params_of(server, path, **absent)
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    assert params.max_tokens == (16 if path == "completions" else 40)


def test_given_fields_win(server: RunningServer) -> None:
    """Also with the values that OpenAI and the sampler have as defaults."""
    params = params_of(server, "chat/completions", temperature=1, top_p=1, max_tokens=100)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 1.0, 1.05)
    assert params.max_tokens == 100
    assert params_of(server, "completions", temperature=0).temperature == 0.0
    assert params_of(server, "chat/completions", min_tokens=60).max_tokens == 60


def test_model_list_has_the_defaults(server: RunningServer) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["sampling_defaults"] == {**DEFAULTS, "max_tokens": 40}


def test_command_line_reads_the_defaults(server: RunningServer) -> None:
    """A value that equals OpenAI's default is sent where the server's differs."""
    backend = HTTPBackend(server.url, None, MODEL)
    assert backend.sampling_defaults == {**DEFAULTS, "max_tokens": 40}
    server.client.submitted.clear()
    list(backend.stream("a", SamplingParams(temperature=0.7, top_p=1.0)))
    params = server.client.submitted[0].params
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.7, 1.0, 1.0)
    backend.close()
