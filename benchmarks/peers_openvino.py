"""OpenVINO GenAI, in process. See peers_worker.py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peers_worker import serve

MAX_BATCHED_TOKENS = 2304  # of one step


class OpenVINO:
    """The continuous-batching pipeline, the default on a CPU."""

    def load(
        self, path: str, threads: int, context: int, streams: int, prefix_caching: bool = False
    ) -> dict[str, Any]:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-context * streams // 32) + 1
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = min(context, MAX_BATCHED_TOKENS)
        scheduler.enable_prefix_caching = prefix_caching
        properties = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
        return {"version": openvino_genai.__version__}

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """From the first token on, which the step that ends the prompt gives."""
        handle = self.pipeline.add_request(0, _tensor(prompt), _greedy(tokens + 1))
        ids: list[int] = []
        while not ids:
            self.pipeline.step()
            ids += _read(handle)
        started = time.perf_counter()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        seconds = time.perf_counter() - started
        while handle.can_read():
            ids += _read(handle)
        return {"seconds": seconds, "ids": ids[1:]}

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        answer = self._timed([ids], 1)
        return {**answer, "ids": answer["ids"][0]}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        return self._timed(prompts, tokens)

    def _timed(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        started = time.perf_counter()
        answers = self.pipeline.generate([_tensor(ids) for ids in prompts], [_greedy(tokens)] * len(prompts))
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ids": [list(answer.m_generation_ids[0]) for answer in answers]}


def _read(handle: openvino_genai.GenerationHandle) -> list[int]:
    """Tokens since the last call."""
    if not handle.can_read():
        return []
    return [token_id for output in handle.read().values() for token_id in output.generated_ids]


def _tensor(ids: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([ids], dtype=np.int64))


def _greedy(tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = tokens
    config.ignore_eos = True
    return config


if __name__ == "__main__":
    serve(OpenVINO())
