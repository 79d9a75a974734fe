"""What a trained head costs, in plain decode steps: the commit in each pass, and the passes of a draft.

    python -m benchmarks.heads [--head eagle3|p-eagle|dflash|dspark|mtp] [--draft-vocab-size 32768]
                               [--dtype bfloat16] [--quantization int8] [--threads 2] [--context 500]

Random weights of Llama 3.2 1B's shape (tied embedding) with an EAGLE-3 or P-EAGLE head of its size (draft
vocabulary 32,000), or a DFlash or DSpark head of five layers of its size (the model's output layer; tables of
rank 256), or of Qwen3.5 0.8B's shape (vocabulary 248,320, tied) with its MTP head. All works take turns in
one process, so figures are ratios. One request, native kernels.

    commit_N   time of a pass of N rows with the commit of a head, over the same pass without
    prompt     the same for a prompt chunk of 512 rows
    rows_4     time of a step that verifies 3 draft tokens, with the commit, over a plain step of one row
    draft_3    time of a draft of 3 tokens, as the engine's drafter makes it, over a plain step
    draft_3x4  the same for 4 requests, over a plain step of 4 requests
    draft_7    a draft of 7 tokens in one pass, if that is how the head drafts
    gain_A     tokens per plain step's time at A tokens a step: A / (rows_4 + draft_3)
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.script import print_json, run_script
from benchmarks.states import medians
from foreword.core.batch import Batch, Chunk, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.states import SEGMENT, StateSizes
from foreword.kernels.cpu.backend import CpuOps
from foreword.kv_cache.storage import KVStorage
from foreword.models.heads.head_loader import load_head, load_mtp_head
from foreword.models.interfaces import Head, Precision
from foreword.models.model_loader import load_model
from foreword.sampling.sampler import Sampler
from foreword.speculation.drafters.head import HeadDrafter
from foreword.speculation.engine_drafter import DraftRequest

BLOCK_SIZE, MAX_LEN, DRAFT_LEN, ROUNDS = 16, 1024, 3, 25
ANCHORS = MAX_LEN // 64 + 1  # of a request with states
LENGTHS = (2.0, 2.5, 3.0)  # tokens a step: SCALE of published heads
GREEDY = SamplingParams(temperature=0.0)
LAYER = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
TARGET = {**LAYER, "num_hidden_layers": 16, "tie_word_embeddings": True}
QWEN = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
}
HEAD = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
}


DFLASH = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "num_target_layers": 16,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 4, 7, 10, 13]},
    "tie_word_embeddings": False,
}
DSPARK = {
    **DFLASH,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {**DFLASH["dflash_config"], "markov_rank": 256},
}
HEADS = {
    "eagle3": HEAD,
    "p-eagle": {**HEAD, "pard_token": 5},
    "dflash": DFLASH,
    "dspark": DSPARK,
    "mtp": HEAD,
}


class Passes:
    """One target, compiled without and with its head."""

    def __init__(
        self,
        folder: Path,
        method: str,
        draft_vocab_size: int,
        precision: Precision,
        threads: int,
        context: int,
    ) -> None:
        for name, config in (("target", QWEN if method == "mtp" else TARGET), ("head", HEADS[method])):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        ops, dtype = CpuOps(threads=threads), str(precision.dtype).removeprefix("torch.")
        target = load_model(folder / "target", ops, precision, "cpu", MAX_LEN, dummy=True)
        head: Head
        if method == "mtp":
            sizes = {"dummy": True, "draft_vocab_size": draft_vocab_size}
            head = load_mtp_head(folder / "target", target, ops, precision, "cpu", **sizes)
        else:
            head = load_head(folder / "head", target, ops, precision, "cpu", MAX_LEN, dummy=True)
        num_blocks = 4 * (MAX_LEN // BLOCK_SIZE)
        kv = KVStorage(
            num_blocks,
            BLOCK_SIZE,
            target.cache_shapes,
            dtype,
            states=StateSizes(5, 4 * ANCHORS + 1, max_rows=512),
            state_dtype=precision.dtype,
            head=head.cache_shape,
            num_draft_blocks=8,
        )
        self.context = context
        self._has_states = target.has_states
        self.plain = target.compile_logits(kv)
        target.head = head
        self.with_head = target.compile_logits(kv)
        self.parallel = head.parallel
        sampler = Sampler(ops, target.vocab_size, [])
        self._drafter = HeadDrafter(head, ops, kv, sampler, 8, MAX_LEN, target.vocab_size)
        for start in range(0, context + 8, 256):
            self.with_head(self.batch(256, start))

    def batch(self, rows: int, start: int, requests: int = 1) -> Batch:
        segments = range(start // SEGMENT, (start + rows) // SEGMENT + 1)
        chunks = [
            Chunk(
                [7] * rows,
                start,
                self._blocks(n),
                min(rows, 8),
                state_slot=n + 1,
                anchors=[1 + n * ANCHORS + segment for segment in segments],
            )
            for n in range(requests)
        ]
        options = {"with_states": self._has_states, "with_prev_slots": True}
        return build_batch(chunks, BLOCK_SIZE, 1, "cpu", **options)

    def draft(self, requests: int, length: int = DRAFT_LEN) -> None:
        states = [
            RequestState(Request(str(n), (7,) * (self.context + 1), GREEDY, seed=0), 0, MAX_LEN)
            for n in range(requests)
        ]
        for n, state in enumerate(states):
            state.num_computed = self.context
            state.blocks.extend(self._blocks(n))
        self._drafter.propose([DraftRequest(state, length) for state in states])

    def _blocks(self, request: int) -> range:
        size = MAX_LEN // BLOCK_SIZE
        return range(1 + request * size, 1 + (request + 1) * size)


def measure(passes: Passes) -> dict[str, float]:
    start = passes.context
    one, four, eight = (passes.batch(rows, start) for rows in (1, 4, 8))
    several, prompt = passes.batch(1, start, 4), passes.batch(512, 0)
    works = {
        **{f"plain_{n}": lambda b=b: passes.plain(b) for n, b in ((1, one), (4, four), (8, eight))},
        **{f"head_{n}": lambda b=b: passes.with_head(b) for n, b in ((1, one), (4, four), (8, eight))},
        "plain_4_requests": lambda: passes.plain(several),
        "draft_1": lambda: passes.draft(1),
        "draft_4": lambda: passes.draft(4),
    }
    if passes.parallel is not None:
        works["draft_7"] = lambda: passes.draft(1, 7)
    seconds = dict(zip(works, medians(list(works.values()), ROUNDS), strict=True))
    prompts = medians([lambda: passes.plain(prompt), lambda: passes.with_head(prompt)], 3)
    plain = seconds["plain_1"]
    figures = {f"commit_{n}": seconds[f"head_{n}"] / seconds[f"plain_{n}"] for n in (1, 4, 8)}
    figures |= {
        "prompt": prompts[1] / prompts[0],
        "rows_4": seconds["head_4"] / plain,
        "draft_3": seconds["draft_1"] / plain,
        "draft_3x4": seconds["draft_4"] / seconds["plain_4_requests"],
    }
    if passes.parallel is not None:
        figures["draft_7"] = seconds["draft_7"] / plain
    cost = figures["rows_4"] + figures["draft_3"]
    return figures | {f"gain_{length}": length / cost for length in LENGTHS}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", choices=tuple(HEADS), default="eagle3")
    parser.add_argument("--draft-vocab-size", type=int, default=32768)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=500)
    args = parser.parse_args()
    precision = Precision.from_dtypes(args.dtype, None, args.quantization)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        sizes = (precision, args.threads, args.context)
        figures = measure(Passes(Path(folder), args.head, args.draft_vocab_size, *sizes))
    for name, value in figures.items():
        print(f"{name:12} {value:.3f}")
    print_json(figures)
    return 0


if __name__ == "__main__":
    run_script(main)
