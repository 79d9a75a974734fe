"""OpenVINO GenAI, in process. See peers_worker.py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peers_worker import serve


class OpenVINO:
    """The continuous-batching pipeline, the default on a CPU."""

    def load(self, path: str, threads: int, context: int, streams: int) -> dict[str, Any]:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-context * streams // 32) + 1
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = context
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
        return {"version": openvino_genai.__version__}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, float]:
        first = 0.0

        def note(_: object) -> bool:
            nonlocal first
            first = first or time.perf_counter()
            return False

        handle = self.pipeline.add_request(0, _tensor(prompt), _greedy(tokens + 1))
        count = 0
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            count += 1
            if count == 1:
                note(handle)
        return {"seconds": time.perf_counter() - first}

    def prompt(self, ids: list[int]) -> dict[str, float]:
        return self._timed([ids], 1)

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        return self._timed(prompts, tokens)

    def _timed(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        self.pipeline.generate([_tensor(ids) for ids in prompts], [_greedy(tokens)] * len(prompts))
        return {"seconds": time.perf_counter() - started}


def _tensor(ids: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([ids], dtype=np.int64))


def _greedy(tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = tokens
    config.ignore_eos = True
    return config


if __name__ == "__main__":
    serve(OpenVINO())
