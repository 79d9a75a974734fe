"""Every feature over HTTP, streamed and whole, with and without speculation; docs/features.md."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.core.structured_output import StructuredOutput
from tests.server.conftest import MODEL, RunningServer, run_engine
from tests.support.budget import is_full
from tests.support.checkpoints import write_checkpoint
from tests.support.feature_matrix import FEATURES, HTTP, MODEL_COLUMNS, MODEL_DRAFTERS

PROMPT = "the thing on the an in the thing on the "
CONSTRAINTS = {"json_schema": "json", "lark": "grammar", "gbnf": "grammar"}
AS_JSON = ("json_schema", "choice", "structural_tag")
OFF = {"method": "off"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("features")
    model = write_checkpoint(path / "model", "llama", seed=1)
    drafter = write_checkpoint(path / "drafter", "llama", seed=1, dtype="bfloat16")
    recording = path / "recording.jsonl"
    recording.write_text(json.dumps({"prompt_token_ids": [5], "seed": 1, "token_ids": [6, 7]}) + "\n")
    config = Config(
        model=str(model),
        speculate=",".join(MODEL_DRAFTERS),
        draft_model=str(drafter),
        draft_length="fixed",
        replay_file=str(recording),
        threads=1,
        kv_cache_memory="1000tokens",
        max_num_batched_tokens=32,
        max_num_seqs=8,
        log_level="warning",
    )
    with run_engine(config) as served:
        yield served


def body_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Body fields of the same settings."""
    body = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in body["logit_bias"].items()}
    if "prediction" in body:
        body["prediction"] = {"type": "content", "content": body["prediction"]}
    if "structured" in body:
        body["structured_outputs"] = _constraint(body.pop("structured"))
    return body


def _constraint(structured: StructuredOutput) -> dict[str, Any]:
    text = json.loads(structured.text) if structured.constraint_type in AS_JSON else structured.text or True
    options = {} if structured.whitespace else {"disable_any_whitespace": True}
    after = {} if structured.after is None else {"after": structured.after}
    return {CONSTRAINTS.get(structured.constraint_type, structured.constraint_type): text, **options, **after}


def ask(server: RunningServer, body: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Choices by index, and usage, streamed or whole."""
    sent = {
        "model": MODEL,
        "prompt": PROMPT,
        "seed": 7,
        "max_tokens": 30,
        "return_token_ids": True,
        **body,
        **fields,
    }
    if sent.get("stream"):
        return read_stream(server, sent | {"stream_options": {"include_usage": True}})
    reply = server.http.post("/v1/completions", json=sent)
    assert reply.status_code == 200, reply.text
    result = reply.json()
    choices = {
        choice["index"]: choice_fields(choice, choice["text"], choice["token_ids"])
        for choice in result["choices"]
    }
    return {"choices": choices, "usage": result["usage"]}


def choice_fields(choice: Mapping[str, Any], text: str, token_ids: list[int]) -> tuple[Any, ...]:
    return text, token_ids, choice["finish_reason"], choice["stop_reason"]


def read_stream(server: RunningServer, sent: Mapping[str, Any]) -> dict[str, Any]:
    texts: defaultdict[int, str] = defaultdict(str)
    ids: defaultdict[int, list[int]] = defaultdict(list)
    choices: dict[int, Any] = {}
    usage = None
    with server.http.stream("POST", "/v1/completions", json=dict(sent)) as reply:
        for line in filter(None, reply.iter_lines()):
            if line == "data: [DONE]":
                return {"choices": choices, "usage": usage}
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                index = choice["index"]
                texts[index] += choice["text"]
                ids[index] += choice["token_ids"]
                if choice["finish_reason"] is not None:
                    choices[index] = choice_fields(choice, texts[index], ids[index])
    raise AssertionError("the stream has no end")


def without_prediction(result: dict[str, Any]) -> dict[str, Any]:
    """Without prediction usage, the only field that speculation may change."""
    usage = {name: value for name, value in result["usage"].items() if name != "completion_tokens_details"}
    cached = {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
    return {**result, "usage": cached}


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_stream_and_speculation_change_no_answer(server: RunningServer, feature: str) -> None:
    body = body_of(FEATURES[feature])
    plain = without_prediction(ask(server, body, speculation=OFF))
    assert without_prediction(ask(server, body)) == plain
    if "prompt_logprobs" in body:
        return  # not in a stream
    assert without_prediction(ask(server, body, stream=True)) == plain
    assert without_prediction(ask(server, body, stream=True, speculation=OFF)) == plain


@pytest.mark.parametrize("drafter", MODEL_COLUMNS if is_full() else ("auto",))
@pytest.mark.parametrize("feature", HTTP)
def test_feature_cell(server: RunningServer, feature: str, drafter: str) -> None:
    body = {"prediction": {"type": "content", "content": "the an thing on"}, **HTTP[feature]}
    plain = without_prediction(ask(server, body, speculation=OFF))
    assert without_prediction(ask(server, body, speculation={"method": drafter})) == plain
    assert len(plain["choices"]) == body.get("n", 1)
