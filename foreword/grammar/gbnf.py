"""Grammars of llama.cpp (GBNF) and of vLLM (EBNF with ::=), as Lark for llguidance.

llguidance reads text in two stages: terminals are regular expressions that take as much as they can, rules put terminals
together. So what is not recursive becomes one terminal, as large as possible: within it nothing is taken too early.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.grammar import limits
from foreword.grammar.json_text import GrammarError, nesting
from foreword.grammar.lark import code_point

__all__ = ["gbnf_to_lark"]

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
ESCAPE: Final = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
CONTROL: Final = {"n": "\n", "r": "\r", "t": "\t"}
TIMES: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
EMPTY: Final = '""'
MAX_DIGITS: Final = 9  # of a number of times; Python reads thousands of digits slowly, or not at all


@dataclass(frozen=True, slots=True)
class Characters:
    """A regular expression."""

    regex: str


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Chain:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    low: int
    high: int | None


Node = Characters | Reference | Chain | Choice | Repeat


def gbnf_to_lark(text: str, start: str = "start") -> str:
    """Lark rules and terminals; the rule `root` becomes `start`, and all other names begin with it.

    Raises GrammarError for what is malformed, and for rules that are missing.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GrammarError("the grammar has no rule 'root'")
    _check_references(rules)
    return _Writer(rules, start).lark()


