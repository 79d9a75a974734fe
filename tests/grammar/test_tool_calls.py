"""Constraints on answers with tools: formats, choices, dropped keywords, drafts, the reasoning's budget."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.chat_formats.events import ReasoningText
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.tool_validation import Choice, check_tools, parse_choice
from foreword.chat_formats.tools import NO_TOOLS, ReasoningOptions, ToolUse
from foreword.core.batch import SampleRow
from foreword.core.request import RequestState
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar.tool_calls import ConstraintTask, may_follow_space
from tests.support.budget import examples, some_of
from tests.support.grammar_walks import legal_ids
from tests.support.tool_walks import CALL, OTHER_CALL, TOOLS, ToolCases, mask_ids
from tests.support.waiting import WAIT_S

NO_ARGUMENTS = {"type": "object", "maxProperties": 0}
SEEDS = st.integers(0, 2**32)
# Each format with its markers as tokens and as text: in the fast suite it takes turns.
FORMS = [(name, (number + turn) % 2 == 0) for number, name in enumerate(FORMATS) for turn in (0, 1)]
IN_EACH_FORM = pytest.mark.parametrize(("name", "has_markers"), some_of(FORMS, 2))


@IN_EACH_FORM
@settings(max_examples=examples(40))
@given(seed=SEEDS, choice=st.sampled_from(["auto", "required"]), parallel=st.booleans())
def test_answer_parses_to_valid_calls(
    cases: ToolCases, name: str, has_markers: bool, seed: int, choice: Choice, parallel: bool
) -> None:
    case = cases.get(name, has_markers)
    use = ToolUse(TOOLS, choice, (), parallel)
    tools = case.calls
    begin = ""
    if choice == "auto":  # a call at the start, or within a text
        first = tools.first if isinstance(tools.first, str) else "{"
        begin = first if tools.opens_answer else f"Hello {first}"
    answer = case.walk(case.begin(case.constraint(use)), random.Random(seed), begin=begin)
    if answer[-1] != case.eos:
        return
    parsed = case.parse(use, answer)
    for called, arguments in parsed.json_calls:
        tool = use.get(called)
        assert tool is not None
        jsonschema.validate(arguments, tool.parameters or NO_ARGUMENTS)
    assert parsed.calls or (choice == "auto" and tools.opens_answer)
    assert parallel or len(parsed.calls) <= 1
    assert choice == "auto" or not parsed.content


@pytest.mark.parametrize("is_special", some_of([False, True], 2))
@IN_EACH_FORM
def test_call_as_the_template_writes_it(
    cases: ToolCases, name: str, has_markers: bool, is_special: bool
) -> None:
    case = cases.get(name, has_markers, is_special and has_markers)
    one, two = case.written(CALL), case.written(CALL, OTHER_CALL)
    unknown = case.written(replace(CALL, name="get_news"))
    no_city = case.written(replace(CALL, arguments={"days": 3}))
    tools = case.calls
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


def test_named_tool_is_called_exactly_once(cases: ToolCases) -> None:
    case = cases.get("hermes")
    choice, allowed = parse_choice({"type": "function", "function": {"name": "now"}}, "tool_choice")
    structured = case.constraint(check_tools([("", tool) for tool in TOOLS], choice, allowed))
    call = case.written(OTHER_CALL)
    assert case.accepts(structured, call)
    assert not case.accepts(structured, call + call)
    assert not case.accepts(structured, case.written(CALL))


@IN_EACH_FORM
def test_separators_of_a_call_are_bounded(cases: ToolCases, name: str, has_markers: bool) -> None:
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
        if token_id == case.eos:
            break
        answer.append(token_id)
        grammar.accept([token_id])
        if not free:
            assert not re.search(r"\s{4}$", case.decode(answer)), case.decode(answer)


def test_forced_call_beside_another_constraint_is_refused(cases: ToolCases) -> None:
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


@IN_EACH_FORM
def test_no_whitespace_precedes_a_constrained_text(cases: ToolCases, name: str, has_markers: bool) -> None:
    """What the client gets is a text of the constraint; whitespace before JSON is not passed on."""
    case = cases.get(name, has_markers)
    reasoning = case.reasoning
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
                    drops_space = may_follow_space(document)
                    assert case.parse(use, answer, drops_space).content == text


def test_nothing_is_masked_before_a_trigger_token(cases: ToolCases) -> None:
    case = cases.get("hermes")
    grammar = case.begin(case.constraint(ToolUse(TOOLS)))
    text = case.encode("<b> </tool_call> {")
    state = RequestState(case.request(case.constraint(ToolUse(TOOLS))), 0, 2048, grammar)
    case.grammars.start_masks([SampleRow(state, tuple(text))])
    for token_id in text:
        assert grammar.mask(()) is None and grammar.forced(4) == () and not grammar.must_end(())
        assert grammar.num_legal([token_id, 1, 2]) == 3
        grammar.accept([token_id])
    assert grammar.mask(tuple(case.encode("<tool_call>"))) is not None
    grammar.accept(case.encode("<tool_call>"))
    assert grammar.mask(()) is not None and grammar.num_legal([ord("x")]) == 0


def test_spelled_trigger_is_text_where_it_is_a_token(cases: ToolCases) -> None:
    case = cases.get("hermes")
    grammar = case.begin(case.constraint(ToolUse(TOOLS)))
    grammar.accept(list(b"<tool_call>"))
    assert grammar.mask(()) is None


def test_llama_answer_is_free_once_it_is_no_call(cases: ToolCases) -> None:
    case = cases.get("llama-json")
    structured = case.constraint(ToolUse(TOOLS))
    for text in ('{"name": "Rome"}', '{"names": 1}', "{", "Hello {", '{"name": "get_weather'):
        assert case.accepts(structured, text), text
    assert not case.accepts(structured, '{"name": "now", "parameters": 1}')
    grammar = case.begin(structured)
    assert grammar.mask(()) is None
    grammar.accept(list(b" Hi {"))
    assert grammar.mask(()) is None and grammar.num_legal(case.encode('{"name": "now", 3')) == 17


@settings(max_examples=examples(40))
@given(data=st.data())
def test_ignored_eos_ends_no_free_text(cases: ToolCases, data: st.DataObject) -> None:
    """A constraint ends with its text; whatever was drafted, and in a resumed request."""
    hermes, llama = cases.get("hermes"), cases.get("llama-json")
    call, llama_call = hermes.written(CALL), llama.written(CALL)
    budget, auto = ReasoningOptions(budget_tokens=2), ToolUse(TOOLS)
    case, structured, texts, num_kept = data.draw(
        st.sampled_from(
            [
                (hermes, hermes.constraint(auto), ("", "Hi ", "you"), None),
                (hermes, hermes.constraint(auto), ("Hi", call, "."), 2),
                (hermes, hermes.constraint(NO_TOOLS, budget), ("a", "<think>b</think>c", "d"), None),
                (hermes, hermes.constraint(NO_TOOLS, budget, True), ("", "</think>c", "d"), None),
                (llama, llama.constraint(auto), ("Hi", llama_call, "d"), None),
                (llama, llama.constraint(auto), (llama_call, "a", "b"), 1),
            ]
        )
    )
    tokens = [token_id for text in texts for token_id in (*case.encode(text), case.eos)]
    ends = list(itertools.accumulate(len(case.encode(text)) + 1 for text in texts))
    expected = len(tokens) if num_kept is None else ends[num_kept - 1]
    at = data.draw(st.integers(0, expected - 1))
    request = case.request(structured, resume_output_ids=tuple(tokens[:at]))
    request = replace(request, params=replace(request.params, ignore_eos=True))
    state = RequestState(request, 0, 2048, case.grammars.compile(request).result(WAIT_S))
    reason = None
    while reason is None and at < len(tokens):
        run = tokens[at : at + data.draw(st.integers(1, 40))]
        kept, reason, _, _ = state.check_finish(run)
        state.append(run[:kept])
        at += kept
    assert (at, reason) == (expected, None if num_kept is None else "stop")


def test_marker_tokens_are_no_part_of_a_value(cases: ToolCases) -> None:
    case = cases.get("qwen3-coder")
    grammar = case.begin(case.constraint(ToolUse(TOOLS, "required")))
    grammar.accept(case.encode("<tool_call>\n<function=get_weather>\n<parameter=city>\nRo"))
    ids = case.bound.token_ids
    assert not {ids["<tool_call>"], ids["</tool_call>"], ids["<think>"]} & set(legal_ids(grammar.mask(())))
    assert grammar.num_legal(list(b"<tool_call>")) == 11


@pytest.mark.parametrize("name", ["hermes", "glm-4.5", "granite", "gpt-oss"])
@pytest.mark.parametrize("has_markers", [True, False])
def test_forced_call_may_reason_first(cases: ToolCases, name: str, has_markers: bool) -> None:
    case = cases.get(name, has_markers)
    reasoning = case.reasoning
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
def test_answer_does_not_end_inside_reasoning(cases: ToolCases, name: str, choice: str) -> None:
    """Where a call or a document must follow. A call ends it where the family's models call inside of it."""
    case = cases.get(name)
    reasoning = case.reasoning
    assert reasoning is not None
    document = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"const": 1}}}, field="f")
    use = ToolUse(TOOLS, "required") if choice == "required" else NO_TOOLS
    structured = case.constraint(use, ReasoningOptions(), True, None if use.tools else document)
    begun = case.constraint(use, ReasoningOptions(), False, None if use.tools else document)
    thought = tuple(case.encode("I <b>"))
    allowed = [i for i in range(len(case.tokens)) if i != case.eos]
    for grammar, start in ((case.begin(structured), ()), (case.begin(begun), case.encode(reasoning.begin))):
        grammar.accept(start)
        assert grammar.num_legal((*thought, case.eos, 9)) == len(thought)
        assert [mask_ids(grammar, thought[:n]) for n in range(3)] == [allowed] * 3
        grammar.accept(thought)
        assert mask_ids(grammar) == allowed and not grammar.must_end(())
    rest = case.written(CALL) if use.tools else '{"a": 1}'
    assert case.accepts(structured, f"I <b>{reasoning.end}{rest}")
    if use.tools:
        assert case.accepts(structured, f"I <b>{rest}") == reasoning.ended_by_call
        opener, bad = rest[: rest.index("get_")], rest.replace("get_", "got_")
        draft = case.encode(f"I {bad}")
        if reasoning.ended_by_call:
            grammar = case.begin(structured)
            assert grammar.num_legal(draft) == len(case.encode(f"I {opener}g"))
            drafted = mask_ids(grammar, tuple(case.encode(f"I {opener}g")))
            grammar.accept(case.encode(f"I {opener}g"))
            assert drafted == mask_ids(grammar) and ord("o") not in drafted
    auto = case.begin(case.constraint(ToolUse(TOOLS), ReasoningOptions(), True))
    assert auto.mask(()) is None and auto.num_legal((*thought, case.eos)) == len(thought) + 1


