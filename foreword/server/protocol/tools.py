"""Tools of a request: chat's fields `tools` and `tool_choice`, and the checks that every API shares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, Unsupported
from foreword.formats.tools import Tool, ToolUse
from foreword.server.protocol.base import StrictModel

__all__ = [
    "MAX_ARGUMENTS_CHARS",
    "MAX_TOOLS",
    "MAX_TOOLS_BYTES",
    "Choice",
    "FunctionBody",
    "ToolBody",
    "ToolsBody",
    "check_arguments",
    "check_tools",
    "custom_input_grammar",
    "parse_choice",
]

MAX_TOOLS: Final = 512
MAX_TOOLS_BYTES: Final = 1 << 20  # of the tools' descriptions and schemas as JSON
MAX_ARGUMENTS_CHARS: Final = 1 << 20  # of one call in the history
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
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may hold at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    fields: dict[str, str] = {}
    num_bytes = 0
    for field, tool in tools:
        if TOOL_NAME.fullmatch(tool.name) is None:
            raise InvalidRequest(
                f"{field}.name must be 1 to 128 letters, digits and characters of _.:/-, "
                f"got {tool.name!r:.140}",
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
                f"{choice_field} names the tool {name!r:.140}; the tools are: {known or 'none'}", choice_field
            )
    return ToolUse(tuple(tool for _, tool in tools), choice, tuple(allowed), parallel)


def _num_bytes(tool: Tool, field: str, schema_field: str) -> int:
    """Bytes of description and schema. Raises InvalidRequest for a schema that is not of an object."""
    if not tool.parameters:
        return len(tool.description)
    path, kind = f"{field}.{schema_field}", tool.parameters.get("type")
    if kind != "object":
        got = "none" if kind is None else f"{kind!r:.80}"
        raise InvalidRequest(f'{path} must be a schema of type "object", got type {got}', path)
    try:
        return len(tool.description) + len(json.dumps(tool.parameters))
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply", path) from None


def check_arguments(arguments: object, field: str) -> None:
    """Raises InvalidRequest for arguments of a call in the history that are too long."""
    if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENTS_CHARS:
        raise InvalidRequest(
            f"{field} has {len(arguments)} characters; the limit is {MAX_ARGUMENTS_CHARS}", field
        )


def custom_input_grammar(format_: Mapping[str, Any] | None, field: str) -> StructuredOutput | None:
    """The constraint on a custom tool's input: OpenAI's {"type": "text"} or {"type": "grammar", ...}.

    A grammar is {"syntax": "lark" or "regex", "definition": ...}, in chat inside of "grammar".
    """
    if format_ is None or format_.get("type") == "text":
        return None
    described = format_.get("grammar", format_)
    syntax = described.get("syntax") if isinstance(described, Mapping) else None
    definition = described.get("definition") if isinstance(described, Mapping) else None
    if format_.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidRequest(
            f'{field} must be {{"type": "text"}} or {{"type": "grammar"}} with syntax "lark" or "regex" '
            f"and a definition, got {dict(format_)!r:.80}",
            field,
        )
    if syntax == "regex":
        return StructuredOutput.regex(definition, field=field)
    return StructuredOutput("lark", definition, field=field)


class FunctionBody(StrictModel):
    is_lenient: ClassVar[bool] = True
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or None, bool(self.strict))


class CustomBody(StrictModel):
    """A tool whose input is a text, of a grammar if `format` has one."""

    is_lenient: ClassVar[bool] = True
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None

    def tool(self, field: str) -> Tool:
        grammar = custom_input_grammar(self.format, f"{field}.format")
        return Tool(self.name, self.description or "", is_custom=True, input_grammar=grammar)


class ToolBody(StrictModel):
    is_lenient: ClassVar[bool] = True
    type: str | None = None  # "function" or "custom"
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    def tool(self, field: str) -> tuple[str, Tool]:
        """The tool and its field. Raises InvalidRequest, Unsupported."""
        kind = self.type or ("custom" if self.custom is not None else "function")
        if kind not in ("function", "custom"):
            raise Unsupported(
                f"{field}.type must be 'function' or 'custom': this server runs no tools, got {kind!r:.80}",
                f"{field}.type",
            )
        path = f"{field}.{kind}"
        if kind == "custom" and self.custom is not None:
            return path, self.custom.tool(path)
        if kind == "function" and self.function is not None:
            return path, self.function.tool()
        raise InvalidRequest(f"{path} is required", path)


class ToolsBody(StrictModel):
    """Chat's fields of tools, and OpenAI's older `functions` and `function_call`."""

    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    function_call: str | dict[str, Any] | None = None

    @property
    def wants_function_call(self) -> bool:
        """Whether a call is answered in the older form."""
        return self.functions is not None

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest, Unsupported."""
        if self.functions is None:
            tools = [tool.tool(f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
            choice, allowed = parse_choice(self.tool_choice, "tool_choice")
            return check_tools(tools, choice, allowed, self.parallel_tool_calls is not False)
        for field in ("tools", "tool_choice"):
            if getattr(self, field):
                raise InvalidRequest(f"functions is the older form of {field}: give one of them", field)
        tools = [(f"functions[{i}]", function.tool()) for i, function in enumerate(self.functions)]
        choice, allowed = parse_choice(self.function_call, "function_call")
        return check_tools(tools, choice, allowed, parallel=False, choice_field="function_call")


def parse_choice(value: str | dict[str, Any] | None, field: str) -> tuple[Choice, list[str]]:
    """(choice, names that may be called) of `tool_choice` or `function_call`."""
    if value is None or value == "auto":
        return "auto", []
    if value == "none":
        return "none", []
    if value in ("required", "any"):  # "any": Mistral
        return "required", []
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _parse_allowed(value.get("allowed_tools", value), f"{field}.allowed_tools")
    name = _tool_name(value)
    if name is None:
        raise InvalidRequest(
            f'{field} must be "none", "auto", "required", '
            f'{{"type": "function", "function": {{"name": ...}}}} or allowed_tools, got {value!r:.80}',
            field,
        )
    return "required", [name]


def _parse_allowed(value: object, field: str) -> tuple[Choice, list[str]]:
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    tools = value.get("tools") if isinstance(value, Mapping) else None
    names = [_tool_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        raise InvalidRequest(
            f'{field} must have a mode, "auto" or "required", and tools with names, got {value!r:.80}', field
        )
    return mode, list(dict.fromkeys(filter(None, names)))


def _tool_name(value: object) -> str | None:
    """The name in {"type": "function", "function": {"name": N}}, its custom form, or {"name": N}."""
    if not isinstance(value, Mapping):
        return None
    inner: Iterable[object] = (value.get("function"), value.get("custom"), value)
    names = (part.get("name") for part in inner if isinstance(part, Mapping))
    return next((name for name in names if isinstance(name, str)), None)
