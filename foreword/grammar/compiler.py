"""What a caller asks of an answer, as a grammar that llguidance compiles.

A grammar at its beginning, from which every request with the same constraint gets a matcher.
"""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Final

from llguidance import LLMatcher

from foreword.core.structured import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar import limits
from foreword.grammar.gbnf import gbnf_to_lark
from foreword.grammar.json_schema import ANY_OBJECT, GrammarError, convert_schema_text, read_json
from foreword.grammar.lark import check_brackets, lark_literal, lark_regex
from foreword.grammar.limits import RECOMPILE_CPU_S, parser_limits
from foreword.grammar.structural_tag import structural_tag_to_lark
from foreword.grammar.vocab import GrammarVocab

__all__ = ["CompiledGrammar", "error_reason", "to_llguidance"]

# llguidance would force its own cut of the text into tokens; here the model chooses, as without a grammar.
OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
# Of llguidance's errors: the grammar with line numbers, and places in what was written here around a schema or expression.
GRAMMAR_LISTING: Final = re.compile(r"^ *\d+ \| ", re.MULTILINE)
ERROR_LOCATION: Final = re.compile(r"^at 2\(8\): (failed to compile JSON schema: )?")
# Rule attributes that llguidance cannot roll back, or that belong to the sampler.
UNSUPPORTED_ATTRIBUTE: Final = re.compile(
    r"^[ \t]*[!?]?[A-Za-z_][\w-]*[ \t]*\[[^\]\n]*\b(max_tokens|stop|temperature)\b", re.MULTILINE
)


def to_llguidance(structured: StructuredOutput) -> str:
    """The grammar of a constraint, in llguidance's own format.

    Raises InvalidRequest for what is malformed, not supported, or larger than `limits` allow. A text that passes may
    still be refused by llguidance.
    """
    try:
        return json.dumps({"grammars": [{"lark_grammar": _to_lark(structured)}]})
    except GrammarError as error:
        raise InvalidRequest(f"{structured.field}: {error}", structured.field) from None


def error_reason(llg: LLMatcher) -> str:
    """Why an automaton gave up, in one line; without the grammar, which the caller has not seen in this form."""
    text = GRAMMAR_LISTING.split(llg.get_error().replace("<non-verbose/>", ""), maxsplit=1)[0]
    return " ".join(ERROR_LOCATION.sub("", text).split())[: limits.MAX_REASON_CHARS]


def _to_lark(structured: StructuredOutput) -> str:
    text = structured.text
    match structured.constraint_type:
        case "json_schema":
            return f"{OPTIONS}start: %json {convert_schema_text(text, structured.whitespace)}\n"
        case "json_object":
            return f"{OPTIONS}start: %json {convert_schema_text(ANY_OBJECT, structured.whitespace)}\n"
        case "regex":
            return f"{OPTIONS}start: {lark_regex(text)}\n"
        case "choice":
            return f"{OPTIONS}start: CHOICE\nCHOICE: {_choice_to_lark(text)}\n"
        case "lark":
            _check_lark(text)
            return f"{text}\n{OPTIONS}"  # at the end: line numbers in errors stay true
        case "gbnf":
            return OPTIONS + gbnf_to_lark(text)
        case _:
            return OPTIONS + structural_tag_to_lark(text, structured.whitespace)


def _choice_to_lark(text: str) -> str:
    choices = read_json(text, "the choice")
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise GrammarError("a choice must be a list of texts that are not empty")
    if len(choices) > limits.MAX_CHOICES:
        raise GrammarError(f"a choice may hold {limits.MAX_CHOICES} texts, got {len(choices)}")
    return " | ".join(lark_literal(choice) for choice in dict.fromkeys(choices))


def _check_lark(text: str) -> None:
    attribute = UNSUPPORTED_ATTRIBUTE.search(text)
    if attribute:
        raise GrammarError(
            f"the attribute {attribute[1]!r} of a rule is not supported; `suffix` and `lazy` are"
        )
    check_brackets(text, "the grammar")


class CompiledGrammar:
    """Compiled once, copied for each request. Raises InvalidRequest with llguidance's reason.

    Copies of one matcher share a lexer, which remembers what it has seen: it makes them fast, lets one of them compute at a
    time, and may fill up. So there are several lexers, and new ones where one is full; unless they take long to build.

    num_lexers  masks of as many requests are computed at the same time
    spent       the lexer is full, and takes too long to build to do it here: requests to come want a new Compiled
    """

    def __init__(self, structured: StructuredOutput, vocab: GrammarVocab, num_lexers: int = 1) -> None:
        self._structured = structured
        self._vocab = vocab
        self._num_lexers = num_lexers
        self._lock = threading.Lock()
        begin = time.thread_time()
        self._prototypes = [self._compile()]
        self._is_cheap = time.thread_time() - begin < RECOMPILE_CPU_S
        self._num_copies = 0
        self.is_lexer_full = False

    @property
    def kind(self) -> str:
        """One of foreword.core.structured.KINDS."""
        return self._structured.constraint_type

    def new_matcher(self) -> LLMatcher:
        """A matcher at the beginning of the grammar."""
        with self._lock:
            if self._is_cheap and len(self._prototypes) <= self._num_copies < self._num_lexers:
                self._prototypes.append(self._compile())
            first = self._prototypes[self._num_copies % len(self._prototypes)]
            self._num_copies += 1
            return first.deep_copy()

    def recompile(self) -> LLMatcher | None:
        """A matcher with a lexer of its own, also for those to come; None where that takes too long."""
        if not self._is_cheap:
            self.is_lexer_full = True
            return None
        first = self._compile()
        with self._lock:
            self._prototypes = [first]
            self._num_copies = 1
        return first.deep_copy()

    def _compile(self) -> LLMatcher:
        structured = self._structured
        llg = LLMatcher(
            self._vocab.ll_tokenizer, to_llguidance(structured), log_level=0, limits=parser_limits()
        )
        llg.consume_tokens([])  # from here on it knows if nothing but the end may follow
        if llg.is_error():
            raise InvalidRequest(f"{structured.field}: {error_reason(llg)}", structured.field)
        return llg
