"""Arguments as elements between tags: <parameter=KEY>VALUE</parameter>."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from foreword.chat_formats.call_grammar import (
    ANY_TEXT,
    KEY,
    OBJECT_KEYWORDS,
    SPACE_TEXT,
    SPACES,
    GrammarWriter,
    Item,
    Text,
    ToolItems,
    ToolSchema,
    any_order,
    join,
    join_path,
    literal,
    read_properties,
    rule_suffix,
    space,
    text_items,
)
from foreword.chat_formats.parts.json import LITERALS, MAX_LITERAL_CHARS, escape, to_json
from foreword.chat_formats.parts.part import FormatPart
from foreword.chat_formats.stream_reader import MARKER, CallReader, Wait, stops_of
from foreword.chat_formats.tools import (
    ANY_TYPES,
    MAX_SCHEMA_DEPTH,
    SchemaTypes,
    WrittenCall,
    json_type,
    resolve_reference,
)

LITERAL_TEXTS: Final = {"boolean": "/true|false/", "null": "/null/"}
STRING_KEYWORDS: Final = frozenset(("const", "enum", "pattern", "minLength", "maxLength"))
MIN_VISITS: Final = 256  # visited alternatives of a tool's arguments; more for a schema of more parts
# The type of a JSON text by its first character.
FIRST_TYPES: Final = {
    **dict.fromkeys("-0123456789", "number"),
    **dict.fromkeys("tf", "boolean"),
    "n": "null",
    "{": "object",
    "[": "array",
}


@dataclass(frozen=True, slots=True)
class TaggedArguments(FormatPart):
    """One element per argument, in any order, `between` (whitespace) after each:

    key_begin KEY key_end [between value_begin] [padding] VALUE [padding] value_end between

    Strings are raw, other values are JSON.
    """

    key_begin: str
    key_end: str
    value_end: str
    value_begin: str = ""
    padding: str = ""  # once on each side of a value, no part of it
    between: str = "\n"
    types_in_tag: bool = False  # key_end is followed by ` string="true">`, or ` string="false">` for JSON

    def encode(self, encode: Callable[[str], str]) -> Self:
        return replace(
            self,
            key_begin=encode(self.key_begin),
            key_end=encode(self.key_end),
            value_begin=encode(self.value_begin),
            value_end=encode(self.value_end),
        )

    def grammar(self, writer: GrammarWriter) -> list[Item | ToolItems]:
        return [lambda tool: writer.arguments_once(tool, lambda: _TaggedGrammar(writer, self, tool).items())]

    def read(self, reader: CallReader, closer: str) -> Wait:
        return (yield from _read_elements(reader, self, closer))

    def write(self, call: WrittenCall) -> str:
        return "".join(self._write_element(*item) + self.between for item in call.arguments.items())

    def _write_element(self, key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        types = f' string="{str(is_text).lower()}">' if self.types_in_tag else ""
        text = value if is_text else to_json(value)
        begin = self.key_begin + key + self.key_end + types + self.value_begin
        return begin + self.padding + text + self.padding + self.value_end


class _TaggedGrammar:
    """Writes the arguments of one tool as elements, in any order."""

    def __init__(self, writer: GrammarWriter, part: TaggedArguments, tool: ToolSchema) -> None:
        self._writer = writer
        self._part = part
        self._tool = tool
        self._types = SchemaTypes(tool.parameters)
        self._num_visits_left = MIN_VISITS + 4 * self._types.num_parts
        end = writer.marker(part.value_end)
        self._end: list[Item] = [*end, space(part.between)]

    def items(self) -> list[Item]:
        properties, required, others = read_properties(self._tool.parameters)
        self._writer.drop_others(self._tool, self._tool.parameters, "", OBJECT_KEYWORDS)
        entries = {key: self._element(key, schema) for key, schema in properties.items()}
        if others is not None:
            return [f"({self._element(None, others)})*"]
        return [any_order(self._writer, self._tool, "", entries, required, "")]

    def _element(self, key: str | None, schema: Any) -> str:
        """An argument; the key None is any."""
        part = self._part
        name = Text(KEY if key is None else literal(key))
        head = [*self._writer.marker(part.key_begin), name, *self._writer.marker(part.key_end)]
        path = "/additionalProperties" if key is None else join_path("/properties", key)
        types = self._tool.definition.argument_types(key)
        strings = list(self._string_options(schema, path)) if "string" in types else []
        # A raw text that reads as a number or a literal is one: free text leaves objects and arrays to JSON.
        is_any_text = any(not {*option} & STRING_KEYWORDS for option, _ in strings)
        has_scalars = is_any_text and not part.types_in_tag
        others = types & {"object", "array"} if has_scalars else types - {"string"}
        bodies = [
            join([*head, *self._value_begin(True), *self._string(option, others, place)])
            for option, place in strings
        ]
        if strings:
            schema = self._without_strings(schema, others, path)
        if not strings or (schema is not None and others):
            value = self._writer.json(self._tool, schema, path)
            bodies.append(join([*head, *self._value_begin(False), value, SPACE_TEXT, *self._end]))
        return self._writer.count(" | ".join(bodies))

    def _string_options(self, schema: Any, path: str) -> Iterator[tuple[Mapping[str, Any], str]]:
        """The alternatives of a schema that allow strings, each with its path."""
        for option, place in self._expand(schema, path, lambda part: "string" not in self._types.of(part)):
            if "string" in self._types.of(option):
                yield (option if isinstance(option, Mapping) else {}), place

    def _expand(
        self, schema: Any, path: str, is_leaf: Callable[[Mapping[str, Any]], bool]
    ) -> Iterator[tuple[Any, str]]:
        """The alternatives of a schema, and theirs, each once and with its path.

        A schema of too many allows anything: its keyword is dropped.
        """
        visited: set[int] = set()
        pending = [(schema, path, 0)]
        while pending:
            schema, path, depth = pending.pop()
            if id(schema) in visited:
                continue
            visited.add(id(schema))
            is_plain = not isinstance(schema, Mapping) or is_leaf(schema)
            keyword, options = ("", {}) if is_plain else _alternatives(schema, self._tool.parameters)
            self._num_visits_left -= len(options)
            if not options:
                yield schema, path
            elif depth == MAX_SCHEMA_DEPTH or self._num_visits_left < 0:
                self._writer.drop(self._tool, f"{path}: {keyword}")
                yield {}, path
            else:
                below = [(option, join_path(path, place), depth + 1) for place, option in options.items()]
                pending += reversed(below)

    def _without_strings(self, schema: Any, others: Iterable[str], path: str) -> Any:
        """The part of a schema that allows other values than strings; None if that is not plain.

        others  the types that they may have, if the schema does not tell
        """
        plain: list[Mapping[str, Any]] = []
        for option, _ in self._expand(schema, path, self._is_plain):
            if not isinstance(option, Mapping):
                continue
            if not option:
                plain.append({"type": sorted(others)})
            elif "string" not in self._types.of(option):
                plain.append(option)
            elif isinstance(option.get("type"), list):
                plain.append({**option, "type": [name for name in option["type"] if name != "string"]})
            elif isinstance(option.get("enum"), list):
                choices = [choice for choice in option["enum"] if not isinstance(choice, str)]
                plain += [{**option, "enum": choices}] if choices else []
        return {"anyOf": plain} if len(plain) > 1 else next(iter(plain), None)

    def _is_plain(self, schema: Mapping[str, Any]) -> bool:
        """Whether `_without_strings` can take the strings out of the schema itself."""
        has_list = isinstance(schema.get("type"), list) or isinstance(schema.get("enum"), list)
        return has_list or "string" not in self._types.of(schema)

    def _value_begin(self, is_string: bool) -> list[Item]:
        part = self._part
        types = f' string="{str(is_string).lower()}">' if part.types_in_tag else ""
        begin: list[Item] = (
            [space(part.between), *self._writer.marker(part.value_begin)] if part.value_begin else []
        )
        return [*text_items(types), *begin, *text_items(part.padding)]

    def _string(self, schema: Mapping[str, Any], others: frozenset[str], path: str) -> list[Item]:
        """A raw string and its end; values of the other types have a form of their own."""
        start = self._writer.lark_input(self._tool, in_json=False)
        if start is not None:
            return [start, *text_items(self._part.padding), *self._end]
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            texts = [choice for choice in choices if isinstance(choice, str)]
            choice = Text("(" + "|".join(map(literal, texts)) + ")")
            return [choice, *text_items(self._part.padding), *self._end]
        texts = self._writer.string_terminals(self._tool, schema, path)
        if others & {"object", "array"} and not self._part.types_in_tag:  # what begins like one is one
            texts.append(rf"~(/{SPACES}*[\[\{{](?s:.*)/)")
        head, *tail = self._end
        # A part of the same terminal: the lexer would stay with the text, which may go on with the end's.
        names = () if self._part.types_in_tag else sorted(others & LITERAL_TEXTS.keys())
        literals = [LITERAL_TEXTS[name] for name in names]
        if isinstance(head, Text) and len(tail) == 1:  # the end is a text: up to the first
            if not texts:
                return [self._writer.lazy_rule("string_end", f"/(?s:.*){head.regex}/"), *tail]
            closer, padding = head.regex, literal(self._part.padding)
            text = f"({' & '.join([ANY_TEXT, *texts, f'~(/(?s:.*){closer}(?s:.*)/)'])})"
            body = f"({' | '.join([text, *literals])}) /{padding}{closer}/"
            name = self._writer.rule(f"STRING_{self._tool.rule}_{rule_suffix(path)}".upper(), body)
            return [self._writer.lazy_rule(name.lower(), name), *tail]
        closer = head.regex if isinstance(head, Text) else ""  # text before the marker
        if not texts:
            return [f"/(?s:.*){closer}/", *(tail if closer else self._end)]
        closer = literal(self._part.padding) + closer
        text = f"({' & '.join([ANY_TEXT, *texts])})"
        body = f"({' | '.join([text, *literals])})" + (f" /{closer}/" if closer else "")
        name = self._writer.rule(f"STRING_{self._tool.rule}_{rule_suffix(path)}".upper(), body)
        return [name, *(tail if isinstance(head, Text) else self._end)]


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A keyword, and the schemas that a value conforms to instead, by their places; none: to this one."""
    if isinstance(schema.get("$ref"), str):
        target = resolve_reference(schema["$ref"], root)
        return "$ref", {} if target is None else {"$ref": target}
    for keyword in ("anyOf", "oneOf", "allOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and (keyword != "allOf" or len(options) == 1):
            return keyword, {f"{keyword}/{index}": option for index, option in enumerate(options)}
    return "", {}


def _read_elements(reader: CallReader, part: TaggedArguments, closer: str) -> Wait:
    """Read arguments up to the closer. False if they are none."""
    tool, num_arguments, is_started = reader.tool, 0, False
    assert tool is not None
    while True:
        char = yield from reader.skip_space()
        is_next = bool(char) and (yield from reader.at(part.key_begin))
        is_closed = bool(char) and not is_next and (yield from reader.at(closer))
        if not is_started:
            if not (is_next or is_closed):
                return False
            reader.start_call()
            reader.emit("{")
            is_started = True
        if is_next:
            reader.position += len(part.key_begin)
            key = yield from reader.read_header(part.key_end)
            if key is None or MARKER.search(key):
                reader.num_parse_errors += 1
                continue
            reader.position += len(part.key_end)
            types = tool.argument_types(key)
            if part.types_in_tag:
                header = yield from reader.read_header(">")
                reader.position += header is not None
                types = frozenset({"string"}) if 'string="true"' in (header or "") else types - {"string"}
            elif part.value_begin:
                yield from reader.read_text(part.value_begin)
            reader.emit((", " if num_arguments else "") + to_json(key) + ": ")
            num_arguments += 1
            if not (yield from _read_value(reader, part, closer, types or ANY_TYPES)):
                return True
        elif is_closed or not char or MARKER.match(char):
            reader.emit("}")
            reader.end_call()
            return True
        else:  # no argument: skip it
            reader.num_parse_errors += 1
            yield from reader.pass_until(stops_of(part.key_begin, closer), lambda _: None)


def _read_value(reader: CallReader, part: TaggedArguments, closer: str, types: frozenset[str]) -> Wait:
    """Read a value and its closing tag. False if the answer ends before.

    A tag that is spelled closes a value only where the arguments go on or end behind it.
    """
    value = RawValue(types, part.padding, reader.emit)
    stops = stops_of(part.value_end, closer)
    while (stop := (yield from reader.pass_until(stops, value.feed))) is not None:
        if stop == part.value_end:
            is_end = MARKER.match(stop) is not None or (
                yield from reader.is_followed(len(stop), (part.key_begin, closer))
            )
            num_read = len(stop)
        elif stop == closer and len(stop) > 1:
            is_end = yield from reader.is_followed(len(stop), ())
            num_read = 0
        else:
            is_end = stop == closer or stop in reader.closers
            num_read = 0
        if is_end:
            value.close()
            reader.position += num_read
            return True
        reader.position += len(stop)
        value.feed(reader.spell(stop))
    return False


def _json_type(text: str) -> str | None:
    """The type of a JSON text, None if it is not JSON."""

    def refuse(_: str) -> None:
        raise ValueError

    try:
        # Numbers are not converted: long ones would raise.
        value = json.loads(text, parse_constant=refuse, parse_int=lambda _: 0, parse_float=lambda _: 0.5)
    except (ValueError, RecursionError):
        return None
    return json_type(value)


class RawValue:
    """A value between tags. Strings are raw and are passed on as they come; other values are JSON.

    By the schema first, then by syntax: a text that the schema allows as a string and as another type is the
    other one if it is JSON of that type.
    """

    def __init__(self, types: frozenset[str], padding: str, emit: Callable[[str], None]) -> None:
        """
        types    JSON types that the value may have
        padding  a character that belongs to the tags where the value begins or ends with it
        emit     takes the value as JSON, piece by piece
        """
        self._others = types - {"string"}
        self._may_be_string = "string" in types
        self._padding = padding
        self._emit = emit
        self._is_first = True
        self._tail = ""  # padding at the end, if the value ends here
        self._pieces: list[str] = []  # the value, while its type is not certain
        self._num_chars = 0  # length of the pieces
        self._max_chars = 0.0  # their largest length unless the value is a string
        self._is_string = False

    def feed(self, text: str) -> None:
        if not text:
            return
        if self._is_first:
            self._is_first = False
            text = text.removeprefix(self._padding)
        text = self._tail + text
        self._tail = ""
        if self._padding and text.endswith(self._padding):
            self._tail, text = self._padding, text[: -len(self._padding)]
        if self._is_string:
            self._emit(escape(text))
        elif text:
            self._pieces.append(text)
            self._num_chars += len(text)
            if self._may_be_string:
                self._decide()

    def _decide(self) -> None:
        """Pass the value on as a string once it can be nothing else."""
        if not self._max_chars:
            text = "".join(self._pieces)
            body = text.lstrip()
            if self._others and not body and len(text) <= MAX_LITERAL_CHARS:
                return
            name = FIRST_TYPES.get(body[:1], "") if len(text) - len(body) <= MAX_LITERAL_CHARS else ""
            is_possible = name in self._others or (name == "number" and "integer" in self._others)
            is_long = name in ("object", "array")
            self._max_chars = (math.inf if is_long else MAX_LITERAL_CHARS) if is_possible else -1
        if self._num_chars > self._max_chars:
            self._is_string = True
            self._emit('"' + escape("".join(self._pieces)))
            self._pieces.clear()

    def close(self) -> None:
        """The value is complete."""
        if self._is_string:
            self._emit('"')
            return
        text = "".join(self._pieces)
        stripped = text.strip()
        json_type = _json_type(stripped)
        if json_type is not None and (json_type in self._others or not self._may_be_string):
            self._emit(stripped)
        elif not self._may_be_string and stripped in LITERALS:
            self._emit(LITERALS[stripped])
        elif not self._may_be_string and not stripped and "null" in self._others:
            self._emit("null")
        else:
            self._emit(to_json(text))
