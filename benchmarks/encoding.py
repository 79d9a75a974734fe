"""Gaps between tokens of streams while images arrive, against no arrivals and against text prompts.

    python -m benchmarks.encoding [--shape small] [--sides 224,560,1120] [--streams 4] [--rounds 3]

Regime: an engine in this process with random weights in the shape of Qwen2-VL and `--rows` rows a step;
speculation, prefix cache and image cache are off. `--streams` requests decode all the time. With them
run, one after the other and alternating within a round: nothing, prompts with a square image, and text
prompts of as many tokens. A gap is the time between two tokens of a stream; a prompt ends with its first
token.

Prints a table and one JSON line. The figures are how much longer gaps and prompts are with images than
with the same number of text tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from benchmarks.script import print_json, run_script, track_progress
from foreword.bench.regime import require
from foreword.bench.statistics import percentile
from foreword.bench.tables import print_table
from foreword.config.options import Config
from foreword.core.images import PromptImage, expand_placeholders
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from tests.support.vision_checkpoints import random_image, write_vision_checkpoint

TEXT_TOKENS = 16  # around an image
CONTEXT = 32  # tokens of a stream when it begins
BASELINE_STEPS = 20
KINDS = ("nothing", "text", "pictures")
SHAPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "tiny": {
            "text_config": {
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
            },
            "vision_config": {"embed_dim": 160, "hidden_size": 256, "depth": 4, "num_heads": 4},
        },
        "small": {  # an encoder as large relative to its decoder as that of the 7B model
            "text_config": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
            },
            "vision_config": {"embed_dim": 480, "hidden_size": 896, "depth": 16, "num_heads": 8},
        },
    }
)
TEXT = {  # heads of 64
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}
PATCH = 14


@dataclass(slots=True)
class StreamTimings:
    """Gaps of all streams, times of whole prompts, and the share of time spent on encoding."""

    gaps_s: list[float] = field(default_factory=list)
    prompts_s: list[float] = field(default_factory=list)
    encode_s: float = 0.0
    seconds: float = 0.0


class StreamTraffic:
    """Endless streams, and the prompts that run with them."""

    def __init__(self, engine: Engine, streams: int, seed: int) -> None:
        self._engine = engine
        self._chance = Random(seed)
        self._streams = frozenset(f"stream {number}" for number in range(streams))
        self._num_prompts = 0
        self._num_encoded = engine.step().stats.images_encoded_total
        for name in self._streams:
            engine.submit(self._request(name, self._text(CONTEXT), None))
        while (
            any(not state.is_decoding for state in engine.scheduler.states.values())
            or not engine.scheduler.running
        ):
            engine.step()

    def run_baseline(self, steps: int) -> StreamTimings:
        measured = StreamTimings()
        for _ in range(steps):
            self._step(measured)
        return measured

    def run_alongside(self, prompt_ids: Sequence[int], images: Sequence[PromptImage]) -> StreamTimings:
        """Step until one prompt has its first token."""
        measured = StreamTimings()
        encoded = self._num_encoded
        self._num_prompts += 1
        name = f"prompt {self._num_prompts}"
        self._engine.submit(self._request(name, prompt_ids, 1, images))
        while name in self._engine.scheduler.states:
            self._step(measured)
        require("images encoded", self._num_encoded - encoded, len(images))
        measured.prompts_s.append(measured.seconds)
        return measured

    def end(self) -> None:
        for name in self._streams:
            self._engine.remove(name)

    def _step(self, measured: StreamTimings) -> None:
        started = time.perf_counter()
        report = self._engine.step()
        seconds = time.perf_counter() - started
        delivered = {event.request_id for event in report.events if isinstance(event, TokenEvent)}
        require("streams without a token in a step", self._streams - delivered, set())
        self._num_encoded = report.stats.images_encoded_total
        measured.gaps_s.append(seconds)
        measured.seconds += seconds
        measured.encode_s += report.stats.stage_seconds.get("encode", 0.0)

    def _request(
        self, name: str, ids: Sequence[int], max_tokens: int | None, images: Sequence[PromptImage] = ()
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, on_runaway="off")
        return Request(name, tuple(ids), params, 0, images=tuple(images))

    def _text(self, count: int) -> list[int]:
        return [self._chance.randrange(1, 250) for _ in range(count)]


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as made:
        path = _checkpoint(Path(made) / "model", options.shape)
        engine = _engine(path, options)
        rows = [_measure(engine, path, side, options) for side in options.sides]
    _show(rows)
    print_json(
        {"shape": options.shape, "streams": options.streams, "rows_per_step": options.rows, "sides": rows}
    )


def _measure(engine: Engine, path: Path, side: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of images of one size."""
    found = {kind: StreamTimings() for kind in KINDS}
    traffic = StreamTraffic(engine, options.streams, seed=side)
    num_tokens = 0
    for number in track_progress(range(options.rounds + 1), f"{side} x {side}", options.rounds + 1):
        prompt_ids, pictures = _prompt(engine, path, side, seed=number)
        num_tokens = len(prompt_ids)
        text = [1 + 7 * (i + number) % 240 for i in range(num_tokens)]
        pieces = {
            "pictures": traffic.run_alongside(prompt_ids, pictures),
            "text": traffic.run_alongside(text, ()),
            "nothing": traffic.run_baseline(BASELINE_STEPS),
        }
        if number:  # the first round is not counted: it allocates
            _add(found, pieces)
    traffic.end()
    return {"side": side, "tokens": num_tokens, **{kind: _figures(found[kind]) for kind in KINDS}}


