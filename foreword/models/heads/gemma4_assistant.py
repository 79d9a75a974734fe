"""Gemma 4's assistants: MTP heads in checkpoints of their own, which read the K and V of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foreword.core.batch import Batch, HeadCache, HeadShape, KVLayer, KVShape
from foreword.kernels.ops import Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Linear, load_linear
from foreword.layers.rope import Rope
from foreword.layers.weights import Weights
from foreword.models.architectures import read_decoder
from foreword.models.decoder import Decoder, describe_model
from foreword.models.decoder_config import DecoderConfig, LayerType
from foreword.models.gemma4 import Gemma4Layer
from foreword.models.heads.aux_head import head_mismatch
from foreword.models.interfaces import KVCache, Precision
from foreword.models.layer_builder import LayerBuilder, build_norm
from foreword.weights.config_reader import ConfigReader

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Which tokens' logits the original computes; here all of them are
CENTROID_KEYS = ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
UNUSED_TENSORS = (
    "masked_embedding.centroids.weight",
    "masked_embedding.token_ordering",
    "lm_head.weight",  # tied
)

_mismatch = partial(head_mismatch, "assistant")


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """Options of an assistant."""

    layer: DecoderConfig  # as a decoder of these layers
    target_hidden_size: int

    @classmethod
    def read(cls, config: ConfigReader) -> AssistantConfig:
        """config.json of these model types. Raises CheckpointError."""
        section = config.get_section("text_config")
        if section is None:
            raise config.error("text_config", "is missing")
        size = config.get_int("backbone_hidden_size", 1536)
        config.require_value("tie_word_embeddings", True)
        for key in CENTROID_KEYS:
            config.get(key, None)
        text = section.without(("num_kv_shared_layers",)).with_defaults({"dtype": config.get_dtype()})
        _architecture, layers = read_decoder(text, "gemma4_text")
        if layers.moe is not None or layers.per_layer_size or layers.double_wide_mlp:
            raise config.error("text_config", "an assistant has no experts and no per-layer embeddings")
        config.ignore_repeats_of(text)
        config.check_all_read()
        # The original's mask of local layers includes both ends
        types = tuple(
            each if each.window is None else replace(each, window=each.window + 1)
            for each in layers.layer_types
        )
        return cls(replace(layers, layer_types=types, takes_lora=False), size)


class Gemma4Assistant:
    """See Head. Its layers have queries alone: each sees K and V of the target's last layer of its type.

    All tokens of a draft are at the position of the last known token, of which the target has no K and V yet.
    """

    method = "mtp"
    parallel = None
    has_fixed_position = True

    def __init__(
        self,
        config: AssistantConfig,
        target: Decoder,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
        max_model_len: int,
    ) -> None:
        """Raises CheckpointError for an assistant that does not fit the target."""
        layers, size = config.layer, config.target_hidden_size
        self._sources = _find_sources(layers, size, target.config)
        shapes = tuple(shape._replace(source=0) for shape in layers.kv_shapes)
        self._config = layers = replace(layers, cache_shapes=shapes)
        self._ops = ops
        self._target = target
        self._device = device
        self.aux_layers: tuple[int, ...] = (len(target.config.layer_types),)
        before, hidden = weights.num_parameters, layers.hidden_size
        body, linear_format = weights.prefixed("model."), precision.linear_format
        self._layers = [
            Gemma4Layer(LayerBuilder(ops, layers, precision, index, body.prefixed(f"layers.{index}.")))
            for index in range(len(shapes))
        ]
        self._norm = build_norm(ops, layers, body, "norm")
        self._pre = Linear(
            ops, load_linear(ops, weights, linear_format, 2 * size, {"pre_projection": hidden})
        )
        self._post = Linear(ops, load_linear(ops, weights, linear_format, hidden, {"post_projection": size}))
        rows = {"embed_tokens": layers.vocab_size}
        lm_head = load_linear(ops, body, precision.embedding_format, hidden, rows)
        self._lm_head = Linear(ops, lm_head, torch.float32)
        self.cache_shape = HeadShape((), size)
        self.info = replace(
            describe_model(layers, weights.num_parameters - before, 0),
            architecture=self.method,
            context_len=target.info.context_len,
            embedding_parameters=layers.vocab_size * hidden,
            is_head=True,
            hidden_values_per_token=size,
        )
        self.set_max_model_len(max_model_len)

    @property
    def uses_mrope(self) -> bool:
        return False

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepare for contexts of this length."""
        ropes = dict.fromkeys(layer_type.rope for layer_type in self._config.layer_types)
        self._ropes = {rope: Rope(rope, max_model_len + 1, self._device) for rope in ropes}

    def commit(
        self, batch: Batch, embeddings: Tensor, aux_hidden_states: Sequence[Tensor], cache: HeadCache
    ) -> None:
        """See Head."""
        self._ops.write_hidden(self._target.norm(aux_hidden_states[0]), cache.hidden, batch.slots)

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """See Head."""
        cache = kv_cache.head
        assert cache is not None
        sources: list[KVLayer] = []
        for source in self._sources:
            layer = kv_cache.layer(source)
            assert isinstance(layer, KVLayer)
            sources.append(layer)

        def draft(batch: Batch) -> Tensor:
            ops, layer_types = self._ops, self._config.layer_types
            assert batch.prev_slots is not None, "a batch without prev_slots"
            hidden = ops.read_hidden(cache.hidden, batch.prev_slots)
            x = self._pre(ops.concat((self._target.embedding(batch.token_ids), hidden)))
            contexts = {layer_type: self._context(batch, layer_type) for layer_type in layer_types}
            for layer, layer_type, source in zip(self._layers, layer_types, sources, strict=True):
                x = layer(x, contexts[layer_type], source)
            y = self._norm(x)
            ops.write_hidden(self._post(y), cache.hidden, batch.slots)
            return self._lm_head(ops.index_rows(y, batch.sample_rows))

        return self._ops.compile(draft)

    def _context(self, batch: Batch, layer_type: LayerType) -> ForwardContext:
        """batch.positions are those of the last tokens with K and V; queries are one further."""
        metadata = self._ops.build_attention_metadata(batch, layer_type.window)
        rope = self._ropes[layer_type.rope]
        return ForwardContext(batch, rope.cos_sin[1:], rope.query_cos_sin[1:], metadata, batch.positions)


def _find_sources(layers: DecoderConfig, size: int, target: DecoderConfig) -> list[int]:
    """The target's layer that each layer reads. Raises CheckpointError for a target of another shape."""
    if not target.architecture.startswith("gemma4") or size != target.hidden_size:
        found = f"{target.architecture} of hidden size {target.hidden_size}"
        raise _mismatch(f"is made for a Gemma 4 of hidden size {size}, this one is {found}")
    if layers.vocab_size != target.vocab_size:
        raise _mismatch(f"has {layers.vocab_size} tokens, the model {target.vocab_size}")
    result: list[int] = []
    for layer_type, shape in zip(layers.layer_types, layers.kv_shapes, strict=True):
        sources = [
            index
            for index, (other, other_type) in enumerate(
                zip(target.cache_shapes, target.layer_types, strict=True)
            )
            if isinstance(other, KVShape)
            and other.source is None
            and (other_type.window is None) == (layer_type.window is None)
        ]
        if not sources or target.cache_shapes[sources[-1]] != shape:
            kind = "global" if layer_type.window is None else "local"
            raise _mismatch(f"needs K and V of {shape.heads} heads of {shape.head_dim} in {kind} layers")
        result.append(sources[-1])
    return result
