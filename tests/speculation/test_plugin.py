"""Plugged-in drafters: whatever they do, the tokens are the same and no request fails."""

from __future__ import annotations

import logging
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from foreword import LLM, Draft, Drafter, DrafterContext, RequestView, SamplingParams, Speculation
from foreword.bench.server import ServerProcess
from foreword.checkpoint import prepare_checkpoint
from foreword.cli.main import main
from foreword.config.options import Config
from foreword.core.outputs import TokenEvent
from foreword.core.request import Request, RequestState
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.engine_client import local
from foreword.engine_client.make_client import make_engine_client
from foreword.errors import ConfigError, InvalidRequest, Terminated
from foreword.speculation.draft_length.policy import FixedLength
from foreword.speculation.drafter import TokenSequence
from foreword.speculation.engine_drafter import DraftRequest
from foreword.speculation.plugin import DrafterAdapter, make_plugin
from foreword.speculation.proposer import Proposer
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.engines import load_engine, make_request, run, tokens_of
from tests.support.fakes import extended

DRAFTERS_PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
CONTEXT = DrafterContext(Path("model"), 100, frozenset(), 64, 4, "cpu")
PROMPT = (40, 41, 42, 40, 41)


class Scripted(Drafter):
    """Answers each call with `answer(requests)`."""

    def __init__(self, answer: Callable[[Sequence[RequestView]], Any]) -> None:
        self.answer = answer
        self.calls: list[tuple[str, Any]] = []

    def start(self, request: RequestView) -> None:
        self.calls.append(("start", request))

    def propose(self, requests: Sequence[RequestView]) -> Any:
        self.calls.append(("propose", requests))
        return self.answer(requests)

    def finish(self, request: RequestView, output: Sequence[int]) -> None:
        self.calls.append(("finish", (request.id, output)))


def state_of(name: str = "a") -> RequestState:
    return RequestState(Request(name, (1, 2, 3), SamplingParams(), 0, cache_salt="salt"), 0, 100)


def propose(answer: Callable[[Sequence[RequestView]], Any], *states: RequestState) -> list[Draft | None]:
    """Drafts of at most 4 tokens, from a vocabulary of 10."""
    adapter = DrafterAdapter("own", Scripted(answer), 10)
    for state in states:
        adapter.start(state)
    return adapter.propose([DraftRequest(state, 4) for state in states])


def test_request_is_seen_from_start_to_finish() -> None:
    drafter, state = Scripted(lambda requests: [None]), state_of()
    adapter = DrafterAdapter("own", drafter, 10)
    adapter.start(state)
    adapter.propose([DraftRequest(extended(state, (7, 8)), 4)])
    adapter.finish("a", [7, 8])
    adapter.check(())
    (_, started), (_, (asked,)), ended = drafter.calls
    assert (started.id, started.num_prompt_tokens, started.max_tokens, started.cache_salt) == (
        ("a", 3, 0, "salt")
    )
    assert (list(asked.tokens), asked.num_prompt_tokens, asked.max_tokens) == ([1, 2, 3, 7, 8], 3, 4)
    assert ended == ("finish", ("a", (7, 8)))


def test_views_cannot_change_a_request() -> None:
    state = state_of()
    view = RequestView("a", TokenSequence(state.tokens), 3)
    with pytest.raises(FrozenInstanceError):
        view.max_tokens = 9  # type: ignore[misc]
    with pytest.raises(TypeError):
        view.tokens[0] = 9  # type: ignore[index]
    view.tokens[:].append(9)
    assert state.tokens == [1, 2, 3] and len(view.tokens) == 3
    assert "1" not in repr(view.tokens)


