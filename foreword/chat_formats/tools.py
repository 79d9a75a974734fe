"""The tools of a request, which of them the model may or must call, and how it may reason before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foreword.chat_formats.schema_types import SchemaTypes
from foreword.core.structured_output import StructuredOutput


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call, or a custom tool, whose input is a text."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  # JSON schema of an object; None: no arguments
    strict: bool = False  # keywords of the schema that cannot be enforced are refused, not dropped
    is_custom: bool = False
    input_grammar: StructuredOutput | None = None  # constraint on a custom tool's input; None: any text
    is_deferred: bool = False  # described by a message: chat templates do not get it
    schema_field: str = field(default="", compare=False)  # the user's name of `parameters`, for errors
    _argument_types: dict[str | None, frozenset[str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def argument_types(self, key: str | None) -> frozenset[str]:
        """JSON types that the schema allows for an argument; None for one that it does not name."""
        if self.is_custom:
            return frozenset({"string"})
        if not self._argument_types:
            self._argument_types.update(SchemaTypes(self.parameters or {}).arguments)
        return self._argument_types.get(key, self._argument_types[None])

    def to_template(self) -> dict[str, Any]:
        """OpenAI's form, as chat templates read it."""
        parameters: Mapping[str, Any] = self.parameters or {"type": "object", "properties": {}}
        if self.is_custom:
            properties = {"input": {"type": "string"}}
            parameters = {"type": "object", "properties": properties, "required": ["input"]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, in its order."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] = ()  # names that may be called; (): all
    parallel: bool = True  # several calls in one answer
    _by_name: Mapping[str, Tool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {tool.name: tool for tool in self.tools})

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that this answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if not self.allowed or tool.name in self.allowed)

    @property
    def listed_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt describes, whichever may be called: the prefix stays the same."""
        return tuple(tool for tool in self.tools if not tool.is_deferred)

    def get(self, name: str) -> Tool | None:
        return self._by_name.get(name)


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call to write as a model would, such as one of the history."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    index: int = 0  # number in the conversation, which some formats write


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """How the model may reason before it answers."""

    enabled: bool | None = None  # None: the chat template's default
    effort: str | None = None  # "minimal" .. "max", for templates with such a variable
    budget_tokens: int | None = None  # thinking budget; at its end the reasoning is closed

    @property
    def is_enabled(self) -> bool | None:
        """None: nothing is asked for. An effort asks for reasoning, "none" for no reasoning."""
        if self.enabled is None and self.effort is not None:
            return self.effort != "none"
        return self.enabled


NO_TOOLS = ToolUse()
DEFAULT_REASONING = ReasoningOptions()
