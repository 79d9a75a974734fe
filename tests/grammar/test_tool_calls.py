"""Constraints on answers with tools: formats, choices, dropped keywords, drafts, the reasoning's budget."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.chat_formats.call_writer import write_calls
from foreword.chat_formats.events import ContentText, ReasoningText
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.tool_validation import check_tools, parse_choice
from foreword.chat_formats.tools import NO_TOOLS, ReasoningOptions, Tool, ToolUse, WrittenCall
from foreword.core.batch import SampleRow
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.structured_output import RequestGrammar, StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar.manager import GrammarManager
from foreword.grammar.tool_calls import may_follow_space, tool_constraint
from tests.support.budget import examples
from tests.support.grammar_walks import legal_ids
from tests.support.parsed_answers import collect
from tests.support.tool_walks import (
    ToolVocab,
    accepts,
    begin_tools,
    open_tool_grammars,
    parse_tools,
    tool_vocab,
    walk_tools,
)

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 20},
            "unit": {"enum": ["c", "f"]},
        },
        "required": ["city"],
    },
)
GET = Tool(
    "get",
    parameters={
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "deep": {"$ref": "#/$defs/P"},
            "on": {"type": "boolean"},
            "x": {"type": ["number", "null"]},
        },
        "required": ["deep", "on"],
        "$defs": {"P": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    },
)
TOOLS = (WEATHER, GET, Tool("now"))
NO_ARGUMENTS = {"type": "object", "maxProperties": 0}
SEEDS = st.integers(0, 2**32)
CALL = WrittenCall("get_weather", {"city": "Rome", "days": 3}, "000000001")
OTHER_CALL = WrittenCall("now", {}, "000000002")
NO_REASONING = ReasoningOptions(enabled=False)


class Case:
    """A chat format over one vocabulary."""

    def __init__(self, vocab: ToolVocab, grammars: GrammarManager) -> None:
        self.vocab, self.grammars = vocab, grammars

    def constraint(
        self,
        use: ToolUse,
        reasoning: ReasoningOptions = NO_REASONING,
        in_reasoning: bool = False,
        response_format: StructuredOutput | None = None,
    ) -> StructuredOutput:
        made = tool_constraint(self.vocab.bound, use, reasoning, in_reasoning, response_format)
        assert made.structured is not None
        return made.structured

    def begin(self, structured: StructuredOutput, **fields: object) -> RequestGrammar:
        return begin_tools(self.grammars, self.vocab, structured, **fields)

    def accepts(self, structured: StructuredOutput, text: str) -> bool:
        return accepts(self.grammars, self.vocab, structured, text)

    def written(self, *calls: WrittenCall) -> str:
        tools = self.vocab.bound.format.tools
        assert tools is not None
        return write_calls(tools, calls)


class Cases:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._cases: dict[tuple[str, bool, bool], Case] = {}

    def get(self, name: str, has_markers: bool = True, is_special: bool = False) -> Case:
        key = (name, has_markers, is_special)
        if key not in self._cases:
            vocab = tool_vocab(*key)
            self._cases[key] = Case(vocab, self._stack.enter_context(open_tool_grammars(vocab)))
        return self._cases[key]


@pytest.fixture(scope="module")
def cases() -> Iterator[Cases]:
    with ExitStack() as stack:
        yield Cases(stack)


def _check_calls(case: Case, use: ToolUse, answer: list[int]) -> list[tuple[str, str]]:
    calls = collect(parse_tools(case.vocab, use, answer)).calls
    for name, arguments in calls:
        tool = use.get(name)
        assert tool is not None
        jsonschema.validate(json.loads(arguments), tool.parameters or NO_ARGUMENTS)
    return calls


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(8))
@given(seed=SEEDS, parallel=st.booleans())
def test_required_answer_parses_to_valid_calls(
    cases: Cases, name: str, has_markers: bool, seed: int, parallel: bool
) -> None:
    case = cases.get(name, has_markers)
    use = ToolUse(TOOLS, "required", (), parallel)
    grammar = case.begin(case.constraint(use))
    answer = walk_tools(grammar, case.vocab, random.Random(seed))
    if answer[-1] == case.vocab.eos:
        events = parse_tools(case.vocab, use, answer)
        assert not any(isinstance(event, ContentText) for event in events)
        calls = _check_calls(case, use, answer)
        assert calls and (parallel or len(calls) == 1)


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(8))
@given(seed=SEEDS, parallel=st.booleans())
def test_call_within_text_is_valid(
    cases: Cases, name: str, has_markers: bool, seed: int, parallel: bool
) -> None:
    case = cases.get(name, has_markers)
    use = ToolUse(TOOLS, "auto", (), parallel)
    tools = case.vocab.bound.format.tools
    assert tools is not None
    first = (tools.begin + tools.call)[0]
    opening = (first if isinstance(first, str) else "{") if tools.opens_answer else f"Hello {first}"
    answer = walk_tools(case.begin(case.constraint(use)), case.vocab, random.Random(seed), begin=opening)
    if answer[-1] == case.vocab.eos:
        calls = _check_calls(case, use, answer)
        assert tools.opens_answer or calls
        assert parallel or len(calls) <= 1


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_call_as_the_template_writes_it(cases: Cases, name: str, has_markers: bool, is_special: bool) -> None:
    case = cases.get(name, has_markers, is_special and has_markers)
    one, two = case.written(CALL), case.written(CALL, OTHER_CALL)
    unknown = case.written(replace(CALL, name="get_news"))
    no_city = case.written(replace(CALL, arguments={"days": 3}))
    tools = case.vocab.bound.format.tools
    assert tools is not None
    for use in (ToolUse(TOOLS, "required"), ToolUse(TOOLS, "auto")):
        structured = case.constraint(use)
        is_free = use.choice == "auto"
        assert case.accepts(structured, one) and case.accepts(structured, two)
        assert not case.accepts(structured, no_city)
        assert case.accepts(structured, unknown) == (is_free and tools.opens_answer)
        assert case.accepts(structured, "Some text.") == is_free
        alone = case.constraint(replace(use, parallel=False))
        assert case.accepts(alone, one) and not case.accepts(alone, two)
        if not tools.opens_answer:
            assert case.accepts(structured, f"Some text.\n{one}") == is_free
    assert not case.accepts(case.constraint(ToolUse(TOOLS, "required", ("get", "now"))), one)


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_named_tool_is_called_exactly_once(cases: Cases, name: str, has_markers: bool) -> None:
    case = cases.get(name, has_markers)
    choice, allowed = parse_choice({"type": "function", "function": {"name": "now"}}, "tool_choice")
    structured = case.constraint(check_tools([("", tool) for tool in TOOLS], choice, allowed))
    call = replace(OTHER_CALL, id=CALL.id)
    assert case.accepts(structured, case.written(call))
    assert not case.accepts(structured, case.written(call, call))
    assert not case.accepts(structured, case.written(CALL))


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_separators_of_a_call_are_bounded(cases: Cases, name: str, has_markers: bool) -> None:
    """A walk that takes whitespace wherever it may never takes three in a row."""
    case = cases.get(name, has_markers)
    structured = case.constraint(ToolUse(TOOLS, "required"))
    spaces = [ord(char) for char in " \n\t\r"]
    draw = random.Random(name)
    grammar, answer = case.begin(structured), list[int]()
    while len(answer) < 120:
        legal = legal_ids(grammar.mask(()))
        free = ord("x") in legal  # inside of a text
        token_id = next((i for i in spaces if i in legal and not free), None)
        if token_id is None:
            token_id = draw.choice(sorted(legal))
        if token_id == case.vocab.eos:
            break
        answer.append(token_id)
        grammar.accept([token_id])
        if not free:
            assert not re.search(r"\s{4}$", case.vocab.decode(answer)), case.vocab.decode(answer)


def test_forced_call_beside_another_constraint_is_refused(cases: Cases) -> None:
    """Not beside the formats of content, of which a forced call has none."""
    case = cases.get("hermes")
    use = ToolUse(TOOLS, "required")
    for field in ("structured_outputs.choice", "guided_choice"):
        document = StructuredOutput.choice(["yes"], field=field)
        with pytest.raises(InvalidRequest, match=f"{field} .* tool_choice") as caught:
            case.constraint(use, response_format=document)
        assert caught.value.param == field
    for field in ("response_format", "text.format.schema", "output_config.format.schema"):
        document = StructuredOutput.json_schema({"const": 1}, field=field)
        assert not case.accepts(case.constraint(use, response_format=document), "1")


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_no_whitespace_precedes_a_constrained_text(cases: Cases, name: str, has_markers: bool) -> None:
    """What the client gets is a text of the constraint; whitespace before JSON is not passed on."""
    case = cases.get(name, has_markers)
    reasoning = case.vocab.bound.format.reasoning
    thoughts = ["", f"{reasoning.begin}abc{reasoning.end}"] if reasoning is not None else [""]
    documents = [
        (StructuredOutput.choice(["yes", "no"]), ["yes"], [" yes", "\nno"]),
        (StructuredOutput.regex(" ?[a-z]{3}"), ["yes", " yes"], ["  yes"]),
        (StructuredOutput.json_schema({"enum": ["yes"]}), ['"yes"'], []),
    ]
    for use in (NO_TOOLS, ToolUse(TOOLS)):
        for document, good, bad in documents:
            structured = case.constraint(use, ReasoningOptions(), response_format=document)
            gaps = ["", "\n\n"] if structured.text != document.text and document.text[0] == "{" else [""]
            for text, thought, gap in itertools.product((*good, *bad), thoughts, gaps):
                answer = thought + gap + text
                assert case.accepts(structured, answer) == (text in good), (answer, document)
                if text in good:
                    events = parse_tools(
                        case.vocab, use, case.vocab.encode(answer), drops_space=may_follow_space(document)
                    )
                    content = [event.text for event in events if isinstance(event, ContentText)]
                    assert "".join(content) == text


def test_nothing_is_masked_before_a_trigger_token(cases: Cases) -> None:
    case = cases.get("hermes")
    grammar = case.begin(case.constraint(ToolUse(TOOLS)))
    text = case.vocab.encode("<b> </tool_call> {")
    state = RequestState(_request(case, case.constraint(ToolUse(TOOLS))), 0, 2048, grammar)
    case.grammars.start_masks([SampleRow(state, tuple(text))])
    for token_id in text:
        assert grammar.mask(()) is None and grammar.forced(4) == () and not grammar.must_end(())
        assert grammar.num_legal([token_id, 1, 2]) == 3
        grammar.accept([token_id])
    assert grammar.mask(tuple(case.vocab.encode("<tool_call>"))) is not None
    grammar.accept(case.vocab.encode("<tool_call>"))
    assert grammar.mask(()) is not None and grammar.num_legal([ord("x")]) == 0


def test_spelled_trigger_is_text_where_it_is_a_token(cases: Cases) -> None:
    case = cases.get("hermes")
    grammar = case.begin(case.constraint(ToolUse(TOOLS)))
    grammar.accept(list(b"<tool_call>"))
    assert grammar.mask(()) is None


def test_llama_answer_is_free_once_it_is_no_call(cases: Cases) -> None:
    case = cases.get("llama-json")
    structured = case.constraint(ToolUse(TOOLS))
    for text in ('{"name": "Rome"}', '{"names": 1}', "{", "Hello {", '{"name": "get_weather'):
        assert case.accepts(structured, text), text
    assert not case.accepts(structured, '{"name": "now", "parameters": 1}')
    grammar = case.begin(structured)
    assert grammar.mask(()) is None
    grammar.accept(list(b" Hi {"))
    assert grammar.mask(()) is None and grammar.num_legal(case.vocab.encode('{"name": "now", 3')) == 17


def test_marker_tokens_are_no_part_of_a_value(cases: Cases) -> None:
    case = cases.get("qwen3-coder")
    grammar = case.begin(case.constraint(ToolUse(TOOLS, "required")))
    grammar.accept(case.vocab.encode("<tool_call>\n<function=get_weather>\n<parameter=city>\nRo"))
    ids = case.vocab.bound.token_ids
    assert not {ids["<tool_call>"], ids["</tool_call>"], ids["<think>"]} & set(legal_ids(grammar.mask(())))
    assert grammar.num_legal(list(b"<tool_call>")) == 11


@pytest.mark.parametrize("name", ["hermes", "glm-4.5", "granite", "gpt-oss"])
@pytest.mark.parametrize("has_markers", [True, False])
def test_forced_call_may_reason_first(cases: Cases, name: str, has_markers: bool) -> None:
    case = cases.get(name, has_markers)
    reasoning = case.vocab.bound.format.reasoning
    assert reasoning is not None
    between = "<|start|>assistant" if name == "gpt-oss" else "\n\n"
    call = case.written(CALL)
    thought = f"I think { {1}!s} <b>{reasoning.end}{between}"
    use, options = ToolUse(TOOLS, "required"), ReasoningOptions()
    structured = case.constraint(use, options)
    assert case.accepts(structured, call)
    assert case.accepts(structured, f"{reasoning.begin}{thought}{call}")
    assert not case.accepts(structured, f"{reasoning.begin}{thought}No.")
    opened = case.constraint(use, options, in_reasoning=True)
    assert case.accepts(opened, f"{thought}{call}")
    assert not case.accepts(opened, f"{thought}No.")


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "kimi-k2"])
@pytest.mark.parametrize("choice", ["required", "document"])
def test_answer_does_not_end_inside_reasoning(cases: Cases, name: str, choice: str) -> None:
    """Where a call or a document must follow. A call ends it where the family's models call inside of it."""
    case = cases.get(name)
    vocab, reasoning = case.vocab, case.vocab.bound.format.reasoning
    assert reasoning is not None
    document = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"const": 1}}}, field="f")
    use = ToolUse(TOOLS, "required") if choice == "required" else NO_TOOLS
    structured = case.constraint(use, ReasoningOptions(), True, None if use.tools else document)
    begun = case.constraint(use, ReasoningOptions(), False, None if use.tools else document)
    thought = tuple(vocab.encode("I <b>"))
    allowed = [i for i in range(len(vocab.vocabulary.tokens)) if i != vocab.eos]
    for grammar, start in ((case.begin(structured), ()), (case.begin(begun), vocab.encode(reasoning.begin))):
        grammar.accept(start)
        assert grammar.num_legal((*thought, vocab.eos, 9)) == len(thought)
        assert [_mask_ids(grammar, thought[:n]) for n in range(3)] == [allowed] * 3
        grammar.accept(thought)
        assert _mask_ids(grammar) == allowed and not grammar.must_end(())
    rest = case.written(CALL) if use.tools else '{"a": 1}'
    assert case.accepts(structured, f"I <b>{reasoning.end}{rest}")
    if use.tools:
        assert case.accepts(structured, f"I <b>{rest}") == reasoning.ended_by_call
        opener, bad = rest[: rest.index("get_")], rest.replace("get_", "got_")
        draft = vocab.encode(f"I {bad}")
        if reasoning.ended_by_call:
            grammar = case.begin(structured)
            assert grammar.num_legal(draft) == len(vocab.encode(f"I {opener}g"))
            drafted = _mask_ids(grammar, tuple(vocab.encode(f"I {opener}g")))
            grammar.accept(vocab.encode(f"I {opener}g"))
            assert drafted == _mask_ids(grammar) and ord("o") not in drafted
    auto = case.begin(case.constraint(ToolUse(TOOLS), ReasoningOptions(), True))
    assert auto.mask(()) is None and auto.num_legal((*thought, vocab.eos)) == len(thought) + 1


