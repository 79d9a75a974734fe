"""EAGLE-3 heads: a reference in plain torch (float32) from the published layout, files, and training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import Batch, HeadCache, HeadShape, KVShape
from tests.support.checkpoints import write_json
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import finish

HEAD_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,  # no limit of the drafts: positions are relative
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
AUX_LAYERS = (0, 1, 2)
MAX_TRAINED = 256  # tokens of a text


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    return 1 + 0.3 * x if len(shape) == 1 else x * (1.5 * shape[-1] ** -0.5)


@dataclass
class Layers:
    """Attention and MLP of decoder layers over rows with any positions and mask."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def __call__(self, x: Tensor, index: int, positions: Tensor, mask: Tensor, context: Tensor) -> Tensor:
        """x [N, h] -> [N, h]; context [C, h]: rows that are only seen; mask bool [N, C + N]"""
        prefix = f"layers.{index}."
        y = self.norm(x, f"{prefix}input_layernorm")
        keys = torch.cat((context, y))
        x = x + self.attend(prefix, y, keys, positions, mask)
        return x + self.mlp(prefix, x)

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        y = self.norm(x, f"{prefix}post_attention_layernorm")
        gate, up = (F.linear(y, self.tensors[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.tensors[f"{prefix}mlp.down_proj.weight"])

    def attend(self, prefix: str, y: Tensor, keys: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """y: the last rows of keys [C + N, ...]; positions [C + N]"""
        q, k, v = (
            self.project(each, f"{prefix}self_attn.{n}") for each, n in ((y, "q"), (keys, "k"), (keys, "v"))
        )
        if f"{prefix}self_attn.q_norm.weight" in self.tensors:
            q = self.norm(q, f"{prefix}self_attn.q_norm")
            k = self.norm(k, f"{prefix}self_attn.k_norm")
        q, k = self.rotate(q, positions[len(keys) - len(y) :]), self.rotate(k, positions)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in (q, k, v)), attn_mask=mask
        )
        return F.linear(
            attended[0].transpose(0, 1).flatten(1), self.tensors[f"{prefix}self_attn.o_proj.weight"]
        )

    def project(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}_proj.weight"]).view(len(x), -1, self.config["head_dim"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


@dataclass
class ReferenceHead:
    """Logits of chains of draft tokens. Everything is computed again for each token."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor  # [V, h]
    lm_head: Tensor  # [draft vocabulary, h]
    norm_before_residual: bool = False
    norm_output: bool = False
    prefix: str = "midlayer."
    options: dict[str, bool] = field(default_factory=dict)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[L, layers, H] -> [L, h]"""
        if self.options.get("fc_norm"):
            parts = [
                self.norm(aux_hidden_states[:, i], f"fc_norm.{i}") for i in range(aux_hidden_states.shape[1])
            ]
            aux_hidden_states = torch.stack(parts, 1)
        joined = aux_hidden_states.flatten(1)
        if self.options.get("norm_before_fc"):
            joined = self.norm(joined, "input_norm")
        return F.linear(joined, self.tensors["fc.weight"])

    def chain(self, hidden: Tensor, token_ids: Sequence[int], count: int) -> list[Tensor]:
        """Logits of `count` greedy draft tokens: [draft vocabulary] each.

        hidden [L - 1, h]: fuse() of the target's tokens but the last; token_ids: L of them
        """
        tokens, logits = list(token_ids), []
        for _ in range(count):
            out, normalized = self.layer(hidden, torch.tensor(tokens[1:]))
            logits.append(F.linear(normalized[-1], self.lm_head))
            tokens.append(self.target_id(int(logits[-1].argmax())))
            recycled = normalized if self.norm_output else out
            hidden = torch.cat((hidden, recycled[-1:]))
        return logits

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else draft_id

    def layer(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs (token i + 1, hidden state i) -> the layer's output, and that after the norm: [L, h] each."""
        positions = torch.arange(len(token_ids))
        x = self.first_layer(hidden, token_ids, positions, positions[None] <= positions[:, None])
        return x, self.norm(x, "norm")

    def first_layer(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Pairs with any positions [N] and mask bool [N, N] -> [N, h]"""
        layers, prefix = Layers(self.config, self.tensors), self.prefix
        embedded = self.norm(self.embedding[tokens], f"{prefix}input_layernorm")
        normalized = self.norm(hidden, f"{prefix}hidden_norm")
        residual = normalized if self.norm_before_residual else hidden
        pair = torch.cat((embedded, normalized), -1)
        x = residual + layers.attend(prefix, pair, pair, positions, mask)
        return x + layers.mlp(prefix, x)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return Layers(self.config, self.tensors).norm(x, name)


def projection_shapes(config: dict[str, Any], prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Of attention that reads `inputs` values, and of the MLP."""
    size, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        f"{prefix}self_attn.q_proj.weight": (q, inputs),
        f"{prefix}self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}self_attn.o_proj.weight": (size, q),
        f"{prefix}mlp.gate_proj.weight": (inner, size),
        f"{prefix}mlp.up_proj.weight": (inner, size),
        f"{prefix}mlp.down_proj.weight": (size, inner),
    }


def head_tensors(
    config: dict[str, Any], target_size: int = 64, prefix: str = "midlayer.", seed: int = 0, **options: bool
) -> dict[str, Tensor]:
    """Random tensors of a head without embedding, in float32."""
    size, dim = config["hidden_size"], config["head_dim"]
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * target_size),
        **{f"{prefix}{name}.weight": (size,) for name in norms},
        **projection_shapes(config, prefix, 2 * size),
        "norm.weight": (size,),
        "lm_head.weight": (config.get("draft_vocab_size", config["vocab_size"]), size),
    }
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * target_size,)
    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (target_size,) for index in range(3)}
    if options.get("qk_norm"):
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor(shape, generator) for name, shape in shapes.items()}


