"""Token masks of one step, computed in a thread during the forward pass."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from foreword.grammar.compiler import Lexer

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """The masks after each prefix of `draft`, the empty prefix first."""

    matcher: LLMatcher
    lexer: Lexer
    draft: tuple[int, ...]
    on_masks: Callable[[Tensor], None]  # called with int32 [len(draft) + 1, W]


class MaskBuffer:
    """Memory for the masks of a step, overwritten by the next step. It grows and is never freed."""

    __slots__ = ("_masks", "_num_words")

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._masks = torch.zeros(0, num_words, dtype=torch.int32)

    def rows(self, num_rows: int) -> Tensor:
        """int32 [num_rows, W], uninitialized."""
        if num_rows > self._masks.shape[0]:
            self._masks = torch.zeros(
                max(num_rows, 2 * self._masks.shape[0]), self._num_words, dtype=torch.int32
            )
        return self._masks[:num_rows]


class MaskJob:
    """Computes masks once: in the background thread, or in `finish` if that comes first."""

    __slots__ = ("_buffer", "_done", "_executor", "_lock", "_requests")

    def __init__(self, requests: Sequence[MaskRequest], executor: LLExecutor, buffer: MaskBuffer) -> None:
        self._requests = requests
        self._executor = executor
        self._buffer = buffer
        self._lock = threading.Lock()
        self._done = False

    def finish(self) -> None:
        """Return once the masks are computed."""
        with self._lock:
            if not self._done:
                self._compute()
                self._done = True

    def cancel(self) -> None:
        """Drop the job. Its matchers are free when this returns."""
        with self._lock:
            self._done = True

    def _compute(self) -> None:
        masks = self._buffer.rows(sum(len(request.draft) + 1 for request in self._requests))
        begin_s = time.perf_counter()
        compute_masks(self._executor, [(request.matcher, request.draft) for request in self._requests], masks)
        elapsed_s = time.perf_counter() - begin_s
        # Any lexer may have taken all of the time: by a share, its cost would have no upper bound
        for lexer in {id(request.lexer): request.lexer for request in self._requests}.values():
            lexer.unread_s += elapsed_s
        begin = 0
        for request in self._requests:
            end = begin + len(request.draft) + 1
            request.on_masks(masks[begin:end])
            begin = end


def compute_masks(
    executor: LLExecutor, requests: Sequence[tuple[LLMatcher, tuple[int, ...]]], masks: Tensor
) -> None:
    """Compute the masks after each prefix of each draft. Matchers keep their state.

    masks  int32 [sum(len(draft) + 1), W], overwritten; all zero after an illegal token
    """
    drafted: list[tuple[LLMatcher, int, list[int]]] = []
    plain: list[tuple[LLMatcher, int]] = []
    line = 0
    for matcher, draft in requests:
        if draft:
            drafted.append((matcher, line, list(draft)))
            masks[line + 1 : line + 1 + len(draft)].zero_()
        else:
            plain.append((matcher, line))
        line += len(draft) + 1
    assert line == masks.shape[0]
    memory = masks.data_ptr(), masks.shape[1] * WORD_BYTES, line
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)
    if plain:
        executor.unsafe_compute_mask_ptr(plain, *memory)


class MaskThread:
    """A daemon thread that runs jobs; it ends when this object is collected."""

    __slots__ = ("__weakref__", "_jobs", "_thread")

    def __init__(self) -> None:
        self._jobs: SimpleQueue[MaskJob | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="grammar-masks", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: MaskJob) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def _run_jobs(jobs: SimpleQueue[MaskJob | None]) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):  # the matcher computes its masks again, and raises it
            job.finish()
        del job  # it holds the grammars of its requests
