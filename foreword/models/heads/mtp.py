"""MTP heads: a layer more in a checkpoint, which drafts. Source: arXiv 2412.19437, section 2.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foreword.core.batch import Batch, HeadCache, HeadShape, KVShape
from foreword.kernels.ops import Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Linear, load_linear
from foreword.layers.weights import Weights
from foreword.models.decoder import Decoder, describe_model
from foreword.models.decoder_config import DecoderConfig
from foreword.models.heads.aux_head import DraftLogits
from foreword.models.interfaces import KVCache, Precision
from foreword.models.layer_builder import LayerBuilder, build_norm
from foreword.models.llama import LlamaLayer
from foreword.weights.trained_heads import MTPNames


class MTP:
    """See Head. It reads the target's hidden states behind the last norm, and recycles its own likewise.

    Others measured that less is accepted before the norms (docs/architecture.md). The embedding and the
    output layer are the target's; copies of them in the files are not read.
    """

    method = "mtp"
    parallel = None
    has_fixed_position = False

    def __init__(
        self,
        names: MTPNames,
        target: Decoder,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
        draft_vocab_size: int = 0,
    ) -> None:
        """draft_vocab_size: only ids below are drafted; 0: all"""
        config, before = one_layer(target.config), weights.num_parameters
        body, size = weights.prefixed(names.prefix), config.hidden_size
        self.aux_layers: tuple[int, ...] = (len(target.config.layer_types),)
        self._ops = ops
        self._target = target
        self._layer_type = config.layer_types[0]
        self._embedding_norm = build_norm(ops, config, body, names.embedding_norm)
        self._hidden_norm = build_norm(ops, config, body, names.hidden_norm)
        fc = load_linear(ops, body, precision.linear_format, 2 * size, {names.fc: size})
        self._fc = Linear(ops, fc)
        layer = target.build_layer(
            LayerBuilder(ops, config, precision, 0, body.prefixed(names.layer), head_inputs=size)
        )
        assert isinstance(layer, LlamaLayer)
        self._layer = layer
        self._norm = build_norm(ops, config, body, names.norm)
        # Ids below are drafted: an output layer of 248,000 rows has 12 times the parameters of the layer
        size_drafted = min(draft_vocab_size or target.vocab_size, target.vocab_size)
        lm_head, vocab_ids = target.lm_head, None
        if size_drafted < target.vocab_size:
            lm_head = target.lm_head.first_rows(size_drafted)
            vocab_ids = torch.arange(size_drafted, device=device)
        self._logits = DraftLogits(ops, lm_head, target.vocab_size, vocab_ids)
        kv_shape = config.cache_shapes[0]
        assert isinstance(kv_shape, KVShape)
        self.cache_shape = HeadShape((kv_shape,), size)
        self.info = replace(
            describe_model(config, weights.num_parameters - before, 0),
            architecture=self.method,
            context_len=target.info.context_len,
            embedding_parameters=0,
            is_head=True,
            hidden_values_per_token=size,
        )

    @property
    def uses_mrope(self) -> bool:
        return self._layer_type.uses_mrope

    def set_max_model_len(self, max_model_len: int) -> None:
        """The target's tables of angles are used."""

    def commit(
        self, batch: Batch, embeddings: Tensor, aux_hidden_states: Sequence[Tensor], cache: HeadCache
    ) -> None:
        """See Head."""
        self._ops.write_hidden(self._target.norm(aux_hidden_states[0]), cache.hidden, batch.slots)
        self._layer.write_kv(self._join(embeddings, batch, cache), self._context(batch), cache.layers[0])

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """See Head."""
        cache = kv_cache.head
        assert cache is not None
        layer = cache.layers[0]

        def draft(batch: Batch) -> Tensor:
            ops = self._ops
            x = self._join(self._target.embedding(batch.token_ids), batch, cache)
            y = self._norm(self._layer(x, self._context(batch), layer))
            ops.write_hidden(y, cache.hidden, batch.slots)
            return self._logits(ops.index_rows(y, batch.sample_rows))

        return self._ops.compile(draft)

    def _join(self, embeddings: Tensor, batch: Batch, cache: HeadCache) -> Tensor:
        """Input of the layer [T, H], from the tokens and the hidden states before them."""
        assert batch.prev_slots is not None, "a batch without prev_slots"
        hidden = self._ops.read_hidden(cache.hidden, batch.prev_slots)
        pair = self._ops.concat((self._embedding_norm(embeddings), self._hidden_norm(hidden)))
        return self._fc(pair)

    def _context(self, batch: Batch) -> ForwardContext:
        metadata = self._ops.build_attention_metadata(batch, self._layer_type.window, 1)
        return self._target.forward_context(batch, self._layer_type, metadata)


def one_layer(config: DecoderConfig) -> DecoderConfig:
    """The config of a decoder with one layer: the last one of the target that has attention."""
    index = max(i for i, shape in enumerate(config.cache_shapes) if isinstance(shape, KVShape))
    moe = config.moe
    return replace(
        config,
        layer_types=(config.layer_types[index],),
        cache_shapes=(config.cache_shapes[index],),
        moe=None if moe is None else replace(moe, has_experts=(moe.has_experts[index],)),
        takes_lora=False,
    )
