"""Encoders against transformers: texts/s and tokens/s, in one run, on the same cores.

    python -m benchmarks.encoders [DIR] [--threads N] [--rounds N]

Without a checkpoint, random weights in the shape of MiniLM-L6 (22 million parameters) or, with --shape
base, BERT-base (110 million). Texts have the lengths of questions and paragraphs (8 to 200 tokens).
transformers gets them padded with an attention mask, in float32, as sentence-transformers does. Regime:
one process after the other, rounds interleaved, the best of each counts; both have `--threads` threads.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.utils import logging as transformers_logging

from benchmarks.script import run_script
from foreword.bench.regime import require
from foreword.config.options import Config
from foreword.embedding.local import load_local_encoder
from tests.support.embedding_checkpoints import wordpiece, write_tokenizer

SHAPES = {
    "mini": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}
VOCABULARY = 30522
BATCHES = {1: 16, 32: 32}  # texts at once: texts in all


MIN_COSINE = 0.99  # of a vector and that of transformers; Foreword computes in bfloat16


@dataclass(frozen=True, slots=True)
class BenchSide:
    """One measured implementation."""

    encode: Callable[[Sequence[list[int]]], object]
    torch_threads: int


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as made:
        path = options.model or _random_checkpoint(Path(made), options.shape)
        ours = load_local_encoder(Config(embedding_model=str(path), threads=options.threads))
        theirs = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        sides = {
            "ours": BenchSide(ours.encode, options.torch_threads),
            "theirs": BenchSide(lambda texts: _mean(theirs, texts), options.threads),
        }
        vocab_size = ours.info.vocab_size
        _check(ours.encode, theirs, _texts(4, vocab_size))
        rows = [_measure(sides, vocab_size, batch, count, options.rounds) for batch, count in BATCHES.items()]
    _print_table(rows)
    print(
        json.dumps(
            {"backend": ours.info.backend, "threads": options.threads, "shape": options.shape, "rows": rows}
        )
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="mini")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--torch-threads", type=int, default=1, help="of torch within ours; served, it is one"
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _random_checkpoint(path: Path, shape: str) -> Path:
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **SHAPES[shape])).save_pretrained(
        path
    )
    write_tokenizer(path, "wordpiece", wordpiece())
    return path


def _measure(
    sides: Mapping[str, BenchSide], vocab_size: int, batch: int, count: int, rounds: int
) -> dict[str, float]:
    texts = _texts(count, vocab_size)
    tokens = sum(map(len, texts))
    best = dict.fromkeys(sides, float("inf"))
    for number in range(rounds):
        print(f"\rbatch {batch}: round {number + 1} of {rounds}", end="", flush=True)
        for name, side in sides.items():
            best[name] = min(best[name], _seconds(side, texts, batch))
    print("\r" + " " * 40, end="\r")
    return {
        "batch": batch,
        "tokens_per_text": tokens / count,
        "texts_per_s": count / best["ours"],
        "tokens_per_s": tokens / best["ours"],
        "transformers_texts_per_s": count / best["theirs"],
        "ratio": best["theirs"] / best["ours"],
    }


def _check(
    ours: Callable[[Sequence[list[int]]], Sequence[bytes]],
    theirs: torch.nn.Module,
    texts: Sequence[list[int]],
) -> None:
    """Raise RegimeError unless both give nearly the same vectors."""
    mine = torch.stack([torch.frombuffer(bytearray(vector), dtype=torch.float32) for vector in ours(texts)])
    cosine = torch.nn.functional.cosine_similarity(mine, _mean(theirs, texts)).min()
    require(f"vectors of both are alike (cosine {cosine:.4f})", bool(cosine > MIN_COSINE), True)


def _texts(count: int, vocab_size: int) -> list[list[int]]:
    """Token ids; half of the texts are short."""
    rng = random.Random(0)
    lengths = [rng.randint(8, 40) if rng.random() < 0.5 else rng.randint(60, 200) for _ in range(count)]
    return [[rng.randrange(5, vocab_size) for _ in range(length)] for length in lengths]


def _seconds(side: BenchSide, texts: Sequence[list[int]], batch: int) -> float:
    torch.set_num_threads(side.torch_threads)
    started = time.perf_counter()
    for first in range(0, len(texts), batch):
        side.encode(texts[first : first + batch])
    return time.perf_counter() - started


@torch.inference_mode()
def _mean(model: torch.nn.Module, texts: Sequence[list[int]]) -> torch.Tensor:
    """Mean pooling as in sentence-transformers: padded and masked."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    states: torch.Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _print_table(rows: Sequence[dict[str, float]]) -> None:
    print(f"{'batch':>6} {'texts/s':>9} {'tokens/s':>9} {'transformers texts/s':>21} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['batch']:>6} {row['texts_per_s']:>9.1f} {row['tokens_per_s']:>9.0f} "
            f"{row['transformers_texts_per_s']:>21.1f} {row['ratio']:>6.2f}"
        )


if __name__ == "__main__":
    sys.exit(run_script(main))