@pytest.mark.parametrize("name", ["gemma4", "gpt-oss"])
def test_described_reasoning_holds_no_special_token(cases: Cases, name: str) -> None:
    """Where the marker is more than a token, the grammar has the reasoning too."""
    case = cases.get(name)
    reasoning = case.vocab.bound.format.reasoning
    assert reasoning is not None
    grammar = case.begin(case.constraint(ToolUse(TOOLS, "required"), ReasoningOptions()))
    grammar.accept(case.vocab.encode(f"{reasoning.begin} I"))
    mask = _mask_ids(grammar)
    assert mask is not None and case.vocab.eos not in mask and ord("x") in mask
    assert grammar.num_legal([ord("x"), case.vocab.eos]) == 1


def _request(case: Case, structured: StructuredOutput, **fields: object) -> Request:
    params = SamplingParams(structured=structured)
    return Request("r", (1, 2), params, 0, eos_token_ids=(case.vocab.eos,), **fields)  # type: ignore[arg-type]


BUDGET_CASES = [("hermes", True), ("hermes", False), ("gpt-oss", True)]


@pytest.mark.parametrize(("name", "has_markers"), BUDGET_CASES)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_budget_closes_the_reasoning(
    cases: Cases, name: str, has_markers: bool, choice: str, budget: int
) -> None:
    """At every draft length, the masks after a draft are those without it, and force the closer."""
    case = cases.get(name, has_markers)
    reasoning = case.vocab.bound.format.reasoning
    assert reasoning is not None
    use = ToolUse(TOOLS, choice) if choice != "none" else NO_TOOLS  # type: ignore[arg-type]
    structured = case.constraint(use, ReasoningOptions(budget_tokens=budget), in_reasoning=True)
    thought = list(b"thoughts go on")
    for num_before in range(budget + 1):
        grammar = case.begin(structured)
        grammar.accept(thought[:num_before])
        rest = thought[num_before:budget]
        assert grammar.num_legal(thought[num_before:]) == len(rest)
        spent = case.begin(structured)
        spent.accept(thought[:budget])
        closer = spent.forced(20)
        assert case.vocab.decode(closer) == reasoning.end
        draft = (*rest, *closer)
        assert grammar.num_legal(draft) == len(draft)
        for n in range(len(rest), len(draft)):
            assert legal_ids(grammar.mask(draft[:n])) == [draft[n]]
            assert not grammar.must_end(draft[:n])
        grammar.accept(rest)
        assert grammar.forced(20) == closer
        grammar.accept(closer)
        fresh = case.begin(case.constraint(use, ReasoningOptions(budget_tokens=99), in_reasoning=True))
        fresh.accept([*thought[:budget], *closer])
        assert _mask_ids(grammar) == _mask_ids(fresh)