@pytest.mark.parametrize("name", ["gemma4", "gpt-oss"])
def test_described_reasoning_holds_no_special_token(cases: ToolCases, name: str) -> None:
    """Where the marker is more than a token, the grammar has the reasoning too."""
    case = cases.get(name)
    reasoning = case.reasoning
    assert reasoning is not None
    grammar = case.begin(case.constraint(ToolUse(TOOLS, "required"), ReasoningOptions()))
    grammar.accept(case.encode(f"{reasoning.begin} I"))
    mask = mask_ids(grammar)
    assert mask is not None and case.eos not in mask and ord("x") in mask
    assert grammar.num_legal([ord("x"), case.eos]) == 1


BUDGET_CASES = [("hermes", True), ("hermes", False), ("gpt-oss", True)]


@pytest.mark.parametrize(("name", "has_markers"), BUDGET_CASES)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("budget", [0, 5])
def test_budget_closes_the_reasoning(
    cases: ToolCases, name: str, has_markers: bool, choice: str, budget: int
) -> None:
    """At every draft length, the masks after a draft are those without it, and force the closer."""
    case = cases.get(name, has_markers)
    reasoning = case.reasoning
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
        assert case.decode(closer) == reasoning.end
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
        assert mask_ids(grammar) == mask_ids(fresh)


