"""vLLM's CPU build, its engine in process. See peers_worker.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB

from peers_worker import serve


class VLLM:
    """Offline engine in bfloat16, compiled by its defaults, driven step by step."""

    def load(
        self,
        path: str,
        threads: int,
        context: int,
        streams: int,
        prefix_caching: bool = False,
        cpu_isa: str = "auto",
    ) -> dict[str, Any]:
        if cpu_isa == "avx2":  # it chooses its library by this
            torch.cpu._is_avx512_supported = lambda: False
        os.environ["OMP_NUM_THREADS"] = str(threads)
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        import vllm  # noqa: PLC0415  (after its environment)

        self.params = vllm.SamplingParams
        self.engine = vllm.LLM(
            model=path,
            dtype="bfloat16",
            max_model_len=context,
            max_num_seqs=streams,
            enable_prefix_caching=prefix_caching,
            disable_log_stats=True,
        ).llm_engine
        self.count = 0
        mapped = Path("/proc/self/maps").read_text().splitlines()
        loaded = {Path(line).name for line in mapped if "vllm/_C" in line}
        return {"version": vllm.__version__, "isa": " ".join(sorted(loaded))}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        self._add(prompt, tokens + 1)
        ids: list[int] = []
        while not ids:
            ids = self._step().get(self.count, [])
        started = time.perf_counter()
        while self.engine.has_unfinished_requests():
            ids = self._step().get(self.count, ids)
        return {"seconds": time.perf_counter() - started, "ids": ids[1:]}

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        answer = self.streams([ids], 1)
        return {**answer, "ids": answer["ids"][0]}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """ "at_once": most requests of one step."""
        started = time.perf_counter()
        order = [self._add(prompt, tokens) for prompt in prompts]
        ids: dict[int, list[int]] = {}
        at_once = 0
        while self.engine.has_unfinished_requests():
            delivered = self._step()
            at_once = max(at_once, len(delivered))
            ids |= delivered
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "at_once": at_once, "ids": [ids[number] for number in order]}

    def _add(self, prompt: list[int], tokens: int) -> int:
        self.count += 1
        params = self.params(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        return self.count

    def _step(self) -> dict[int, list[int]]:
        """All tokens so far of the requests that got one."""
        return {int(out.request_id): list(out.outputs[0].token_ids) for out in self.engine.step()}


if __name__ == "__main__":
    serve(VLLM())