def _mask_ids(grammar: RequestGrammar, draft: tuple[int, ...] = ()) -> list[int] | None:
    mask = grammar.mask(draft)
    return None if mask is None else legal_ids(mask)


def test_budget_counts_reasoning_that_the_model_begins(cases: Cases) -> None:
    case = cases.get("hermes")
    structured = case.constraint(NO_TOOLS, ReasoningOptions(budget_tokens=2))
    begin, end = case.vocab.encode("<think>")[0], case.vocab.encode("</think>")[0]
    grammar = case.begin(structured)
    assert grammar.num_legal([1, 2, 3, 4, begin, 1, 2, 3]) == 7
    grammar.accept([1, 2, 3, 4, begin, 1, 2])
    assert legal_ids(grammar.mask(())) == [end]
    grammar.accept([end])
    assert grammar.mask(()) is None
    assert case.begin(structured).num_legal([begin, 1, end, 1, 2, 3]) == 6


def test_response_format_waits_for_the_reasoning(cases: Cases) -> None:
    document = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"const": 1}}}, field="f")
    for has_markers in (True, False):
        case = cases.get("hermes", has_markers)
        structured = case.constraint(NO_TOOLS, ReasoningOptions(budget_tokens=20), response_format=document)
        assert case.accepts(structured, '{"a": 1}') and not case.accepts(structured, '{"a": 2}')
        assert case.accepts(structured, '<think>abc</think>\n{"a": 1}')
        assert not case.accepts(structured, '<think>abcdefghijklmnopqrstuvw</think>\n{"a": 1}')
        assert not case.accepts(structured, "<think>abc</think>\nNo.")
        grammar = case.begin(structured)
        grammar.accept(case.vocab.encode("<think>abcdefghijklmnopqrst"))
        assert case.vocab.decode(grammar.forced(20)) == "</think>"