def test_budget_counts_reasoning_that_the_model_begins(cases: ToolCases) -> None:
    case = cases.get("hermes")
    structured = case.constraint(NO_TOOLS, ReasoningOptions(budget_tokens=2))
    begin, end = case.encode("<think>")[0], case.encode("</think>")[0]
    grammar = case.begin(structured)
    assert grammar.num_legal([1, 2, 3, 4, begin, 1, 2, 3]) == 7
    grammar.accept([1, 2, 3, 4, begin, 1, 2])
    assert legal_ids(grammar.mask(())) == [end]
    grammar.accept([end])
    assert grammar.mask(()) is None
    assert case.begin(structured).num_legal([begin, 1, end, 1, 2, 3]) == 6


def test_response_format_waits_for_the_reasoning(cases: ToolCases) -> None:
    document = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"const": 1}}}, field="f")
    for has_markers in (True, False):
        case = cases.get("hermes", has_markers)
        structured = case.constraint(NO_TOOLS, ReasoningOptions(budget_tokens=20), response_format=document)
        assert case.accepts(structured, '{"a": 1}') and not case.accepts(structured, '{"a": 2}')
        assert case.accepts(structured, '<think>abc</think>\n{"a": 1}')
        assert not case.accepts(structured, '<think>abcdefghijklmnopqrstuvw</think>\n{"a": 1}')
        assert not case.accepts(structured, "<think>abc</think>\nNo.")
        grammar = case.begin(structured)
        grammar.accept(case.encode("<think>abcdefghijklmnopqrst"))
        assert case.decode(grammar.forced(20)) == "</think>"


