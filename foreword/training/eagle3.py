"""An EAGLE-3 head as a torch module, and its files in the format of the speculators library.

For each position p it reads the pair (x_p, g_{p-1}): the embedding of a token, and the target's hidden states
before it, or the head's own output where the target has none yet. It predicts x_{p+1}. Source: arXiv
2503.01840; names of tensors and options: speculators 0.9 (eagle3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foreword.errors import ConfigError
from foreword.models.decoder_config import DecoderConfig
from foreword.models.heads.eagle3 import NUM_AUX_LAYERS

SPECULATORS_VERSION = "0.9.0"  # the format's
DRAFT_TOKENS = 3  # default length of a chain, as the field serves EAGLE-3


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Shape of a head. Its hidden size and norm epsilon are those of the target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    rope_theta: float
    context_length: int  # the target's, which readers of the file expect
    aux_layers: tuple[int, ...]  # layers whose input, the residual stream, the head reads

    @property
    def has_draft_vocabulary(self) -> bool:
        """The head predicts some of the target's tokens only."""
        return self.draft_vocab_size < self.vocab_size


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers near the start, in the middle and near the end, as published heads have them.

    Raises ConfigError for a model that has too few.
    """
    if num_layers >= 8:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 4:
        return (1, num_layers // 2, num_layers - 1)
    if num_layers < NUM_AUX_LAYERS - 1:
        raise ConfigError(f"a head is for models of at least {NUM_AUX_LAYERS - 1} layers, not {num_layers}")
    return (num_layers - 2, num_layers - 1, num_layers)


def default_sizes(target: DecoderConfig) -> dict[str, int]:
    """Sizes of a layer like the target's; of a dense one, where that has experts or latent attention."""
    shape, hidden = target.kv_shapes[0], target.hidden_size
    head_dim, heads, kv_heads = shape.head_dim, target.num_heads, shape.heads
    if target.latent is not None:
        head_dim = 128 if hidden % 128 == 0 else hidden // target.num_heads
        heads = kv_heads = hidden // head_dim
    intermediate = target.intermediate_size if target.moe is None else 3 * hidden
    return {
        "intermediate_size": intermediate,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }


class _RMSNorm(nn.Module):
    """In float32, also where matrix products are in bfloat16."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        pair, hidden, head_dim = 2 * shape.hidden_size, shape.hidden_size, shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(pair, shape.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(pair, shape.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(pair, shape.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head_dim, hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden, intermediate = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class _Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(shape.hidden_size, shape.eps)
        self.hidden_norm = _RMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = _RMSNorm(shape.hidden_size, shape.eps)
        self.self_attn, self.mlp = _Attention(shape), _MLP(shape)


class _Pair(NamedTuple):
    """Pairs of a token and a hidden state."""

    input: Tensor  # [B, n, 2H]: of the attention, both normalized
    residual: Tensor  # [B, n, H]: norm_before_residual


class Eagle3DraftModel(nn.Module):
    """The head. Names of its parameters are those of the files; the embedding is the target's."""

    def __init__(self, shape: Eagle3Shape, draft_ids: Tensor) -> None:
        """draft_ids  int64 [draft vocabulary]: tokens that the head predicts, ascending"""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.aux_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = _RMSNorm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.draft_ids: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, draft vocabulary]"""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits.float()

    def unroll(
        self, embeddings: Tensor, aux_hidden_states: Tensor, starts: Tensor, num_passes: int
    ) -> list[Tensor]:
        """Hidden states [B, W, H] of each pass of chains that begin at the positions `starts`.

        embeddings  [B, L, H]
        aux_hidden_states  [B, L, layers * H]
        starts      int64 [B, W], from 1 to L - 1

        Pass j of a chain that begins at p reads the pair at p + j, clamped to L - 1, and predicts the token
        after it. The first pass reads the target's hidden states, later ones the chain's own output, with the
        known tokens: while a chain agrees with the text, it computes what drafting computes (training-time
        test).
        """
        length = embeddings.shape[1]
        known = self._pair(embeddings[:, 1:], self.fc(aux_hidden_states[:, :-1]))
        positions = torch.arange(1, length, device=embeddings.device)
        k, v = self._keys(known.input, positions.expand(len(embeddings), -1))
        mask = positions <= starts[:, :, None]
        own = torch.eye(starts.shape[1], dtype=torch.bool, device=mask.device).expand(len(mask), -1, -1)
        pair = _Pair(*(_gather(each, starts - 1) for each in (known.input, known.residual)))
        passes: list[Tensor] = []
        for index in range(num_passes):
            positions = (starts + index).clamp(max=length - 1)
            if index:
                pair = self._pair(_gather(embeddings, positions), passes[-1])
                own_k, own_v = self._keys(pair.input, positions)
                k, v, mask = torch.cat([k, own_k], 2), torch.cat([v, own_v], 2), torch.cat([mask, own], 2)
            passes.append(self._layer(pair, positions, k, v, mask))
        return passes

    @property
    def _block(self) -> _Layer:
        (layer,) = self.layers
        assert isinstance(layer, _Layer)
        return layer

    def _pair(self, tokens: Tensor, hidden: Tensor) -> _Pair:
        """tokens, hidden [B, n, H]"""
        normed = self._block.hidden_norm(hidden)
        return _Pair(torch.cat([self._block.input_layernorm(tokens), normed], dim=-1), normed)

    def _keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hk, n, D] of pairs [B, n, 2H] at positions [B, n]"""
        attention, count = self._block.self_attn, self.shape.num_kv_heads
        k = _rotate(_heads(attention.k_proj(x), count), positions, self.shape.rope_theta)
        return k, _heads(attention.v_proj(x), count)

    def _layer(self, pair: _Pair, positions: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """mask bool [B, n, keys] -> [B, n, H]"""
        block, shape = self._block, self.shape
        q = _heads(block.self_attn.q_proj(pair.input), shape.num_heads)
        q = _rotate(q, positions, shape.rope_theta)
        is_grouped = shape.num_heads != shape.num_kv_heads
        attended = F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=is_grouped)
        x = pair.residual + block.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + block.mlp(block.post_attention_layernorm(x))
        return y


def _heads(x: Tensor, count: int) -> Tensor:
    """[B, n, count * D] -> [B, count, n, D]"""
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, n, H], rows int64 [B, W] -> [B, W, H]"""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [B, heads, n, D] in halves; positions [B, n]."""
    size = x.shape[-1]
    exponents = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
    angles = positions[:, None, :, None].float() * theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def write_head(
    folder: Path, head: Eagle3DraftModel, target: str, architectures: Sequence[str], dtype: torch.dtype
) -> None:
    """Write config.json and model.safetensors. `target` is the name by which other engines find the model."""
    shape, ids = head.shape, head.draft_ids.cpu()
    tensors = {name: value.detach().to("cpu", dtype) for name, value in head.state_dict().items()}
    if shape.has_draft_vocabulary:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    for name in ("model.safetensors", "config.json"):
        partial = folder / f".{name}.partial"
        if name == "config.json":
            config = head_config(shape, target, architectures, str(dtype).removeprefix("torch."))
            partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        else:
            save_file({key: value.contiguous() for key, value in tensors.items()}, partial, {"format": "pt"})
            partial.chmod(0o644)
        partial.replace(folder / name)


def head_config(
    shape: Eagle3Shape, target: str, architectures: Sequence[str], dtype: str
) -> Mapping[str, Any]:
    """The config.json of a head."""
    layer = {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.context_length,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": dtype,
        "draft_vocab_size": shape.draft_vocab_size,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFT_TOKENS}],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "tie_word_embeddings": False,
    }