class _Parser:
    """Recursive descent; the nesting is limited before."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        if nesting(sign for _, sign in self._tokens) > limits.MAX_NESTING:
            raise GrammarError(f"brackets are nested deeper than {limits.MAX_NESTING} levels")
        self._next = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._next < len(self._tokens):
            name = self._take("name")
            self._take("defined")
            if name in rules:
                raise GrammarError(f"the rule {name!r} is defined twice")
            rules[name] = self._choice()
            if len(rules) > limits.MAX_RULES:
                raise GrammarError(f"a grammar may have {limits.MAX_RULES} rules")
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._peek() == ("sign", "|"):
            self._next += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        return items[0] if len(items) == 1 else Chain(tuple(items))

    def _item(self) -> Node | None:
        kind, text = self._peek()
        if kind in ("end", "times", "defined") or text in ("|", ")", "*", "+", "?"):
            return None
        if kind == "name" and self._peek(1)[0] == "defined":
            return None  # the next rule begins
        self._next += 1
        match kind:
            case "name":
                return Reference(text)
            case "text":
                return _literal(text[1:-1])
            case "set":
                return Characters(_set(text))
        return self._group() if text == "(" else Characters("(?s:.)")

    def _group(self) -> Node:
        inner = self._choice()
        if self._peek() != ("sign", ")"):
            raise GrammarError(f"expected ')' {self._where()}")
        self._next += 1
        return inner

    def _repeated(self, item: Node) -> Node:
        kind, text = self._peek()
        while kind == "times" or text in TIMES:
            self._next += 1
            low, high = TIMES[text] if kind == "sign" else _bounds(text)
            item = Repeat(item, low, high)
            kind, text = self._peek()
        return item

    def _take(self, kind: str) -> str:
        found, text = self._peek()
        if found != kind:
            raise GrammarError(f"expected {'a rule name' if kind == 'name' else '::='} {self._where()}")
        self._next += 1
        return text

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        index = self._next + ahead
        return self._tokens[index] if index < len(self._tokens) else ("end", "")

    def _where(self) -> str:
        before = " ".join(text for _, text in self._tokens[max(self._next - 4, 0) : self._next])
        return f"after {before[-60:]!r}, got {self._peek()[1][:40]!r}"


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            line = text.count("\n", 0, place) + 1
            raise GrammarError(f"line {line} of the grammar cannot be read at {text[place : place + 40]!r}")
        place = match.end()
        if match.lastgroup != "space":
            yield str(match.lastgroup), match[0]


def _literal(text: str) -> Node:
    return Characters("".join(code_point(char) for char, _ in _characters(text))) if text else Chain(())


def _set(text: str) -> str:
    """A character set; "-" between two characters makes a range."""
    body = text[1:-1].removeprefix("^")
    signs = ["-" if char == "-" and not escaped else code_point(char) for char, escaped in _characters(body)]
    if not signs:
        raise GrammarError(f"the character set {text} is empty")
    for index in (0, len(signs) - 1):  # at an edge it stands for itself
        if signs[index] == "-":
            signs[index] = code_point("-")
    return f"[{'^' if text.startswith('[^') else ''}{''.join(signs)}]"


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """(character, whether it was escaped)."""
    for two, four, eight, escaped, plain in ESCAPE.findall(text):
        if plain:
            yield plain, False
        elif escaped:
            yield CONTROL.get(escaped, escaped), True
        else:
            yield _code(two or four or eight), True


def _code(digits: str) -> str:
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarError(f"no character has the code {digits}")
    return chr(code)


def _bounds(text: str) -> tuple[int, int | None]:
    low, comma, high = (part.strip() for part in text[1:-1].partition(","))
    if max(len(low), len(high)) <= MAX_DIGITS:
        bounds = int(low), (int(high) if high else None) if comma else int(low)
        if max(bounds[0], bounds[1] or 0) <= limits.MAX_REPEAT:
            return bounds
    raise GrammarError(f"a repetition may have {limits.MAX_REPEAT} times, got {text:.40}")


def _references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Chain(nodes) | Choice(nodes):
            for inner in nodes:
                yield from _references(inner)
        case Repeat(item):
            yield from _references(item)


def _check_references(rules: dict[str, Node]) -> None:
    for name, node in rules.items():
        for target in _references(node):
            if target not in rules:
                raise GrammarError(f"the rule {target!r} is not defined; {name!r} refers to it")


def _terminals(rules: dict[str, Node]) -> frozenset[str]:
    """Rules that lead to no recursion: regular expressions."""
    open_targets = {name: set(_references(node)) for name, node in rules.items()}
    used_by: defaultdict[str, list[str]] = defaultdict(list)
    for name, targets in open_targets.items():
        for target in targets:
            used_by[target].append(name)
    ready = [name for name, targets in open_targets.items() if not targets]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in used_by[name]:
            open_targets[user].discard(name)
            if not open_targets[user]:
                ready.append(user)
    return frozenset(found)


class _Writer:
    """Writes rules as Lark: terminals in capitals, rules in small letters."""

    def __init__(self, rules: dict[str, Node], start: str) -> None:
        self._rules = rules
        self._start = start
        self._terminals = _terminals(rules)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._lines: list[str] = []
        self._num_joined = 0

    def lark(self) -> str:
        self._lines = [f"{self._start}: {self._name('root')}"]
        for name, node in self._rules.items():
            body = self._regular(node) if name in self._terminals else self._rule(node)
            self._lines.append(f"{self._name(name)}: {body}")
        return "\n".join(self._lines) + "\n"

    def _name(self, rule: str) -> str:
        number = self._numbers[rule]
        return f"{self._start.upper()}_T{number}" if rule in self._terminals else f"{self._start}_r{number}"

    def _regular(self, node: Node) -> str:
        """The inside of a terminal."""
        match node:
            case Characters(regex):
                return f"/{regex}/"
            case Reference(name):
                return self._name(name)
            case Chain(items):
                return " ".join(map(self._regular, items)) or EMPTY
            case Choice(options):
                return f"({' | '.join(map(self._regular, options))})"
            case Repeat(item, low, high):
                return f"({self._regular(item)}){_times(low, high)}"

    def _rule(self, node: Node) -> str:
        if self._is_regular(node):
            return self._terminal(node)
        match node:
            case Chain(items):
                return " ".join(self._parts(items)) or EMPTY
            case Choice(options):
                return f"({' | '.join(map(self._rule, options))})"
            case Repeat(item, low, high):
                return f"({self._rule(item)}){_times(low, high)}"
            case Reference(name):
                return self._name(name)
            case Characters():
                raise AssertionError("characters are regular")

    def _parts(self, items: Sequence[Node]) -> Iterator[str]:
        """Neighbours that are regular make one terminal."""
        regular: list[Node] = []
        for item in items:
            if self._is_regular(item):
                regular.append(item)
                continue
            if regular:
                yield self._terminal(Chain(tuple(regular)))
                regular = []
            yield self._rule(item)
        if regular:
            yield self._terminal(Chain(tuple(regular)))

    def _is_regular(self, node: Node) -> bool:
        return self._terminals.issuperset(_references(node))

    def _terminal(self, node: Node) -> str:
        """The name of a terminal for the node."""
        if isinstance(node, Reference):
            return self._name(node.name)
        name = f"{self._start.upper()}_J{self._num_joined}"
        self._num_joined += 1
        self._lines.append(f"{name}: {self._regular(node)}")
        return name


def _times(low: int, high: int | None) -> str:
    if (low, high) in ((0, None), (1, None), (0, 1)):
        return {(0, None): "*", (1, None): "+", (0, 1): "?"}[low, high]
    return f"{{{low},{'' if high is None else high}}}"
