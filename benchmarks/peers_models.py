"""Random checkpoints in the shapes of known models, for comparisons between engines.

Nothing is downloaded, and every answer has the requested length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

EOS = "<|end|>"
CONTEXT = 40960
GAIN = 0.8  # of a layer: activations stay in a realistic range through 24 layers


@dataclass(frozen=True, slots=True)
class PeerModelShape:
    """A random checkpoint: head dimension 64, tied head."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    rope_theta: float
    bias: bool

    def config(self) -> dict[str, Any]:
        """config.json"""
        return {
            "architectures": [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[self.family]],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": self.vocab - 1,
            "bos_token_id": self.vocab - 1,
        }

    def layer_weights(self) -> int:
        """Weights multiplied with every prompt token: all matrices but the embedding."""
        return sum(math.prod(size) for name, size in self.shapes() if len(size) == 2 and "embed" not in name)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Shapes of the tensors by name."""
        q, kv = self.heads * 64, self.kv_heads * 64
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{name}.weight", (self.hidden,)
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                yield f"{prefix}self_attn.{name}_proj.weight", (size, self.hidden)
                if self.bias:
                    yield f"{prefix}self_attn.{name}_proj.bias", (size,)
            yield f"{prefix}self_attn.o_proj.weight", (self.hidden, q)
            for name in ("gate", "up"):
                yield f"{prefix}mlp.{name}_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}mlp.down_proj.weight", (self.hidden, self.intermediate)


MODELS: Mapping[str, PeerModelShape] = {
    "qwen2.5-0.5b": PeerModelShape("qwen2", 24, 896, 4864, 14, 2, 151936, 1e6, bias=True),
    "llama-3.2-1b": PeerModelShape("llama", 16, 2048, 8192, 32, 8, 128256, 5e5, bias=False),
    "tiny": PeerModelShape("qwen2", 2, 256, 512, 4, 2, 1024, 1e6, bias=True),
}


def write_checkpoint(shape: PeerModelShape, folder: Path) -> None:
    """Write safetensors in bfloat16, config and tokenizer, unless they exist."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", shape.config())
    _write_json(folder / "generation_config.json", {"eos_token_id": shape.vocab - 1})
    _write_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    )
    make_tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _random(name, size, generator) for name, size in shape.shapes()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    value = torch.randn(size, generator=generator)
    if name.endswith("norm.weight"):
        return value.mul_(0.1).add_(1).bfloat16()
    if name.endswith("bias"):
        return value.mul_(0.1).bfloat16()
    return value.mul_((0.3 if "embed" in name else GAIN) / math.sqrt(size[-1])).bfloat16()


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose merges fill the vocabulary: pairs of bytes, then triples."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(alphabet), vocab_size - len(alphabet) - 1))
    tokens = [*alphabet, *(left + right for left, right in merges), EOS]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def _merges(alphabet: list[str]) -> Iterator[tuple[str, str]]:
    pairs = [(left, right) for left in alphabet for right in alphabet]
    yield from pairs
    for left, right in pairs:
        for third in alphabet:
            yield left + right, third


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
