"""Schemas of tools: enforced, dropped or refused; their costs are counted in calls of functions."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.parts.tagged import TaggedArguments
from foreword.chat_formats.tool_validation import Choice
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse, WrittenCall
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar.tool_calls import ConstraintTask
from tests.support.counted_work import count_calls
from tests.support.tool_walks import CALL, NO_REASONING, WEATHER, ToolCases

IN_EACH_FORMAT = pytest.mark.parametrize("name", FORMATS)


UNIQUE = {"properties": {"ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
NOT_EMPTY = {"properties": {"ids": {"type": "array"}}, "minProperties": 1}


@pytest.mark.parametrize(
    ("name", "schema", "place", "keyword"),
    [
        *((name, UNIQUE, "/properties/ids", "uniqueItems") for name in ("hermes", "qwen3-coder", "pythonic")),
        *((name, NOT_EMPTY, "", "minProperties") for name in ("qwen3-coder", "pythonic")),
    ],
)
def test_keyword_that_cannot_be_enforced_is_dropped_unless_strict(
    cases: ToolCases, name: str, schema: dict[str, Any], place: str, keyword: str
) -> None:
    case = cases.get(name)
    tool = Tool("find", parameters={"type": "object", **schema})
    made = ConstraintTask(
        case.bound, ToolUse((WEATHER, tool), "required"), NO_REASONING, False, None
    ).constrain()
    assert made.dropped == (f"tools[1].function.parameters{place}: {keyword}",)
    assert made.structured is not None
    assert case.accepts(made.structured, case.written(WrittenCall("find", {"ids": [1, 1]}, "000000001")))
    strict = ToolUse((WEATHER, replace(tool, strict=True)), "required")
    with pytest.raises(InvalidRequest, match=rf"tools\[1\]\.function\.parameters: .*'{keyword}'") as caught:
        ConstraintTask(case.bound, strict, NO_REASONING, False, None).constrain()
    assert caught.value.param == "tools[1].function.parameters"


OTHERS = {
    "type": "object",
    "properties": {
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "named": {"type": "object", "required": ["a"]},
    },
}


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "pythonic", "functiongemma"])
def test_arguments_that_the_schema_does_not_name(cases: ToolCases, name: str) -> None:
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
    parsed = case.parse(use, case.written(WrittenCall("put", {"n": "1"})))
    assert parsed.json_calls == [("put", {"n": "1"})]


UNIT = {"enum": ["c", "f"]}


PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


# Schemas of an argument, values that they allow, and values that they do not.
ARGUMENTS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"$ref": "#/$defs/U"}, ["c"], ["x", None]),
    ({"anyOf": [{"$ref": "#/$defs/U"}, {"type": "null"}]}, ["f", None], ["x"]),
    ({"allOf": [{"$ref": "#/$defs/U"}]}, ["c"], ["x"]),
    ({"anyOf": [{"$ref": "#/$defs/P"}, {"type": "string", "maxLength": 2}]}, ["ab", {"n": 1}], ["abc", {}]),
    ({"anyOf": [{"type": "string", "minLength": 9}, {"type": "null"}]}, [9 * "x", None], ["x"]),
    ({"type": ["string", "integer"], "maxLength": 2}, ["ab", 12345], ["abc"]),
    ({"type": ["string", "null"]}, ["x", None], []),
    ({"enum": ["a", 1, None]}, ["a", 1, None], []),
    ({"anyOf": [{}, {"type": "null"}]}, ["x", -0.5, None, {"a": [1]}, True], []),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, ["x", [1]], []),
    ({"type": "string"}, ["1", "null", "[1]", "\x00'\"\\"], []),
]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "deepseek-v3.2", "minimax-m2", "lfm2"])
def test_values_of_an_argument(cases: ToolCases, name: str) -> None:
    case = cases.get(name)
    for schema, good, bad in ARGUMENTS:
        if bad and name == "lfm2":  # enforces no lengths of strings
            continue
        parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"U": UNIT, "P": PERSON}}
        use = ToolUse((Tool("put", parameters=parameters),), "required")
        for value in (*good, *bad):
            text = case.written(WrittenCall("put", {"x": value}))
            assert case.accepts(case.constraint(use), text) == (value in good), text
            parsed = case.parse(use, text)
            assert value in bad or parsed.json_calls == [("put", {"x": value})]


@IN_EACH_FORMAT
def test_custom_input_that_reads_as_a_number(cases: ToolCases, name: str) -> None:
    case = cases.get(name)
    use = ToolUse((Tool("run", is_custom=True),), "required")
    for text in ("1", "null", "[1]", "True"):
        answer = case.written(WrittenCall("run", {"input": text}, "000000001"))
        assert case.accepts(case.constraint(use), answer)
        assert case.parse(use, answer).calls == [("run", text)]


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
def test_messy_schema_is_served(cases: ToolCases, name: str) -> None:
    case = cases.get(name)
    use = ToolUse((Tool("find", parameters=MESSY),), "required")
    made = ConstraintTask(case.bound, use, NO_REASONING, False, None).constrain()
    assert any(place.endswith("/properties/mail: pattern") for place in made.dropped) or name != "hermes"
    assert made.structured is not None
    text = case.written(WrittenCall("find", {"mail": "me", "long": "x", "kind": "a"}, "000000001"))
    assert case.accepts(made.structured, text)


def test_custom_input_follows_its_expression(cases: ToolCases) -> None:
    tool = Tool("run", is_custom=True, input_grammar=StructuredOutput.regex('[a-c]+ "[0-9]\\n"'))
    for name in FORMATS:
        case = cases.get(name)
        if name in ("pythonic", "olmo3", "lfm2", "functiongemma", "gemma4"):
            continue
        structured = case.constraint(ToolUse((tool,), "required"))
        good, bad = (WrittenCall("run", {"input": text}, "000000001") for text in ('ab "7\n"', 'ad "7\n"'))
        assert case.accepts(structured, case.written(good)), name
        assert not case.accepts(structured, case.written(bad)), name


def test_many_tools(cases: ToolCases) -> None:
    tools = tuple(
        replace(WEATHER, name=f"{word}_{i}") for i in range(128) for word in ("a", "b", "ab", "get")
    )
    choices: dict[str, Choice] = {
        "hermes": "required",
        "llama-json": "auto",
        "qwen3-coder": "auto",
        "lfm2": "required",
    }
    for name, choice in choices.items():
        case = cases.get(name)
        structured = case.constraint(ToolUse(tools, choice))
        assert case.accepts(structured, case.written(replace(CALL, name="ab_77")))
        assert case.begin(structured).error is None


def test_unsatisfiable_schema_names_its_tool(cases: ToolCases) -> None:
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
def test_custom_input_follows_its_grammar(cases: ToolCases, name: str) -> None:
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
        call = replace(CALL, name="apply_patch", arguments={"input": body})
        assert case.parse(ToolUse((tool,)), case.written(call)).calls == [("apply_patch", body)]


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
    cases: ToolCases, grammar: str, reason: str
) -> None:
    input_grammar = StructuredOutput("lark", grammar, field="tools[0].format")
    with pytest.raises(InvalidRequest, match=rf"tools\[0\]\.format: .*{re.escape(reason)}"):
        cases.get("hermes").constraint(ToolUse((Tool("run", is_custom=True, input_grammar=input_grammar),)))


TAGGED = [
    name
    for name, fmt in FORMATS.items()
    if fmt.tools is not None and any(isinstance(part, TaggedArguments) for part in fmt.tools.call)
]
PYTHON = ["pythonic", "olmo3", "lfm2", "functiongemma", "gemma4"]


def _to_itself(size: int) -> dict[str, Any]:
    """Each alternative is the schema that holds it."""
    options = [{"type": "integer"}, *[{"$ref": "#/properties/a"}] * size]
    return {"type": "object", "properties": {"a": {"anyOf": options}}}


def _in_layers(size: int) -> dict[str, Any]:
    """Two references from each definition to the next one: 2^size ways."""
    definitions: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2 + [{"type": "string"}]} for i in range(size)
    }
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}


def _shared(size: int) -> dict[str, Any]:
    """Each argument has each alternative."""
    options = [{"type": "string", "maxLength": i} for i in range(size)]
    arguments = {f"a{i}": {"$ref": "#/$defs/d"} for i in range(size)}
    return {"type": "object", "properties": arguments, "$defs": {"d": {"anyOf": options}}}


def _foreign(size: int) -> dict[str, Any]:
    """References to other documents beside examples, which hold no schemas."""
    arguments = {f"a{i}": {"$ref": "x"} for i in range(size)}
    return {"type": "object", "properties": arguments, "examples": [0] * 50 * size}


def _constrain(name: str, parameters: dict[str, Any]) -> None:
    bound = bind_format(FORMATS[name], lambda text: None)
    use = ToolUse((Tool("f", parameters=parameters),), "required")
    ConstraintTask(bound, use, ReasoningOptions(), False, None).constrain()


@pytest.mark.parametrize("name", [*TAGGED, *PYTHON, "hermes", "llama-json"])
def test_references_to_the_schema_around_them_are_read_once(name: str) -> None:
    """755 bytes of them took longer than anyone waits."""
    for make, sizes in ((_to_itself, (2, 3, 4, 20, 40)), (_in_layers, (20, 40, 80))):
        counts = [count_calls(partial(_constrain, name, make(size))) for size in sizes]
        for (size, count), (larger, after) in pairwise(zip(sizes, counts, strict=True)):
            assert after < 1.2 * count * larger / size + 500


@pytest.mark.parametrize("name", ["qwen3-coder", "deepseek-v3.2", "pythonic", "hermes"])
def test_foreign_references_do_not_walk_the_whole_schema(name: str) -> None:
    counts = [count_calls(partial(_constrain, name, _foreign(size))) for size in (100, 200)]
    assert counts[1] < 2.2 * counts[0] and counts[0] < 20_000


def test_visits_of_shared_alternatives_are_bounded() -> None:
    """Beyond the bound an argument takes any text, and the keyword is counted as dropped."""
    bound = bind_format(FORMATS["qwen3-coder"], lambda text: None)
    made = ConstraintTask(
        bound, ToolUse((Tool("f", parameters=_shared(100)),)), ReasoningOptions(), False, None
    ).constrain()
    assert made.dropped and all(place.endswith(("$ref", "anyOf")) for place in made.dropped)
    strict = ToolUse((Tool("f", parameters=_shared(100), strict=True),))
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        ConstraintTask(bound, strict, ReasoningOptions(), False, None).constrain()
    counts = [count_calls(partial(_constrain, "qwen3-coder", _shared(size))) for size in (100, 200)]
    assert counts[1] < 2.5 * counts[0]


def test_grammar_is_refused_while_it_grows() -> None:
    """Each of 5,000 arguments would repeat a definition of 200 KB."""
    definition = {"type": "object", "properties": {"x": {"enum": ["v" * 200_000]}}}
    arguments = {f"a{i}": {"$ref": "#/$defs/d"} for i in range(2500)}
    parameters = {"type": "object", "properties": arguments, "$defs": {"d": definition}}
    with pytest.raises(InvalidRequest, match="grammar is too large"):
        _constrain("qwen3-coder", parameters)


def test_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"x": schema}}
    for name in ("qwen3-coder", "pythonic", "hermes"):
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            _constrain(name, schema)


@pytest.mark.parametrize("name", ["pythonic", "qwen3-coder"])
def test_types_of_an_argument_are_read_once_for_all_answers(cases: ToolCases, name: str) -> None:
    """The parser asks for them on the event loop, while the answer is generated."""
    case = cases.get(name)
    ids = case.encode(case.written(WrittenCall("f", {"a": 1})))
    counts = []
    for size in (6, 2000):
        use = ToolUse((Tool("f", parameters=_to_itself(size)),), "required")
        answers: list[str] = []

        def parse(use: ToolUse = use, answers: list[str] = answers) -> None:
            answers += [arguments for _, arguments in case.parse(use, ids).calls]

        counts.append([count_calls(parse) for _ in range(2)])
        assert [json.loads(answer) for answer in answers] == [{"a": 1}] * 2
    assert counts[0][1] == counts[1][1]  # from the second answer on
    assert counts[1][0] - counts[0][0] < 10_000
