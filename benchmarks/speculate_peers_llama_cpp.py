"""llama-cpp-python with prompt lookup, in the peers' environment. See peers_worker.py."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from peers_worker import serve

DRAFTED = 10  # draft tokens, the default of the class


class CountedLookup(LlamaPromptLookupDecoding):
    """Prompt lookup that counts its draft tokens."""

    drafted = 0

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        draft = super().__call__(input_ids, **kwargs)
        self.drafted += len(draft)
        return draft


class LlamaCpp:
    """One context; prompt lookup is switched by its draft model."""

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        self.llama = llama_cpp.Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,  # in both modes: prompt lookup needs it
            draft_model=CountedLookup(num_pred_tokens=DRAFTED),
            verbose=False,
        )
        self.lookup = self.llama.draft_model
        return {"version": llama_cpp.__version__, "modes": ["off", "lookup"]}

    def answer(self, mode: str, prompt: list[int], tokens: int, stop: list[int]) -> dict[str, Any]:
        self.llama.draft_model = self.lookup if mode == "lookup" else None
        self.llama.reset()
        self.llama._ctx.kv_cache_clear()
        before = self.lookup.drafted
        started = time.perf_counter()
        ids: list[int] = []
        for token in self.llama.generate(prompt, temp=0.0, top_k=1, reset=True):
            ids.append(token)
            if token in stop or len(ids) == tokens:
                break
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ids": ids, "drafted": self.lookup.drafted - before}


if __name__ == "__main__":
    serve(LlamaCpp())
