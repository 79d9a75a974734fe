"""Constraints are checked in worker processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, OverBudget, Overloaded
from foreword.grammar import limits
from foreword.grammar.check import GrammarChecker
from foreword.grammar.tool_calls import ConstraintTask
from tests.support.adversarial_grammars import ADVERSARIAL, REJECTED
from tests.support.grammar_walks import tokenizer
from tests.support.waiting import WAIT_S, stop_process

GOOD = StructuredOutput("regex", "[a-z]+")
BAD = StructuredOutput("regex", "[a-z", field="guided_regex")
DEADLY = REJECTED["lark: a chain of 20,000 terminals"]


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer().vocabulary, num_workers=1)
    checker.check(GOOD)
    yield checker
    checker.close()


def _workers(checker: GrammarChecker) -> list[int]:
    return [worker.process.pid for worker in checker._pool.workers if worker.process is not None]


@pytest.mark.full
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_hostile(checker: GrammarChecker, name: str) -> None:
    if name in REJECTED:
        with pytest.raises(InvalidRequest, match=r"^structured_outputs: .{10}") as caught:
            checker.check(ADVERSARIAL[name])
        assert caught.value.status == 400 and caught.value.param == "structured_outputs"
        assert "%llguidance" not in caught.value.message and len(caught.value.message) < 600
    else:
        try:
            checker.check(ADVERSARIAL[name])
        except InvalidRequest as error:
            assert error.param == "structured_outputs"
    checker.check(GOOD)


async def test_error_names_field_and_reason(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_regex: .*unclosed character class") as caught:
        checker.check(BAD)
    assert caught.value.param == "guided_regex"
    with pytest.raises(InvalidRequest, match=r"^other: ") as caught:
        checker.check(StructuredOutput("regex", "[a-z", field="other"))
    assert caught.value.param == "other"


async def test_a_death_is_the_fault_of_one(checker: GrammarChecker) -> None:
    """Checks that wait for a worker are not hurt if a grammar kills it."""
    before = _workers(checker)
    others = [StructuredOutput("regex", f"[a-z]+{i}") for i in range(3)]
    deadly = StructuredOutput("lark", DEADLY.text + "\n// once more\n")
    results = await asyncio.gather(
        *(asyncio.to_thread(checker.check, each) for each in [deadly, *others]), return_exceptions=True
    )
    assert isinstance(results[0], InvalidRequest) and results[1:] == [None] * 3
    checker.check(StructuredOutput("regex", "by the next worker"))
    assert _workers(checker) != before


def test_verdict_is_cached(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(checker, "_check", lambda structured: checked.append(structured))
    fresh = StructuredOutput("regex", "never [a-z]+ seen")
    for _ in range(3):
        checker.check(fresh)
        checker.check(StructuredOutput("regex", fresh.text, after="</think>", field="other"))
    assert len(checked) == 1
    checker.check(StructuredOutput("regex", fresh.text, whitespace=False))
    assert len(checked) == 2
    monkeypatch.setattr(checker._verdicts, "_max_size", 2)
    for text in ("a", "b", "c"):
        checker.check(StructuredOutput("regex", text + "never"))
    checker.check(fresh)
    assert len(checked) == 6


async def test_equal_pending_constraints_are_compiled_once(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    go = threading.Event()
    monkeypatch.setattr(
        checker, "_check", lambda structured: checked.append(structured) or (go.wait(WAIT_S) and None)
    )
    fresh = StructuredOutput("regex", "all [a-z]+ at once")
    tasks = [asyncio.create_task(asyncio.to_thread(checker.check, fresh)) for _ in range(5)]
    await asyncio.sleep(0.05)
    tasks[0].cancel()  # the others still wait
    go.set()
    assert await asyncio.gather(*tasks[1:]) == [None] * 4 and len(checked) == 1


def test_queue_timeout_is_overloaded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = StructuredOutput("regex", "waits")
    monkeypatch.setattr(checker._pool, "limits", replace(checker._pool.limits, queue_timeout_s=0.0))
    with checker._pool.worker("field"), pytest.raises(Overloaded) as caught:
        checker.check(waits)
    assert caught.value.status == 429
    monkeypatch.undo()
    checker.check(waits)  # the timeout is not a verdict


def test_hanging_worker_is_replaced(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    checker.check(StructuredOutput("regex", "the worker runs"))
    (pid,) = _workers(checker)
    monkeypatch.setattr(checker._pool, "limits", replace(checker._pool.limits, wall_s=0.2))
    stop_process(pid)
    pending = StructuredOutput("regex", "while it sleeps")
    with pytest.raises(Overloaded, match="too busy"):
        checker.check(pending)
    monkeypatch.undo()
    checker.check(pending)  # the timeout is not a verdict
    assert _workers(checker) != [pid]


def test_cpu_limit_rejects_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time of the worker, so a busy machine rejects nothing."""
    monkeypatch.setattr(limits, "COMPILE_CPU_S", 0.1)
    checker = GrammarChecker(tokenizer().vocabulary, num_workers=1)
    with pytest.raises(OverBudget, match=r"^structured_outputs: it takes more than"):
        checker.check(ADVERSARIAL["schema: 2,000 properties, none required"])
    checker.check(GOOD)
    checker.close()


def test_constraints_of_tools_are_written_by_a_worker(checker: GrammarChecker) -> None:
    """As in this process, and once for equal tools."""
    bound = bind_format(FORMATS["hermes"], lambda text: None)

    def task(keyword: str) -> ConstraintTask:
        parameters = {"type": "object", "properties": {"at": {"type": "string"}, "to": {keyword: {}}}}
        use = ToolUse((Tool("look", parameters=parameters, strict=True),), "required")
        return ConstraintTask(bound, use, ReasoningOptions(), False, None)

    made = checker.constrain(task("description"))
    assert made == task("description").constrain() and checker.constrain(task("description")) is made
    with pytest.raises(InvalidRequest) as caught:
        checker.constrain(task("not"))
    with pytest.raises(InvalidRequest) as here:
        task("not").constrain()
    assert (str(caught.value), caught.value.param) == (str(here.value), here.value.param)


@pytest.mark.parametrize("cpu_s_per_mb", [0.0, 60.0])
def test_time_of_a_schema_is_bounded_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch, cpu_s_per_mb: float
) -> None:
    monkeypatch.setattr(limits, "COMPILE_CPU_S", 0.05)
    monkeypatch.setattr(limits, "COMPILE_CPU_S_PER_MB", cpu_s_per_mb)
    checker = GrammarChecker(tokenizer().vocabulary, num_workers=1)
    arguments = {f"a{i}": {"enum": [f"{i} {j}" for j in range(40)]} for i in range(2000)}
    use = ToolUse((Tool("f", parameters={"type": "object", "properties": arguments}),), "required")
    bound = bind_format(FORMATS["qwen3-coder"], lambda text: None)
    task = ConstraintTask(bound, use, ReasoningOptions(), False, None)
    if cpu_s_per_mb:
        assert checker.constrain(task) == task.constrain()
    else:
        with pytest.raises(OverBudget, match=r"^tools: it takes more than 0.05 s of CPU time") as caught:
            checker.constrain(task)
        assert caught.value.param == "tools"
    checker.close()
