"""The engine's grammars: compiled in the background, prepared beside the forward pass."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from foreword.core.params import SamplingParams
from foreword.core.request import RequestState
from foreword.core.rows import SampleRow
from foreword.core.structured import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar import grammars as grammars_module
from foreword.grammar.grammars import Grammars
from foreword.grammar.masks import MaskJob
from tests.grammar.hostile import HOSTILE
from tests.grammar.walks import begin, ids, legal_ids, open_grammars, request, tokenizer, vocab_size

CHOICE = StructuredOutput("choice", '["yes", "no", "perhaps"]')


def test_a_request_waits_for_the_vocabulary() -> None:
    grammars = Grammars(vocab_size())
    waiting = grammars.begin(request(CHOICE))
    with pytest.raises(FutureTimeout):
        waiting.result(0.05)
    grammars.know(tokenizer().vocabulary())
    assert waiting.result(10).error is None
    grammars.know(tokenizer().vocabulary())
    grammars.close()


def test_a_constraint_that_cannot_be_compiled() -> None:
    with open_grammars() as grammars, pytest.raises(InvalidRequest) as caught:
        begin(grammars, StructuredOutput("regex", "(", field="guided_regex"))
    assert caught.value.param == "guided_regex"


def test_others_run_while_a_grammar_compiles() -> None:
    """llguidance compiles without the interpreter's lock."""
    with open_grammars() as grammars:
        pending = grammars.begin(request(HOSTILE["schema: 2,000 properties, none required"]))
        turns = 0
        while not pending.done():
            time.sleep(0.001)
            turns += 1
        assert turns > 10


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = grammars_module.Compiled
    monkeypatch.setattr(grammars_module, "Compiled", lambda *args: built.append(args[0]) or real(*args))
    monkeypatch.setattr(grammars_module, "MAX_COMPILED", 2)
    with open_grammars() as grammars:
        for _ in range(3):
            begin(grammars, CHOICE)
            begin(grammars, StructuredOutput("choice", CHOICE.text, field="guided_choice"))
        assert len(built) == 1
        for text in ("a", "b"):
            begin(grammars, StructuredOutput("regex", text))
        begin(grammars, CHOICE)
        assert len(built) == 4


def test_a_grammar_that_is_known_waits_for_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    with open_grammars() as grammars:
        begin(grammars, CHOICE)
        monkeypatch.setattr(grammars_module, "Compiled", lambda *args: done.wait(30))
        slow = grammars.begin(request(StructuredOutput("regex", "slow")))
        assert legal_ids(begin(grammars, CHOICE).mask(()))
        assert not slow.done()
        done.set()


def _state(grammars: Grammars, structured: StructuredOutput | None) -> RequestState:
    asked = request(structured) if structured else request(CHOICE, params=SamplingParams())
    return RequestState(asked, 0, 2048, grammars.begin(asked).result(10) if structured else None)


def test_rows_of_many_requests() -> None:
    """Some with drafts, some without, some without a grammar; jobs that nobody waits for; requests that leave."""
    with open_grammars() as grammars:
        plain = _state(grammars, None)
        states = [_state(grammars, structured) for structured in (CHOICE, StructuredOutput("json_object"), CHOICE)]
        drafts = [ids("per"), ids('{"a'), ()]
        fresh = [_state(grammars, structured) for structured in (CHOICE, StructuredOutput("json_object"), CHOICE)]
        rows = [SampleRow(s, d[:n]) for s, d in zip(states, drafts, strict=True) for n in range(len(d) + 1)]
        for _ in range(3):
            grammars.prepare([SampleRow(plain), *rows, SampleRow(plain, (1, 2))])
        grammars.prepare([])
        grammars.prepare([SampleRow(plain)])
        for _ in range(50):
            grammars.prepare(rows)
            for state, other, draft in zip(states, fresh, drafts, strict=True):
                assert state.grammar is not None and other.grammar is not None
                for n in range(len(draft) + 1):
                    assert legal_ids(state.grammar.mask(draft[:n])) == legal_ids(other.grammar.mask(draft[:n]))
        grammars.prepare(rows)
        for state, draft in zip(states, drafts, strict=True):
            state.append(draft)  # without asking for a mask


def test_whoever_comes_first_computes() -> None:
    with open_grammars() as grammars:
        state = _state(grammars, CHOICE)
        seen: set[str] = set()
        real = MaskJob._compute

        def compute(job: MaskJob) -> None:
            seen.add(threading.current_thread().name)
            real(job)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MaskJob, "_compute", compute)
            for pause in (0.0, 0.02) * 20:
                grammars.prepare([SampleRow(state)])
                time.sleep(pause)
                assert state.grammar is not None and state.grammar.mask(()) is not None
        assert "grammar-masks" in seen


def test_an_error_in_the_background_reaches_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_grammars() as grammars:
        state = _state(grammars, CHOICE)

        def fail(job: MaskJob) -> None:
            raise RuntimeError("no masks today")

        monkeypatch.setattr(MaskJob, "_compute", fail)
        grammars.prepare([SampleRow(state)])
        assert state.grammar is not None
        with pytest.raises(RuntimeError, match="no masks today"):
            state.grammar.mask(())
        monkeypatch.undo()
        assert state.grammar.mask(()) is not None


def test_close_while_requests_wait() -> None:
    grammars = Grammars(vocab_size())
    waiting = grammars.begin(request(CHOICE))
    grammars.close()
    assert waiting.exception(10) is not None or waiting.cancelled()


def test_the_thread_of_masks_ends_with_its_owner() -> None:
    """Engines come and go within a process; nobody closes those that an LLM has dropped."""
    grammars = Grammars(vocab_size())
    grammars.know(tokenizer().vocabulary())
    before = set(threading.enumerate())
    state = _state(grammars, CHOICE)
    grammars.prepare([SampleRow(state)])
    assert state.grammar is not None and state.grammar.mask(()) is not None
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "grammar-masks")
    del grammars, state
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
