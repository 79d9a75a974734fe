"""Tools of a request: chat's fields `tools` and `tool_choice`, and checks that the APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from foreword.chat_formats.tool_validation import check_tools, parse_choice
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, Unsupported
from foreword.server.apis.body import StrictModel

MAX_ARGUMENTS_CHARS: Final = 1 << 20  # of one call in the history
TOOL_FORMS: Final = {  # by API
    "chat": '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}',
    "Messages": '{"name": ..., "description": ..., "input_schema": ...}',
    "Responses": '{"type": "function", "name": ..., "description": ..., "parameters": ...}',
}


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


def check_tool_form(tool: StrictModel, form: str, field: str) -> None:
    """Raises InvalidRequest, which shows the form of this API, for a tool in another API's form.

    form  name in TOOL_FORMS
    """
    given = tool.model_dump(exclude_none=True)
    written = None
    if isinstance(given.get("function"), dict):
        written = "chat"
    elif isinstance(given.get("input_schema"), dict):
        written = "Messages"
    elif "name" in given and ("parameters" in given or given.get("type") == "function"):
        written = "Responses"
    if written is not None and written != form:
        raise InvalidRequest(
            f"{field} is a tool in the form of {written}; this API takes {TOOL_FORMS[form]}", field
        )


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


class ChatTool(StrictModel):
    is_lenient: ClassVar[bool] = True
    type: str | None = None  # "function" or "custom"
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    def tool(self, field: str) -> tuple[str, Tool]:
        """The tool and its field. Raises InvalidRequest, Unsupported."""
        check_tool_form(self, "chat", field)
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

    tools: list[ChatTool] | None = None
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
