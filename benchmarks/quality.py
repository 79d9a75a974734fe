"""The quality cost of quantization: perplexity of the bundled demo, and logits of a random model.

    python -m benchmarks.quality [--model qwen2.5-0.5b] [--files FOLDER] [--samples 20]

Perplexity: of the answers (and their end) to held-out prompts of every category of the demo's training.
Logits: of the last 64 of 128 random tokens, against the same weights in float32 (those of the checkpoint
are bfloat16, as are the activations of every mode but float32). GGUF files next to the checkpoint
(benchmarks/peers.py writes them) are measured too. A random model is the worst case: its logits are close
together, so that a small error changes the likeliest token. Prints two tables and then one JSON line.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.peers_models import MODELS, write_checkpoint
from benchmarks.script import print_json, run_script, track_progress
from foreword import demo
from foreword.bench.tables import print_table
from foreword.core.batch import Chunk, build_batch
from foreword.cuda_graphs.graph_runner import with_graphs
from foreword.kernels.ops import Ops
from foreword.kernels.registry import select_backend
from foreword.kv_cache.storage import KVStorage
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model
from training import corpus

BLOCK_SIZE = 16
RANDOM_TOKENS, SCORED_TOKENS = 128, 64


@dataclass(frozen=True, slots=True)
class QualityMode:
    """A weight format; `file` is a GGUF file next to the checkpoint."""

    name: str
    precision: Precision
    kv_dtype: str = "bfloat16"
    file: str = ""


FLOAT32_MODE = QualityMode("float32", Precision.from_dtypes("float32"), "float32")
BFLOAT16 = Precision.from_dtypes("bfloat16")
MODES = (
    FLOAT32_MODE,
    QualityMode("bfloat16", BFLOAT16),
    QualityMode("bfloat16, int8 KV", BFLOAT16, "int8"),
    QualityMode("int8", Precision.from_dtypes("bfloat16", quantization="int8")),
    QualityMode("int8, int8 KV", Precision.from_dtypes("bfloat16", quantization="int8"), "int8"),
    QualityMode("int4", Precision.from_dtypes("bfloat16", quantization="int4")),
)


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """Tokens, of which the last `num_scored` are scored."""

    ids: Sequence[int]
    num_scored: int


def main() -> int:
    args = _parse()
    ops = select_backend("cpu", False, torch.get_num_threads(), args.cpu_isa)
    documents = list(_answers(args.samples))
    with torch.inference_mode():
        perplexity = {
            mode.name: _perplexity(ops, mode, documents)
            for mode in track_progress(MODES, "the demo", len(MODES))
        }
        write_checkpoint(MODELS[args.model], args.files / args.model)
        errors = _logit_errors(ops, args.files / args.model, MODELS[args.model].vocab)
    _show(args, ops.name, perplexity, errors, sum(document.num_scored for document in documents))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-0.5b")
    parser.add_argument(
        "--files", type=Path, default=Path("build/peers-models"), metavar="FOLDER", help="checkpoints"
    )
    parser.add_argument("--samples", type=int, default=20, metavar="N", help="of each kind of prompt")
    parser.add_argument("--cpu-isa", default="auto", metavar="NAME")
    return parser.parse_args()


def _answers(count: int) -> Iterator[ScoredDocument]:
    """Held-out exchanges as the chat template writes them."""
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    for kind in corpus.KINDS:
        for sample in corpus.test_samples(kind, count):
            prompt = (
                f"{corpus.USER}{sample.prompt}{corpus.END}{corpus.ASSISTANT}"
                if sample.chat
                else sample.prompt
            )
            before = tokenizer.encode(prompt, add_special_tokens=False).ids
            answer = tokenizer.encode(sample.answer + corpus.END, add_special_tokens=False).ids
            yield ScoredDocument(before + answer, len(answer))


def _logits(ops: Ops, path: Path, mode: QualityMode, documents: Sequence[ScoredDocument]) -> Iterator[Tensor]:
    """float32 [num_scored, V] of each document, one row before each scored token."""
    longest = max(len(document.ids) for document in documents)
    model = load_model(path, ops, mode.precision, "cpu", longest)
    num_blocks = -(-longest // BLOCK_SIZE)
    storage = KVStorage(num_blocks, BLOCK_SIZE, model.cache_shapes, mode.kv_dtype)
    forward = with_graphs(model.ops, model.compile_logits(storage))
    for document in documents:
        chunk = Chunk(document.ids[:-1], 0, range(1, num_blocks + 1), document.num_scored)
        yield forward(build_batch([chunk], BLOCK_SIZE, ops.row_tile, "cpu")).clone()


def _perplexity(ops: Ops, mode: QualityMode, documents: Sequence[ScoredDocument]) -> float:
    """exp of the mean negative log-likelihood over all scored tokens."""
    total = 0.0
    for document, logits in zip(documents, _logits(ops, demo.MODEL, mode, documents), strict=True):
        targets = torch.tensor(document.ids[-document.num_scored :])
        total += float(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum"))
    return math.exp(total / sum(document.num_scored for document in documents))


def _logit_errors(ops: Ops, folder: Path, vocab: int) -> dict[str, dict[str, float]]:
    """By mode, against float32."""
    ids = torch.randint(vocab - 1, (RANDOM_TOKENS + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    document = ScoredDocument(ids, SCORED_TOKENS)
    files = [QualityMode(path.stem, BFLOAT16, file=path.name) for path in sorted(folder.glob("*.gguf"))]
    modes = [*MODES, *files]
    errors: dict[str, dict[str, float]] = {}
    for mode in track_progress(modes, "a random model", len(modes)):
        (logits,) = _logits(ops, folder / mode.file, mode, [document])
        if mode is FLOAT32_MODE:
            exact = logits.double()
        else:
            errors[mode.name] = _error(logits.double(), exact)
    return errors


def _error(logits: Tensor, exact: Tensor) -> dict[str, float]:
    """Both [R, V]. Logit errors are relative to their spread; KL divergence is in nats a token, mean over
    rows.
    """
    spread = exact - exact.mean(-1, keepdim=True)
    p, q = exact.log_softmax(-1), logits.log_softmax(-1)
    return {
        "relative_rms": float((logits - exact).square().mean().sqrt() / spread.square().mean().sqrt()),
        "same_token": float((logits.argmax(-1) == exact.argmax(-1)).double().mean()),
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
    }


def _show(
    args: argparse.Namespace,
    backend: str,
    perplexity: dict[str, float],
    errors: dict[str, dict[str, float]],
    tokens: int,
) -> None:
    base = perplexity["bfloat16"]
    rows = [(name, f"{value:.4f}", f"{value / base - 1:+.2%}") for name, value in perplexity.items()]
    print_table(
        f"perplexity of the demo, {tokens} tokens of held-out answers",
        ("weights", "perplexity", "against bfloat16"),
        rows,
    )
    columns = ("weights", "error of logits", "same token", "KL, nats")
    lines = [
        (name, f"{of['relative_rms']:.2%}", f"{of['same_token']:.0%}", f"{of['kl']:.1e}")
        for name, of in errors.items()
    ]
    print_table(f"a random model of the shape of {args.model}, against float32", columns, lines)
    regime: dict[str, Any] = {
        "backend": backend,
        "samples": args.samples,
        "tokens": tokens,
        "model": args.model,
    }
    print_json({"bench": "quality", **regime, "perplexity": perplexity, "logits": errors})


if __name__ == "__main__":
    sys.exit(run_script(main))