def _prompt(
    engine: Engine, path: Path, side: int, seed: int
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    placeholder = engine.info.image_token_id
    assert placeholder is not None
    half = [1 + seed % 200] * (TEXT_TOKENS // 2)
    return expand_placeholders(
        [*half, placeholder, *half], placeholder, [random_image(path, seed, side, side)]
    )


def _add(found: Mapping[str, StreamTimings], pieces: Mapping[str, StreamTimings]) -> None:
    for kind, piece in pieces.items():
        found[kind].gaps_s += piece.gaps_s
        found[kind].prompts_s += piece.prompts_s
        found[kind].encode_s += piece.encode_s
        found[kind].seconds += piece.seconds


def _figures(measured: StreamTimings) -> dict[str, float]:
    gaps = measured.gaps_s
    figures = {"p50_ms": percentile(gaps, 50), "p99_ms": percentile(gaps, 99), "max_ms": max(gaps)}
    if measured.prompts_s:
        figures["prompt_ms"] = percentile(measured.prompts_s, 50)
    rounded = {name: round(1000 * (seconds or 0.0), 2) for name, seconds in figures.items()}
    return {**rounded, "encoding": round(measured.encode_s / measured.seconds, 3)}


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ["beside", "gap p50", "p99", "longest", "prompt", "encoding", "longest : text", "prompt : text"]
    for row in rows:
        lines = []
        for kind in KINDS:
            one, text = row[kind], row["text"]
            times = [
                f"{one[name]:.1f} ms" if name in one else ""
                for name in ("p50_ms", "p99_ms", "max_ms", "prompt_ms")
            ]
            ratios = [
                f"{one[name] / text[name]:.2f}" if name in one else "" for name in ("max_ms", "prompt_ms")
            ]
            lines.append([kind, *times, f"{one['encoding']:.0%}", *ratios])
        print_table(f"{row['side']} x {row['side']} pixels, {row['tokens']} tokens", columns, lines)


def _checkpoint(path: Path, shape: str) -> Path:
    parts = {name: dict(values) for name, values in SHAPES[shape].items()}
    parts["text_config"] |= TEXT
    parts["vision_config"] |= {"patch_size": PATCH, "mlp_ratio": 4}
    return write_vision_checkpoint(path, "qwen2_vl", dtype="bfloat16", **parts)


def _engine(path: Path, options: argparse.Namespace) -> Engine:
    config = Config(
        model=str(path), threads=options.threads, max_num_batched_tokens=options.rows,
        max_num_seqs=options.streams + 1, max_model_len=8192, kv_cache_memory="30000tokens",
        speculate="off", prefix_caching=False, image_cache_memory="0",
    )  # fmt: skip
    return load(config, never_sampled_ids=())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument(
        "--sides", type=lambda text: [int(one) for one in text.split(",")], default=[224, 560, 1120]
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_script(main))
