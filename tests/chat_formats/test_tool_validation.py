"""Tools of a request are checked once, for every API."""

from __future__ import annotations

from typing import Any

import pytest

from foreword.chat_formats.tool_validation import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    check_tools,
    parse_choice,
    read_tools,
)
from foreword.chat_formats.tools import Tool
from foreword.errors import InvalidRequest

BIG = {"type": "object", "description": "x" * (MAX_TOOLS_BYTES // 2 + 1)}


def named(*tools: Tool) -> list[tuple[str, Tool]]:
    return [(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


@pytest.mark.parametrize(
    ("tools", "param", "part"),
    [
        ([Tool("f"), Tool("f")], "tools[1].name", "'f' is the name of tools[0] too"),
        ([Tool("a b")], "tools[0].name", "128"),
        ([Tool("x" * 129)], "tools[0].name", "128"),
        (
            [Tool("f", parameters={"properties": {}})],
            "tools[0].parameters",
            'type "object", got type none',
        ),
        ([Tool("f", parameters={"type": "array"})], "tools[0].parameters", "'array'"),
        ([Tool("f", parameters={"type": "object", "x": float("nan")})], "tools[0].parameters", "as JSON"),
        ([Tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools", str(MAX_TOOLS)),
        ([Tool("a", parameters=BIG), Tool("b", parameters=BIG)], "tools", str(MAX_TOOLS_BYTES)),
    ],
)
def test_refused_tools(tools: list[Tool], param: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tools(named(*tools))
    assert caught.value.param == param and part in caught.value.message


@pytest.mark.parametrize(
    ("choice", "part"),
    [
        ("maybe", "required"),
        ({"type": "function", "function": {"name": "g"}}, "names the tool 'g'; the tools are: f"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "mode"),
        ({"type": "allowed_tools", "mode": "none", "tools": [{"name": "f"}]}, "mode"),
        (5, "must be"),
    ],
)
def test_refused_choices(choice: Any, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tools(named(Tool("f")), *parse_choice(choice, "tool_choice"))
    assert caught.value.param in ("tool_choice", "tool_choice.allowed_tools") and part in caught.value.message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", [])),
        ("any", ("required", [])),
        ({"type": "function", "function": {"name": "f"}}, ("required", ["f"])),
        ({"type": "custom", "custom": {"name": "f"}}, ("required", ["f"])),
        ({"name": "f"}, ("required", ["f"])),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}, ("auto", ["f"])),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"name": "f"}]}},
            ("required", ["f"]),
        ),
    ],
)
def test_forms_of_a_choice(choice: Any, expected: tuple[str, list[str]]) -> None:
    assert parse_choice(choice, "tool_choice") == expected


def test_one_tool_by_name_is_called_once() -> None:
    assert not check_tools(named(Tool("f"), Tool("g")), "required", ["f"]).parallel
    assert check_tools(named(Tool("f"), Tool("g")), "required", ["f", "g"]).parallel
    with pytest.raises(InvalidRequest, match="there are no tools"):
        check_tools([], "required")


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "function"}, "tools[0].function"),
        ({"function": {"name": 5}}, "tools[0].function"),
        ({"function": {"name": "f", "parameters": "x"}}, "tools[0].function.parameters"),
    ],
)
def test_malformed_tools_of_a_python_caller(tool: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tools([tool])
    assert caught.value.param == field
