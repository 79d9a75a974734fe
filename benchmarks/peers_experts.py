"""Random mixtures of experts in the proportions of known models, as GGUF files.

    python benchmarks/peers_experts.py MODEL OUT.gguf

Layers and vocabulary are fewer by the same factor, so that a file has about 4 GB, and the share of each part
of a step is that of the whole model. Blocks are random bits with scales of the usual size: nothing is
quantized, and only one tensor is in memory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from peers_models import GAIN, make_tokenizer

ROUTER_STD = 2.0  # of logits
PER_LAYER_TABLE = "per_layer_token_embd.weight"
EMBEDDINGS = ("token_embd.weight", PER_LAYER_TABLE)  # of which a token reads one row
ROPE_FREQS = "rope_freqs.weight"  # a quarter of the angles of Gemma 4's global layers turn
Array = npt.NDArray[Any]
Tensors = Iterator[tuple[str, tuple[int, ...], Kind]]  # name, shape as in torch, type


@dataclass(frozen=True, slots=True)
class ExpertModelShape:
    """A random model whose layers all have experts."""

    architecture: str  # of GGUF: qwen3moe or gpt-oss
    layers: int
    hidden: int
    experts: int
    top_k: int
    intermediate: int  # of an expert
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    file: str  # name

    def tensors(self) -> Tensors:
        is_gpt_oss = self.architecture == "gpt-oss"
        outer = (Kind.Q8_0, Kind.Q8_0) if is_gpt_oss else (Kind.Q4_K, Kind.Q6_K)
        yield "token_embd.weight", (self.vocab, self.hidden), outer[0]
        yield "output.weight", (self.vocab, self.hidden), outer[1]
        yield "output_norm.weight", (self.hidden,), Kind.F32
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = self.experts, self.intermediate, self.hidden
        for layer in range(self.layers):
            matrices = {
                "attn_q": (q, self.hidden),
                "attn_k": (kv, self.hidden),
                "attn_v": (kv, self.hidden),
                "attn_output": (self.hidden, q),
                "ffn_gate_exps": inner,
                "ffn_up_exps": inner,
                "ffn_down_exps": (self.experts, self.hidden, self.intermediate),
            }
            floats = {"attn_norm": (self.hidden,), "ffn_gate_inp": (self.experts, self.hidden)}
            if is_gpt_oss:
                floats |= {"post_attention_norm": (self.hidden,), "attn_sinks": (self.heads,)}
                biases = {**matrices, "ffn_gate_inp": (self.experts, 0)}
                for name, shape in biases.items():
                    yield f"blk.{layer}.{name}.bias", shape[:-1], Kind.F32
            else:
                floats |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (self.head_dim,))
                floats |= {"ffn_norm": (self.hidden,)}
            for name, shape in floats.items():
                yield f"blk.{layer}.{name}.weight", shape, Kind.F32
            for name, shape in matrices.items():
                yield f"blk.{layer}.{name}.weight", shape, self._kind(name, layer)

    def _kind(self, name: str, layer: int) -> Kind:
        """As llama.cpp chooses for Q4_K_M, and as in the published files of gpt-oss."""
        if self.architecture == "gpt-oss":
            return Kind.MXFP4 if name.endswith("exps") else Kind.Q8_0
        eighth = self.layers // 8
        is_wide = layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
        return Kind.Q6_K if is_wide and name in ("attn_v", "ffn_down_exps") else Kind.Q4_K

    def layer_weights(self) -> int:
        """Weights multiplied with every prompt token: all matrices but the embedding and other experts."""
        return sum(
            math.prod(shape) // (self.experts // self.top_k if name.endswith("exps.weight") else 1)
            for name, shape, _ in self.tensors()
            if name.endswith("weight") and len(shape) > 1 and name not in EMBEDDINGS
        )

    def read_bytes(self) -> int:
        """Bytes of the file that a step with one row reads, without its row of the embedding."""
        tensors = list(self.tensors())
        is_tied = all(name != "output.weight" for name, *_ in tensors)
        return sum(
            _num_bytes(shape, kind) // (self.experts // self.top_k if name.endswith("exps.weight") else 1)
            for name, shape, kind in tensors
            if name not in EMBEDDINGS or (is_tied and name != PER_LAYER_TABLE)
        )

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Keys of the shape."""
        writer.add_name("random weights")
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.intermediate)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_freq_base(self.rope_theta)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(self.top_k)
            writer.add_expert_feed_forward_length(self.intermediate)
        if self.architecture == "gpt-oss":
            writer.add_sliding_window(128)
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(32.0)
            writer.add_rope_scaling_orig_ctx_len(4096)


