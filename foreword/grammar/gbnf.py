"""Converts GBNF (llama.cpp) and EBNF with ::= (vLLM) to llguidance's Lark.

llguidance has a greedy lexer below its parser. So each non-recursive part becomes one terminal, as large as
possible: inside a terminal, no match ends too early. `llguidance.gbnf_to_lark` is not used: it rejects lines
that begin with `|` and rules named `start`, breaks \\u escapes, and accepts a rule that is defined twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from foreword.chat_formats.call_grammar import escape_char
from foreword.errors import shown
from foreword.grammar import limits
from foreword.grammar.json_schema import GrammarError, nesting_depth

TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<defined>::=)
      | (?P<name>[A-Za-z0-9_-]+)
      | (?P<text>"(?:[^"\\\n]|\\.)*")
      | (?P<set>\[\^?(?:[^\]\\]|\\.)+\])
      | (?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
ESCAPE: Final = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL
)
CONTROL_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}
QUANTIFIERS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
EMPTY_LITERAL: Final = '""'
MAX_DIGITS: Final = 9  # longest repetition count: int() of thousands of digits is slow or fails


@dataclass(frozen=True, slots=True)
class Regex:
    regex: str


@dataclass(frozen=True, slots=True)
class RuleRef:
    name: str


@dataclass(frozen=True, slots=True)
class Concat:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    low: int
    high: int | None


Node = Regex | RuleRef | Concat | Alternation | Repeat


def gbnf_to_lark(text: str, start: str = "start") -> str:
    """Lark rules and terminals. The rule `root` becomes `start`, the prefix of all other names.

    Raises GrammarError for malformed grammars and undefined rules.
    """
    rules = _Parser(text).parse()
    if "root" not in rules:
        raise GrammarError("the grammar has no rule 'root'")
    _check_references(rules)
    return _Writer(rules, start).write()


class _Parser:
    """Recursive-descent parser; the constructor limits the nesting."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokenize(text))
        if nesting_depth(sign for _, sign in self._tokens) > limits.MAX_NESTING:
            raise GrammarError(f"brackets are nested deeper than {limits.MAX_NESTING} levels")
        self._position = 0

    def parse(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._position < len(self._tokens):
            name = self._expect("name")
            self._expect("defined")
            if name in rules:
                raise GrammarError(f"the rule {shown(name)} is defined twice")
            rules[name] = self._parse_alternation()
            if len(rules) > limits.MAX_RULES:
                raise GrammarError(f"a grammar may have at most {limits.MAX_RULES} rules")
        return rules

    def _parse_alternation(self) -> Node:
        options = [self._parse_sequence()]
        while self._peek() == ("sign", "|"):
            self._position += 1
            options.append(self._parse_sequence())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _parse_sequence(self) -> Node:
        items: list[Node] = []
        while (item := self._parse_item()) is not None:
            items.append(self._parse_quantifiers(item))
        return items[0] if len(items) == 1 else Concat(tuple(items))

    def _parse_item(self) -> Node | None:
        kind, text = self._peek()
        if kind in ("end", "times", "defined") or text in ("|", ")", "*", "+", "?"):
            return None
        if kind == "name" and self._peek(1)[0] == "defined":
            return None  # the next rule begins
        self._position += 1
        match kind:
            case "name":
                return RuleRef(text)
            case "text":
                return _parse_literal(text[1:-1])
            case "set":
                return Regex(_parse_char_set(text))
        return self._parse_group() if text == "(" else Regex("(?s:.)")

    def _parse_group(self) -> Node:
        inner = self._parse_alternation()
        if self._peek() != ("sign", ")"):
            raise GrammarError(f"expected ')' {self._error_context()}")
        self._position += 1
        return inner

    def _parse_quantifiers(self, item: Node) -> Node:
        kind, text = self._peek()
        while kind == "times" or text in QUANTIFIERS:
            self._position += 1
            low, high = QUANTIFIERS[text] if kind == "sign" else _parse_bounds(text)
            item = Repeat(item, low, high)
            kind, text = self._peek()
        return item

    def _expect(self, token_type: str) -> str:
        actual_type, text = self._peek()
        if actual_type != token_type:
            raise GrammarError(
                f"expected {'a rule name' if token_type == 'name' else '::='} {self._error_context()}"
            )
        self._position += 1
        return text

    def _peek(self, offset: int = 0) -> tuple[str, str]:
        index = self._position + offset
        return self._tokens[index] if index < len(self._tokens) else ("end", "")

    def _error_context(self) -> str:
        before = " ".join(text for _, text in self._tokens[max(self._position - 4, 0) : self._position])
        return f"after {before[-60:]!r}, got {self._peek()[1][:40]!r}"


def _tokenize(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            line = text.count("\n", 0, place) + 1
            raise GrammarError(f"line {line}: syntax error at {text[place : place + 40]!r}")
        place = match.end()
        if match.lastgroup != "space":
            yield str(match.lastgroup), match[0]


def _parse_literal(text: str) -> Node:
    return Regex("".join(escape_char(char) for char, _ in _unescape(text))) if text else Concat(())


def _parse_char_set(text: str) -> str:
    """A character class of a regex. An unescaped "-" between two characters is a range."""
    body = text[1:-1].removeprefix("^")
    signs = ["-" if char == "-" and not escaped else escape_char(char) for char, escaped in _unescape(body)]
    if not signs:
        raise GrammarError(f"the character class {text} is empty")
    for index in (0, len(signs) - 1):  # a "-" at either end is a literal
        if signs[index] == "-":
            signs[index] = escape_char("-")
    return f"[{'^' if text.startswith('[^') else ''}{''.join(signs)}]"


def _unescape(text: str) -> Iterator[tuple[str, bool]]:
    """(character, whether it was escaped)."""
    for two, four, eight, escaped, plain in ESCAPE.findall(text):
        if plain:
            yield plain, False
        elif escaped:
            yield CONTROL_ESCAPES.get(escaped, escaped), True
        else:
            yield _decode_code_point(two or four or eight), True


def _decode_code_point(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarError(f"{digits} is not a Unicode code point")
    return chr(code)


def _parse_bounds(text: str) -> tuple[int, int | None]:
    low, comma, high = (part.strip() for part in text[1:-1].partition(","))
    if max(len(low), len(high)) <= MAX_DIGITS:
        bounds = int(low), (int(high) if high else None) if comma else int(low)
        if max(bounds[0], bounds[1] or 0) <= limits.MAX_REPEAT:
            return bounds
    raise GrammarError(f"a repetition may be at most {limits.MAX_REPEAT}, got {text:.40}")


def _referenced_rules(node: Node) -> Iterator[str]:
    match node:
        case RuleRef(name):
            yield name
        case Concat(nodes) | Alternation(nodes):
            for inner in nodes:
                yield from _referenced_rules(inner)
        case Repeat(item):
            yield from _referenced_rules(item)


def _check_references(rules: dict[str, Node]) -> None:
    for name, node in rules.items():
        for target in _referenced_rules(node):
            if target not in rules:
                raise GrammarError(f"the rule {shown(target)} is not defined; {shown(name)} refers to it")


def _find_terminals(rules: dict[str, Node]) -> frozenset[str]:
    """Rules without recursion, which become terminals."""
    open_targets = {name: set(_referenced_rules(node)) for name, node in rules.items()}
    used_by: defaultdict[str, list[str]] = defaultdict(list)
    for name, targets in open_targets.items():
        for target in targets:
            used_by[target].append(name)
    ready = [name for name, targets in open_targets.items() if not targets]
    terminals: set[str] = set()
    while ready:
        name = ready.pop()
        terminals.add(name)
        for user in used_by[name]:
            open_targets[user].discard(name)
            if not open_targets[user]:
                ready.append(user)
    return frozenset(terminals)


class _Writer:
    """Writes Lark: terminals have upper-case names, rules lower-case ones."""

    def __init__(self, rules: dict[str, Node], start: str) -> None:
        self._rules = rules
        self._start = start
        self._terminals = _find_terminals(rules)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._lines: list[str] = []
        self._num_anonymous = 0

    def write(self) -> str:
        self._lines = [f"{self._start}: {self._lark_name('root')}"]
        for name, node in self._rules.items():
            body = self._body(node, in_terminal=name in self._terminals)
            self._lines.append(f"{self._lark_name(name)}: {body}")
        return "\n".join(self._lines) + "\n"

    def _lark_name(self, rule: str) -> str:
        number = self._numbers[rule]
        return f"{self._start.upper()}_T{number}" if rule in self._terminals else f"{self._start}_r{number}"

    def _body(self, node: Node, in_terminal: bool) -> str:
        if not in_terminal and self._is_regular(node):
            return self._add_terminal(node)
        match node:
            case Regex(regex):
                return f"/{regex}/"
            case RuleRef(name):
                return self._lark_name(name)
            case Alternation(options):
                return f"({' | '.join(self._body(option, in_terminal) for option in options)})"
            case Repeat(item, low, high):
                return f"({self._body(item, in_terminal)}){_quantifier(low, high)}"
            case Concat(items):
                parts = items if in_terminal else self._merge_regular(items)
                return " ".join(self._body(part, in_terminal) for part in parts) or EMPTY_LITERAL

    def _merge_regular(self, items: Sequence[Node]) -> Iterator[Node]:
        """Join adjacent regular nodes, so that they make one terminal."""
        for is_regular, group in groupby(items, self._is_regular):
            if is_regular:
                yield Concat(tuple(group))
            else:
                yield from group

    def _is_regular(self, node: Node) -> bool:
        return self._terminals.issuperset(_referenced_rules(node))

    def _add_terminal(self, node: Node) -> str:
        """Add a terminal for the node; returns its name."""
        if isinstance(node, RuleRef):
            return self._lark_name(node.name)
        name = f"{self._start.upper()}_J{self._num_anonymous}"
        self._num_anonymous += 1
        self._lines.append(f"{name}: {self._body(node, in_terminal=True)}")
        return name


def _quantifier(low: int, high: int | None) -> str:
    if (low, high) in ((0, None), (1, None), (0, 1)):
        return {(0, None): "*", (1, None): "+", (0, 1): "?"}[low, high]
    return f"{{{low},{'' if high is None else high}}}"
