"""Constraints are tried in a process that may fall."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from foreword.core.structured import StructuredOutput, Vocabulary
from foreword.errors import InvalidRequest, Overloaded, RequestFailed
from foreword.grammar import check as check_module
from foreword.grammar import limits
from foreword.grammar.check import GrammarChecker
from tests.support.adversarial_grammars import ADVERSARIAL, REJECTED
from tests.support.grammar_walks import tokenizer

GOOD = StructuredOutput("regex", "[a-z]+")
BAD = StructuredOutput("regex", "[a-z", field="guided_regex")
DEADLY = REJECTED["lark: a chain of 20,000 terminals"]


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer().vocabulary, num_workers=1)
    checker.check_sync(GOOD)
    yield checker
    checker.close()


def _workers(checker: GrammarChecker) -> list[int]:
    return [worker._process.pid for worker in checker._workers if worker._process is not None]


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_hostile(checker: GrammarChecker, name: str) -> None:
    if name in REJECTED:
        with pytest.raises(InvalidRequest, match=r"^structured_outputs: .{10}") as caught:
            checker.check_sync(ADVERSARIAL[name])
        assert caught.value.status == 400 and caught.value.param == "structured_outputs"
        assert "%llguidance" not in caught.value.message and len(caught.value.message) < 600
    else:
        try:
            checker.check_sync(ADVERSARIAL[name])
        except InvalidRequest as error:
            assert error.param == "structured_outputs"
    checker.check_sync(GOOD)


async def test_the_field_and_the_reason_are_named(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_regex: .*unclosed character class") as caught:
        await checker.check(BAD)
    assert caught.value.param == "guided_regex"
    with pytest.raises(InvalidRequest, match=r"^other: ") as caught:
        checker.check_sync(StructuredOutput("regex", "[a-z", field="other"))
    assert caught.value.param == "other"


async def test_a_death_is_the_fault_of_one(checker: GrammarChecker) -> None:
    """Those that wait behind a grammar that kills the worker are answered by the next worker."""
    before = _workers(checker)
    others = [StructuredOutput("regex", f"[a-z]+{i}") for i in range(3)]
    deadly = StructuredOutput("lark", DEADLY.text + "\n// once more\n")
    results = await asyncio.gather(*map(checker.check, [deadly, *others]), return_exceptions=True)
    assert isinstance(results[0], InvalidRequest) and results[1:] == [None] * 3
    assert _workers(checker) != before


def test_a_verdict_is_remembered(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(checker, "_check", lambda structured: asked.append(structured) or "")
    fresh = StructuredOutput("regex", "never [a-z]+ seen")
    for _ in range(3):
        checker.check_sync(fresh)
        checker.check_sync(StructuredOutput("regex", fresh.text, after="</think>", field="other"))
    assert len(asked) == 1
    checker.check_sync(StructuredOutput("regex", fresh.text, whitespace=False))
    assert len(asked) == 2
    monkeypatch.setattr(limits, "MAX_CACHED_VERDICTS", 2)
    for text in ("a", "b", "c"):
        checker.check_sync(StructuredOutput("regex", text + "never"))
    checker.check_sync(fresh)
    assert len(asked) == 6


async def test_the_same_constraint_is_compiled_once_for_all_that_wait(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    go = threading.Event()
    monkeypatch.setattr(
        checker, "_check", lambda structured: asked.append(structured) or str(go.wait(10) and "")
    )
    fresh = StructuredOutput("regex", "all [a-z]+ at once")
    tasks = [asyncio.create_task(checker.check(fresh)) for _ in range(5)]
    await asyncio.sleep(0.05)
    tasks[0].cancel()  # its caller has gone; the others still wait
    go.set()
    assert await asyncio.gather(*tasks[1:]) == [None] * 4 and len(asked) == 1


async def test_who_waits_too_long_is_told_to_come_back(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "QUEUE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(checker, "_check", lambda structured: str(time.sleep(0.2) or ""))
    slow = asyncio.create_task(checker.check(StructuredOutput("regex", "slow")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await checker.check(StructuredOutput("regex", "behind it"))
    assert caught.value.status == 429
    await slow
    checker.check_sync(StructuredOutput("regex", "behind it"))  # was never a verdict


def test_a_worker_that_hangs_is_replaced(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    (pid,) = _workers(checker)
    monkeypatch.setattr(limits, "COMPILE_WALL_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    asleep = StructuredOutput("regex", "while it sleeps")
    with pytest.raises(Overloaded, match="too busy"):
        checker.check_sync(asleep)
    monkeypatch.undo()
    checker.check_sync(asleep)  # was never a verdict
    assert _workers(checker) != [pid]


def test_a_worker_that_was_killed_speaks_against_nobody(checker: GrammarChecker) -> None:
    """A machine that runs out of memory ends whom it likes."""
    (pid,) = _workers(checker)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    checker.check_sync(StructuredOutput("regex", "the next one"))
    assert _workers(checker) != [pid]


IMPATIENT = """
import sys
from foreword.grammar import limits
from foreword.grammar import check_worker as worker
limits.COMPILE_CPU_S = 0.1
worker.main(int(sys.argv[1]))
"""


def test_too_much_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker measures its own time: a machine that is busy refuses nobody."""
    monkeypatch.setattr(check_module, "WORKER", ("-c", IMPATIENT))
    checker = GrammarChecker(tokenizer().vocabulary, num_workers=1)
    with pytest.raises(InvalidRequest, match="takes more than"):
        checker.check_sync(ADVERSARIAL["schema: 2,000 properties, none required"])
    checker.check_sync(GOOD)
    checker.close()


def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module.sys, "executable", "/bin/false")
    checker = GrammarChecker(lambda: Vocabulary((b"a",), (), ()), num_workers=1)
    with pytest.raises(RequestFailed):
        checker.check_sync(GOOD)
    checker.close()


def test_close_ends_the_workers() -> None:
    checker = GrammarChecker(tokenizer().vocabulary, num_workers=1)
    checker.check_sync(GOOD)
    (pid,) = _workers(checker)
    checker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
