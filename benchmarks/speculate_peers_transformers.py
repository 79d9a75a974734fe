"""transformers with prompt lookup and an assistant model, in the peers' environment. See peers_worker.py."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from peers_worker import serve
from transformers import AutoModelForCausalLM

DRAFTED = 10  # draft tokens of prompt lookup, as in its documentation


class Transformers:
    """`generate()`, greedy, one request at a time: assisted decoding takes no batch."""

    def load(self, path: str, threads: int, drafter: str | None) -> dict[str, Any]:
        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.rows: list[int] = []  # of each forward pass of an answer
        self.model.register_forward_pre_hook(self._count_rows, with_kwargs=True)
        self.options: dict[str, dict[str, Any]] = {"off": {}, "lookup": {"prompt_lookup_num_tokens": DRAFTED}}
        if drafter is not None:
            self.options["assistant"] = {
                "assistant_model": AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.bfloat16).eval()
            }
        return {"version": transformers.__version__, "modes": list(self.options)}

    def answer(self, mode: str, prompt: list[int], tokens: int, stop: list[int]) -> dict[str, Any]:
        ids = torch.tensor([prompt])
        self.rows.clear()
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=stop[0],
                **self.options[mode],
            )
        seconds = time.perf_counter() - started
        drafted = sum(rows - 1 for rows in self.rows[1:])  # the first pass is the prompt
        return {"seconds": seconds, "ids": out[0, len(prompt) :].tolist(), "drafted": drafted}

    def _count_rows(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rows.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[1])


if __name__ == "__main__":
    serve(Transformers())
