"""Foreword's engine in process, without speculation except for `rows`. See peers_worker.py."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from peers_worker import serve

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.engine_client.local import LocalClient
from foreword.tokenizer.input_processor import SamplingDefaults, make_requests

OFF = Speculation("off")
MAX_ROWS = 16
ROWS_CONTEXT = 256
WARMUP_STEPS = 2  # steps after a prompt before the first verified draft
VISITS = 4  # of each row count


class ForewordPeer:
    """Replayed drafts are wrong, so that a step verifies the requested rows and emits one token."""

    def load(
        self, path: str, threads: int, tokens: int, streams: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w") as recording:
            wrong = [(7 * index) % 64 + 100 for index in range(2048)]
            json.dump({"prompt_token_ids": [1] * ROWS_CONTEXT, "token_ids": wrong}, recording)
            recording.flush()
            config = Config(
                model=path,
                threads=threads,
                kv_cache_memory=f"{tokens}tokens",
                max_num_seqs=streams,
                prefix_caching=False,
                speculate="replay",
                replay_file=recording.name,
                num_speculative_tokens=MAX_ROWS - 1,
                **options,
            )
            self.prepared = prepare_checkpoint(config)
            self.client = LocalClient(
                self.prepared.config, self.prepared.never_sampled_ids, self.prepared.tokenizer.vocabulary
            )
        info = self.client.info
        return {
            "backend": info.backend,
            "weight_bytes": info.resolved.weight_bytes,
            "kv_bytes": info.resolved.kv_bytes,
        }

    def decode(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """ "forward": seconds in the forward pass."""
        self._submit(prompt, tokens + 1)
        self._until_first()
        started, forward = time.perf_counter(), 0.0
        while not self.client.idle:
            forward += self.client.step().stats.stage_seconds["forward"]
        return {"seconds": time.perf_counter() - started, "forward": forward}

    def prompt(self, ids: list[int]) -> dict[str, float]:
        self._submit(ids, 1)
        started = time.perf_counter()
        self._drain()
        return {"seconds": time.perf_counter() - started}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        for prompt in prompts:
            self._submit(prompt, tokens)
        self._drain()
        return {"seconds": time.perf_counter() - started}

    def rows(self, context: int, counts: list[int], steps: int) -> dict[str, float]:
        assert context == ROWS_CONTEXT, "only this prompt is recorded"
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(VISITS):
            for count in counts:
                seconds[count] += self._verified_steps(count, steps // VISITS + WARMUP_STEPS)[WARMUP_STEPS:]
        return {str(count): statistics.median(spans) for count, spans in seconds.items()}

    def _verified_steps(self, count: int, steps: int) -> list[float]:
        """Seconds of steps with `count` rows each."""
        how = Speculation("replay", count - 1) if count > 1 else OFF
        request_id = self._submit([1] * ROWS_CONTEXT, MAX_ROWS * (steps + 2), how)
        self._until_first()
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            self.client.step()
            seconds.append(time.perf_counter() - started)
        self.client.abort(request_id)
        self._drain()
        return seconds

    def _submit(self, prompt: Sequence[int], tokens: int, speculation: Speculation = OFF) -> str:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, speculation=speculation)
        limit = self.client.info.resolved.max_model_len
        (request,) = make_requests(
            prompt, params, self.prepared.tokenizer, f"peer-{time.monotonic_ns()}", limit, SamplingDefaults(0)
        )
        self.client.submit(request)
        return request.id

    def _until_first(self) -> None:
        while not any(
            isinstance(event, TokenEvent) and event.token_ids for event in self.client.step().events
        ):
            pass

    def _drain(self) -> None:
        while not self.client.idle:
            self.client.step()


if __name__ == "__main__":
    serve(ForewordPeer())