EXPERT_MODELS: Mapping[str, ExpertModelShape] = {
    "qwen3-30b-a3b": ExpertModelShape(  # 11 of 48 layers
        "qwen3moe", 11, 2048, 128, 8, 768, 32, 4, 128, 34816, 40960, 1e6, "q4_k_m.gguf"
    ),
    "gpt-oss-20b": ExpertModelShape(  # 8 of 24 layers
        "gpt-oss", 8, 2880, 32, 4, 2880, 64, 8, 64, 67072, 131072, 150000.0, "mxfp4.gguf"
    ),
    "tiny-experts": ExpertModelShape("qwen3moe", 2, 256, 8, 2, 256, 4, 2, 64, 1024, 4096, 1e6, "q4_k_m.gguf"),
    "tiny-gpt-oss": ExpertModelShape(
        "gpt-oss", 2, 288, 8, 4, 288, 4, 2, 64, 1024, 4096, 150000.0, "mxfp4.gguf"
    ),
}


def write_gguf(shape: ExpertModelShape, path: Path) -> None:
    """Write the file, unless it exists."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    writer = gguf.GGUFWriter(unfinished, shape.architecture)
    shape.add_metadata(writer)
    _add_tokenizer(writer, shape.vocab)
    tensors = list(shape.tensors())
    for name, size, kind in tensors:
        num_bytes = _num_bytes(size, kind)
        if kind == Kind.F32:
            writer.add_tensor_info(name, size, np.dtype(np.float32), num_bytes)
        else:
            row = (*size[:-1], num_bytes // math.prod(size[:-1]))
            writer.add_tensor_info(name, row, np.dtype(np.uint8), num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for name, size, kind in tensors:
        writer.write_tensor_data(_random(name, size, kind, generator))
    writer.close()
    unfinished.rename(path)


def _num_bytes(size: tuple[int, ...], kind: Kind) -> int:
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(size) // block_values * block_bytes


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    values = json.loads(make_tokenizer(vocab).to_str())
    tokens: dict[str, int] = values["model"]["vocab"]
    special = {token["content"] for token in values["added_tokens"]}
    names = sorted(tokens, key=tokens.__getitem__)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([kinds.CONTROL if name in special else kinds.NORMAL for name in names])
    writer.add_token_merges([" ".join(merge) for merge in values["model"]["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(len(tokens) - 1)
    writer.add_add_bos_token(False)


def _random(name: str, size: tuple[int, ...], kind: Kind, generator: np.random.Generator) -> Array:
    if kind == Kind.F32:
        values = generator.standard_normal(size, np.float32)
        if name.endswith(("norm.weight", "layer_output_scale.weight")):
            return 1 + 0.1 * values
        if name == ROPE_FREQS:
            return np.where(np.arange(size[0]) < size[0] // 4, np.float32(1), np.float32(1e30))
        if name.endswith("ssm_a"):
            return -np.exp(values - 2)
        return values * np.float32(ROUTER_STD / math.sqrt(size[-1]) if len(size) > 1 else 0.1)
    std = 0.3 / math.sqrt(size[-1]) if name in EMBEDDINGS else GAIN / math.sqrt(size[-1])
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = math.prod(size) // block_values
    blocks = np.frombuffer(generator.bytes(count * block_bytes), np.uint8).reshape(count, block_bytes).copy()
    _set_scales(blocks, kind, std, generator)
    return blocks.reshape(*size[:-1], -1)


def _set_scales(blocks: Array, kind: Kind, std: float, generator: np.random.Generator) -> None:
    """Scales of random codes [blocks, bytes] so that values have about this standard deviation."""
    count = len(blocks)
    spread = generator.uniform(0.8, 1.2, (count, 1)).astype(np.float32)
    if kind == Kind.MXFP4:  # codes have 2.9
        blocks[:, 0] = 127 + round(math.log2(std / 2.9)) + (blocks[:, 0] & 1)
    elif kind == Kind.Q8_0:  # codes have 74
        blocks[:, :2] = (spread * (std / 74)).astype(np.float16).view(np.uint8)
    elif kind == Kind.Q6_K:  # codes have 18.5, scales are 32 to 95
        blocks[:, 192:208] = 32 + blocks[:, 192:208] % 64
        blocks[:, 208:] = (spread * (std / (64 * 18.5))).astype(np.float16).view(np.uint8)
    elif kind == Kind.Q4_K:  # codes have 4.6; scales of values and of minimums are equal, 16 to 47
        scale = spread * (std / (32 * 4.6))
        blocks[:, :2] = scale.astype(np.float16).view(np.uint8)
        blocks[:, 2:4] = (7.5 * scale).astype(np.float16).view(np.uint8)
        six_bits = 16 + blocks[:, 4:12] % 32
        first, last = six_bits[:, :4], six_bits[:, 4:]
        blocks[:, 4:8] = blocks[:, 8:12] = first | last >> 4 << 6
        blocks[:, 12:16] = (last & 15) * 17


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(EXPERT_MODELS))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write_gguf(EXPERT_MODELS[args.model], args.out)


if __name__ == "__main__":
    main()