def test_answer_is_a_call_or_the_response_format(cases: Cases) -> None:
    document = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"const": 1}}}, field="f")
    case = cases.get("hermes")
    structured = case.constraint(ToolUse(TOOLS), response_format=document)
    assert case.accepts(structured, case.written(CALL)) and case.accepts(structured, '{"a": 1}')
    assert not case.accepts(structured, "Hello") and not case.accepts(structured, '{"a": 2}')
    with pytest.raises(InvalidRequest, match="f: a constraint of type lark must be the only one"):
        case.constraint(ToolUse(TOOLS), response_format=StructuredOutput("lark", 'start: "a"', field="f"))


def test_nothing_to_enforce(cases: Cases) -> None:
    bound = cases.get("hermes").vocab.bound
    assert tool_constraint(bound, NO_TOOLS, ReasoningOptions(), False, None).structured is None
    none = tool_constraint(bound, ToolUse(TOOLS, "none"), ReasoningOptions(), True, None)
    assert none.structured is None


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "pythonic"])
def test_keyword_that_cannot_be_enforced_is_dropped_unless_strict(cases: Cases, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    }
    case = cases.get(name)
    use = ToolUse((WEATHER, Tool("find", parameters=schema)), "required")
    made = tool_constraint(case.vocab.bound, use, NO_REASONING, False, None)
    assert made.dropped == ("tools[1].function.parameters/properties/ids: uniqueItems",)
    assert made.structured is not None
    assert case.accepts(made.structured, case.written(WrittenCall("find", {"ids": [1, 1]}, "000000001")))
    strict = ToolUse((WEATHER, Tool("find", parameters=schema, strict=True)), "required")
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.function\.parameters: .*'uniqueItems'") as caught:
        tool_constraint(case.vocab.bound, strict, NO_REASONING, False, None)
    assert caught.value.param == "tools[1].function.parameters"


