"""Work on schemas of tools, counted in calls of functions: it grows with their bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.parts.tagged import TaggedArguments
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse, WrittenCall
from foreword.errors import InvalidRequest
from foreword.grammar import tool_calls
from tests.support.tool_walks import ToolCases

TAGGED = [
    name
    for name, fmt in FORMATS.items()
    if fmt.tools is not None and any(isinstance(part, TaggedArguments) for part in fmt.tools.call)
]
PYTHON = ["pythonic", "olmo3", "lfm2", "functiongemma", "gemma4"]


def _count_calls(work: Callable[[], object]) -> int:
    """Calls of Python functions, steps of generators included."""
    count = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


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
    tool_calls._constrain_calls.cache_clear()
    bound = bind_format(FORMATS[name], lambda text: None)
    use = ToolUse((Tool("f", parameters=parameters),), "required")
    tool_calls.tool_constraint(bound, use, ReasoningOptions(), False, None)


@pytest.mark.parametrize("name", [*TAGGED, *PYTHON, "hermes", "llama-json"])
def test_references_to_the_schema_around_them_are_read_once(name: str) -> None:
    """755 bytes of them took longer than anyone waits."""
    for make, sizes in ((_to_itself, (2, 3, 4, 20, 40)), (_in_layers, (20, 40, 80))):
        counts = [_count_calls(partial(_constrain, name, make(size))) for size in sizes]
        for (size, count), (larger, after) in pairwise(zip(sizes, counts, strict=True)):
            assert after < 1.2 * count * larger / size + 500


@pytest.mark.parametrize("name", ["qwen3-coder", "deepseek-v3.2", "pythonic", "hermes"])
def test_foreign_references_do_not_walk_the_whole_schema(name: str) -> None:
    counts = [_count_calls(partial(_constrain, name, _foreign(size))) for size in (100, 200)]
    assert counts[1] < 2.2 * counts[0] and counts[0] < 20_000


def test_visits_of_shared_alternatives_are_bounded() -> None:
    """Beyond the bound an argument takes any text, and the keyword is counted as dropped."""
    bound = bind_format(FORMATS["qwen3-coder"], lambda text: None)
    made = tool_calls.tool_constraint(
        bound, ToolUse((Tool("f", parameters=_shared(100)),)), ReasoningOptions(), False, None
    )
    assert made.dropped and all(place.endswith(("$ref", "anyOf")) for place in made.dropped)
    strict = ToolUse((Tool("f", parameters=_shared(100), strict=True),))
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        tool_calls.tool_constraint(bound, strict, ReasoningOptions(), False, None)
    counts = [_count_calls(partial(_constrain, "qwen3-coder", _shared(size))) for size in (100, 200)]
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

        counts.append([_count_calls(parse) for _ in range(2)])
        assert [json.loads(answer) for answer in answers] == [{"a": 1}] * 2
    assert counts[0][1] == counts[1][1]  # from the second answer on
    assert counts[1][0] - counts[0][0] < 10_000
