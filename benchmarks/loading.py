"""Loading: seconds by phase from the model's name to the first step, and peak memory.

    python -m benchmarks.loading [--model FILE] [--rounds 3] [--threads N]

Regime: a GGUF file of 4 GB of random valid blocks in the mix of Q4_K_M and the proportions of Qwen3-8B
(28 of its layers), with a vocabulary of 151 936 tokens, written to --files unless it exists; --model takes
another. Each round is a new process that has imported everything; the file is in the page cache, and the
KV cache is small (--kv-cache-memory). The clock starts with the file's name and stops after one step of a
prompt of one token. `other` is the rest: the image of the vocabulary in the tokenizer, the chat template.

Rates are shares of a plain copy of memory with as many threads in the same process. The peak is VmHWM of
/proc from the first phase on, mapped pages of the file included; `limit` is 1.05 times weights and touched
cache, and 300 MB for Python and its libraries. Prints a table and then one JSON line; exit code 1 if the
peak exceeds the limit.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks.peers_models import make_tokenizer
from benchmarks.peers_worker import peak_bytes
from benchmarks.script import print_json, run_script
from foreword.bench.tables import print_table
from foreword.core.params import SamplingParams
from foreword.llm import LLM
from foreword.planning.memory import format_bytes
from foreword.utils.mapped_memory import CHUNK_BYTES, HugePages
from tests.support.gguf_files import write_byte_level

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 28, 4096, 12288, 32, 8, 128, 151_936
CONTEXT = 40960
PATTERN_ROWS = 64  # random rows, repeated to the size of a tensor
COPY_BYTES, COPIES = 1 << 30, 5
SPARE_BYTES, SPARE_RATIO = 300_000_000, 1.05  # of the peak, beyond weights and cache


def block_rows(kind: Kind, columns: int, random: np.random.Generator) -> np.ndarray:
    """Random valid blocks [PATTERN_ROWS, bytes of a row] with values of about 1 / sqrt(columns)."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (PATTERN_ROWS, columns // values, size), np.uint8)
    if kind == Kind.Q4_K:
        step = columns**-0.5 / 160  # scales are about 32, quantized values 5 from their middle
        blocks[..., :4] = np.array([step, 7.5 * step], np.float16).view(np.uint8)
    else:
        assert kind == Kind.Q6_K
        blocks[..., 208:] = np.array([columns**-0.5 / 1300], np.float16).view(np.uint8)
    return blocks.reshape(PATTERN_ROWS, -1)


def matrices() -> Iterator[tuple[str, int, int, Kind]]:
    """Name, rows, columns and type, as llama.cpp mixes types in Q4_K_M."""
    yield "token_embd", VOCAB, HIDDEN, Kind.Q4_K
    yield "output", VOCAB, HIDDEN, Kind.Q6_K
    for layer in range(LAYERS):
        eighth = LAYERS // 8
        is_better = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        better = Kind.Q6_K if is_better else Kind.Q4_K
        yield f"blk.{layer}.attn_q", HEADS * HEAD_DIM, HIDDEN, Kind.Q4_K
        yield f"blk.{layer}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN, Kind.Q4_K
        yield f"blk.{layer}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN, better
        yield f"blk.{layer}.attn_output", HIDDEN, HEADS * HEAD_DIM, Kind.Q4_K
        yield f"blk.{layer}.ffn_gate", INTERMEDIATE, HIDDEN, Kind.Q4_K
        yield f"blk.{layer}.ffn_up", INTERMEDIATE, HIDDEN, Kind.Q4_K
        yield f"blk.{layer}.ffn_down", HIDDEN, INTERMEDIATE, better


def vectors() -> Iterator[tuple[str, int]]:
    yield "output_norm", HIDDEN
    for layer in range(LAYERS):
        yield from ((f"blk.{layer}.{name}", HIDDEN) for name in ("attn_norm", "ffn_norm"))
        yield from ((f"blk.{layer}.{name}", HEAD_DIM) for name in ("attn_q_norm", "attn_k_norm"))


