"""Foreword's engine in process, without speculation except for `rows`. See peers_worker.py."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from peers_worker import serve

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import StepReport, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.engine_client.local import LocalClient
from foreword.tokenizer.input_processor import SamplingDefaults, make_requests

OFF = Speculation("off")
MAX_ROWS = 16
ROWS_CONTEXT = 256
WARMUP_STEPS = 2  # steps after a prompt before the first verified draft
VISITS = 4  # of each row count


class ForewordPeer:
    """Replayed drafts of a fixed length are wrong: a step verifies the requested rows and emits one token."""

    def load(
        self, path: str, threads: int, tokens: int, streams: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w") as recording:
            wrong = [(7 * index) % 64 + 100 for index in range(2048)]
            json.dump({"prompt_token_ids": [1] * ROWS_CONTEXT, "token_ids": wrong}, recording)
            recording.flush()
            defaults = {"prefix_caching": False, "draft_length": "fixed"}
            config = Config(
                model=path,
                threads=threads,
                kv_cache_memory=f"{tokens}tokens",
                max_model_len=tokens,
                max_num_seqs=streams,
                speculate="replay",
                replay_file=recording.name,
                num_speculative_tokens=MAX_ROWS - 1,
                **{**defaults, **options},
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

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """ "forward": seconds in the forward pass."""
        self._submit(prompt, tokens + 1)
        self._until_first()
        started, forward, ids = time.perf_counter(), 0.0, []
        while not self.client.idle:
            report = self.client.step()
            forward += report.stats.stage_seconds["forward"]
            ids += _token_ids(report)
        return {"seconds": time.perf_counter() - started, "forward": forward, "ids": ids}

    def prompt(self, ids: list[int]) -> dict[str, Any]:
        """ "cached": prompt tokens that were not computed."""
        self._submit(ids, 1)
        started, cached, answer = time.perf_counter(), 0, []
        while not self.client.idle:
            report = self.client.step()
            answer += _token_ids(report)
            cached += sum(event.num_cached for event in report.events if isinstance(event, TokenEvent))
        return {"seconds": time.perf_counter() - started, "cached": cached, "ids": answer}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """ "at_once": most requests of one step."""
        started = time.perf_counter()
        order = [self._submit(prompt, tokens) for prompt in prompts]
        ids: dict[str, list[int]] = defaultdict(list)
        at_once = 0
        while not self.client.idle:
            report = self.client.step()
            delivered = [event for event in report.events if isinstance(event, TokenEvent)]
            at_once = max(at_once, len(delivered))
            for event in delivered:
                ids[event.request_id] += event.token_ids
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "at_once": at_once, "ids": [ids[name] for name in order]}

    def rows(self, context: int, counts: list[int], steps: int) -> dict[str, Any]:
        assert context == ROWS_CONTEXT, "only this prompt is recorded"
        seconds: dict[int, list[float]] = defaultdict(list)
        verified: dict[int, set[int]] = defaultdict(set)
        ids: dict[int, list[int]] = {}
        for _ in range(VISITS):
            for count in counts:
                spans, rows, ids[count] = self._verified_steps(count, steps // VISITS + WARMUP_STEPS)
                seconds[count] += spans[WARMUP_STEPS:]
                verified[count] |= set(rows[WARMUP_STEPS:])
        return {
            "seconds": {str(count): statistics.median(spans) for count, spans in seconds.items()},
            "rows": {str(count): sorted(rows) for count, rows in verified.items()},
            "ids": list(ids.values()),
        }

    def _verified_steps(self, count: int, steps: int) -> tuple[list[float], list[int], list[int]]:
        """Seconds and rows of each step, asked for `count`, and the tokens that all of them emitted."""
        how = Speculation("replay", count - 1) if count > 1 else OFF
        request_id = self._submit([1] * ROWS_CONTEXT, MAX_ROWS * (steps + 2), how)
        self._until_first()
        seconds, rows, ids = [], [], []
        for _ in range(steps):
            started = time.perf_counter()
            report = self.client.step()
            seconds.append(time.perf_counter() - started)
            rows += [
                1 + (event.draft.num_drafted if event.draft else 0)
                for event in report.events
                if isinstance(event, TokenEvent)
            ]
            ids += _token_ids(report)
        self.client.abort(request_id)
        while not self.client.idle:
            self.client.step()
        return seconds, rows, ids

    def _submit(self, prompt: Sequence[int], tokens: int, speculation: Speculation = OFF) -> str:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, speculation=speculation)
        limit = self.client.info.resolved.max_model_len
        (request,) = make_requests(
            prompt, params, self.prepared.tokenizer, f"peer-{time.monotonic_ns()}", limit, SamplingDefaults(0)
        )
        self.client.submit(request)
        return request.id

    def _until_first(self) -> None:
        while not _token_ids(self.client.step()):
            pass


def _token_ids(report: StepReport) -> list[int]:
    return [
        token_id for event in report.events if isinstance(event, TokenEvent) for token_id in event.token_ids
    ]


if __name__ == "__main__":
    serve(ForewordPeer())
