"""One fake and one real engine behind the template of hermes, for the tests of all APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_engine, run_server
from tests.support.fakes import FakeOutput, byte_tokenizer
from tests.support.feature_matrix import MODEL_DRAFTERS
from tests.support.tool_checkpoint import chat_template, write_tool_checkpoint


@pytest.fixture(scope="session")
def shared_fake() -> Iterator[RunningServer]:
    with run_server(tokenizer=byte_tokenizer(chat_template("hermes"))) as server:
        yield server


@pytest.fixture
def fake(shared_fake: RunningServer) -> Iterator[RunningServer]:
    """A fake engine, which writes what a test says; all markers are spelled texts."""
    shared_fake.client.script = FakeOutput()
    shared_fake.client.submitted.clear()
    yield shared_fake
    shared_fake.wait_until_idle()


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Random weights, every drafter, and the markers as tokens."""
    folder = tmp_path_factory.mktemp("hermes")
    sizes = {"max_position_embeddings": 16384}
    recording = folder / "recording.jsonl"
    recording.write_text(json.dumps({"prompt_token_ids": [5], "seed": 1, "token_ids": [6, 7]}) + "\n")
    config = Config(
        model=str(write_tool_checkpoint(folder / "model", **sizes)),
        draft_model=str(write_tool_checkpoint(folder / "drafter", dtype="bfloat16", **sizes)),
        speculate=",".join(MODEL_DRAFTERS),
        draft_length="fixed",
        replay_file=str(recording),
        kv_cache_memory="60000tokens",
        log_level="warning",
        threads=1,
    )
    with run_engine(config) as server:
        yield server