OTHERS = {
    "type": "object",
    "properties": {
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "named": {"type": "object", "required": ["a"]},
    },
}


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "pythonic", "functiongemma"])
def test_arguments_that_the_schema_does_not_name(cases: Cases, name: str) -> None:
    case = cases.get(name)

    def accepts(parameters: dict[str, object], arguments: dict[str, object]) -> bool:
        structured = case.constraint(ToolUse((Tool("put", parameters=parameters),), "required"))
        return case.accepts(structured, case.written(WrittenCall("put", arguments)))

    assert accepts(OTHERS, {"map": {"b": 1, "c": 2}, "named": {"a": "x"}})
    assert not accepts(OTHERS, {"map": {"b": "1"}})
    assert not accepts(OTHERS, {"named": {}})
    integers = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert accepts(integers, {"n": 1, "m": 2}) and not accepts(integers, {"n": 1, "m": [2]})
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    assert accepts(texts, {"n": "1"})
    use = ToolUse((Tool("put", parameters=texts),))
    events = parse_tools(case.vocab, use, case.vocab.encode(case.written(WrittenCall("put", {"n": "1"}))))
    assert collect(events).json_calls == [("put", {"n": "1"})]


UNIT = {"enum": ["c", "f"]}
PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ALTERNATIVES = [
    ({"$ref": "#/$defs/U"}, ["c"], ["x", None]),
    ({"anyOf": [{"$ref": "#/$defs/U"}, {"type": "null"}]}, ["f", None], ["x"]),
    ({"allOf": [{"$ref": "#/$defs/U"}]}, ["c"], ["x"]),
    ({"anyOf": [{"$ref": "#/$defs/P"}, {"type": "string", "maxLength": 2}]}, ["ab", {"n": 1}], ["abc", {}]),
    ({"anyOf": [{"type": "string", "minLength": 9}, {"type": "null"}]}, [9 * "x", None], ["x"]),
    ({"type": ["string", "integer"], "maxLength": 2}, ["ab", 12345], ["abc"]),
]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "deepseek-v3.2", "minimax-m2"])
@pytest.mark.parametrize(("schema", "good", "bad"), ALTERNATIVES)
def test_alternatives_of_an_argument(
    cases: Cases, name: str, schema: dict[str, object], good: list[object], bad: list[object]
) -> None:
    case = cases.get(name)
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"U": UNIT, "P": PERSON}}
    use = ToolUse((Tool("put", parameters=parameters),), "required")
    for values, is_good in ((good, True), (bad, False)):
        for value in values:
            text = case.written(WrittenCall("put", {"x": value}))
            assert case.accepts(case.constraint(use), text) == is_good, text
            calls = collect(parse_tools(case.vocab, use, case.vocab.encode(text))).calls
            assert not is_good or json.loads(calls[0][1]) == {"x": value}


