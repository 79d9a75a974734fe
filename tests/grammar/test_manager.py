"""The engine's grammars: background compilation, background masks, caches."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from foreword.core.batch import SampleRow
from foreword.core.params import SamplingParams
from foreword.core.request import RequestState
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar import manager as manager_module
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
from tests.support.waiting import WAIT_S

CHOICE = StructuredOutput("choice", '["yes", "no", "perhaps"]')


def test_request_waits_for_the_vocabulary() -> None:
    grammars = GrammarManager(vocab_size())
    pending = grammars.compile(request(CHOICE))
    with pytest.raises(FutureTimeout):
        pending.result(0.05)
    grammars.set_vocabulary(tokenizer().vocabulary())
    assert pending.result(WAIT_S).error is None
    grammars.set_vocabulary(tokenizer().vocabulary())
    grammars.close()


def test_compile_error_names_the_field() -> None:
    with open_grammar_manager() as grammars, pytest.raises(InvalidRequest) as caught:
        begin_request(grammars, StructuredOutput("regex", "(", field="guided_regex"))
    assert caught.value.param == "guided_regex"


def test_others_run_while_a_grammar_compiles() -> None:
    """llguidance compiles without the GIL."""
    with open_grammar_manager() as grammars:
        pending = grammars.compile(request(ADVERSARIAL["schema: 2,000 properties, none required"]))
        num_sleeps = 0
        while not pending.done():
            time.sleep(0.001)
            num_sleeps += 1
        assert num_sleeps > 10


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = manager_module.CompiledGrammar
    monkeypatch.setattr(manager_module, "CompiledGrammar", lambda *args: built.append(args[0]) or real(*args))
    monkeypatch.setattr(manager_module, "MAX_CACHED_GRAMMARS", 2)
    with open_grammar_manager() as grammars:
        for _ in range(3):
            begin_request(grammars, CHOICE)
            begin_request(grammars, StructuredOutput("choice", CHOICE.text, field="guided_choice"))
        assert len(built) == 1
        for text in ("a", "b"):
            begin_request(grammars, StructuredOutput("regex", text))
        begin_request(grammars, CHOICE)
        assert len(built) == 4


def test_cached_grammar_does_not_wait_for_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    with open_grammar_manager() as grammars:
        begin_request(grammars, CHOICE)
        monkeypatch.setattr(manager_module, "CompiledGrammar", lambda *args: done.wait(WAIT_S))
        slow = grammars.compile(request(StructuredOutput("regex", "slow")))
        assert legal_ids(begin_request(grammars, CHOICE).mask(()))
        assert not slow.done()
        done.set()


def _state(grammars: GrammarManager, structured: StructuredOutput | None) -> RequestState:
    new = request(structured) if structured else request(CHOICE, params=SamplingParams())
    return RequestState(new, 0, 2048, grammars.compile(new).result(WAIT_S) if structured else None)


def test_rows_of_many_requests() -> None:
    """With and without drafts and grammars; unused jobs; tokens accepted without a mask."""
    with open_grammar_manager() as grammars:
        plain = _state(grammars, None)
        states = [
            _state(grammars, structured) for structured in (CHOICE, StructuredOutput("json_object"), CHOICE)
        ]
        drafts = [encode("per"), encode('{"a'), ()]
        expected = [
            _state(grammars, structured) for structured in (CHOICE, StructuredOutput("json_object"), CHOICE)
        ]
        rows = [SampleRow(s, d[:n]) for s, d in zip(states, drafts, strict=True) for n in range(len(d) + 1)]
        for _ in range(3):
            grammars.start_masks([SampleRow(plain), *rows, SampleRow(plain, (1, 2))])
        grammars.start_masks([])
        grammars.start_masks([SampleRow(plain)])
        for _ in range(50):
            grammars.start_masks(rows)
            for state, other, draft in zip(states, expected, drafts, strict=True):
                assert state.grammar is not None and other.grammar is not None
                for n in range(len(draft) + 1):
                    assert legal_ids(state.grammar.mask(draft[:n])) == legal_ids(
                        other.grammar.mask(draft[:n])
                    )
        grammars.start_masks(rows)
        for state, draft in zip(states, drafts, strict=True):
            state.append(draft)  # without a call of mask()


def test_first_thread_computes_the_mask() -> None:
    with open_grammar_manager() as grammars:
        state = _state(grammars, CHOICE)
        seen: set[str] = set()
        real = MaskJob._compute

        def compute(job: MaskJob) -> None:
            seen.add(threading.current_thread().name)
            real(job)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MaskJob, "_compute", compute)
            for number in itertools.count():
                grammars.start_masks([SampleRow(state)])
                time.sleep(0.02 * (number % 2))
                assert state.grammar is not None and state.grammar.mask(()) is not None
                if number > 40 and "grammar-masks" in seen:
                    break


def test_background_error_is_raised_by_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_grammar_manager() as grammars:
        state = _state(grammars, CHOICE)

        def fail(job: MaskJob) -> None:
            raise RuntimeError("no masks today")

        monkeypatch.setattr(MaskJob, "_compute", fail)
        grammars.start_masks([SampleRow(state)])
        assert state.grammar is not None
        with pytest.raises(RuntimeError, match="no masks today"):
            state.grammar.mask(())
        monkeypatch.undo()
        assert state.grammar.mask(()) is not None


def test_close_while_requests_wait() -> None:
    grammars = GrammarManager(vocab_size())
    pending = grammars.compile(request(CHOICE))
    grammars.close()
    assert pending.exception(10) is not None or pending.cancelled()


def test_mask_thread_ends_with_its_manager() -> None:
    """A dropped LLM does not close its engine."""
    grammars = GrammarManager(vocab_size())
    grammars.set_vocabulary(tokenizer().vocabulary())
    before = set(threading.enumerate())
    state = _state(grammars, CHOICE)
    grammars.start_masks([SampleRow(state)])
    assert state.grammar is not None and state.grammar.mask(()) is not None
    (thread,) = (t for t in set(threading.enumerate()) - before if t.name == "grammar-masks")
    del grammars, state
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