def test_answer_is_a_call_or_the_response_format(cases: ToolCases) -> None:
    document = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"const": 1}}}, field="f")
    case = cases.get("hermes")
    structured = case.constraint(ToolUse(TOOLS), response_format=document)
    assert case.accepts(structured, case.written(CALL)) and case.accepts(structured, '{"a": 1}')
    assert not case.accepts(structured, "Hello") and not case.accepts(structured, '{"a": 2}')
    with pytest.raises(InvalidRequest, match="f: a constraint of type lark must be the only one"):
        case.constraint(ToolUse(TOOLS), response_format=StructuredOutput("lark", 'start: "a"', field="f"))


def test_nothing_to_enforce(cases: ToolCases) -> None:
    bound = cases.get("hermes").bound
    assert ConstraintTask(bound, NO_TOOLS, ReasoningOptions(), False, None).constrain().structured is None
    none = ConstraintTask(bound, ToolUse(TOOLS, "none"), ReasoningOptions(), True, None).constrain()
    assert none.structured is None


def test_masks_with_a_draft_equal_masks_without(cases: ToolCases) -> None:
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
        answer = (*case.encode(text), case.eos)
        plain, rows = case.begin(structured), []
        for token_id in answer:
            rows.append(mask_ids(plain))
            plain.accept([token_id])
        for start in range(0, len(answer), 7):
            drafted = case.begin(structured, resume_output_ids=answer[:start])
            assert drafted.num_legal(answer[start:]) == len(answer) - start
            state = RequestState(case.request(structured), 0, 2048, drafted)
            drafts = [answer[start:end] for end in range(start, min(start + 20, len(answer)))]
            case.grammars.start_masks([SampleRow(state, draft) for draft in drafts])
            assert [mask_ids(drafted, draft) for draft in drafts] == rows[start : start + len(drafts)]
            drafted.reset()
            assert [mask_ids(drafted, draft) for draft in drafts] == rows[start : start + len(drafts)]


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
def test_forced_text_of_a_call_is_drafted(cases: ToolCases, name: str, written: str, expected: str) -> None:
    case = cases.get(name)
    grammar = case.begin(case.constraint(ToolUse(TOOLS)))
    grammar.accept(case.encode(written))
    assert case.decode(grammar.forced(64)).startswith(expected)


def test_required_answer_begins_with_a_draft(cases: ToolCases) -> None:
    case = cases.get("hermes")
    grammar = case.begin(case.constraint(ToolUse(TOOLS, "required")))
    assert case.decode(grammar.forced(64)) == '<tool_call>\n{"name": "'


def test_reasoning_text_is_not_a_call(cases: ToolCases) -> None:
    """A trigger inside reasoning is text, unless the family calls there."""
    for name, is_call in (("hermes", False), ("qwen3-coder", True)):
        case = cases.get(name)
        grammar = case.begin(case.constraint(ToolUse(TOOLS), ReasoningOptions(), in_reasoning=True))
        grammar.accept(case.encode("so <tool_call>"))
        assert (grammar.mask(()) is not None) == is_call
        events = case.events(ToolUse(TOOLS), "so <tool_call>x", in_reasoning=True)
        assert any(isinstance(event, ReasoningText) for event in events)