VALUES_BY_TYPE = [
    ({"type": ["string", "null"]}, ["x", None]),
    ({"enum": ["a", 1, None]}, ["a", 1, None]),
    ({"anyOf": [{}, {"type": "null"}]}, ["x", -0.5, None, {"a": [1]}, True]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, ["x", [1]]),
    ({"type": "string"}, ["1", "null", "[1]", "\x00'\"\\"]),
]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "deepseek-v3.2", "minimax-m2", "lfm2"])
@pytest.mark.parametrize(("schema", "values"), VALUES_BY_TYPE)
def test_each_type_of_an_argument_can_be_written(
    cases: Cases, name: str, schema: dict[str, object], values: list[object]
) -> None:
    case = cases.get(name)
    tool = Tool("put", parameters={"type": "object", "properties": {"x": schema}})
    for value in values:
        text = case.written(WrittenCall("put", {"x": value}))
        assert case.accepts(case.constraint(ToolUse((tool,), "required")), text), text
        calls = collect(parse_tools(case.vocab, ToolUse((tool,)), case.vocab.encode(text))).calls
        assert [json.loads(arguments) for _, arguments in calls] == [{"x": value}]


@pytest.mark.parametrize("name", FORMATS)
def test_custom_input_that_reads_as_a_number(cases: Cases, name: str) -> None:
    case = cases.get(name)
    use = ToolUse((Tool("run", is_custom=True),), "required")
    for text in ("1", "null", "[1]", "True"):
        answer = case.written(WrittenCall("run", {"input": text}, "000000001"))
        assert case.accepts(case.constraint(use), answer)
        assert collect(parse_tools(case.vocab, use, case.vocab.encode(answer))).calls == [("run", text)]


