"""What all decoder-only models have in common: embedding, layers, final norm, head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foreword.core.batch import Batch, Features
from foreword.core.kv import KVLayer
from foreword.kernels.ops import DraftLoop, Ops
from foreword.kernels.rounds import RunsAhead
from foreword.layers.attention import Attention, AttentionConfig, Pass
from foreword.layers.embedding import Embedding
from foreword.layers.linear import Linear, load_linear
from foreword.layers.mlp import MLP
from foreword.layers.norm import RMSNorm
from foreword.layers.rope import Rope, RopeConfig
from foreword.layers.weights import Weights
from foreword.models.base import KV, Precision, Tower
from foreword.models.config import ConfigReader
from foreword.resolve import ModelFacts

__all__ = ["Decoder", "DecoderConfig", "Kind", "Layer", "Parts"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells layers apart: how far they look back (None: to the beginning), and how they know positions."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and options of a checkpoint.

    context        positions it was made for
    kinds          one per layer
    tied           the head is the embedding
    scale          of attention scores
    norm_offset    added to every norm's weight
    score_softcap  of attention scores, or None
    logit_softcap  of the logits, or None
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    activation: str
    kinds: tuple[Kind, ...]
    tied: bool
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    score_softcap: float | None = None
    logit_softcap: float | None = None


class Layer(Protocol):
    """One layer of a model."""

    def __call__(self, x: Tensor, shared: Pass, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""


class Parts:
    """Builds the parts of one layer from its tensors, which keep the names they have in the checkpoint."""

    def __init__(self, ops: Ops, config: DecoderConfig, precision: Precision, kind: Kind, weights: Weights) -> None:
        self.ops = ops
        self._config = config
        self._precision = precision
        self._kind = kind
        self._weights = weights

    def norm(self, name: str) -> RMSNorm:
        return self._norm(self._weights, name, self._config.hidden)

    def attention(self, name: str, fused: str | None = None, head_norms: bool = False) -> Attention:
        """`fused` names the projection that holds q, k and v; otherwise they stand apart."""
        config = self._config
        weights = self._weights.within(f"{name}.")
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        outputs = {fused: q + 2 * kv} if fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        return Attention(
            self.ops,
            self._attention_config(),
            self._linear(weights, config.hidden, outputs, config.qkv_bias),
            self._linear(weights, q, {"o_proj": config.hidden}, config.out_bias),
            self._norm(weights, "q_norm", config.head_dim) if head_norms else None,
            self._norm(weights, "k_norm", config.head_dim) if head_norms else None,
        )

    def mlp(self, name: str, fused: str | None = None) -> MLP:
        """`fused` names the projection that holds gate and up; otherwise they stand apart."""
        config = self._config
        weights = self._weights.within(f"{name}.")
        size = config.intermediate
        outputs = {fused: 2 * size} if fused else {"gate_proj": size, "up_proj": size}
        gate_up = self._linear(weights, config.hidden, outputs, config.mlp_bias)
        down = self._linear(weights, size, {"down_proj": config.hidden}, config.mlp_bias)
        return MLP(self.ops, gate_up, down, config.activation)

    def _linear(self, weights: Weights, inputs: int, outputs: Mapping[str, int], bias: bool) -> Linear:
        return Linear(self.ops, load_linear(self.ops, weights, self._precision.linear, inputs, outputs, bias))

    def _norm(self, weights: Weights, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.ops, weights.take(f"{name}.weight", size), self._config.eps, self._config.norm_offset)

    def _attention_config(self) -> AttentionConfig:
        config = self._config
        return AttentionConfig(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.scale,
            window=self._kind.window,
            softcap=config.score_softcap,
        )


class Decoder(ABC):
    """A decoder-only model. A subclass, one to an architecture, reads the config and builds the layers."""

    def __init__(
        self, config: DecoderConfig, ops: Ops, precision: Precision, weights: Weights, device: str, max_model_len: int
    ) -> None:
        self.ops = ops
        self.config = config
        self.vocab_size = config.vocab_size
        self.kv_layers = ((config.kv_heads, config.head_dim),) * len(config.kinds)
        body = weights.within("model.")
        embedding = load_linear(ops, body, precision.embedding, config.hidden, {"embed_tokens": self.vocab_size})
        self._embedding = Embedding(ops, embedding, precision.dtype, config.embedding_scale)
        self._kinds = tuple(dict.fromkeys(config.kinds))
        self._kind_of = tuple(self._kinds.index(kind) for kind in config.kinds)
        self._layers = [
            self.layer(Parts(ops, config, precision, kind, body.within(f"layers.{index}.")))
            for index, kind in enumerate(config.kinds)
        ]
        self._norm = RMSNorm(ops, body.take("norm.weight", config.hidden), config.eps, config.norm_offset)
        head = embedding
        if not config.tied:
            head = load_linear(ops, weights, precision.embedding, config.hidden, {"lm_head": self.vocab_size})
        self._head = Linear(ops, head, torch.float32)
        self._device = device
        self.limit(max_model_len)
        self.facts = _facts(config, weights.parameters)
        self.tower: Tower | None = None

    def limit(self, max_model_len: int) -> None:
        """Be ready for contexts of this length, as if loaded for it. Nothing is compiled yet."""
        self._ropes = {rope: Rope(rope, max_model_len, self._device) for rope in {kind.rope for kind in self._kinds}}

    @classmethod
    @abstractmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """What config.json says. Raises CheckpointError for what this architecture does not honour."""

    @abstractmethod
    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""

    def forward(self, batch: Batch, kv: KV) -> Tensor:
        """Hidden states [T, H] of every row; K and V of every row are written to the cache."""
        x = self._embedding(batch.token_ids)
        if batch.features is not None:
            self.ops.put_rows(x, batch.features.rows, batch.features.values[:, : self.config.hidden])
        shared = [self._shared(batch, kind) for kind in self._kinds]
        for index, (layer, kind) in enumerate(zip(self._layers, self._kind_of, strict=True)):
            x = layer(x, shared[kind], kv.layer(index))
            if batch.features is not None:
                self._deepen(x, batch.features, index + 1)
        return self._norm(x)

    def _deepen(self, x: Tensor, features: Features, layer: int) -> None:
        """Behind the first layers more of what the tower saw is added, where it has more."""
        size = self.config.hidden
        values = features.values[:, layer * size : (layer + 1) * size]
        if values.shape[1]:
            self.ops.put_rows(x, features.rows, self.ops.add(self.ops.take_rows(x, features.rows), values.contiguous()))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]"""
        logits = self._head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)

    def compiled(self, kv: KV) -> Callable[[Batch], Tensor]:
        """Of a batch, the logits of its sampled rows, float32 [R, V], valid until the next call."""

        def sampled_logits(batch: Batch) -> Tensor:
            return self.logits(self.ops.take_rows(self.forward(batch, kv), batch.sample_rows))

        return self._compiled(sampled_logits)

    def compiled_hidden(self, kv: KV) -> Callable[[Batch], Tensor]:
        """Of a batch, the hidden states of its sampled rows behind the final norm [R, H], valid until the next call."""

        def sampled_hidden(batch: Batch) -> Tensor:
            return self.ops.take_rows(self.forward(batch, kv), batch.sample_rows)

        return self._compiled(sampled_hidden)

    def _compiled(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        quick = self.ops.compile(forward)
        if self.tower is None or isinstance(quick, RunsAhead):  # which takes batches with pictures as they are
            return quick
        return _SeeingLoop(quick, forward) if isinstance(quick, DraftLoop) else _Seeing(quick, forward)

    @property
    def directions(self) -> bool:
        """It knows positions in several directions (M-RoPE)."""
        return any(kind.rope.axes is not None for kind in self._kinds)

    def _shared(self, batch: Batch, kind: Kind) -> Pass:
        plan, axes = self.ops.plan_attention(batch, kind.window), kind.rope.axes
        positions = batch.positions if axes is None else batch.rope_positions
        assert positions is not None, "a batch without positions in several directions"
        return Pass(batch, self._ropes[kind.rope].table, plan, positions, axes)


class _Seeing:
    """A batch with pictures, which is a prompt, goes operation by operation: what is compiled knows only tokens."""

    def __init__(self, quick: Callable[[Batch], Tensor], forward: Callable[[Batch], Tensor]) -> None:
        self._quick = quick
        self._forward = forward

    def __call__(self, batch: Batch) -> Tensor:
        return self._quick(batch) if batch.features is None else self._forward(batch)


class _SeeingLoop(_Seeing):
    """Drafts are made behind pictures."""

    def __init__(self, quick: DraftLoop, forward: Callable[[Batch], Tensor]) -> None:
        super().__init__(quick, forward)
        self.draft = quick.draft


def _facts(config: DecoderConfig, parameters: int) -> ModelFacts:
    projected = (config.heads + 2 * config.kv_heads) * config.head_dim
    return ModelFacts(
        architecture=config.architecture,
        context=config.context,
        dtype=config.dtype,
        parameters=parameters,
        vocab_size=config.vocab_size,
        kv_values_per_token=2 * len(config.kinds) * config.kv_heads * config.head_dim,
        kv_vectors_per_token=2 * len(config.kinds) * config.kv_heads,
        embedding_parameters=config.vocab_size * config.hidden * (1 if config.tied else 2),
        row_values=3 * config.hidden + max(3 * config.intermediate, 2 * projected),
    )
