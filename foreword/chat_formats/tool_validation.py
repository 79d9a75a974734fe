"""Checks of a request's tools and tool choice, the same for every API and for Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from foreword.chat_formats.tools import Tool, ToolUse
from foreword.errors import InvalidRequest, shown

MAX_TOOLS: Final = 512
MAX_TOOLS_BYTES: Final = 1 << 20  # descriptions and schemas as JSON, all together
TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
Choice = Literal["auto", "none", "required"]


def check_tools(
    tools: Sequence[tuple[str, Tool]],
    choice: Choice = "auto",
    allowed: Sequence[str] = (),
    parallel: bool = True,
    schema_field: str = "parameters",
    choice_field: str = "tool_choice",
) -> ToolUse:
    """The tools of a request, checked. Raises InvalidRequest, which names the field and the limit.

    tools         each with its field in the body, such as "tools[3].function"
    allowed       names that may be called; (): all
    schema_field  the field of a tool's schema
    choice_field  the field of `choice` and `allowed`
    """
    check_num_tools(len(tools))
    fields: dict[str, str] = {}
    num_bytes = 0
    for field, tool in tools:
        if TOOL_NAME.fullmatch(tool.name) is None:
            raise InvalidRequest(
                f"{field}.name must be 1 to 128 letters, digits and characters of _.:/-, "
                f"got {shown(tool.name, 140)}",
                f"{field}.name",
            )
        if tool.name in fields:
            raise InvalidRequest(
                f"{field}.name: {tool.name!r} is the name of {fields[tool.name]} too", f"{field}.name"
            )
        fields[tool.name] = field
        num_bytes += _num_bytes(tool, field, schema_field)
        if num_bytes > MAX_TOOLS_BYTES:
            raise InvalidRequest(
                f"tools have more than {MAX_TOOLS_BYTES} bytes of descriptions and schemas", "tools"
            )
    if choice == "required" and not tools:
        raise InvalidRequest(f"{choice_field} asks for a call, but there are no tools", choice_field)
    for name in allowed:
        if name not in fields:
            known = ", ".join(list(fields)[:8]) + (", ..." if len(fields) > 8 else "")
            raise InvalidRequest(
                f"{choice_field} names the tool {shown(name, 140)}; the tools are: {known or 'none'}",
                choice_field,
            )
    if choice == "required" and len(allowed) == 1:
        parallel = False  # one tool by name: exactly one call of it
    named = (replace(tool, schema_field=f"{field}.{schema_field}") for field, tool in tools)
    return ToolUse(tuple(named), choice, tuple(allowed), parallel)


def check_num_tools(count: int) -> None:
    """Before any of them is read. Raises InvalidRequest."""
    if count > MAX_TOOLS:
        raise InvalidRequest(f"tools may hold at most {MAX_TOOLS} tools, got {count}", "tools")


def read_tools(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any] = "auto", parallel: bool = True
) -> ToolUse:
    """The tools of a Python caller, in the form of OpenAI's chat. Raises InvalidRequest."""
    choice, allowed = parse_choice(tool_choice, "tool_choice")
    return check_tools(list(map(_read_tool, range(len(tools)), tools)), choice, allowed, parallel)


def _read_tool(index: int, tool: Mapping[str, Any]) -> tuple[str, Tool]:
    """A tool and its field."""
    field = f"tools[{index}].function"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{field} must be an object with a name, got {shown(function)}", field)
    parameters = function.get("parameters") or None
    if parameters is not None and not isinstance(parameters, Mapping):
        name = f"{field}.parameters"
        raise InvalidRequest(f"{name} must be a JSON schema, got {shown(parameters)}", name)
    description = str(function.get("description") or "")
    return field, Tool(function["name"], description, parameters, bool(function.get("strict")))


def _num_bytes(tool: Tool, field: str, schema_field: str) -> int:
    """Bytes of description and schema. Raises InvalidRequest for a schema that is not of an object."""
    if not tool.parameters:
        return len(tool.description)
    path, kind = f"{field}.{schema_field}", tool.parameters.get("type")
    if kind != "object":
        got = "none" if kind is None else f"{shown(kind)}"
        raise InvalidRequest(f'{path} must be a schema of type "object", got type {got}', path)
    try:
        return len(tool.description) + len(json.dumps(tool.parameters, allow_nan=False))
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply", path) from None
    except ValueError as error:
        raise InvalidRequest(f"{path} cannot be written as JSON: {error}", path) from None


def parse_choice(value: str | Mapping[str, Any] | None, field: str) -> tuple[Choice, list[str]]:
    """(choice, names that may be called) of `tool_choice` or `function_call`."""
    if value is None or value == "auto":
        return "auto", []
    if value == "none":
        return "none", []
    if value in ("required", "any"):  # "any": Mistral
        return "required", []
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _parse_allowed(value.get("allowed_tools", value), f"{field}.allowed_tools")
    name = _tool_name(value)
    if name is None:
        raise InvalidRequest(
            f'{field} must be "none", "auto", "required", '
            f'{{"type": "function", "function": {{"name": ...}}}} or allowed_tools, got {shown(value)}',
            field,
        )
    return "required", [name]


def _parse_allowed(value: object, field: str) -> tuple[Choice, list[str]]:
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    tools = value.get("tools") if isinstance(value, Mapping) else None
    names = [_tool_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        raise InvalidRequest(
            f'{field} must have a mode, "auto" or "required", and tools with names, got {shown(value)}', field
        )
    return mode, list(dict.fromkeys(filter(None, names)))


def _tool_name(value: object) -> str | None:
    """The name in {"type": "function", "function": {"name": N}}, its custom form, or {"name": N}."""
    if not isinstance(value, Mapping):
        return None
    inner: Iterable[object] = (value.get("function"), value.get("custom"), value)
    names = (part.get("name") for part in inner if isinstance(part, Mapping))
    return next((name for name in names if isinstance(name, str)), None)
