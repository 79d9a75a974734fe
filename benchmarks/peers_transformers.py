"""transformers in bfloat16 with its own cache. See peers_worker.py."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from peers_worker import serve
from transformers import AutoModelForCausalLM


class Transformers:
    """`generate()` with a static batch."""

    def load(self, path: str, threads: int, context: int, streams: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        return {"version": transformers.__version__, "isa": torch.backends.cpu.get_cpu_capability()}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """A loop over the model itself, since generate() does not report the first token."""
        ids = []
        with torch.inference_mode():
            out = self.model(torch.tensor([prompt]), use_cache=True)
            started = time.perf_counter()
            for _ in range(tokens):
                token = out.logits[:, -1:].argmax(-1)
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
                ids.append(int(token))
            return {"seconds": time.perf_counter() - started, "ids": ids}

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        answer = self._timed([ids], 1)
        return {**answer, "ids": answer["ids"][0]}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        return self._timed(prompts, tokens)

    def _timed(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Prompts of one length."""
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        return {"seconds": time.perf_counter() - started, "ids": out[:, ids.shape[1] :].tolist()}


if __name__ == "__main__":
    serve(Transformers())
