"""Grammars of calls in llguidance's Lark dialect: texts, which become terminals, and rules."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from typing import Any, Final

from foreword.chat_formats.tools import Tool
from foreword.core.structured_output import MAX_TOOLS_BYTES, Marker
from foreword.errors import InvalidRequest

ANY_TEXT: Final = "/(?s:.*)/"
SPACES: Final = r"[ \t\r\n]"
# One separator: a small model would write blank lines up to the end of its answer.
BLANK: Final = r"[ \n]"
PLAIN_CHARS: Final = frozenset(" _,:;=<>\"'%!@&")  # unescaped in a regular expression, as letters and digits

KEY: Final = "[a-zA-Z_][a-zA-Z0-9_.-]*"
MAX_ANY_ORDER: Final = 64  # bits of llguidance's parameter; more arguments come in the schema's order
OBJECT_KEYWORDS: Final = ("type", "properties", "required", "additionalProperties")
MAX_PATH_CHARS: Final = 1000  # longer paths in a schema are hashed


@dataclass(frozen=True, slots=True)
class Text:
    """Text by a regular expression. Neighbours are joined to one terminal."""

    regex: str
    is_space: bool = False  # it may be empty, which a terminal may not


Item = Text | str  # a text, or a part of a Lark rule
SPACE_TEXT: Final = Text(f"{BLANK}?", is_space=True)


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A callable tool and the schema of its arguments."""

    index: int  # place in the request
    definition: Tool
    parameters: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def field(self) -> str:
        """The user's name of the schema, for errors."""
        return self.definition.schema_field or f"tools[{self.index}].function.parameters"

    @property
    def is_strict(self) -> bool:
        return self.definition.strict or self.definition.is_custom

    @property
    def rule(self) -> str:
        """A part of the names of its rules, where grammar/compiler.py finds the tool of an error."""
        return f"tool{self.index}"


ToolItems = Callable[[ToolSchema], list[Item]]  # items that differ between tools


class GrammarWriter(abc.ABC):
    """Collects the rules of one grammar. Its abstract methods know which schemas llguidance can enforce."""

    def __init__(self, to_marker: Callable[[str], Marker]) -> None:
        """to_marker  a text of the format as texts and ids of marker tokens: BoundFormat.pieces()"""
        self._to_marker = to_marker
        self._lines: dict[str, str] = {}  # head of each rule -> its body
        self._arguments: dict[int, list[Item]] = {}  # the tool's index -> its arguments
        self._num_chars = 0  # characters of rules, and of the arguments in them

    @abc.abstractmethod
    def json(self, tool: ToolSchema, schema: Any, path: str) -> str:
        """JSON by a schema at this path of the tool's parameters, as a part of a rule."""

    @abc.abstractmethod
    def string_terminals(self, tool: ToolSchema, schema: Mapping[str, Any], path: str) -> list[str]:
        """Terminals that a raw string must match, all of them."""

    @abc.abstractmethod
    def lark_input(self, tool: ToolSchema, in_json: bool) -> str | None:
        """The start rule of a custom tool's grammar; None if it has none in Lark."""

    @abc.abstractmethod
    def drop(self, tool: ToolSchema, place: str) -> None:
        """Leave out a keyword: "/properties/x: not". Raises InvalidRequest for strict tools."""

    @abc.abstractmethod
    def drop_others(
        self, tool: ToolSchema, schema: Mapping[str, Any], path: str, keywords: Iterable[str]
    ) -> None:
        """Leave out keywords that constrain, besides these and definitions."""

    def finish(self, start: str) -> str:
        """The text of the grammar."""
        return "\n".join(f"{head}: {body}" for head, body in {"start": start, **self._lines}.items()) + "\n"

    def rule(self, head: str, body: str) -> str:
        """Add a rule, which may be there already. Returns its name."""
        assert self._lines.setdefault(head, self.count(body)) == body, f"two rules {head}"
        return head.removesuffix("[lazy]").removesuffix("::_")

    def lazy_rule(self, name: str, terminal: str) -> str:
        """Add a rule that ends as soon as the terminal matches."""
        return self.rule(f"{name}[lazy]", terminal)

    def count(self, text: str) -> str:
        """A text of the grammar. Raises InvalidRequest for a grammar that is too large, while it grows."""
        self._num_chars += len(text)
        if self._num_chars > 2 * MAX_TOOLS_BYTES:
            raise InvalidRequest(
                "tools: their grammar is too large (fewer tools or simpler schemas fit)", "tools"
            )
        return text

    def arguments_once(self, tool: ToolSchema, write: Callable[[], list[Item]]) -> list[Item]:
        """The arguments of a tool, written once for its first call and the further ones."""
        if tool.index not in self._arguments:
            self._arguments[tool.index] = write()
        return self._arguments[tool.index]

    def pieces(self, marker: Marker) -> list[Item]:
        """Texts and marker tokens as items."""
        return [f"<[{piece}]>" if isinstance(piece, int) else Text(literal(piece)) for piece in marker]

    def marker(self, text: str) -> list[Item]:
        """A text of the format as items."""
        return self.pieces(self._to_marker(text))

    def optional(self, text: str) -> str:
        """A text of the format that may be left out."""
        body = join(self.marker(text))
        return f"({body})?" if body else ""


