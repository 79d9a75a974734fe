"""A grammar at its beginning, from which every request with the same constraint gets a matcher."""

from __future__ import annotations

import threading
import time

from llguidance import LLMatcher

from foreword.core.structured import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.grammar.compile import grammar_text, reason
from foreword.grammar.limits import RENEW_CPU_S, parser_limits
from foreword.grammar.tokens import Tokens

__all__ = ["Compiled"]


class Compiled:
    """Compiled once, copied for each request. Raises InvalidRequest with llguidance's reason.

    Copies of one matcher share a lexer, which remembers what it has seen: it makes them fast, lets one of them compute at a
    time, and may fill up. So there are several lexers, and new ones where one is full; unless they take long to build.

    num_lexers  masks of as many requests are computed at the same time
    spent       the lexer is full, and takes too long to build to do it here: requests to come want a new Compiled
    """

    def __init__(self, structured: StructuredOutput, tokens: Tokens, num_lexers: int = 1) -> None:
        self._structured = structured
        self._tokens = tokens
        self._num_lexers = num_lexers
        self._lock = threading.Lock()
        begin = time.thread_time()
        self._firsts = [self._compile()]
        self._cheap = time.thread_time() - begin < RENEW_CPU_S
        self._num_given = 0
        self.spent = False

    @property
    def kind(self) -> str:
        """One of foreword.core.structured.KINDS."""
        return self._structured.kind

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of the grammar."""
        with self._lock:
            if self._cheap and len(self._firsts) <= self._num_given < self._num_lexers:
                self._firsts.append(self._compile())
            first = self._firsts[self._num_given % len(self._firsts)]
            self._num_given += 1
            return first.deep_copy()

    def renewed(self) -> LLMatcher | None:
        """A matcher with a lexer of its own, also for those to come; None where that takes too long."""
        if not self._cheap:
            self.spent = True
            return None
        first = self._compile()
        with self._lock:
            self._firsts = [first]
            self._num_given = 1
        return first.deep_copy()

    def _compile(self) -> LLMatcher:
        structured = self._structured
        llg = LLMatcher(self._tokens.llg, grammar_text(structured), log_level=0, limits=parser_limits())
        llg.consume_tokens([])  # from here on it knows if nothing but the end may follow
        if llg.is_error():
            raise InvalidRequest(f"{structured.field}: {reason(llg)}", structured.field)
        return llg