def add_vocab(tensors: dict[str, Tensor], vocab_size: int, draft_size: int, seed: int = 0) -> None:
    """d2t and t2d of a random draft vocabulary."""
    chosen = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_size]
    ids = chosen.sort().values
    tensors["d2t"] = ids - torch.arange(draft_size)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)


def write_head(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors")
    return path


# As in llama.cpp: conversion/llama.py and gguf-py/gguf/constants.py
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
GGUF_OUTER = {
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "fc": "fc",
    "input_norm": "enc.output_norm",
}


def write_gguf_head(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    norm_before_residual: bool = False,
    layers_key: str = "target_layers",
    **keys: Any,
) -> Path:
    """As llama.cpp's converter: q and k for interleaved RoPE, d2t with the target's ids, no t2d.

    layers_key  older files have `extract_layers`
    keys        whole numbers instead of the usual ones
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "eagle3")
    size, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    for key, value in {
        "context_length": config["max_position_embeddings"],
        "embedding_length": size,
        "feed_forward_length": config["intermediate_size"],
        "block_count": 1,
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": dim,
        "vocab_size": config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size", size),
        **keys,
    }.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32("eagle3.rope.freq_base", config["rope_theta"])
    writer.add_bool("eagle3.norm_before_residual", norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", "input_norm.weight" in tensors)
    writer.add_array(f"eagle3.{layers_key}", list(AUX_LAYERS))
    for name, value in tensors.items():
        if name == "d2t":
            writer.add_tensor("d2t", (value + torch.arange(len(value))).numpy())
        elif name != "t2d":
            writer.add_tensor(*_gguf_tensor(name, value, dim))
    finish(writer)
    return path


def _gguf_tensor(name: str, value: Tensor, head_dim: int) -> tuple[str, Any]:
    inner = name.removesuffix(".weight").removeprefix("midlayer.")
    if inner in ("self_attn.q_proj", "self_attn.k_proj"):
        value = value.view(-1, 2, head_dim // 2, value.shape[1]).transpose(1, 2).flatten(0, 2)
    place = GGUF_OUTER.get(inner) or f"blk.0.{GGUF_NAMES[inner]}"
    return f"{place}.weight", value.contiguous().numpy()


def head_config(model: Path, **options: Any) -> dict[str, Any]:
    """A config of the original's layout for a target; tests have few layers, so it names all layers."""
    target = json.loads((model / "config.json").read_text())
    target |= target.get("text_config", {})
    layers = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}
    size = target["hidden_size"]
    sizes = {"vocab_size": target["vocab_size"], "hidden_size": size, "head_dim": size // 4}
    return {**HEAD_CONFIG, **sizes, **layers, "eagle_config": {"use_aux_hidden_state": True}, **options}


def read_head(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of write_head()."""
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def write_random_head(path: Path, model: Path, seed: int = 0) -> Path:
    """A head that knows nothing, for a target."""
    config = head_config(model)
    return write_head(path, config, head_tensors(config, config["hidden_size"], seed=seed))


class AuxRecorder:
    """A Head that only keeps the target's hidden states."""

    method, uses_mrope = "eagle3", False
    cache_shape = HeadShape((KVShape(1, 16),), 16)

    def __init__(self, aux_layers: Sequence[int]) -> None:
        self.aux_layers = tuple(aux_layers)
        self.recorded = torch.empty(0)

    def commit(
        self, batch: Batch, embeddings: Tensor, aux_hidden_states: Sequence[Tensor], cache: HeadCache
    ) -> None:
        self.recorded = torch.stack(list(aux_hidden_states), 1)


def record_aux_hidden_states(
    model: Path, texts: Sequence[Sequence[int]], aux_layers: Sequence[int] = AUX_LAYERS
) -> list[Tensor]:
    """[L, layers, H] of each text."""
    helper = ForwardHelper(model, head=AuxRecorder(aux_layers))
    result = []
    for text in texts:
        helper.logits(text)
        result.append(helper.model.head.recorded[: len(text)].clone())
    return result


def train_head(
    path: Path, model: Path, texts: Sequence[Sequence[int]], steps: int = 150, **options: Any
) -> Path:
    """A head that knows the texts: trained on each next token, unrolled twice."""
    config = head_config(model, **options)
    tensors = head_tensors(config, config["hidden_size"])
    weights = load_file(model / "model.safetensors")
    ends = ("embed_tokens.weight", "embeddings.weight", "wte.weight")
    embedding = next(value.float() for name, value in weights.items() if name.endswith(ends))
    texts = [text[:MAX_TRAINED] for text in texts]
    recorded = record_aux_hidden_states(model, texts)
    for value in tensors.values():
        value.requires_grad_()
    head = ReferenceHead(config, tensors, embedding, tensors["lm_head.weight"])
    optimizer = torch.optim.Adam(tensors.values(), lr=4e-3)
    for step in range(steps):
        loss = torch.zeros(())
        pairs = list(zip(texts, recorded, strict=True))
        for text, aux_hidden_states in pairs[step % 2 :: 2] or pairs:
            hidden, ids = head.fuse(aux_hidden_states[:-1]), torch.tensor(text)
            for shift in range(1, 3):
                out, normalized = head.layer(hidden, ids[shift:])
                logits = F.linear(normalized[:-1], head.lm_head)
                loss = loss + F.cross_entropy(logits, ids[shift + 1 :])
                hidden = out[:-1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return write_head(path, config, {name: value.detach() for name, value in tensors.items()})
