"""Grammars in the engine: compiled in the background, followed token by token, masks beside the forward pass."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLExecutor

from foreword.core.grammar import RequestGrammar
from foreword.core.request import Request
from foreword.core.rows import SampleRow
from foreword.core.structured import StructuredOutput
from foreword.core.vocabulary import Vocabulary
from foreword.grammar.compiled import Compiled
from foreword.grammar.limits import MAX_COMPILED
from foreword.grammar.masks import MaskBuffer, MaskJob, MaskThread, Wanted
from foreword.grammar.matcher import Matcher
from foreword.grammar.tokens import Tokens

__all__ = ["Grammars"]

MAX_MASK_THREADS: Final = 8


class Grammars:
    """All grammars of an engine. `begin` may be called from any thread, the rest from the engine's.

    vocab_size   of the model: the columns of its logits
    num_threads  that compute masks beside the forward pass; None: half of the cores, at most 8
    """

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._num_threads = num_threads or min(max(len(os.sched_getaffinity(0)) // 2, 1), MAX_MASK_THREADS)
        self._executor = LLExecutor(self._num_threads)
        self._compiler = ThreadPoolExecutor(1, "grammar-compile")
        self._ready = ThreadPoolExecutor(1, "grammar-ready")  # for all that need not be compiled
        self._tokens: Future[Tokens] = Future()
        self._cache = _Cache()
        self._thread: MaskThread | None = None
        self._buffer: MaskBuffer | None = None
        self._job: MaskJob | None = None

    def know(self, vocabulary: Vocabulary) -> None:
        """What the model's tokens spell. Requests that came before wait for it; a second vocabulary is ignored."""
        if not self._tokens.done():
            self._ready.submit(self._read, vocabulary)

    def begin(self, request: Request) -> Future[RequestGrammar]:
        """The grammar of a request, at the end of what was delivered of it; InvalidRequest if there is none."""
        structured = request.params.structured
        assert structured is not None, "only requests with a constraint have a grammar"
        known = self._cache.get(structured) is not None  # it waits for nobody's compilation
        return (self._ready if known else self._compiler).submit(self._begin, request, structured)

    def prepare(self, rows: Sequence[SampleRow]) -> None:
        """Compute in the background what `mask` will be asked for by these rows. Rows without a grammar are ignored."""
        if self._job is not None:
            self._job.drop()
            self._job = None
        matchers = _longest_drafts(rows)
        wanted = [(matcher, want) for matcher, draft in matchers.items() if (want := matcher.wanted(draft)) is not None]
        if wanted:
            self._job = self._start([want for _, want in wanted])
            for matcher, _ in wanted:
                matcher.follow(self._job)

    def close(self) -> None:
        """Stop all threads; requests that wait are cancelled."""
        self._tokens.cancel()
        self._ready.shutdown(wait=False, cancel_futures=True)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.close()

    def _start(self, wanted: Sequence[Wanted]) -> MaskJob:
        if self._thread is None or self._buffer is None:
            self._thread = MaskThread()
            self._buffer = MaskBuffer(self._tokens.result().num_words)
        job = MaskJob(wanted, self._executor, self._buffer)
        self._thread.put(job)
        return job

    def _read(self, vocabulary: Vocabulary) -> None:
        try:
            self._tokens.set_result(Tokens(vocabulary, self._vocab_size))
        except Exception as error:
            self._tokens.set_exception(error)

    def _begin(self, request: Request, structured: StructuredOutput) -> RequestGrammar:
        tokens = self._tokens.result()
        compiled = self._cache.get(structured)
        if compiled is None:
            compiled = Compiled(structured, tokens, self._num_threads)
            self._cache.put(structured, compiled)
        return Matcher(request, compiled, tokens, self._executor)


def _longest_drafts(rows: Sequence[SampleRow]) -> dict[Matcher, tuple[int, ...]]:
    """The longest draft of each grammar: its rows are the prefixes of one draft, in order."""
    return {row.state.grammar: row.draft for row in rows if isinstance(row.state.grammar, Matcher)}


class _Cache:
    """Grammars compiled last, each at its beginning; lives in more than one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str, bool], Compiled] = OrderedDict()

    def get(self, structured: StructuredOutput) -> Compiled | None:
        with self._lock:
            found = self._compiled.get(_key(structured))
            if found is None or found.spent:
                return None
            self._compiled.move_to_end(_key(structured))
            return found

    def put(self, structured: StructuredOutput, compiled: Compiled) -> None:
        with self._lock:
            self._compiled[_key(structured)] = compiled
            self._compiled.move_to_end(_key(structured))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)


def _key(structured: StructuredOutput) -> tuple[str, str, bool]:
    return structured.kind, structured.text, structured.whitespace