def write_model(path: Path) -> None:
    """Write the file, tensor by tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "qwen3")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    write_byte_level(writer, make_tokenizer(VOCAB), "gpt-2", eos="<|end|>", add_bos=False)
    random = np.random.default_rng(0)
    pattern = {(kind, columns): block_rows(kind, columns, random) for _, _, columns, kind in set(matrices())}
    for name, rows, columns, kind in matrices():
        row_bytes = pattern[kind, columns].shape[1]
        info = ((rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, kind)
        writer.add_tensor_info(f"{name}.weight", *info)
    for name, size in vectors():
        writer.add_tensor_info(f"{name}.weight", (size,), np.dtype(np.float32), 4 * size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, rows, columns, kind in matrices():
        writer.write_tensor_data(np.resize(pattern[kind, columns], (rows, pattern[kind, columns].shape[1])))
    for _, size in vectors():
        writer.write_tensor_data(np.ones(size, np.float32))
    writer.close()
    partial.rename(path)


def copy_rate(threads: int) -> float:
    """Bytes copied a second."""
    torch.set_num_threads(threads)
    source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(COPIES):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return COPY_BYTES / min(seconds)


def touch_memory(num_bytes: int) -> None:
    """Touch and free memory: the host of a virtual machine may back it only then, which takes long."""
    pages = HugePages()
    held = [pages.allocate(CHUNK_BYTES) for _ in range(num_bytes // CHUNK_BYTES)]
    for chunk in held:
        chunk[:: mmap.PAGESIZE] = 1


def load_once(path: str, threads: int, cache: str) -> dict[str, Any]:
    """Seconds by phase and bytes of one start in this process."""
    touch_memory(int(SPARE_RATIO * Path(path).stat().st_size) + SPARE_BYTES)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # restart VmHWM
    imported = peak_bytes("self")
    started = time.perf_counter()
    llm = LLM(path, threads=threads, kv_cache_memory=cache)
    loaded = time.perf_counter()
    llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1))
    done = time.perf_counter()
    phases = dict(llm.info.load_seconds)
    phases["other"] = loaded - started - sum(phases.values())
    phases["first step"] = done - loaded
    resolved = llm.info.resolved
    return {
        "seconds": done - started,
        "phases": phases,
        "peak": peak_bytes("self"),
        "imported": imported,
        "weights": resolved.weight_bytes,
        "cache": resolved.kv_bytes,
        "copy_rate": copy_rate(threads),
    }


def run_round(args: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.loading", "--worker", "--model", args.model]
    words += ["--threads", str(args.threads), "--kv-cache-memory", args.kv_cache_memory]
    result = subprocess.run(words, check=True, capture_output=True, text=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def report(rounds: list[dict[str, Any]], size: int) -> bool:
    """Print the medians; whether the peak is below the limit."""
    best = min(rounds, key=lambda each: each["seconds"])
    rate = statistics.median(each["copy_rate"] for each in rounds)
    rows = []
    for name in best["phases"]:
        seconds = statistics.median(each["phases"][name] for each in rounds)
        share = f"{size / seconds / rate:.0%}" if name == "weights" else ""
        rows.append([name, f"{seconds:.2f}", share])
    total = statistics.median(each["seconds"] for each in rounds)
    rows.append(["open to first step", f"{total:.2f}", f"{size / total / rate:.0%}"])
    legend = [f"of a copy: bytes of the file a second, of {rate / 1e9:.1f} GB/s that a copy of memory moves"]
    print_table("Loading", ["phase", "s", "of a copy"], rows, legend)
    peak = max(each["peak"] for each in rounds)
    limit = int(SPARE_RATIO * (best["weights"] + best["cache"])) + SPARE_BYTES
    print(
        f"peak {format_bytes(peak)}, limit {format_bytes(limit)}: weights {format_bytes(best['weights'])} "
        f"(file {format_bytes(size)}), cache {format_bytes(best['cache'])}, "
        f"before loading {format_bytes(best['imported'])}"
    )
    print_json(
        {"seconds": total, "best_s": best["seconds"], "peak": peak, "limit": limit, "bytes": size}
        | {"copy_rate": rate, "phases": best["phases"]}
    )
    return peak <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a GGUF file instead of the random one")
    parser.add_argument("--files", default="build/loading", help="folder of the random model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-cache-memory", default="512tokens")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(load_once(args.model, args.threads, args.kv_cache_memory)))
        return 0
    if args.model is None:
        path = Path(args.files) / "qwen3-4gb-q4_k_m.gguf"
        if not path.exists():
            print(f"writing {path}")
            write_model(path)
        args.model = str(path)
    size = Path(args.model).stat().st_size
    return 0 if report([run_round(args) for _ in range(args.rounds)], size) else 1


if __name__ == "__main__":
    sys.exit(run_script(main))
