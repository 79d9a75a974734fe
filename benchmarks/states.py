"""What layers with state cost: a step by the place in its segment, rows, prompts, and a further turn.

    python -m benchmarks.states MODEL [--isa avx2] [--threads 2] [--turn 30000]

MODEL is a GGUF file or a directory of a model with layers with state, such as those of peers_states.py.

    step      time of a decode step at places 0, 31, 62 and 63 of a segment; the last one writes an anchor
    rows      time of a step that verifies 4, 8 or 16 rows over that of one row, at place 31
    prompt    tokens/s of a prompt of 512 tokens
    turn      a conversation of --turn tokens, then the same with an answer and 20 further tokens: tokens that
              are computed again, and seconds to the first token, cold and warm
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.script import print_json, run_script
from foreword import LLM, SamplingParams
from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.states import NO_ANCHOR, SEGMENT, StateSizes
from foreword.kernels.cpu.backend import CpuOps
from foreword.kv_cache.storage import KVStorage
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info

BLOCK_SIZE, MAX_ROWS, CONTEXT, BASE = 16, 33, 1024, 448
ANSWER = 40  # tokens
PLACES, ROWS = (0, 31, 62, 63), (4, 8, 16)


class Passes:
    """Forward passes of one request."""

    def __init__(self, path: Path, isa: str, threads: int) -> None:
        info = read_model_info(path)
        self.ops = CpuOps(isa, threads)
        self.model = load_model(path, self.ops, Precision.from_dtypes(info.dtype), "cpu", CONTEXT)
        assert self.model.has_states, "a model without layers with state"
        sizes = StateSizes(2, CONTEXT // SEGMENT + 2, MAX_ROWS)
        dtype = getattr(torch, info.dtype)
        num_blocks = CONTEXT // BLOCK_SIZE + 1
        kv = KVStorage(num_blocks, BLOCK_SIZE, self.model.cache_shapes, info.dtype, "cpu", sizes, dtype)
        self.run = self.model.compile_logits(kv)
        self.run(self.batch(512, 0))

    def batch(self, rows: int, start: int) -> Batch:
        anchors = [i + 1 if i else NO_ANCHOR for i in range(start // SEGMENT, (start + rows) // SEGMENT + 1)]
        blocks = range(1, CONTEXT // BLOCK_SIZE + 1)
        sampled = rows if rows < MAX_ROWS else 1
        chunk = Chunk([7] * rows, start, blocks, sampled, state_slot=1, anchors=anchors)
        return build_batch([chunk], BLOCK_SIZE, 1, "cpu", with_states=True)


def medians(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of each, measured in turn."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, taken in zip(works, seconds, strict=True):
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


def measure_steps(passes: Passes) -> dict[str, float]:
    batches = [passes.batch(1, BASE + place) for place in PLACES]
    batches += [passes.batch(rows, BASE + 31) for rows in ROWS]
    works = [lambda batch=batch: passes.run(batch) for batch in batches]
    seconds = medians(works, 40)
    figures = {f"step_{place}_ms": taken * 1e3 for place, taken in zip(PLACES, seconds, strict=False)}
    one = seconds[PLACES.index(31)]
    figures |= {f"rows_{rows}": taken / one for rows, taken in zip(ROWS, seconds[len(PLACES) :], strict=True)}
    figures["anchor_share"] = (seconds[3] - seconds[2]) / SEGMENT / one
    (prompt,) = medians([lambda: passes.run(passes.batch(512, 0))], 5)
    return figures | {"prompt_tokens_per_s": 512 / prompt}


def measure_turn(path: Path, length: int, threads: int) -> dict[str, float]:
    llm = LLM(
        str(path), threads=threads, max_model_len=length + 200, kv_cache_memory=f"{length + 4096}tokens"
    )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(256, (length,), generator=generator).tolist()

    def first_token(token_ids: list[int], count: int = 1) -> tuple[float, list[int], int]:
        """Seconds, the answer and its cached tokens."""
        started = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": token_ids}], params)
        assert output.metrics is not None
        return time.perf_counter() - started, list(output.token_ids), output.metrics.cached_tokens or 0

    cold, _, _ = first_token(prompt)
    _, answer, _ = first_token(prompt, ANSWER)
    longer = [*prompt, *answer, *range(20)]
    warm, _, cached = first_token(longer)
    return {"turn_cold_s": cold, "turn_warm_s": warm, "turn_recomputed": len(longer) - cached}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turn", type=int, default=30000)
    args = parser.parse_args()
    with torch.inference_mode():
        figures = measure_steps(Passes(args.model, args.isa, args.threads))
    if args.turn:
        figures |= measure_turn(args.model, args.turn, args.threads)
    for name, value in figures.items():
        print(f"{name:20} {value:.4g}")
    print_json(figures)
    return 0


if __name__ == "__main__":
    run_script(main)
