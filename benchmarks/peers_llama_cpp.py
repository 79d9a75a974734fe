"""llama.cpp through the C API of llama-cpp-python. See peers_worker.py."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any

import llama_cpp
import numpy as np
from peers_worker import serve

KV_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
}
FLASH_ATTENTION = {
    True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


class LlamaCpp:
    """One model, one context of up to 16 sequences."""

    def load(
        self,
        path: str,
        threads: int,
        context: int,
        streams: int,
        kv_type: str = "f16",
        keep: bool = False,
        flash: bool = True,
    ) -> dict[str, Any]:
        """`keep` leaves each prompt's KV in a sequence of its own, so that it is computed once.

        Flash attention rounds some values to float16, whatever the KV.
        """
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context * streams
        options.n_seq_max = streams
        options.n_batch = context
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = KV_TYPES[kv_type]
        options.flash_attn_type = FLASH_ATTENTION[flash]
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(context * streams, 0, 1)
        self.kept: list[list[int]] | None = [] if keep else None
        self.num_computed = 0
        return {"version": llama_cpp.__version__, "isa": llama_cpp.llama_print_system_info().decode()}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        sequence = self._start(prompt)
        token = self._first(prompt, sequence)
        started, ids = time.perf_counter(), []
        for position in range(len(prompt), len(prompt) + tokens):
            self._run([(token, position, sequence, True)])
            token = self._argmax(0)
            ids.append(token)
        return {"seconds": time.perf_counter() - started, "ids": ids}

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        """ "cached": prompt tokens that were not computed."""
        sequence, before = self._start(ids), self.num_computed
        started = time.perf_counter()
        token = self._first(ids, sequence)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ids": [token], "cached": len(ids) - (self.num_computed - before)}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        self._clear()
        started = time.perf_counter()
        heads = [self._first(prompt, number) for number, prompt in enumerate(prompts)]
        ids = [[head] for head in heads]
        for step in range(tokens - 1):
            self._run([(of[-1], len(prompts[i]) + step, i, True) for i, of in enumerate(ids)])
            for number, of in enumerate(ids):
                of.append(self._argmax(number))
        return {"seconds": time.perf_counter() - started, "ids": ids}

    def rows(self, context: int, counts: list[int], steps: int) -> dict[str, Any]:
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
                if not llama_cpp.llama_memory_seq_rm(self.memory, 0, context, -1):
                    context += count  # a recurrent state takes nothing back: the context grows
        return {
            "seconds": {str(count): statistics.median(spans) for count, spans in seconds.items()},
            "rows": {str(count): [count] for count in counts},  # as given to llama_decode
        }

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def _start(self, prompt: list[int]) -> int:
        """The sequence for a prompt, empty or with all but the prompt's last token."""
        if self.kept is None:
            self._clear()
            return 0
        if prompt in self.kept:
            llama_cpp.llama_memory_seq_rm(self.memory, self.kept.index(prompt), len(prompt) - 1, -1)
        else:
            self.kept.append(prompt)
        return self.kept.index(prompt)

    def _first(self, prompt: list[int], sequence: int) -> int:
        """The prompt's first token; computes what is not in the sequence."""
        start, last = llama_cpp.llama_memory_seq_pos_max(self.memory, sequence) + 1, len(prompt) - 1
        self._run([(prompt[at], at, sequence, at == last) for at in range(start, len(prompt))])
        self.num_computed += len(prompt) - start
        return self._argmax(last - start)

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
