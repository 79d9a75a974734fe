"""Converts a constraint to llguidance's Lark and compiles it, once for all its requests."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from llguidance import LLMatcher

from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar import limits
from foreword.grammar.gbnf import gbnf_to_lark
from foreword.grammar.json_schema import (
    ANY_OBJECT,
    GrammarError,
    convert_schema_text,
    is_text_list,
    read_json,
)
from foreword.grammar.lark import check_brackets, lark_literal, lark_regex
from foreword.grammar.limits import RECOMPILE_CPU_S, parser_limits
from foreword.grammar.structural_tag import structural_tag_to_lark
from foreword.grammar.vocab import GrammarVocab

T = TypeVar("T")
# llguidance would force its own tokenization of fixed text; here the model chooses the tokens.
OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
# Parts of llguidance's errors that show the converted grammar, which the user never saw.
VERBOSE_STATE: Final = re.compile(r"\n<state>.*", re.DOTALL)
LEXER_COST: Final = re.compile(r'"lexer_cost": (\d+)')
LEXER_ERROR: Final = "lexer error"
NO_TOKEN: Final = (1 << 31) - 1
GRAMMAR_LISTING: Final = re.compile(r"^ *\d+ \| ", re.MULTILINE)
ERROR_LOCATION: Final = re.compile(r"^at 2\(8\): (failed to compile JSON schema: )?")
ERROR_LINE: Final = re.compile(r"^at (\d+)\(\d+\): ")
TOOL_RULE: Final = re.compile(r"_tool(\d+)", re.IGNORECASE)  # part of a rule's name
# Rule attributes that llguidance cannot roll back, or that the sampler controls.
UNSUPPORTED_ATTRIBUTE: Final = re.compile(
    r"^[ \t]*[!?]?[A-Za-z_][\w-]*[ \t]*\[[^\]\n]*\b(max_tokens|stop|temperature)\b", re.MULTILINE
)
# A backtrace in each of llguidance's errors (RUST_BACKTRACE=1) takes 20 times as long as reading the cost.
os.environ.setdefault("RUST_LIB_BACKTRACE", "0")


def to_llguidance(structured: StructuredOutput) -> str:
    """The constraint in llguidance's JSON format, which llguidance may still reject.

    Raises InvalidRequest for malformed or unsupported constraints, and for those above `limits`.
    """
    try:
        return json.dumps({"grammars": [{"lark_grammar": _to_lark(structured)}]})
    except GrammarError as error:
        raise InvalidRequest(f"{structured.field}: {error}", structured.field) from None


def error_reason(llg: LLMatcher) -> str:
    """llguidance's error in one line, without its listing of the converted grammar."""
    text = GRAMMAR_LISTING.split(VERBOSE_STATE.sub("", llg.get_error()), maxsplit=1)[0]
    return " ".join(ERROR_LOCATION.sub("", text).split())[: limits.MAX_REASON_CHARS]


def _to_lark(structured: StructuredOutput) -> str:
    text = structured.text
    match structured.constraint_type:
        case "json_schema" | "json_object":
            return f"{OPTIONS}start: {constraint_body(structured)}\n"
        case "regex" | "choice":
            return f"{OPTIONS}start: TEXT\nTEXT: {constraint_body(structured)}\n"
        case "tools":
            return OPTIONS + text
        case "lark":
            _check_lark(text)
            return f"{text}\n{OPTIONS}"  # options last: keeps the line numbers of errors
        case "gbnf":
            return OPTIONS + gbnf_to_lark(text)
        case _:
            return OPTIONS + structural_tag_to_lark(text, structured.whitespace)


def constraint_body(structured: StructuredOutput) -> str:
    """Right side of a Lark rule, or for texts of a terminal. Raises GrammarError for a whole grammar."""
    match structured.constraint_type:
        case "json_schema":
            return f"%json {convert_schema_text(structured.text, structured.whitespace)}"
        case "json_object":
            return f"%json {convert_schema_text(ANY_OBJECT, structured.whitespace)}"
        case "regex":
            return lark_regex(structured.text)
        case "choice":
            return _choice_to_lark(structured.text)
    raise GrammarError(f"a constraint of type {structured.constraint_type} must be the only one")


def _choice_to_lark(text: str) -> str:
    choices = read_json(text, "the choice")
    if not is_text_list(choices):
        raise GrammarError("a choice must be a list of non-empty texts")
    if len(choices) > limits.MAX_CHOICES:
        raise GrammarError(f"a choice may hold at most {limits.MAX_CHOICES} texts, got {len(choices)}")
    return " | ".join(lark_literal(choice) for choice in dict.fromkeys(choices))


def _check_lark(text: str) -> None:
    attribute = UNSUPPORTED_ATTRIBUTE.search(text)
    if attribute:
        raise GrammarError(f"the rule attribute {attribute[1]!r} is not supported; use `suffix` or `lazy`")
    check_brackets(text, "the grammar")


