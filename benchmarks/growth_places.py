"""The places of an API's bodies that can grow: every list, map, text, number and nesting of the document.

The document says where a list or an object stands, and not what is valid there. SAMPLES has a small valid
value of each schema; `growth_forms` has the histories, schemas, grammars and parts that it leaves open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Make = Callable[[int], str]  # elements -> the JSON of a value
Schema = Mapping[str, Any]
Key = tuple[str, str]  # (schema, field)

ABSENT = object()
LETTERS = 16  # characters of a text for each element
HI = {"role": "user", "content": "Hi"}
TEXT_PART = {"type": "text", "text": "t"}
OBJECT_SCHEMA = {"type": "object"}
FUNCTION_CALL = {"name": "f", "arguments": "{}"}
# Small valid values; "{i}" becomes the number of the element where a list's elements differ.
SAMPLES: Mapping[str, dict[str, Any]] = {
    "ChatBody": {"messages": [HI], "max_tokens": 1},
    "CompletionBody": {"prompt": "Hi", "max_tokens": 1},
    "ResponsesBody": {"input": "Hi", "max_output_tokens": 1, "store": False},
    "InputTokensBody": {"input": "Hi"},
    "MessagesBody": {"messages": [HI], "max_tokens": 1},
    "CountTokensBody": {"messages": [HI]},
    "EmbeddingBody": {"input": "Hi"},
    "RerankBody": {"query": "Hi", "documents": ["Hi"]},
    "ScoreBody": {"text_1": "Hi", "text_2": "Hi"},
    "TokenizeBody": {"prompt": "Hi"},
    "DetokenizeBody": {"tokens": [5]},
    "Message": HI,
    "MessageBody": HI,
    "InputItem": HI,
    "ToolCallBody": {"id": "c{i}", "type": "function", "function": FUNCTION_CALL},
    "CalledFunction": FUNCTION_CALL,
    "ChatTool": {"type": "function", "function": {"name": "f{i}", "parameters": OBJECT_SCHEMA}},
    "FunctionBody": {"name": "f{i}", "parameters": OBJECT_SCHEMA},
    "CustomBody": {"name": "f{i}"},
    "FlatTool": {"type": "function", "name": "f{i}", "parameters": OBJECT_SCHEMA},
    "ToolBody": {"name": "f{i}", "input_schema": OBJECT_SCHEMA},
    "ThinkingBody": {"type": "adaptive"},
    "NamedSchema": {"name": "x", "schema": OBJECT_SCHEMA},
    "OutputFormatBody": {"type": "json_schema", "schema": OBJECT_SCHEMA},
}
ONE_TOOL = [SAMPLES["ChatTool"]]
# Fields that must be sent together, or must not be.
NEEDS: Mapping[Key, dict[str, Any]] = {
    ("ChatBody", "tool_choice"): {"tools": ONE_TOOL},
    ("ChatBody", "function_call"): {"functions": [SAMPLES["FunctionBody"]]},
    ("ChatBody", "logprob_token_ids"): {"logprobs": True},
    ("ChatBody", "top_logprobs"): {"logprobs": True},
    ("ChatBody", "max_completion_tokens"): {"max_tokens": ABSENT},
    ("CompletionBody", "logprob_token_ids"): {"logprobs": 0},
    ("MessagesBody", "tool_choice"): {"tools": [SAMPLES["ToolBody"]]},
    ("CountTokensBody", "tool_choice"): {"tools": [SAMPLES["ToolBody"]]},
    ("ResponsesBody", "tool_choice"): {"tools": [SAMPLES["FlatTool"]]},
    ("InputTokensBody", "tool_choice"): {"tools": [SAMPLES["FlatTool"]]},
    ("ResponsesBody", "top_logprobs"): {"include": ["message.output_text.logprobs"]},
    ("ResponsesBody", "max_tokens"): {"max_output_tokens": ABSENT},
    ("TokenizeBody", "messages"): {"prompt": ABSENT},
    ("TokenizeBody", "tools"): {"prompt": ABSENT, "messages": [HI]},
    ("TokenizeBody", "chat_template_kwargs"): {"prompt": ABSENT, "messages": [HI]},
    ("ScoreBody", "data_1"): {"text_1": ABSENT, "text_2": ABSENT, "data_2": "Hi"},
    ("ScoreBody", "data_2"): {"text_1": ABSENT, "text_2": ABSENT, "data_1": "Hi"},
    ("ScoreBody", "queries"): {"text_1": ABSENT, "text_2": ABSENT, "documents": "Hi"},
    ("ScoreBody", "documents"): {"text_1": ABSENT, "text_2": ABSENT, "queries": "Hi"},
    ("ScoreBody", "items"): {"text_1": ABSENT, "text_2": ABSENT, "queries": "Hi"},
    ("Message", "refusal"): {"role": "assistant", "content": ABSENT},
    ("Message", "reasoning"): {"role": "assistant"},
    ("Message", "reasoning_content"): {"role": "assistant"},
    ("Message", "thinking"): {"role": "assistant"},
    ("Message", "tool_calls"): {"role": "assistant"},
    ("Message", "function_call"): {"role": "assistant"},
    ("Message", "tool_call_id"): {"role": "tool"},
    ("ToolCallBody", "custom"): {"type": "custom", "function": ABSENT},
    ("ChatTool", "custom"): {"type": "custom", "function": ABSENT},
    ("FlatTool", "format"): {"type": "custom", "parameters": ABSENT},
    ("FlatTool", "tools"): {"type": "namespace", "parameters": ABSENT},
    ("InputItem", "arguments"): {"type": "function_call", "call_id": "c", "name": "f", "role": ABSENT},
    ("InputItem", "output"): {"type": "function_call_output", "call_id": "c", "role": ABSENT},
    ("InputItem", "input"): {"type": "custom_tool_call", "call_id": "c", "name": "f", "role": ABSENT},
    ("InputItem", "summary"): {"type": "reasoning", "role": ABSENT, "content": ABSENT},
    ("InputItem", "encrypted_content"): {
        "type": "reasoning",
        "summary": [],
        "role": ABSENT,
        "content": ABSENT,
    },
    ("ResponseFormat", "json_schema"): {"type": "json_schema"},
    ("ResponseFormat", "schema"): {"type": "json_object"},
    ("ResponseFormat", "structures"): {"type": "structural_tag", "triggers": ["<a"]},
    ("ResponseFormat", "triggers"): {
        "type": "structural_tag",
        "structures": [{"begin": "<a", "schema": OBJECT_SCHEMA, "end": ">"}],
    },
    ("ResponseFormat", "format"): {"type": "structural_tag"},
    ("TextFormat", "schema"): {"type": "json_schema", "name": "x"},
}


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the body of a route, with the JSON that grows there; or two places of a product."""

    route: str
    name: str  # path in the body, and form
    field: str  # of the body
    template: Mapping[str, Any]  # the body, with a mark at the place
    parts: tuple[tuple[str, Make], ...]  # marks, and what replaces them

    def body(self, *sizes: int) -> bytes:
        """The body with `sizes` elements at its parts, or one size at all of them."""
        text = json.dumps(self.template)
        for (mark, make), size in zip(self.parts, sizes * (len(self.parts) // len(sizes)), strict=True):
            text = text.replace(f'"{mark}"', make(size))
        return text.replace("{i}", "0").encode("utf-8", "surrogatepass")

    def times(self, other: Place) -> Place:
        """Both places in one body; their fields differ."""
        template = {
            **self.template,
            **{name: value for name, value in other.template.items() if name not in self.template},
            other.field: other.template[other.field],
        }
        return Place(
            self.route, f"{self.name} x {other.name}", self.field, template, (*self.parts, *other.parts)
        )


def repeat(count: int, text: str, separator: str = ",", reverse: bool = False) -> str:
    """The text `count` times, with the number of each in place of "{i}"."""
    if "{i}" not in text:
        return separator.join([text] * count)
    numbers = reversed(range(count)) if reverse else range(count)
    return separator.join([text.replace("{i}", str(i)) for i in numbers])


def grow(text: str) -> Make:
    """The text with each part in "<<>>" repeated, and each in "<<<<" repeated backwards."""
    parts = re.split(r"<<(.*?)(>>|<<)", text)
    fixed, repeated, ends = parts[::3], parts[1::3], parts[2::3]

    def make(count: int) -> str:
        texts = [repeat(count, part, reverse=end == "<<") for part, end in zip(repeated, ends, strict=True)]
        return "".join(f"{before}{inner}" for before, inner in zip(fixed, [*texts, ""], strict=True))

    return make


def list_of(text: str) -> Make:
    return grow(f"[<<{text}>>]")


def alike(text: str) -> Make:
    return list_of(text.replace("{i}", "0"))


def text_of(text: str) -> Make:
    """A JSON text of the text repeated."""
    return lambda count: json.dumps(repeat(count, text, ""))


def nested(opening: str, inner: str, closing: str) -> Make:
    return lambda count: opening * count + inner + closing * count


LISTS: Mapping[str, Make] = {
    "list of numbers": alike("0"),
    "list of lists": alike("[]"),
    "nested lists": nested("[", "", "]"),
}
MAPS: Mapping[str, Make] = {
    "map": grow('{<<"k{i}":1>>}'),
    "nested maps": nested('{"a":', "1", "}"),
    "list in a map": grow('{"a":[<<0>>]}'),
}
TEXTS: Mapping[str, Make] = {
    "letters": text_of("a" * LETTERS),
    "words": text_of("word {i} " + "a" * (LETTERS - 8)),
}
NUMBERS: Mapping[str, Make] = {"number": str, "digits": lambda count: "1" * count}
FRACTIONS: Mapping[str, Make] = {"digits of a fraction": lambda count: "0." + "1" * count}


class DocumentWalk:
    """Walks the bodies of an OpenAPI document.

    forms  values of a field that the document leaves open, by (schema, field)
    """

    def __init__(self, document: Schema, forms: Mapping[Key, Mapping[str, Make]]) -> None:
        self._schemas: Mapping[str, Schema] = document["components"]["schemas"]
        self._document = document
        self._forms = forms
        self._route = ""
        self._root = ""  # field of the body
        self._seen: set[tuple[str, str, str]] = set()

    def places(self) -> Iterator[Place]:
        for route, operations in self._document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            name = _reference(schema)
            if name is None or self._is_seen("", name, ""):
                continue  # the same body, as of /rerank and /v1/rerank
            self._route = route
            yield from self._object(name, lambda value: value, "", (name,))

    def bodies(self) -> dict[str, dict[str, Any]]:
        """The smallest body of each route."""
        bodies = {}
        for route, operations in self._document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            if name := _reference(content.get("application/json", {}).get("schema", {})):
                bodies[route] = self.sample(name)
        return bodies

    def sample(self, name: str) -> dict[str, Any]:
        """A small valid value of a schema."""
        schema = self._schemas[name]
        made = {field: self._value(schema["properties"][field]) for field in schema.get("required", ())}
        return {**made, **SAMPLES.get(name, {})}

    def _value(self, schema: Schema | bool) -> Any:
        if isinstance(schema, bool):
            return 1
        schema = schema.get("anyOf", [schema])[0]
        if (name := _reference(schema)) is not None:
            return self.sample(name)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        if schema.get("type") == "array":
            return [self._value(schema.get("items", {}))]
        return {"string": "w{i}", "integer": 1, "number": 1, "boolean": True}.get(
            schema.get("type", ""), TEXT_PART
        )

    def _is_seen(self, route: str, name: str, field: str) -> bool:
        """Whether the field was walked; those that bodies inherit are walked with the first."""
        seen = (route, name, field) in self._seen
        self._seen.add((route, name, field))
        return seen

    def _object(
        self, name: str, put: Callable[[Any], Any], path: str, stack: tuple[str, ...]
    ) -> Iterator[Place]:
        sample = self.sample(name)
        if stack[1:]:
            opening = json.dumps({**sample, "x": 1})[:-1] + ","
            yield self._place(
                put, f"{path}: unknown fields", lambda count: opening + repeat(count, '"x{i}":1') + "}"
            )
        for field, schema in self._schemas[name].get("properties", {}).items():
            beside = {**sample, **NEEDS.get((name, field), {}), field: ABSENT}
            beside = {key: value for key, value in beside.items() if value is not ABSENT}

            def put_field(value: Any, beside: Any = beside, field: str = field) -> Any:
                return put({**beside, field: value})

            if not stack[1:]:
                self._root = field
                owner = json.dumps({k: v for k, v in schema.items() if k != "description"}, sort_keys=True)
                if not path and (name, field) not in self._forms and self._is_seen("", owner, field):
                    continue
            yield from self._grow(schema, put_field, f"{path}.{field}" if path else field, stack)
            for form, make in self._forms.get((name, field), {}).items():
                yield self._place(put_field, f"{path}.{field} with {form}".lstrip("."), make)

    def _grow(
        self, schema: Schema, put: Callable[[Any], Any], path: str, stack: tuple[str, ...]
    ) -> Iterator[Place]:
        """The places of a value that put() puts in the body."""
        for branch in schema.get("anyOf", [schema]):
            if (name := _reference(branch)) is not None:
                if name not in stack:
                    yield from self._object(name, put, path, (*stack, name))
                elif path.endswith("[]"):
                    yield self._nested_items(name, put, path)
                continue
            kind = branch.get("type")
            if kind == "array":
                yield from self._list(branch.get("items", {}), put, path, stack)
            forms: dict[str, Make] = {} if branch else {**LISTS, **MAPS, **TEXTS}
            if kind == "object":
                forms |= MAPS
                value = json.dumps(self._value(branch.get("additionalProperties") or {}))
                forms["map of values"] = grow('{<<"k{i}":' + value + ">>}")
            if kind == "string" and not branch.keys() & {"enum", "const"}:
                forms |= TEXTS
            if kind in ("integer", "number"):
                forms |= NUMBERS
            if kind == "number":
                forms |= FRACTIONS
            yield from (self._place(put, f"{path}: {form}", make) for form, make in forms.items())

    def _list(
        self, items: Schema, put: Callable[[Any], Any], path: str, stack: tuple[str, ...]
    ) -> Iterator[Place]:
        item = self._value(items)
        text = "{i}" if item == 1 else json.dumps(item)
        kind = {dict: "objects", str: "texts", int: "numbers", list: "lists"}[type(item)]
        yield self._place(put, f"{path}: {kind} alike", alike(text))
        if isinstance(item, dict) and "{i}" not in text:
            text = json.dumps({**item, "id": "i{i}"})
        if "{i}" in text:
            yield self._place(put, f"{path}: different {kind}", list_of(text))
        yield from self._grow(items, lambda value: put([value]), f"{path}[]", stack)

    def _nested_items(self, name: str, put: Callable[[Any], Any], path: str) -> Place:
        """A list of the schema in which the list itself stands, such as tools in a namespace of tools."""
        field = path.removesuffix("[]").rpartition(".")[2]
        beside = {**self.sample(name), **NEEDS.get((name, field), {}), field: "@inner@"}
        text = json.dumps({key: value for key, value in beside.items() if value is not ABSENT})
        opening, closing = text.split('"@inner@"')
        return self._place(put, f"{path}: nested", nested(opening + "[", "", "]" + closing))

    def _place(self, put: Callable[[Any], Any], name: str, make: Make) -> Place:
        mark = f"@{name}@"
        return Place(self._route, name, self._root, put(mark), ((mark, make),))


def _reference(schema: Schema) -> str | None:
    reference = schema.get("$ref")
    return None if reference is None else str(reference).rpartition("/")[2]
