"""The JSON types that a tool's schema allows for each argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

ANY_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MAX_SCHEMA_DEPTH: Final = 16  # references and alternatives
MAX_INDEX_DIGITS: Final = 6  # digits of a list index in a reference


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
