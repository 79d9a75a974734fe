"""The pipeline from a conversation to engine requests: plain data in and out."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, Unsupported
from foreword.grammar.check import GrammarChecker
from foreword.tokenizer import chat_processor
from foreword.tokenizer.chat_processor import ChatInputProcessor, ChatTask
from foreword.tokenizer.input_processor import make_requests
from tests.support.fakes import byte_tokenizer
from tests.support.tool_checkpoint import chat_template

USER = [{"role": "user", "content": "Weather?"}]
USE = ToolUse((Tool("weather", parameters={"type": "object", "properties": {"at": {"type": "string"}}}),))


@pytest.fixture(scope="module")
def processor() -> ChatInputProcessor:
    return ChatInputProcessor(byte_tokenizer(chat_template("hermes")), None, 0)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(byte_tokenizer().vocabulary, num_workers=1)
    yield checker
    checker.close()


def test_task_plan_and_requests_are_plain_data(
    processor: ChatInputProcessor, checker: GrammarChecker
) -> None:
    """They cross a process boundary, and make the same there."""
    task = ChatTask(USER, SamplingParams(n=2, seed=7), USE, ReasoningOptions(budget_tokens=5))
    sent = pickle.loads(pickle.dumps(task))
    assert sent == task
    for given in (task, sent):
        ids, images = processor.render(given, is_seeded=True)
        plan = pickle.loads(pickle.dumps(processor.plan(given, ids, checker)))
        assert plan == processor.plan(task, ids, checker) and not images
        requests = make_requests(ids, plan.params, byte_tokenizer(), "x", 2048)
        assert pickle.loads(pickle.dumps(requests)) == requests and len(requests) == 2
    parser = processor.make_parser(plan.parsing)
    assert parser is not None and requests[0].params.structured is not None


def test_plain_conversation_needs_no_constraint(
    processor: ChatInputProcessor, checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_processor, "ConstraintTask", None)
    monkeypatch.setattr(chat_processor, "may_follow_space", None)
    params = SamplingParams(temperature=0.5)
    for task in (ChatTask(USER, params), ChatTask(USER, params, ToolUse(USE.tools, "none"))):
        plan = processor.plan(task, processor.render(task)[0], checker)
        assert plan.params is params and plan.parsing is not None
    after = SamplingParams(structured=StructuredOutput.regex("a", after="b"))
    monkeypatch.setattr(chat_processor, "may_follow_space", lambda structured: False)
    assert processor.plan(ChatTask(USER, after), [1], checker).params is after


def test_text_is_content_where_reasoning_is_not_separated(
    processor: ChatInputProcessor, checker: GrammarChecker
) -> None:
    plan = processor.plan(ChatTask(USER, separate_reasoning=False), [1], checker)
    assert plan.parsing is None and processor.make_parser(plan.parsing) is None


def test_fields_that_exclude_each_other() -> None:
    with pytest.raises(Unsupported, match="separate_reasoning"):
        ChatTask(USER, tools=USE, separate_reasoning=False).check()
    after = StructuredOutput.regex("a", after="b", field="structured_outputs.regex")
    with pytest.raises(InvalidRequest) as caught:
        ChatTask(USER, SamplingParams(structured=after), USE).check()
    assert caught.value.param == "structured_outputs.regex.after"


def test_call_ids_are_random_and_have_the_prefix_of_the_api(
    processor: ChatInputProcessor, checker: GrammarChecker
) -> None:
    task = ChatTask(USER, tools=USE, call_id_prefix="toolu_")
    plan = processor.plan(task, processor.render(task)[0], checker)
    ids = set()
    for _ in range(2):
        parser = processor.make_parser(plan.parsing)
        assert parser is not None
        events = parser.feed(-1, '<tool_call>\n{"name": "weather", "arguments": {"at"')
        ids |= {event.id for event in events if hasattr(event, "id")}
    assert len(ids) == 2 and all(call_id.startswith("toolu_") for call_id in ids)