@pytest.mark.parametrize("name", ["qwen3-coder", "pythonic"])
def test_keyword_of_all_arguments_is_dropped_unless_strict(cases: Cases, name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1}
    bound = cases.get(name).vocab.bound
    made = tool_constraint(bound, ToolUse((Tool("put", parameters=schema),)), NO_REASONING, False, None)
    assert made.dropped == ("tools[0].function.parameters: minProperties",)
    with pytest.raises(InvalidRequest, match="'minProperties' cannot be enforced"):
        use = ToolUse((Tool("put", parameters=schema, strict=True),))
        tool_constraint(bound, use, NO_REASONING, False, None)


MESSY = {
    "properties": {
        "mail": {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        "far": {"$ref": "https://example.com/schema.json"},
        "gone": {"$ref": "#/$defs/gone"},
        "long": {"type": "string", "maxLength": 10**9},
        "odd": {"type": "dict"},
        "kind": {"type": "integer", "enum": ["a", "b"]},
        "uri": {"type": "string", "format": "uri-reference"},
        "both": {"type": "object", "not": {"required": ["x"]}},
    },
    "if": {"required": ["far"]},
}


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "pythonic", "gemma4"])
def test_messy_schema_is_served(cases: Cases, name: str) -> None:
    case = cases.get(name)
    use = ToolUse((Tool("find", parameters=MESSY),), "required")
    made = tool_constraint(case.vocab.bound, use, NO_REASONING, False, None)
    assert any(place.endswith("/properties/mail: pattern") for place in made.dropped) or name != "hermes"
    assert made.structured is not None
    text = case.written(WrittenCall("find", {"mail": "me", "long": "x", "kind": "a"}, "000000001"))
    assert case.accepts(made.structured, text)


def test_masks_with_a_draft_equal_masks_without(cases: Cases) -> None:
    """Across the trigger, over two calls and the text between them."""
    for name, has_markers in (
        ("hermes", True),
        ("qwen3-coder", True),
        ("hermes", False),
        ("llama-json", True),
    ):
        case = cases.get(name, has_markers)
        structured = case.constraint(ToolUse(TOOLS), ReasoningOptions(budget_tokens=20))
        text = case.written(CALL)
        if name != "llama-json":
            text = f"<think>ab</think>Hi {text} and {text}"
        answer = (*case.vocab.encode(text), case.vocab.eos)
        plain, rows = case.begin(structured), []
        for token_id in answer:
            rows.append(_mask_ids(plain))
            plain.accept([token_id])
        for start in range(0, len(answer), 7):
            drafted = case.begin(structured, resume_output_ids=answer[:start])
            assert drafted.num_legal(answer[start:]) == len(answer) - start
            state = RequestState(_request(case, structured), 0, 2048, drafted)
            drafts = [answer[start:end] for end in range(start, min(start + 20, len(answer)))]
            case.grammars.start_masks([SampleRow(state, draft) for draft in drafts])
            assert [_mask_ids(drafted, draft) for draft in drafts] == rows[start : start + len(drafts)]
            drafted.reset()
            assert [_mask_ids(drafted, draft) for draft in drafts] == rows[start : start + len(drafts)]


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("hermes", "Hi <tool_call>", '\n{"name": "'),
        ("hermes", '<tool_call>\n{"name": "get_', 'weather", "arguments": {"city": "'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}', "}\n</tool_call>"),
        ("mistral-args", "[TOOL_CALLS]now", "[ARGS]{"),
        ("qwen3-coder", "<tool_call>", "\n<function="),
        ("llama-json", '{"name": "get_weather"', ', "parameters": {"city": "'),
    ],
)
def test_forced_text_of_a_call_is_drafted(cases: Cases, name: str, written: str, expected: str) -> None:
    case = cases.get(name)
    grammar = case.begin(case.constraint(ToolUse(TOOLS)))
    grammar.accept(case.vocab.encode(written))
    assert case.vocab.decode(grammar.forced(64)).startswith(expected)


def test_required_answer_begins_with_a_draft(cases: Cases) -> None:
    case = cases.get("hermes")
    grammar = case.begin(case.constraint(ToolUse(TOOLS, "required")))
    assert case.vocab.decode(grammar.forced(64)) == '<tool_call>\n{"name": "'


