"""llama.cpp through the C API of llama-cpp-python. See peers_worker.py."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any

import llama_cpp
import numpy as np
from peers_worker import serve


class LlamaCpp:
    """One model, one context of up to 16 sequences."""

    def load(self, path: str, threads: int, context: int, streams: int) -> dict[str, Any]:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context * streams
        options.n_seq_max = streams
        options.n_batch = context
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(context * streams, 0, 1)
        return {"version": llama_cpp.__version__}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, float]:
        self._clear()
        token = self._first(prompt, 0)
        started = time.perf_counter()
        for position in range(len(prompt), len(prompt) + tokens):
            self._run([(token, position, 0, True)])
            token = self._argmax(0)
        return {"seconds": time.perf_counter() - started}

    def prompt(self, ids: list[int]) -> dict[str, float]:
        self._clear()
        started = time.perf_counter()
        self._first(ids, 0)
        return {"seconds": time.perf_counter() - started}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        self._clear()
        started = time.perf_counter()
        heads = [self._first(prompt, number) for number, prompt in enumerate(prompts)]
        for step in range(tokens - 1):
            self._run([(token, len(prompts[i]) + step, i, True) for i, token in enumerate(heads)])
            heads = [self._argmax(i) for i in range(len(heads))]
        return {"seconds": time.perf_counter() - started}

    def rows(self, context: int, counts: list[int], steps: int) -> dict[str, float]:
        self._clear()
        self._first([1] * context, 0)
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(steps):
            for count in counts:
                started = time.perf_counter()
                self._run([(2 + i, context + i, 0, True) for i in range(count)])
                for row in range(count):
                    self._argmax(row)
                seconds[count].append(time.perf_counter() - started)
                llama_cpp.llama_memory_seq_rm(self.memory, 0, context, -1)
        return {str(count): statistics.median(spans) for count, spans in seconds.items()}

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def _first(self, prompt: list[int], sequence: int) -> int:
        """The prompt's first token."""
        last = len(prompt) - 1
        self._run([(token, position, sequence, position == last) for position, token in enumerate(prompt)])
        return self._argmax(last)

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows are (token, position, sequence, needs logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def _argmax(self, row: int) -> int:
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(
            np.ctypeslib.as_array(
                ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab,)
            ).argmax()
        )


if __name__ == "__main__":
    serve(LlamaCpp())