@pytest.mark.parametrize(
    ("draft", "checked"),
    [
        *(
            (ids, Draft((5, 6), "own"))
            for ids in (
                [5, 6],
                (5, 6),
                np.array([5, 6]),
                torch.tensor([5, 6]),
                [np.int32(5), torch.tensor(6)],
                Draft((5, 6)),
                Draft([5, 6], "another"),  # type: ignore[arg-type]
                iter([5, 6]),
            )
        ),
        ([5] * 9, Draft((5,) * 4, "own")),
        (Draft((5, 6), confidence=np.array([1, 0.5])), Draft((5, 6), "own", (1.0, 0.5))),  # type: ignore[arg-type]
        *((nothing, None) for nothing in (None, [], Draft(()), np.array([], int))),
    ],
    ids=lambda value: str(value).split(" object at ")[0],
)
def test_any_sequence_of_ids_is_a_draft(draft: Any, checked: Draft | None) -> None:
    """Cut to max_tokens; ids and confidence become built-in numbers."""
    (proposed,) = propose(lambda requests: [draft], state_of())
    assert proposed == checked
    assert proposed is None or all(type(token_id) is int for token_id in proposed.token_ids)
    assert proposed is None or all(type(value) is float for value in proposed.confidence)


@pytest.mark.parametrize("answer", [[], [[5], [6]], None, 7, [[10]], [[-1]], [["a"]], [[1.5]], [7], ["ab"]])
def test_anything_else_raises(answer: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        propose(lambda requests: answer, state_of())


def test_drafter_that_changes_its_answer_later_changes_no_draft() -> None:
    mine = [5, 6]
    (draft,) = propose(lambda requests: [mine], state_of())
    mine[0] = 9
    assert draft == Draft((5, 6), "own")


def test_log_has_one_line_with_the_place_of_the_error(caplog: pytest.LogCaptureFixture) -> None:
    adapter = DrafterAdapter("own", Scripted(lambda requests: [{}["a secret"]]), 10)
    proposer, state = Proposer((adapter,), 10, FixedLength(4)), state_of()
    proposer.start(state)
    for _ in range(100):
        assert proposer.propose([state]) == (None,)
    assert proposer.errors == {"own": 100}
    assert len(caplog.records) == 7
    assert re.search(r"own failed, 64 times .*: KeyError at test_plugin\.py:\d+$", caplog.text, re.M)
    assert "secret" not in caplog.text, "the message of an exception may quote a request"
    with caplog.at_level(logging.DEBUG):
        for _ in range(28):
            proposer.propose([state])
    assert "Traceback" in caplog.text and "secret" in caplog.text


def test_log_says_what_is_wrong_with_a_result(caplog: pytest.LogCaptureFixture) -> None:
    confidences: tuple[Any, ...] = ((2.0, 0.5), (0.5, float("nan")), (0.5,), ("a secret", 1.0))
    for answer in (
        [],
        ["a secret"],
        [[10]],
        None,
        [[True]],
        *([Draft((5, 6), confidence=c)] for c in confidences),
    ):
        adapter = DrafterAdapter("own", Scripted(lambda requests, answer=answer: answer), 10)  # type: ignore[misc]
        proposer = Proposer((adapter,), 10, FixedLength(4))
        proposer.start(state_of())
        proposer.propose([state_of()])
    assert [record.getMessage().partition("dropped: ")[2] for record in caplog.records] == [
        "propose() returned 0 drafts for 1 requests",
        "propose() returned no token ids: str",
        "propose() returned id 10, outside the vocabulary 0..9",
        "propose() returned NoneType, no list of drafts",
        "propose() returned no token ids: bool",
        "confidence must be between 0 and 1, got 2",
        "confidence must be between 0 and 1, got nan",
        "confidence has 1 values for 2 tokens",
        "confidence must be probabilities, one of each token",
    ]


def test_time_is_reported_for_calls_only() -> None:
    """Else the mean time of a call, for which a drafter saves up, would fall while it is not asked."""
    recorded: list[str] = []

    class RecordingPolicy(FixedLength):
        def record_proposing(self, drafter: str, seconds: float) -> None:
            recorded.append(drafter)

    adapters = [DrafterAdapter(name, Scripted(lambda requests: [None]), 10) for name in ("own", "other")]
    proposer = Proposer(adapters, 10, RecordingPolicy(4))
    params = SamplingParams(speculation=Speculation("own"))
    state = RequestState(Request("a", (1, 2, 3), params, 0), 0, 100)
    proposer.start(state)
    for _ in range(2):
        proposer.propose([state])
    assert recorded == ["own", "own"]


def test_call_is_marked_for_the_case_that_it_never_returns() -> None:
    marks: list[str | None] = []
    adapter = DrafterAdapter("own", Scripted(lambda requests: marks.append("called") or [None]), 10)  # type: ignore[func-returns-value]
    proposer = Proposer((adapter,), 10, FixedLength(4))
    proposer.start(state_of())
    proposer.on_timed_call = marks.append
    proposer.propose([state_of()])
    assert marks == ["own", "called", None]


def test_exit_in_a_drafter_is_an_error_and_sigterm_is_not() -> None:
    adapter = DrafterAdapter("own", Scripted(lambda requests: sys.exit(3)), 10)
    proposer = Proposer((adapter,), 10, FixedLength(4))
    proposer.start(state_of())
    assert proposer.propose([state_of()]) == (None,)
    assert proposer.errors == {"own": 1}

    def terminate(requests: Sequence[RequestView]) -> Any:
        raise Terminated(143)  # as the handler of the command line does

    proposer.drafters[0]._drafter.answer = terminate  # type: ignore[attr-defined]
    with pytest.raises(Terminated):
        proposer.propose([state_of()])


def test_drafter_that_does_not_return_is_named_in_process(
    directory: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter waits until a log record names it."""
    monkeypatch.setattr(local, "HANG_NOTICE_S", 0.05)
    code = """
        import threading
        from foreword import Drafter

        NAMED = threading.Event()

        class Waits(Drafter):
            def propose(self, requests):
                assert NAMED.wait(60)
                return [None for _ in requests]
    """
    (directory / "waits.py").write_text(textwrap.dedent(code))
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            sys.modules["waits"].NAMED.set()

    handler = Handler(logging.ERROR)
    local.logger.addHandler(handler)
    try:
        llm = LLM(str(checkpoint), speculate="waits:Waits", kv_cache_memory="1000tokens", threads=1)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": list(PROMPT)}], params)
    finally:
        local.logger.removeHandler(handler)
    assert messages and messages[0].startswith(
        "engine: in the code of drafter waits for 0 s at threading.py:"
    )


# In an engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plugin") / "model", "llama", seed=5)


def answer_of(engine: Engine) -> list[int]:
    """Tokens of one request; its last event says why it ended."""
    events = run(engine, [make_request("a", PROMPT, max_tokens=12)])["a"]
    assert isinstance(events[-1], TokenEvent) and events[-1].finish_reason == "length"
    return tokens_of(events)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    return answer_of(load_engine(checkpoint, speculate="off"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return load_engine(checkpoint, speculate="ngram")


token_ids = st.one_of(st.integers(0, 99), st.integers(), st.none(), st.text(), st.floats(), st.booleans())
drafts = st.one_of(
    st.none(),
    st.integers(),
    st.text(),
    st.lists(st.integers(0, 99), max_size=9),
    st.lists(token_ids, max_size=9),
    st.builds(Draft, st.lists(token_ids, max_size=9), st.text(), st.lists(st.floats(), max_size=9)),
)
answers = st.one_of(st.lists(drafts, max_size=3), st.lists(drafts, min_size=1, max_size=1), drafts)


@settings(max_examples=60)
@given(script=st.lists(st.one_of(answers, st.just(RuntimeError("no"))), min_size=1, max_size=12))
def test_garbage_changes_no_token(engine: Engine, expected: list[int], script: list[Any]) -> None:
    """Valid, invalid and failing calls in any order."""
    calls = iter(script * 12)

    def answer(requests: Sequence[RequestView]) -> Any:
        value = next(calls)
        if isinstance(value, Exception):
            raise value
        return value

    engine.proposer.drafters = (DrafterAdapter("own", Scripted(answer), engine.info.vocab_size),)
    assert answer_of(engine) == expected


@pytest.mark.parametrize("share_right", [0.0, 0.5, 1.0])
def test_drafts_that_are_right_at_times_change_no_token(
    engine: Engine, expected: list[int], share_right: float
) -> None:
    rng = random.Random(3)

    def answer(requests: Sequence[RequestView]) -> Any:
        start = len(requests[0].tokens) - requests[0].num_prompt_tokens
        right = expected[start : start + requests[0].max_tokens]
        return [[token_id if rng.random() < share_right else (token_id + 1) % 100 for token_id in right]]

    scripted = Scripted(answer)
    engine.proposer.drafters = (DrafterAdapter("own", scripted, engine.info.vocab_size),)
    assert answer_of(engine) == expected
    num_calls = sum(call == "propose" for call, _ in scripted.calls)
    if share_right == 1.0:
        assert num_calls == 2  # 1 token of the prompt's pass, 5 in each of two steps, and the last
    if share_right == 0.0:
        assert num_calls == 10  # one token a step; the last has no room for a draft


# From a module


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def page_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DRAFTERS_PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_drafter_of_the_page_runs_and_is_exact(directory: Path) -> None:
    code, comparison = page_blocks("python")
    (directory / "my_drafter.py").write_text(code)
    exec_globals: dict[str, Any] = {}
    exec(compile(comparison.replace("LLM(", "LLM(threads=1, "), "drafters.md", "exec"), exec_globals)
    llm = LLM(threads=1, speculate="my_drafter:Trigram", draft_length="fixed")
    params = SamplingParams(max_tokens=64, temperature=0.0, speculation=Speculation("trigram"))
    (output,) = llm.generate(["one two three one two three one two three"], params)
    assert output.outputs[0].metrics.draft_tokens
    with pytest.raises(InvalidRequest, match="must be one of auto, off, trigram"):
        llm.generate(["a"], SamplingParams(speculation=Speculation("suffix")))


@pytest.mark.parametrize(
    ("reference", "code", "message"),
    [
        ("missing:Bigram", "", r"cannot import missing: it is neither installed nor in "),
        ("mine:Bigram", "import missing_too", r"mine: ModuleNotFoundError at mine.py:1: .*'missing_too'"),
        ("mine:Bigram", "1 / 0", r"cannot import mine: ZeroDivisionError at mine.py:1: division by zero"),
        ("mine:Bigram", "exit(3)", r"cannot import mine: SystemExit at mine.py:1: 3"),
        ("mine:Bigram", "class Bigrams: ...", r"mine has no class Bigram; did you mean Bigrams\?"),
        ("mine:Bigram", "class Bigram: ...", r"mine:Bigram is not a subclass of foreword.Drafter"),
        ("mine:Bigram", "Bigram = 7", r"mine:Bigram is not a subclass of foreword.Drafter"),
        (
            "mine:Bigram",
            "from foreword import Drafter\nclass Bigram(Drafter): ...",
            r"Bigram\(context\) failed: TypeError: .*propose",
        ),
        (
            "mine:Bigram",
            """
            from foreword import Drafter
            class Bigram(Drafter):
                def __init__(self, context):
                    open("/no/such/table")
                def propose(self, requests):
                    return [None for _ in requests]
            """,
            r"Bigram\(context\) failed: FileNotFoundError at mine.py:5: .*",
        ),
    ],
)  # fmt: skip
def test_drafter_that_cannot_be_made_is_one_sentence(
    directory: Path, reference: str, code: str, message: str
) -> None:
    (directory / "mine.py").write_text(textwrap.dedent(code))
    with pytest.raises(ConfigError, match=message) as caught:
        make_plugin(reference, True, CONTEXT)
    assert caught.value.param == "speculate" and "\n" not in str(caught.value)


def test_check_makes_own_drafters(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "my_drafter.py").write_text(page_blocks("python")[0])
    assert main(["check", "demo", "--speculate", "my_drafter:Trigram"]) == 0
    assert "own drafters: trigram" in capsys.readouterr().out
    assert main(["check", "demo", "--speculate", "my_drafter:Trigrams"]) == 1
    assert "has no class Trigrams; did you mean Trigram?" in capsys.readouterr().out


def test_installed_drafter_does_not_come_from_the_current_directory(directory: Path) -> None:
    (directory / "mine.py").write_text("")
    sys.path[:] = [path for path in sys.path if path not in ("", str(directory))]
    with pytest.raises(ConfigError, match="cannot import mine"):
        make_plugin("mine:Bigram", False, CONTEXT)


def test_restart_goes_on_without_a_drafter_that_fails(
    directory: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "from foreword import Drafter\nclass Own(Drafter):\n    def propose(self, requests):\n        1 / 0\n"
    )
    (directory / "mine.py").write_text(code)
    first = load_engine(checkpoint, speculate="ngram,mine:Own")
    assert [drafter.name for drafter in first.proposer.drafters] == ["ngram", "own"]
    (directory / "mine.py").unlink()
    del sys.modules["mine"]
    config = Config(str(checkpoint), speculate="ngram,mine:Own")
    second = load(config, (), first.info.resolved, timings=first.proposer.timings)
    assert [drafter.name for drafter in second.proposer.drafters] == ["ngram"]
    assert "restarts without the drafter own" in caplog.text
    assert second.info.fingerprint == first.info.fingerprint


# In a server


BROKEN_CODE = """
import os
from foreword import Drafter

class Raises(Drafter):
    def propose(self, requests):
        raise RuntimeError("no")

class Dies(Drafter):
    def propose(self, requests):
        if any(len(request.tokens) - request.num_prompt_tokens > 4 for request in requests):
            os._exit(3)
        return [None for _ in requests]

class Hangs(Drafter):
    def propose(self, requests):
        while len(requests[0].tokens) - requests[0].num_prompt_tokens > 4:
            pass
        return [None for _ in requests]
"""


@pytest.mark.full
def test_server_in_the_directory_of_the_page(directory: Path) -> None:
    """Exact by method, labelled in the metrics, and isolated where it fails."""
    (directory / "my_drafter.py").write_text(page_blocks("python")[0])
    (directory / "broken.py").write_text(BROKEN_CODE)
    config = Config(threads=1, draft_length="fixed", speculate="my_drafter:Trigram,broken:Raises")
    body = {"model": "demo", "prompt": "one two three one two three one", "max_tokens": 48, "temperature": 0}
    with ServerProcess(config) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answers = {
            method: http.post("/v1/completions", json={**body, "speculation": {"method": method}}).json()
            for method in ("off", "trigram", "raises", "auto")
        }
        metrics = http.get("/metrics").text
        refused = http.post("/v1/completions", json={**body, "speculation": {"method": "my_drafter:Trigram"}})
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 1
    assert refused.status_code == 400 and "trigram" in refused.text
    counts = {
        (sample.name.removeprefix("foreword_"), sample.labels.get("drafter")): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    assert counts["spec_drafts_total", "trigram"] > 0
    assert counts["spec_drafter_errors_total", "raises"] > 0
    assert counts["spec_drafts_total", "raises"] == counts["spec_drafter_errors_total", "trigram"] == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["Dies", "Hangs"])
async def test_engine_restarts_without_a_drafter_that_ends_it(
    directory: Path, checkpoint: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One crash costs time only: the open request goes on, and no request is suspected."""
    (directory / "broken.py").write_text(BROKEN_CODE)
    options = {"kv_cache_memory": "1000tokens", "threads": 1, "log_level": "error", "hang_timeout": 2.0}
    config = Config(str(checkpoint), speculate=f"broken:{name}", draft_length="fixed", **options)  # type: ignore[arg-type]
    prepared = prepare_checkpoint(config)
    client = make_engine_client(
        prepared.config, prepared.never_sampled_ids, prepared.tokenizer.engine_vocabulary
    )
    errors: list[dict[str, int]] = []  # as the steps report them
    client.on_step = lambda stats: errors.append(dict(stats.drafter_errors)) if stats.drafter_errors else None
    await client.start()
    try:
        answers = []
        for index in range(3):
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            events = [event async for event in client.submit(Request(str(index), PROMPT, params, 1, (EOS,)))]
            answers.append(tokens_of(events))
    finally:
        await client.close()
    assert [len(answer) for answer in answers] == [12] * 3
    assert answers[0] == answers[1] == answers[2]
    assert caplog.text.count("engine died") == 1
    assert f"in the code of drafter {name.lower()}: the next engine runs without it" in caplog.text
    assert errors == [{name.lower(): 1}]
