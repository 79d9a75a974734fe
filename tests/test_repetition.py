"""Repetition detection with a real model: at the same token for every drafter, and reported."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword import LLM, RequestOutput, SamplingParams, Speculation
from foreword.core.finish import PATTERN_LIMITS, RepetitionDetector
from foreword.core.outputs import TokenEvent
from foreword.outputs import CompletionOutput
from foreword.tokenizer.input_processor import make_requests
from tests.support.budget import is_full, some_of
from tests.support.checkpoints import write_checkpoint
from tests.support.feature_matrix import MODEL_COLUMNS, MODEL_DRAFTERS, REPETITION
from tests.test_exact import fingerprint
from tests.test_feature_matrix import prompts, speculated

ENOUGH = PATTERN_LIMITS[0][1]
LOOP: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "frequency_penalty": -2.0, "max_tokens": 420}


@dataclass
class Engines:
    """An engine with every drafter, and a plain one with its answers so far."""

    drafting: LLM
    plain: LLM
    known: Mapping[str, list[RequestOutput]]

    def ask(self, settings: Mapping[str, Any], *drafters: str) -> list[RequestOutput]:
        """Answers of the plain engine, or of every drafter one after the other, all asked at once."""
        if not drafters:
            return self.plain.generate(prompts(), params_of(settings))
        params = [speculated(one, drafter) for drafter in drafters for one in params_of(settings)]
        return self.drafting.generate(prompts() * len(drafters), params)


def params_of(settings: Mapping[str, Any]) -> list[SamplingParams]:
    return [SamplingParams(**{**LOOP, "seed": 100 * i, **settings}) for i in range(3)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The plain engine answers each line once; the other replays these answers with errors."""
    path = tmp_path_factory.mktemp("runaway")
    model = write_checkpoint(path / "model", "llama", seed=1)
    drafter = write_checkpoint(path / "drafter", "llama", seed=1, dtype="bfloat16")
    options: dict[str, Any] = {"threads": 1, "test_mode": True, "kv_cache_memory": "4000tokens", "seed": 1}
    plain = LLM(str(model), speculate="off", **options)
    known = {
        feature: plain.generate(prompts(), params_of(settings)) for feature, settings in REPETITION.items()
    }
    recording = path / "recording.jsonl"
    recording.write_text("".join(recorded(known)))
    drafting = LLM(
        str(model),
        speculate=",".join(MODEL_DRAFTERS),
        draft_model=str(drafter),
        draft_length="fixed",
        num_speculative_tokens=7,
        replay_file=str(recording),
        replay_error_rate=0.1,
        **options,
    )
    yield Engines(drafting, plain, known)
    drafting.check()


def recorded(answers: Mapping[str, list[RequestOutput]]) -> Iterator[str]:
    for outputs in answers.values():
        for output in outputs:
            for choice in output.outputs:
                line = {
                    "prompt_token_ids": output.prompt_token_ids,
                    "seed": choice.seed,
                    "token_ids": choice.token_ids,
                }
                yield json.dumps(line) + "\n"


