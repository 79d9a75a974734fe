"""A grammar at its beginning, from which every request with the same constraint gets a matcher."""

from __future__ import annotations

import threading
import time

from llguidance import LLMatcher

from foreword.core.structured import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar.compile import to_llguidance, error_reason
from foreword.grammar.limits import RECOMPILE_CPU_S, parser_limits
from foreword.grammar.tokens import GrammarVocab

__all__ = ["CompiledGrammar"]


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
        llg = LLMatcher(self._vocab.ll_tokenizer, to_llguidance(structured), log_level=0, limits=parser_limits())
        llg.consume_tokens([])  # from here on it knows if nothing but the end may follow
        if llg.is_error():
            raise InvalidRequest(f"{structured.field}: {error_reason(llg)}", structured.field)
        return llg
