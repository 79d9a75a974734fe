"""Checks of tools and calls that the APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.server.apis.body import StrictModel

MAX_ARGUMENTS_CHARS: Final = 1 << 20  # limit of one call in the history
TOOL_FORMS: Final = {  # form of a tool, by API
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
