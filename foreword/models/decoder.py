"""The common part of decoder-only models: embedding, layers, final norm, head."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from foreword.core.batch import Batch, ImageFeatures
from foreword.kernels.ops import AttentionMetadata, DraftLoop, Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.lora import LoraLayers, LoraLimits
from foreword.layers.per_layer_embedding import PerLayerEmbedding, load_per_layer_embedding
from foreword.layers.rope import Rope
from foreword.layers.weights import Weights
from foreword.models.decoder_config import DecoderConfig, LayerType
from foreword.models.expert_weights import MoEConfig
from foreword.models.interfaces import Head, KVCache, Precision, VisionEncoder
from foreword.models.layer_builder import DecoderLayer, LayerBuilder, build_norm
from foreword.planning.memory import ModelInfo
from foreword.weights.config_reader import ConfigReader


class Decoder(ABC):
    """A decoder-only model. A subclass per architecture reads the config and builds the layers."""

    NORM: ClassVar[str] = "norm"  # name of the last norm
    # Of names in files, where they may differ from ours: see MultipartWeights
    WEIGHT_PREFIXES: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    EMBEDDING: ClassVar[str] = "embed_tokens"

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
        max_model_len: int,
        lora: LoraLimits | None = None,
    ) -> None:
        self.ops = ops
        self.config = config
        self.lora = LoraLayers(lora, precision.dtype, device)
        self.vocab_size = config.vocab_size
        self.cache_shapes = config.cache_shapes
        body = weights.prefixed("model.")
        hidden, weight_format = config.hidden_size, precision.embedding_format
        embedding = load_linear(ops, body, weight_format, hidden, {self.EMBEDDING: self.vocab_size})
        scale = torch.tensor(config.embedding_scale, dtype=precision.dtype).item()
        self.embedding_weight = embedding
        self.embedding = Embedding(ops, embedding, precision.dtype, scale * config.input_scale)
        self._per_layer: PerLayerEmbedding | None = None
        if config.per_layer_size:
            formats, sizes = (precision.embedding_format, precision.linear_format), (self.vocab_size, hidden)
            layers, size = len(config.layer_types), config.per_layer_size
            self._per_layer = load_per_layer_embedding(
                ops, body, precision.dtype, formats, (*sizes, layers, size), config.eps
            )
        self._layer_types = tuple(dict.fromkeys(config.layer_types))
        self._layer_type_indexes = tuple(map(self._layer_types.index, config.layer_types))
        self._layers = []
        for index in range(len(config.layer_types)):
            layer_weights = body.prefixed(f"layers.{index}.")
            builder = LayerBuilder(ops, config, precision, index, layer_weights, self.lora)
            self._layers.append(self.build_layer(builder))
        self.norm = build_norm(ops, config, body, self.NORM)
        self._head_norm = self.norm.scaled(config.logit_scale)
        head = embedding
        if not config.tie_word_embeddings:
            outputs = {"lm_head": self.vocab_size}
            head = load_linear(ops, weights, weight_format, hidden, outputs, config.head_bias)
        self.lm_head = Linear(ops, head, torch.float32)
        self._device = device
        self.set_max_model_len(max_model_len)
        self.info = describe_model(config, weights.num_parameters, self.lora.values_per_rank)
        self.vision_encoder: VisionEncoder | None = None
        self.head: Head | None = None

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepare for contexts of this length. Call it before anything is compiled."""
        ropes = {layer_type.rope for layer_type in self._layer_types}
        self._ropes = {rope: Rope(rope, max_model_len, self._device) for rope in ropes}

    @property
    def rope_digest(self) -> str:
        """Hash of RoPE's angles per position, which some checkpoints derive from the context limit."""
        return hashlib.blake2b(b"".join(sorted(each.digest for each in self._ropes.values()))).hexdigest()

    @classmethod
    @abstractmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """Read config.json. Raises CheckpointError for options that this architecture does not support."""

    @abstractmethod
    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Hidden states [T, H] of all rows; writes K and V of all rows to the cache."""
        return self.norm(self._run_layers(batch, kv_cache)[0])

    def forward_with_aux_hidden_states(
        self, batch: Batch, kv_cache: KVCache, layers: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """The residual stream [T, H] entering each of these layers, and the hidden states of logits() [T, H].

        The number of layers means the last one's output. Not within compile().
        """
        output, streams = self._run_layers(batch, kv_cache, layers)
        return streams, self._head_norm(output)

    def _run_layers(
        self, batch: Batch, kv_cache: KVCache, aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Output of the last layer [T, H], and the residual streams [T, H] entering `aux_layers`."""
        self.lora.batch = batch
        x = self.embedding(batch.token_ids)
        features = batch.image_features
        if features is not None:
            values = features.values[:, : self.config.hidden_size]
            self.ops.scatter_rows(x, features.rows, values * self.config.input_scale)
        contexts = self._forward_contexts(batch, x)
        head_layers = () if self.head is None else self.head.aux_layers
        wanted, streams = {*head_layers, *aux_layers}, {0: x}
        for index, (layer, type_index) in enumerate(zip(self._layers, self._layer_type_indexes, strict=True)):
            x = layer(x, contexts[type_index], kv_cache.layer(index))
            if features is not None:
                self._add_deepstack(x, features, index + 1)
            if index + 1 in wanted:
                streams[index + 1] = x
        if self.head is not None:
            assert kv_cache.head is not None, "a KV cache without memory of the head"
            self.head.commit(batch, streams[0], [streams[each] for each in head_layers], kv_cache.head)
        return x, [streams[each] for each in aux_layers]

    def _add_deepstack(self, x: Tensor, features: ImageFeatures, layer_index: int) -> None:
        """Add the vision encoder's features of inner blocks after the first layers (DeepStack)."""
        size = self.config.hidden_size
        values = features.values[:, layer_index * size : (layer_index + 1) * size]
        if values.shape[1]:
            rows = self.ops.index_rows(x, features.rows)
            self.ops.scatter_rows(x, features.rows, self.ops.add(rows, values.contiguous()))

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows after the head's norm, [R, H] -> float32 [R, V]"""
        logits = self.lm_head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)

    def compile_logits(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """Compile the layers and the logits of sampled rows, float32 [R, V], valid until the next call."""

        def sampled_logits(batch: Batch) -> Tensor:
            hidden = self._head_norm(self._run_layers(batch, kv_cache)[0])
            return self.logits(self.ops.index_rows(hidden, batch.sample_rows))

        return self._compile(sampled_logits)

    def compile_hidden(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """Compile forward() and the hidden states of sampled rows [R, H], valid until the next call."""

        def sampled_hidden(batch: Batch) -> Tensor:
            return self.ops.index_rows(self.forward(batch, kv_cache), batch.sample_rows)

        return self._compile(sampled_hidden)

    def _compile(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        compiled = self.ops.compile(forward)
        if self.vision_encoder is None or compiled is forward:
            return compiled
        return _ImageAwareForward(compiled, forward)

    @property
    def uses_mrope(self) -> bool:
        """Whether batches need mrope_positions."""
        return any(layer_type.uses_mrope for layer_type in self._layer_types)

    @property
    def has_states(self) -> bool:
        """Whether batches need state_slots and anchor_tables."""
        return bool(self.config.state_shapes)

    def _forward_contexts(self, batch: Batch, x: Tensor) -> list[ForwardContext]:
        """One for each layer type; those with the same window share the metadata. x [T, H]: embeddings."""
        inputs = None if self._per_layer is None else self._per_layer(batch.token_ids, x)
        windows = dict.fromkeys(layer_type.window for layer_type in self._layer_types)
        metadata = {window: self.ops.build_attention_metadata(batch, window) for window in windows}
        return [
            self.forward_context(batch, item, metadata[item.window], inputs) for item in self._layer_types
        ]

    def forward_context(
        self,
        batch: Batch,
        layer_type: LayerType,
        metadata: AttentionMetadata,
        inputs: Tensor | None = None,
    ) -> ForwardContext:
        """Inputs of the layers of one type; inputs: of per-layer embeddings."""
        return layer_context(batch, layer_type, self._ropes[layer_type.rope], metadata, inputs)


def layer_context(
    batch: Batch,
    layer_type: LayerType,
    rope: Rope,
    metadata: AttentionMetadata,
    inputs: Tensor | None = None,
) -> ForwardContext:
    """Inputs of the layers of one type with tables of angles; inputs: of per-layer embeddings."""
    sections = layer_type.rope.mrope_sections
    positions = batch.positions if sections is None else batch.mrope_positions
    assert positions is not None, "batch without M-RoPE positions"
    tables = rope.cos_sin, rope.query_cos_sin
    return ForwardContext(batch, *tables, metadata, positions, sections, inputs, rope.query_scale)


def layer_contexts(
    ops: Ops, batch: Batch, layer_types: Sequence[LayerType], rope: Rope, first: int
) -> list[ForwardContext]:
    """Inputs of each layer of a trained head; first: first position that its attention sees."""
    kinds = dict.fromkeys((each.window, each.causal) for each in layer_types)
    metadata = {
        (window, causal): ops.build_attention_metadata(batch, window, first, causal)
        for window, causal in kinds
    }
    return [layer_context(batch, each, rope, metadata[each.window, each.causal]) for each in layer_types]


class _ImageAwareForward:
    """Runs a batch with images, which is a prompt, uncompiled: the compiled forward takes only tokens."""

    def __init__(self, compiled: Callable[[Batch], Tensor], forward: Callable[[Batch], Tensor]) -> None:
        self._compiled = compiled
        self._forward = forward
        if isinstance(compiled, DraftLoop):
            self.draft = compiled.draft  # drafting needs no image features

    def __call__(self, batch: Batch) -> Tensor:
        return self._compiled(batch) if batch.image_features is None else self._forward(batch)


def describe_model(config: DecoderConfig, num_parameters: int, lora_values_per_rank: int) -> ModelInfo:
    """Properties that plans of memory need."""
    kv_shapes = config.kv_shapes
    projected = max((config.num_heads + 2 * shape.heads) * shape.head_dim for shape in kv_shapes)
    embedding_sizes = config.hidden_size * (2 - config.tie_word_embeddings)
    per_layer = len(config.layer_types) * config.per_layer_size
    inner, moe = 3 * config.intermediate_size * (1 + config.double_wide_mlp), config.moe
    if moe is not None:
        inner = max(inner, moe.experts.top_k * (3 * moe.intermediate_size + config.hidden_size))
    return ModelInfo(
        architecture=config.architecture,
        context_len=config.context_length,
        dtype=config.dtype,
        parameters=num_parameters,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        kv_values_per_token=sum(shape.values_per_token for shape in kv_shapes),
        kv_vectors_per_token=sum(shape.vectors_per_token for shape in kv_shapes),
        state_shapes=config.state_shapes,
        embedding_parameters=config.vocab_size * (embedding_sizes + per_layer),
        activation_values_per_row=3 * config.hidden_size
        + per_layer
        + max(inner, 2 * projected, 2 * per_layer),
        num_experts=moe.experts.num_experts if moe else 0,
        experts_per_token=moe.experts.top_k if moe else 0,
        expert_parameters=_expert_parameters(moe, config.hidden_size) if moe else 0,
        lora_values_per_rank=lora_values_per_rank,
    )


def _expert_parameters(moe: MoEConfig, hidden_size: int) -> int:
    """Parameters of all experts but the shared ones."""
    of_one = (2 + moe.experts.gated) * moe.intermediate_size * hidden_size
    of_one += (2 * moe.intermediate_size + hidden_size) * moe.bias
    return sum(moe.has_experts) * moe.experts.num_experts * of_one