def _name_tool(reason: str, lark: str) -> str:
    """llguidance's error with the tool that its line belongs to."""
    place = ERROR_LINE.match(reason)
    line = lark.split("\n")[int(place[1]) - 2] if place else ""  # the first line has the options
    tool = TOOL_RULE.search(line.partition(":")[0])
    if place is None or tool is None:
        return f"{reason} (fewer tools or simpler schemas fit)"
    return f"tools[{tool[1]}]: {reason[place.end() :].removeprefix('failed to compile JSON schema: ')}"


@dataclass(slots=True)
class Lexer:
    """A cache of lexer states, of all matchers made here. Its error ends all of them."""

    prototype: LLMatcher
    base_cost: int = 0  # cost at the first output
    _cost: int = 0  # when last read
    unread_s: float = 0.0  # time of the masks since then

    def new_matcher(self) -> LLMatcher:
        """A matcher at the start of the grammar."""
        return self.prototype.deep_copy()

    def error(self) -> str:
        """Why the lexer reached a limit; "" if it did not. A matcher may call it an illegal token."""
        probe = self.new_matcher()
        probe.consume_token(0)
        reason = error_reason(probe)
        return reason if reason.startswith(LEXER_ERROR) else ""

    def is_full(self, llg: LLMatcher) -> bool:
        """Whether the states cost too much for a shared lexer; `llg` has computed the last mask.

        The cost is read once it may exceed that of a row: below it, no row fails. So the masks of some time
        lie between two reads, however close the lexer is to its own limit.
        """
        if self._cost + self.unread_s * limits.MAX_COST_PER_S > limits.MAX_ROW_COST:
            self._cost = self.read_cost(llg)
            self.unread_s = 0.0
        return self._cost > limits.MAX_LEXER_COST

    def read_cost(self, llg: LLMatcher) -> int:
        """Cost of the states of outputs at the last mask of `llg`; only llguidance's errors tell it."""
        probe = llg.deep_copy()
        probe.consume_token(NO_TOKEN)
        cost = LEXER_COST.search(probe.get_error())
        assert cost is not None, "llguidance's errors do not hold the lexer's cost"
        return int(cost[1]) - self.base_cost


class CompiledGrammar:
    """Compiled once, copied for each request. Raises InvalidRequest with llguidance's reason.

    A shared lexer is fast, but locks, and can fill up. So a grammar that compiles fast gets several lexers,
    and an output that filled one gets its own.
    """

    def __init__(
        self, structured: StructuredOutput, vocab: GrammarVocab, num_lexers: int = 1, for_check: bool = False
    ) -> None:
        """`num_lexers` masks can be computed in parallel."""
        self._structured = structured
        self._limits = parser_limits(self.kind, for_check)
        self._ll_tokenizer = vocab.tokenizer(for_tools=self.kind == "tools")
        self._num_lexers = num_lexers
        self._lock = threading.Lock()
        begin = time.thread_time()
        self._lexers = [self.new_lexer()]
        self._is_cheap = time.thread_time() - begin < RECOMPILE_CPU_S
        self._num_uses = 0

    @property
    def kind(self) -> str:
        return self._structured.constraint_type

    def lexer(self) -> Lexer:
        """A shared lexer for another matcher."""
        with self._lock:
            may_add = self._is_cheap and len(self._lexers) <= self._num_uses < self._num_lexers
            if not self._lexers or may_add:
                self._lexers.append(self.new_lexer())
            self._num_uses += 1
            return self._lexers[(self._num_uses - 1) % len(self._lexers)]

    def replace(self, lexer: Lexer) -> Lexer:
        """A new lexer for the output that filled another; later matchers do not share the full one either.

        Outputs that fill a lexer have few states in common: they would fill a new one too, if they shared it.
        Only a lexer that takes long to compile is shared.
        """
        new = self.new_lexer()
        with self._lock:
            if any(lexer is other for other in self._lexers):
                rest = [other for other in self._lexers if other is not lexer]
                self._lexers = rest if self._is_cheap else [*rest, new]
        return new

    def new_lexer(self) -> Lexer:
        """A lexer that no output has used."""
        structured = self._structured
        llg = LLMatcher(self._ll_tokenizer, to_llguidance(structured), log_level=0, limits=self._limits)
        llg.consume_tokens([])  # sets its stop state
        if llg.is_error():
            reason = error_reason(llg)
            if self.kind == "tools":
                reason = _name_tool(reason, structured.text)
            raise InvalidRequest(f"{structured.field}: {reason}", structured.field)
        lexer = Lexer(llg)
        first = llg.deep_copy()
        first.compute_bitmask()  # gives the lexer the fuel of a step, which all its matchers spend
        lexer.base_cost = lexer.read_cost(first)
        return lexer


class SharedResults(Generic[T]):
    """Results by key, the latest ones kept. Threads that ask for the same one wait for one computation."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._pending: dict[Hashable, Future[T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Raises the error of `compute`, which is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            pending = self._pending.get(key)
            if pending is None:
                own = self._pending[key] = Future[T]()
        if pending is not None:
            return pending.result()
        try:
            own.set_result(compute())
        except BaseException as error:
            own.set_exception(error)
        with self._lock:
            del self._pending[key]
            if own.exception() is None:
                self._kept[key] = own.result()
                while len(self._kept) > self._max_size:
                    self._kept.popitem(last=False)
        return own.result()
