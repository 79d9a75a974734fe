"""The engine's grammars: compiled in the background, prepared beside the forward pass."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from foreword.core.batch import SampleRow
from foreword.core.params import SamplingParams
from foreword.core.request import RequestState
from foreword.core.structured import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar import manager as grammars_module
from foreword.grammar.manager import GrammarManager
from foreword.grammar.masks import MaskJob
from tests.support.adversarial_grammars import ADVERSARIAL
from tests.support.grammar_walks import (
    begin_request,
    encode,
    legal_ids,
    open_grammar_manager,
    request,
    tokenizer,
    vocab_size,
)

CHOICE = StructuredOutput("choice", '["yes", "no", "perhaps"]')


def test_a_request_waits_for_the_vocabulary() -> None:
    grammars = GrammarManager(vocab_size())
    waiting = grammars.compile(request(CHOICE))
    with pytest.raises(FutureTimeout):
        waiting.result(0.05)
    grammars.set_vocabulary(tokenizer().vocabulary())
    assert waiting.result(10).error is None
    grammars.set_vocabulary(tokenizer().vocabulary())
    grammars.close()


def test_a_constraint_that_cannot_be_compiled() -> None:
    with open_grammar_manager() as grammars, pytest.raises(InvalidRequest) as caught:
        begin_request(grammars, StructuredOutput("regex", "(", field="guided_regex"))
    assert caught.value.param == "guided_regex"


def test_others_run_while_a_grammar_compiles() -> None:
    """llguidance compiles without the interpreter's lock."""
    with open_grammar_manager() as grammars:
        pending = grammars.compile(request(ADVERSARIAL["schema: 2,000 properties, none required"]))
        turns = 0
        while not pending.done():
            time.sleep(0.001)
            turns += 1
        assert turns > 10


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = grammars_module.CompiledGrammar
    monkeypatch.setattr(grammars_module, "Compiled", lambda *args: built.append(args[0]) or real(*args))
    monkeypatch.setattr(grammars_module, "MAX_CACHED_GRAMMARS", 2)
    with open_grammar_manager() as grammars:
        for _ in range(3):
            begin_request(grammars, CHOICE)
            begin_request(grammars, StructuredOutput("choice", CHOICE.text, field="guided_choice"))
        assert len(built) == 1
        for text in ("a", "b"):
            begin_request(grammars, StructuredOutput("regex", text))
        begin_request(grammars, CHOICE)
        assert len(built) == 4


def test_a_grammar_that_is_known_waits_for_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    with open_grammar_manager() as grammars:
        begin_request(grammars, CHOICE)
        monkeypatch.setattr(grammars_module, "Compiled", lambda *args: done.wait(30))
        slow = grammars.compile(request(StructuredOutput("regex", "slow")))
        assert legal_ids(begin_request(grammars, CHOICE).mask(()))
        assert not slow.done()
        done.set()


def _state(grammars: GrammarManager, structured: StructuredOutput | None) -> RequestState:
    asked = request(structured) if structured else request(CHOICE, params=SamplingParams())
    return RequestState(asked, 0, 2048, grammars.compile(asked).result(10) if structured else None)


def test_rows_of_many_requests() -> None:
    """Some with drafts, some without, some without a grammar; jobs that nobody waits for; requests that leave."""
    with open_grammar_manager() as grammars:
        plain = _state(grammars, None)
        states = [
            _state(grammars, structured) for structured in (CHOICE, StructuredOutput("json_object"), CHOICE)
        ]
        drafts = [encode("per"), encode('{"a'), ()]
        fresh = [
            _state(grammars, structured) for structured in (CHOICE, StructuredOutput("json_object"), CHOICE)
        ]
        rows = [SampleRow(s, d[:n]) for s, d in zip(states, drafts, strict=True) for n in range(len(d) + 1)]
        for _ in range(3):
            grammars.start_masks([SampleRow(plain), *rows, SampleRow(plain, (1, 2))])
        grammars.start_masks([])
        grammars.start_masks([SampleRow(plain)])
        for _ in range(50):
            grammars.start_masks(rows)
            for state, other, draft in zip(states, fresh, drafts, strict=True):
                assert state.grammar is not None and other.grammar is not None
                for n in range(len(draft) + 1):
                    assert legal_ids(state.grammar.mask(draft[:n])) == legal_ids(
                        other.grammar.mask(draft[:n])
                    )
        grammars.start_masks(rows)
        for state, draft in zip(states, drafts, strict=True):
            state.append(draft)  # without asking for a mask


def test_whoever_comes_first_computes() -> None:
    with open_grammar_manager() as grammars:
        state = _state(grammars, CHOICE)
        seen: set[str] = set()
        real = MaskJob._compute

        def compute(job: MaskJob) -> None:
            seen.add(threading.current_thread().name)
            real(job)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MaskJob, "_set_computed", compute)
            for pause in (0.0, 0.02) * 20:
                grammars.start_masks([SampleRow(state)])
                time.sleep(pause)
                assert state.grammar is not None and state.grammar.mask(()) is not None
        assert "grammar-masks" in seen


def test_an_error_in_the_background_reaches_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_grammar_manager() as grammars:
        state = _state(grammars, CHOICE)

        def fail(job: MaskJob) -> None:
            raise RuntimeError("no masks today")

        monkeypatch.setattr(MaskJob, "_set_computed", fail)
        grammars.start_masks([SampleRow(state)])
        assert state.grammar is not None
        with pytest.raises(RuntimeError, match="no masks today"):
            state.grammar.mask(())
        monkeypatch.undo()
        assert state.grammar.mask(()) is not None


def test_close_while_requests_wait() -> None:
    grammars = GrammarManager(vocab_size())
    waiting = grammars.compile(request(CHOICE))
    grammars.close()
    assert waiting.exception(10) is not None or waiting.cancelled()


def test_the_thread_of_masks_ends_with_its_owner() -> None:
    """Engines come and go within a process; nobody closes those that an LLM has dropped."""
    grammars = GrammarManager(vocab_size())
    grammars.set_vocabulary(tokenizer().vocabulary())
    before = set(threading.enumerate())
    state = _state(grammars, CHOICE)
    grammars.start_masks([SampleRow(state)])
    assert state.grammar is not None and state.grammar.mask(()) is not None
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "grammar-masks")
    del grammars, state
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
