"""Grammars of the engine: compiled in the background, with masks computed during the forward pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLExecutor

from foreword.core.batch import SampleRow
from foreword.core.grammars import Grammars
from foreword.core.request import Request
from foreword.core.structured_output import RequestGrammar, StructuredOutput, Vocabulary
from foreword.grammar.compiler import CompiledGrammar, SharedResults
from foreword.grammar.limits import MAX_CACHED_GRAMMARS
from foreword.grammar.masks import MaskBuffer, MaskJob, MaskRequest, MaskThread
from foreword.grammar.matcher import Matcher
from foreword.grammar.vocab import GrammarVocab

MAX_MASK_THREADS: Final = 8


class GrammarManager(Grammars):
    """Grammars of llguidance."""

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        """`vocab_size` is that of the logits; `num_threads` compute masks (None: half the cores, up to 8)."""
        self._vocab_size = vocab_size
        self._num_threads = num_threads or min(max(len(os.sched_getaffinity(0)) // 2, 1), MAX_MASK_THREADS)
        self._mask_executor = LLExecutor(self._num_threads)
        self._compile_executor = ThreadPoolExecutor(1, "grammar-compile")
        self._cached_executor = ThreadPoolExecutor(
            1, "grammar-ready"
        )  # for cached grammars: no wait for compilations
        self._vocab: Future[GrammarVocab] = Future()
        self._compiled: SharedResults[CompiledGrammar] = SharedResults(MAX_CACHED_GRAMMARS)
        self._mask_thread: MaskThread | None = None
        self._mask_buffer: MaskBuffer | None = None
        self._mask_job: MaskJob | None = None

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the bytes of each token; `compile` waits for it. A second vocabulary is ignored."""
        if not self._vocab.done():
            self._cached_executor.submit(self._build_vocab, vocabulary)

    def compile(self, request: Request) -> Future[RequestGrammar]:
        """The matcher of a request, after its resumed output. The future raises InvalidRequest."""
        structured = request.params.structured
        assert structured is not None, "the request has no constraint"
        is_cached = _cache_key(structured) in self._compiled
        executor = self._cached_executor if is_cached else self._compile_executor
        return executor.submit(self._compile, request, structured)

    def start_masks(self, rows: Sequence[SampleRow]) -> None:
        """Compute the masks of these rows in the background. Rows without a grammar are ignored."""
        if self._mask_job is not None:
            self._mask_job.cancel()
            self._mask_job = None
        # The rows of a request are the prefixes of one draft, in order: the last one has the whole draft.
        drafts = {row.state.grammar: row.draft for row in rows if isinstance(row.state.grammar, Matcher)}
        pairs = [(matcher, matcher.mask_request(draft)) for matcher, draft in drafts.items()]
        requests = [request for _, request in pairs if request is not None]
        if requests:
            self._mask_job = self._start_job(requests)
            for matcher, request in pairs:
                if request is not None:
                    matcher.use_job(self._mask_job)

    def close(self) -> None:
        """Stop all threads; waiting requests are cancelled."""
        self._vocab.cancel()
        self._cached_executor.shutdown(wait=False, cancel_futures=True)
        self._compile_executor.shutdown(wait=False, cancel_futures=True)
        if self._mask_thread is not None:
            self._mask_thread.close()

    def _start_job(self, requests: Sequence[MaskRequest]) -> MaskJob:
        if self._mask_thread is None or self._mask_buffer is None:
            self._mask_thread = MaskThread()
            self._mask_buffer = MaskBuffer(self._vocab.result().num_mask_words)
        job = MaskJob(requests, self._mask_executor, self._mask_buffer)
        self._mask_thread.submit(job)
        return job

    def _build_vocab(self, vocabulary: Vocabulary) -> None:
        try:
            self._vocab.set_result(GrammarVocab(vocabulary, self._vocab_size))
        except Exception as error:
            self._vocab.set_exception(error)

    def _compile(self, request: Request, structured: StructuredOutput) -> RequestGrammar:
        vocab = self._vocab.result()
        compiled = self._compiled.get(
            _cache_key(structured), lambda: CompiledGrammar(structured, vocab, self._num_threads)
        )
        return Matcher(request, compiled, vocab, self._mask_executor)


def _cache_key(structured: StructuredOutput) -> tuple[str, str, bool]:
    return structured.constraint_type, structured.text, structured.whitespace