def test_custom_input_follows_its_expression(cases: Cases) -> None:
    tool = Tool("run", is_custom=True, input_grammar=StructuredOutput.regex('[a-c]+ "[0-9]\\n"'))
    for name in FORMATS:
        case = cases.get(name)
        if name in ("pythonic", "olmo3", "lfm2", "functiongemma", "gemma4"):
            continue
        structured = case.constraint(ToolUse((tool,), "required"))
        good, bad = (WrittenCall("run", {"input": text}, "000000001") for text in ('ab "7\n"', 'ad "7\n"'))
        assert case.accepts(structured, case.written(good)), name
        assert not case.accepts(structured, case.written(bad)), name


def test_many_tools(cases: Cases) -> None:
    tools = tuple(
        replace(WEATHER, name=f"{word}_{i}") for i in range(128) for word in ("a", "b", "ab", "get")
    )
    for name in ("hermes", "llama-json", "qwen3-coder", "lfm2"):
        case = cases.get(name)
        for choice in ("auto", "required"):
            structured = case.constraint(ToolUse(tools, choice))  # type: ignore[arg-type]
            assert case.accepts(structured, case.written(replace(CALL, name="ab_77")))
            assert case.begin(structured).error is None


def test_reasoning_text_is_not_a_call(cases: Cases) -> None:
    """A trigger inside reasoning is text, unless the family calls there."""
    for name, is_call in (("hermes", False), ("qwen3-coder", True)):
        case = cases.get(name)
        grammar = case.begin(case.constraint(ToolUse(TOOLS), ReasoningOptions(), in_reasoning=True))
        grammar.accept(case.vocab.encode("so <tool_call>"))
        assert (grammar.mask(()) is not None) == is_call
        events = parse_tools(case.vocab, ToolUse(TOOLS), case.vocab.encode("so <tool_call>x"), True)
        assert any(isinstance(event, ReasoningText) for event in events)


def test_unsatisfiable_schema_names_its_tool(cases: Cases) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 4}},
        "required": ["n"],
    }
    for name in ("hermes", "qwen3-coder", "llama-json", "lfm2"):
        case = cases.get(name)
        for choice in ("auto", "required"):
            use = ToolUse((WEATHER, Tool("bad", parameters=schema)), choice)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match=r"^tools: tools\[1\]: "):
                case.begin(case.constraint(use))


PATCH = r"""
// As coding agents use it.
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

?hunk: add_hunk
    | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""


@pytest.mark.parametrize(
    "name", ["hermes", "llama-json", "mistral-args", "deepseek-v3", "qwen3-coder", "glm-4.5"]
)
def test_custom_input_follows_its_grammar(cases: Cases, name: str) -> None:
    """Escaped as the format wants it."""
    case = cases.get(name)
    tool = Tool("apply_patch", is_custom=True, input_grammar=StructuredOutput("lark", PATCH))
    body = '*** Begin Patch\n*** Add File: a "b".py\n+x = "\\n"\t# é\n+\n*** Delete File: c\n*** End Patch'
    for choice in ("auto", "required"):
        structured = case.constraint(ToolUse((tool,), choice))  # type: ignore[arg-type]
        long = body.replace("+x", "+" + 700 * 'some "text"')
        for text, is_good in (
            (body, True),
            (long, True),
            (body.replace("+x", "x"), False),
            (body[:-5], False),
        ):
            call = WrittenCall("apply_patch", {"input": text}, "000000001")
            assert case.accepts(structured, case.written(call)) == is_good, text
        events = parse_tools(
            case.vocab,
            ToolUse((tool,)),
            case.vocab.encode(case.written(replace(CALL, name="apply_patch", arguments={"input": body}))),
        )
        assert collect(events).calls == [("apply_patch", body)]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "a"\n%ignore " "', "the directive '%ignore"),
        ("start: <tool>", "'<' is not supported"),
        ('begin: "a"', "has no rule `start`"),
        ("start: /a(?=b)/", "in a regular expression is not supported"),
        ("start: /a/i", "flags of the expression"),
    ],
)
def test_custom_grammar_that_cannot_be_embedded_names_the_reason(
    cases: Cases, grammar: str, reason: str
) -> None:
    input_grammar = StructuredOutput("lark", grammar, field="tools[0].format")
    with pytest.raises(InvalidRequest, match=rf"tools\[0\]\.format: .*{re.escape(reason)}"):
        cases.get("hermes").constraint(ToolUse((Tool("run", is_custom=True, input_grammar=input_grammar),)))
