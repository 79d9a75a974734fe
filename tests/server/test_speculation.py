"""Speculation fields of a request, with a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from foreword.config.options import Config
from tests.server.conftest import RunningServer, run_engine
from tests.support.checkpoints import write_checkpoint

LETTERS = "bcdfgjklm"  # the tokenizer merges none of these: text and tokens are one to one
LONG = {"max_tokens": 60, "ignore_eos": True, "metrics": True}
PREDICTION_ONLY = {"speculation": {"method": "prediction"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Fixed draft lengths, so that counts do not depend on timing."""
    path = write_checkpoint(tmp_path_factory.mktemp("speculation") / "model", "llama", seed=5)
    config = Config(
        model=str(path),
        threads=1,
        kv_cache_memory="4000tokens",
        log_level="warning",
        draft_length="fixed",
        num_speculative_tokens=8,
    )
    with run_engine(config) as served:
        ids = served.app.state.models.loaded[0].tokenizer.encode(LETTERS, add_special_tokens=False)
        assert len(ids) == len(LETTERS)
        served.app.state.letters = ids
        yield served


def ask(server: RunningServer, **fields: Any) -> Any:
    fields = {"temperature": 0, "allowed_token_ids": server.app.state.letters, **LONG, **fields}
    return server.complete("bcd", **fields)


def prediction_of(text: str) -> dict[str, str]:
    return {"type": "content", "content": text}


def counters(server: RunningServer) -> dict[str, float]:
    """Totals of drafted tokens and of draft decisions."""
    series = server.metrics()
    assert all(value == value for value in series.values()), "a NaN metric"
    kept = ("spec_drafts_total", "spec_draft_tokens_total", "spec_no_draft_total", "spec_draft_length_count")
    names = [name for name in series if name[0].removeprefix("foreword_") in kept and series[name]]
    return {str(name): series[name] for name in names}


def test_correct_prediction_is_accepted_completely(server: RunningServer) -> None:
    plain = ask(server, speculation={"method": "off"})
    text = plain.choices[0].text
    guessed = ask(server, prediction=prediction_of(text), **PREDICTION_ONLY)
    assert guessed.choices[0].text == text
    details = guessed.usage.completion_tokens_details
    # The prompt yields one token; each step then verifies 8 tokens and yields 9, the last 4 of 5.
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6 * 8 + 4, 0)
    assert guessed.metrics["draft_tokens"] == 52 and guessed.metrics["verify_steps"] == 7
    assert guessed.usage.completion_tokens == plain.usage.completion_tokens == 60


def test_stream_matches_the_whole_answer(server: RunningServer) -> None:
    text = ask(server).choices[0].text
    fields = {"prediction": prediction_of(text[:30] + "zzz" + text[30:]), **PREDICTION_ONLY}
    whole = ask(server, **fields)
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 40


def test_stream_marks_the_tokens_that_the_engine_accepted(server: RunningServer) -> None:
    text = ask(server).choices[0].text
    fields = {"prediction": prediction_of(text[:30] + "zzz" + text[30:]), **PREDICTION_ONLY}
    chunks = [chunk for chunk in ask(server, stream=True, **fields) if chunk.choices]
    tokens = [token for chunk in chunks for token in chunk.choices[0].tokens]
    assert "".join(token[0] for token in tokens) == text
    marked = [token for token in tokens if token[1]]
    metrics = chunks[-1].choices[0].metrics
    assert len(marked) == sum(chunk.choices[0].accepted_draft_tokens for chunk in chunks) > 40
    assert len(marked) == round(metrics["draft_tokens"] * metrics["draft_tokens_acceptance"])
    assert {drafter for _, _, drafter, _ in marked} == {"prediction"}
    assert all(0 < confidence <= 1 for _, _, _, confidence in marked)
    assert all(token[1:] == [False] for token in tokens if not token[1])


@pytest.mark.parametrize("off", ["off", {"method": "off"}])
def test_off_drafts_nothing(server: RunningServer, off: Any) -> None:
    text = ask(server).choices[0].text
    before = counters(server)
    answer = ask(server, speculation=off, prediction=prediction_of(text))
    assert counters(server) == before, "a draft was proposed or considered"
    assert answer.choices[0].text == text
    assert "draft_tokens" not in answer.metrics and "verify_steps" not in answer.metrics
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_prediction_without_a_prediction_drafts_nothing(server: RunningServer) -> None:
    before = counters(server)
    answer = ask(server, **PREDICTION_ONLY)
    assert "draft_tokens" not in answer.metrics
    assert answer.usage.completion_tokens_details is None
    assert counters(server) == before


@pytest.mark.parametrize("bound", [0, 1, 3, 99])
def test_request_may_only_lower_the_draft_length(server: RunningServer, bound: int) -> None:
    text = ask(server).choices[0].text
    answer = ask(
        server, prediction=prediction_of(text), speculation={"method": "prediction", "max_tokens": bound}
    )
    assert answer.choices[0].text == text
    longest = min(bound, 8)
    assert answer.metrics.get("draft_tokens", 0) <= longest * answer.metrics.get("verify_steps", 0)
    assert answer.metrics.get("mean_acceptance_length", 1) > longest * 0.8


def test_named_drafter_drafts_alone(server: RunningServer) -> None:
    before = counters(server)
    ask(server, speculation={"method": "suffix"}, prediction=prediction_of("bcd"))
    grown = {name for name, value in counters(server).items() if value != before.get(name)}
    assert grown and not [name for name in grown if "'prediction'" in name]


def test_unknown_method_error_lists_the_drafters(server: RunningServer) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": "x", "speculation": {"method": "ngram"}})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "speculation.method")
    assert "auto, off, grammar, prediction, suffix, text" in error["message"]
