"""transformers beside Foreword under `foreword bench gpu`: random weights of the same shape, static cache, compiled, one request.

Both answer in turn, in the same process. transformers compiles by itself where a cache is static and the device is a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from foreword.bench.common import rotate
from foreword.bench.gpu.config import ROLES, write_model
from foreword.bench.gpu.engines import BenchEngine, BenchRequest, EngineFactory, make_requests
from foreword.bench.gpu.report import Measurement

__all__ = ["Baselines"]

WARM_ROUNDS = 2  # the first compiles, the second records


class Baselines:
    def __init__(self, yard: EngineFactory) -> None:
        self.yard = yard
        self.scale = yard.scale

    def parts(self) -> Iterator[Measurement]:
        for role in reversed(ROLES):
            yield Measurement(f"transformers {role}", partial(self._compared, role), 40)
            self.yard.device.free()

    def _compared(self, role: str) -> Mapping[str, Any]:
        """Seconds of all tokens but the first, of either."""
        if importlib.util.find_spec("transformers") is None:
            return {"skipped": "transformers is not installed"}
        generate, about = self._peer(role)
        (question,) = make_requests(
            1, self.scale.prompt, self.scale.peer_tokens, self.scale.shape(role).vocab
        )
        with self.yard.bed(role) as bed:
            runs: dict[str, Callable[[], float]] = {
                "foreword": lambda: _token_s(bed, question),
                "transformers": lambda: self._peer_token_s(generate, question),
            }
            spans: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(WARM_ROUNDS + self.scale.rounds):
                for name in rotate(tuple(runs), number):
                    span = runs[name]()
                    if number >= WARM_ROUNDS:
                        spans[name].append(span)
        times = statistics.median(
            its / mine for mine, its in zip(spans["foreword"], spans["transformers"], strict=True)
        )
        rates = {f"{name} tok/s": 1 / statistics.median(each) for name, each in spans.items()}
        return {"times transformers": times, **rates, **about()}

    def _peer(self, role: str) -> tuple[Callable[[BenchRequest, int], None], Callable[[], dict[str, Any]]]:
        """What answers a question with so many tokens, and what is to be told of it."""
        transformers = importlib.import_module("transformers")
        folder = write_model(self.yard.folder, self.scale.shape(role), self.scale.dtype)
        options = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
        with torch.device(self.scale.device):
            model = (
                transformers.AutoModelForCausalLM.from_config(config)
                .to(getattr(torch, self.scale.dtype))
                .eval()
            )

        def generate(question: BenchRequest, count: int) -> None:
            ids = torch.tensor([question.prompt_ids], device=self.scale.device)
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    cache_implementation="static",
                    pad_token_id=0,
                )
            self.yard.device.wait()

        return generate, lambda: {
            "version": transformers.__version__,
            "compiled": getattr(model, "_compiled_call", None) is not None,
        }

    def _peer_token_s(self, generate: Callable[[BenchRequest, int], None], question: BenchRequest) -> float:
        """A whole answer, less one of a single token."""
        few, many = 2, question.max_tokens
        spans = []
        for count in (few, many):
            started = time.perf_counter()
            generate(question, count)
            spans.append(time.perf_counter() - started)
        return max(spans[1] - spans[0], 1e-9) / (many - few)


def _token_s(bed: BenchEngine, question: BenchRequest) -> float:
    return 1 / max(bed.answer([question]).rate, 1e-9)
