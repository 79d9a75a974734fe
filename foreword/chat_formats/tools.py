"""The tools of a request, which of them the model may or must call, and how it may reason before.

SchemaTypes has the JSON types that a tool's schema allows for each argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import unquote

from foreword.core.structured_output import StructuredOutput

ANY_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MAX_SCHEMA_DEPTH: Final = 16  # references and alternatives
MAX_INDEX_DIGITS: Final = 6  # digits of a list index in a reference


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


class SchemaTypes:
    """JSON types that the parts of a tool's schema allow, as far as it tells. Each part is read once.

    A part inside of itself, or behind MAX_SCHEMA_DEPTH references and alternatives, allows any type.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}  # id() of a part, which the root keeps -> its types
        properties = root.get("properties")
        # All of them now and in this order: the types do not depend on who asks for which first.
        self.arguments: dict[str | None, frozenset[str]] = {
            None: self.of(root.get("additionalProperties")),
            **{key: self.of(schema) for key, schema in _mapping(properties).items()},
        }

    @property
    def num_parts(self) -> int:
        """Parts that were read."""
        return len(self._types)

    def of(self, schema: Any, depth: int = MAX_SCHEMA_DEPTH) -> frozenset[str]:
        """The types of a part of the schema."""
        if not isinstance(schema, Mapping) or not depth:
            return ANY_TYPES
        if id(schema) not in self._types:
            self._types[id(schema)] = ANY_TYPES  # references to the part from inside of it allow any
            self._types[id(schema)] = self._read(schema, depth - 1)
        return self._types[id(schema)]

    def _read(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        types = ANY_TYPES
        names = schema.get("type")
        if isinstance(names, str | list):
            named = {names} if isinstance(names, str) else {name for name in names if isinstance(name, str)}
            types &= named | ({"integer"} if "number" in named else set())
        if isinstance(schema.get("enum"), list):
            types &= {json_type(value) for value in schema["enum"]}
        if "const" in schema:
            types &= {json_type(schema["const"])}
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                types &= frozenset().union(*(self.of(option, depth) for option in schema[keyword]))
        for option in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            types &= self.of(option, depth)
        if isinstance(schema.get("$ref"), str):
            types &= self.of(resolve_reference(schema["$ref"], self._root), depth)
        return types or ANY_TYPES


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of a schema that "#/..." names; None if there is none. Anchors are the root."""
    value: Any = root if reference[:1] == "#" else None
    for step in reference[1:].split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            is_index = step.isdecimal() and len(step) <= MAX_INDEX_DIGITS and int(step) < len(value)
            value = value[int(step)] if is_index else None
        else:
            value = _mapping(value).get(step)
    return value


def json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")