def counted(llm: LLM, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(llm.render_metrics().decode())
    found = [
        s.value for f in families for s in f.samples if s.name == f"foreword_{name}" and s.labels == labels
    ]
    return found[0] if found else 0.0


@pytest.mark.parametrize("feature", REPETITION)
def test_repetition_is_exact_with_every_drafter(engines: Engines, feature: str) -> None:
    expected = engines.known[feature]
    drafters = some_of(MODEL_COLUMNS, 3)
    found = engines.ask(REPETITION[feature], *drafters)
    assert list(map(fingerprint, found)) == list(map(fingerprint, expected)) * len(drafters)
    patterns = [output.metrics and output.metrics.repeating_tokens for output in found]
    plain = [output.metrics and output.metrics.repeating_tokens for output in expected]
    assert patterns == plain * len(drafters)
    assert all(patterns), "every answer repeats itself"


def test_expected_answers_end_at_the_limit(engines: Engines) -> None:
    """Checks the plain answers that those of the drafters are compared with."""
    for feature in REPETITION:
        for output in engines.known[feature]:
            for choice in output.outputs:
                pattern = choice.metrics and choice.metrics.repeating_tokens
                assert pattern == (10 if "preamble" in feature else 1)
                reason = "length" if "warn" in feature else "repetition"
                assert choice.finish_reason == reason and choice.stop_reason is None
                if reason == "repetition":
                    end = choice.token_ids[-ENOUGH - pattern :]
                    assert end[:-pattern] == end[pattern:], "the last 256 tokens repeat"
                    before = choice.token_ids[-ENOUGH - pattern - 1]
                    assert len(choice.token_ids) == ENOUGH + pattern or before != end[pattern - 1], (
                        "and no more do"
                    )


@pytest.mark.parametrize("drafter", ["off", "suffix"] if is_full() else ["suffix"])
@pytest.mark.parametrize("feature", REPETITION)
def test_resumed_request_ends_at_the_same_token(engines: Engines, feature: str, drafter: str) -> None:
    """The replacement engine reports the repetition only if it was not reported before."""
    choice = engines.known[feature][0].outputs[0]
    (found,) = (end.num_tokens for end in [RepetitionDetector().feed(choice.token_ids)] if end)
    for known in (1, 200, len(choice.token_ids) - 1):
        events = resumed(
            engines.drafting,
            replace(params_of(REPETITION[feature])[0], speculation=Speculation(drafter)),
            choice,
            known,
        )
        assert [token for event in events for token in event.token_ids] == list(choice.token_ids[known:])
        assert events[-1].finish_reason == choice.finish_reason
        reported = [event.index + event.repetition.num_tokens for event in events if event.repetition]
        assert reported == ([found] if known < found else [])


def resumed(llm: LLM, params: SamplingParams, choice: CompletionOutput, known: int) -> list[TokenEvent]:
    """Events of an engine that resumes the request after `known` delivered tokens."""
    ids = tuple(prompts()[0]["prompt_token_ids"])
    request = make_requests(
        ids, replace(params, n=1, seed=choice.seed), llm.tokenizer, f"again-{known}", 512
    )[0]
    llm._client.submit(replace(request, resume_output_ids=choice.token_ids[:known]))
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        for event in llm._client.step().events:
            assert isinstance(event, TokenEvent)
            events.append(event)
    return events


def test_stop_output_is_a_prefix_of_warn_output(engines: Engines) -> None:
    stopped, warned, free = (engines.ask({"on_runaway": mode}) for mode in ("stop", "warn", "off"))
    for short, long, plain in zip(stopped, warned, free, strict=True):
        assert long.token_ids == plain.token_ids
        assert short.token_ids == long.token_ids[: len(short.token_ids)] and len(short.token_ids) < len(
            long.token_ids
        )
        assert plain.metrics and plain.metrics.repeating_tokens is None


def test_repetition_is_counted_and_logged_once(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    llm = engines.drafting
    before, ended = (
        counted(llm, "runaway_requests_total"),
        counted(llm, "requests_finished_total", reason="repetition"),
    )
    with caplog.at_level(logging.WARNING, logger="foreword.metrics"):
        outputs = engines.ask({"on_runaway": "stop"}, "suffix") + engines.ask({"on_runaway": "warn"}, "ngram")
    assert counted(llm, "runaway_requests_total") == before + 6
    assert counted(llm, "requests_finished_total", reason="repetition") == ended + 3
    lines = [record.getMessage() for record in caplog.records]
    expected = [len(output.token_ids) for output in outputs[:3]] * 2
    for output, length, fate in zip(
        outputs, expected, ["finished: repetition"] * 3 + ["continuing"] * 3, strict=True
    ):
        (line,) = [line for line in lines if f"request {output.request_id}-0: " in line]
        assert f"pattern length 1, after {length} tokens; {fate}" in line


def test_repetition_is_logged_while_the_request_runs(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    stream = engines.drafting.stream(prompts()[0], SamplingParams(**LOOP))
    with caplog.at_level(logging.WARNING, logger="foreword.metrics"):
        while not caplog.records:
            next(stream)
    assert "continuing (on_runaway warn)" in caplog.text, "warn is the default"
    assert counted(engines.drafting, "longest_running_tokens") >= ENOUGH
    assert 0 < counted(engines.drafting, "oldest_running_seconds") < 600
    stream.close()


def test_engine_default_applies(engines: Engines) -> None:
    llm = LLM(
        str(engines.plain.config.model),
        on_runaway="stop",
        default_max_tokens=390,
        threads=1,
        kv_cache_memory="2000tokens",
    )
    silent = SamplingParams(**{**LOOP, "max_tokens": None})
    assert llm.generate(prompts()[0], silent)[0].finish_reason == "repetition"
    (off,) = llm.generate(prompts()[0], replace(silent, on_runaway="off", speculation=Speculation("off")))
    assert (off.finish_reason, len(off.token_ids)) == ("length", 390)
    (asked,) = llm.generate(prompts()[0], replace(silent, on_runaway="off", max_tokens=395))
    assert len(asked.token_ids) == 395
    (least,) = llm.generate(prompts()[0], replace(silent, on_runaway="off", min_tokens=400))
    assert len(least.token_ids) == 400


def test_without_default_the_context_is_the_limit(engines: Engines) -> None:
    llm = LLM(str(engines.plain.config.model), default_max_tokens=0, threads=1, kv_cache_memory="2000tokens")
    (output,) = llm.generate(
        prompts()[0], SamplingParams(**{**LOOP, "max_tokens": None, "on_runaway": "off"})
    )
    assert len(output.prompt_token_ids) + len(output.token_ids) == llm.info.resolved.max_model_len