def tool_name(tool: ToolSchema) -> list[Item]:
    return [Text(literal(tool.name))]


def text_items(text: str) -> list[Item]:
    return [Text(literal(text))] if text else []


def space(usual: str) -> Text:
    """At most one separator, or what the template writes."""
    return Text(f"({literal(usual)}|{BLANK})?", is_space=True) if len(usual) > 1 else SPACE_TEXT


def evaluate(items: Iterable[Item | ToolItems], tool: ToolSchema | None) -> list[Item]:
    """The items of one tool; of none, where no item differs between tools."""
    evaluated: list[Item] = []
    for item in items:
        if isinstance(item, str | Text):
            evaluated.append(item)
        else:
            assert tool is not None, "a part of a call stands outside of it"
            evaluated += item(tool)
    return evaluated


def join(items: Iterable[Item]) -> str:
    """Items as a part of a rule: neighbouring texts are one terminal."""
    parts: list[str] = []
    for is_text, group in groupby(items, lambda item: isinstance(item, Text)):
        if is_text:
            texts = [item for item in group if isinstance(item, Text)]
            spaces = [f"/{item.regex[:-1]}/?" for item in texts if item.is_space]
            parts += spaces if len(spaces) == len(texts) else [f"/{''.join(item.regex for item in texts)}/"]
        else:
            parts += [item for item in group if isinstance(item, str) and item]
    return " ".join(parts)


@lru_cache(maxsize=4096)
def literal(text: str) -> str:
    """A regular expression for a text."""
    return "".join(char if char in PLAIN_CHARS or char.isalnum() else escape_char(char) for char in text)


def escape_char(char: str) -> str:
    """Any character, escaped for a regular expression."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def rule_suffix(text: str) -> str:
    """A text as a part of a rule's name."""
    return text.encode().hex()


def any_order(
    writer: GrammarWriter,
    tool: ToolSchema,
    path: str,
    entries: Mapping[str, str],
    required: Sequence[str],
    separator: str,
) -> str:
    """Each entry at most once, in any order, the required ones present. Returns a part of a rule.

    A bit of the rule's parameter says that an entry is present.
    """
    if not entries:
        return ""
    name = f"object_{tool.rule}_{rule_suffix(path)}"
    keys = [*required, *(key for key in entries if key not in required)]
    rules = {key: writer.rule(f"{name}_{index}", entries[key]) for index, key in enumerate(keys)}
    between = f"/{separator}{BLANK}?/ " if separator else ""
    if len(keys) > MAX_ANY_ORDER:
        for key in required:
            writer.drop(tool, f"{path}/properties/{key}: required")
        entry = writer.rule(f"{name}_any", " | ".join(rules.values()))
        return f"({entry} ({between}{entry})*)?"
    may_end = f'""{f" %if is_ones([0:{len(required)}])" if required else ""}'
    options = [
        f"{rules[key]} {name}_rest::set_bit({bit}) %if bit_clear({bit})" for bit, key in enumerate(keys)
    ]
    if separator:
        writer.rule(f"{name}::_", " | ".join([may_end, *options]))
    writer.rule(f"{name}_rest::_", " | ".join([may_end, *(between + option for option in options)]))
    return f"{name if separator else f'{name}_rest'}::0x0"


def read_properties(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str], Any]:
    """The properties of an object's schema, the required ones, and the schema of others; None: no others."""
    others = schema.get("additionalProperties", True)
    names = schema.get("required")
    required = [
        name for name in dict.fromkeys(names if isinstance(names, list) else ()) if isinstance(name, str)
    ]
    properties = schema.get("properties")
    properties = dict(properties) if isinstance(properties, Mapping) else {}
    may_have_others = others is not False and "properties" not in schema and not required
    if others is not False:
        properties |= {name: others for name in required if name not in properties}
    others = others if isinstance(others, Mapping) else {}
    return properties, [name for name in required if name in properties], others if may_have_others else None


def join_path(path: str, place: str) -> str:
    """The path of a part of a schema, a text of bounded length."""
    joined = f"{path}/{place}"
    return (
        joined
        if len(joined) <= MAX_PATH_CHARS
        else f"/{blake2b(joined.encode('utf-8', 'surrogatepass')).hexdigest()}"
    )
