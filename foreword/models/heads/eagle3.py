"""EAGLE-3 heads: one layer over the target's hidden states of three depths. Source: arXiv 2503.01840."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foreword.core.batch import Batch, HeadCache, HeadShape
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.lora import LoraLayers
from foreword.layers.norm import RMSNorm
from foreword.layers.rope import Rope
from foreword.layers.weights import Weights
from foreword.models.architectures import read_decoder
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import KVCache, Precision
from foreword.models.layer_builder import LayerBuilder
from foreword.models.model_info import describe_model
from foreword.weights.config_reader import ConfigReader

NUM_AUX_LAYERS = 3
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Of the layer: in the original's files, in those of speculators, and in GGUF files by our names
LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.")
LAYER_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # model types of the layer: all are built as Llama's
# What training and the training framework write, without effect here
UNUSED_KEYS = ("embed_requires_grad", "has_no_defaults_at_init", "speculators_config", "speculators_version")
# eagle_config of TensorRT's exporter: these are what EAGLE-3 is
EAGLE_CONFIG_VALUES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Options of a head; `layer` describes its layer as that of a decoder."""

    layer: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None = None  # as in Head; None: chosen by the target's number of layers
    norm_before_residual: bool = False  # the residual is the normalized hidden state
    norm_before_fc: bool = False  # one norm over all layers together
    fc_norm: bool = False  # a norm for each layer
    norm_output: bool = False  # the recycled hidden state is normalized (EAGLE-3.1)

    @classmethod
    def read(cls, config: ConfigReader) -> Eagle3Config:
        """config.json in the original's or speculators' format. Raises CheckpointError."""
        section = config.get_section("transformer_layer_config")
        is_original = section is None
        head = config if section is None else config.without(UNUSED_KEYS)
        aux_layers = _read_aux_layers(head)
        # speculators writes norm_before_residual; readers of its format take true where it is missing
        options = {"norm_before_residual": head.get_bool("norm_before_residual", not is_original)}
        options |= {name: head.get_bool(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        if options["norm_before_fc"] and options["fc_norm"]:
            raise head.error("fc_norm", "excludes norm_before_fc")
        target_hidden_size = head.get_optional_int("target_hidden_size")
        draft_vocab_size = head.get_optional_int("draft_vocab_size")
        if section is None:
            layer = _read_layer(head)
        else:
            for key in ("speculators_model_type", "transformer_layer_config"):
                head.get(key)
            head.require_value("tie_word_embeddings", False)
            layer = _read_layer(section.with_defaults({"dtype": head.get_dtype()}))
            head.check_all_read()
        return cls(
            replace(layer, takes_lora=False),
            draft_vocab_size or layer.vocab_size,
            target_hidden_size or layer.hidden_size,
            aux_layers,
            **options,
        )


def _read_layer(config: ConfigReader) -> DecoderConfig:
    if config.get("model_type", "llama") not in LAYER_TYPES:
        raise config.error("model_type", f"must be one of {', '.join(LAYER_TYPES)} in a head")
    _architecture, layer = read_decoder(config, "llama")
    if len(layer.layer_types) != 1:
        problem = f"= {len(layer.layer_types)}: heads of one layer run here"
        raise config.error("num_hidden_layers", problem)
    return layer


def _read_aux_layers(head: ConfigReader) -> tuple[int, ...] | None:
    """The layers that the config names, in `eagle_config` or outside of it."""
    eagle = head.get_section("eagle_config") or ConfigReader({}, f"{head.source}: eagle_config")
    for name, value in EAGLE_CONFIG_VALUES.items():
        eagle.require_value(name, value)
    named = eagle if AUX_LAYERS_KEY in eagle else head
    values: Any = named.get(AUX_LAYERS_KEY, None)
    eagle.check_all_read()
    if not values:
        return None
    if (
        not isinstance(values, list)
        or len(values) != NUM_AUX_LAYERS
        or not all(type(x) is int for x in values)
    ):
        raise named.error(AUX_LAYERS_KEY, f"must be a list of {NUM_AUX_LAYERS} layers, got {values!r:.60}")
    return tuple(values)


class Eagle3:
    """See Head. fc(aux_hidden_states) [T, h] and the embedding of a token become a pair [T, 2h]."""

    method = "eagle3"
    has_fixed_position = False

    def __init__(
        self,
        config: Eagle3Config,
        target: Decoder,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
        max_model_len: int,
        vocab_ids: Tensor | None,
    ) -> None:
        """vocab_ids int64 [draft vocabulary]: the target's id of each logit; None: the same ids.

        Raises CheckpointError for a head that does not fit the target.
        """
        self.aux_layers = check_target(config, target.config)
        self._config = config
        self._ops = ops
        self._device = device
        layer, size = config.layer, config.layer.hidden_size
        before = weights.num_parameters
        prefix = next((each for each in LAYER_PREFIXES if weights.has(f"{each}hidden_norm.weight")), "")
        body = weights.prefixed(prefix or LAYER_PREFIXES[0])
        outer = weights.prefixed("model.") if prefix.startswith("model.") else weights
        adapters = LoraLayers(None, precision.dtype, device)
        builder = LayerBuilder(ops, layer, precision, 0, body, adapters, 2 * size)
        self._fc = self._load_fc(precision, weights)
        self._embedding_norm, self._hidden_norm = builder.norm("input_layernorm"), builder.norm("hidden_norm")
        self._attention = builder.attention("self_attn")
        self._mlp_norm = builder.norm("post_attention_layernorm")
        self._mlp = builder.feed_forward()
        self._norm = self._load_norm(outer, "norm", size)
        self._vocab_size = target.vocab_size
        embedding, self._reads_target_input = self._load_embedding(target, precision, outer)
        self._embedding = embedding
        self._lm_head = self._load_lm_head(target, precision, weights)
        self._vocab_ids = None if vocab_ids is None else check_ids(vocab_ids, target.vocab_size).to(device)
        self.cache_shape = HeadShape(layer.kv_shapes[0], size)
        own_rows = layer.vocab_size * outer.has("embed_tokens.weight") + config.draft_vocab_size
        self.info = replace(
            describe_model(layer, weights.num_parameters - before, 0),
            architecture=self.method,
            context_len=target.info.context_len,
            vocab_size=target.vocab_size,
            embedding_parameters=own_rows * size if self._lm_head is not target.lm_head else 0,
            hidden_values_per_token=size,
        )
        self.set_max_model_len(max_model_len)

    @property
    def uses_mrope(self) -> bool:
        return self._config.layer.layer_types[0].rope.mrope_sections is not None

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepare for contexts of this length, whatever the head's own limit: positions are relative."""
        self._rope = Rope(self._config.layer.layer_types[0].rope, max_model_len, self._device)

    def commit(
        self, batch: Batch, embeddings: Tensor, aux_hidden_states: Sequence[Tensor], cache: HeadCache
    ) -> None:
        """See Head."""
        assert cache.kv is not None
        ops = self._ops
        ops.write_hidden(self._fc(self._join(aux_hidden_states)), cache.hidden, batch.slots)
        if not self._reads_target_input:
            embeddings = self._embedding(batch.token_ids)
        pair, _ = self._pair(embeddings, batch, cache)
        self._attention.write_kv(pair, self._context(batch), cache.kv)

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """See Head."""
        cache = kv_cache.head
        assert cache is not None and cache.kv is not None
        layer = cache.kv

        def draft(batch: Batch) -> Tensor:
            ops = self._ops
            pair, residual = self._pair(self._embedding(batch.token_ids), batch, cache)
            x = self._attention(pair, self._context(batch), layer, residual)
            x = self._mlp(self._mlp_norm(x), x)
            y = self._norm(x)
            ops.write_hidden(y if self._config.norm_output else x, cache.hidden, batch.slots)
            logits = self._lm_head(ops.index_rows(y, batch.sample_rows))
            if self._vocab_ids is None:
                return logits
            return ops.expand_vocab(logits, self._vocab_ids, self._vocab_size)

        return self._ops.compile(draft)

    def _join(self, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        """[T, H] each -> [T, layers * H], the input of fc."""
        if self._aux_norms:
            pairs = zip(self._aux_norms, aux_hidden_states, strict=True)
            aux_hidden_states = [norm(hidden) for norm, hidden in pairs]
        joined = self._ops.concat(aux_hidden_states)
        return joined if self._fc_norm is None else self._fc_norm(joined)

    def _pair(self, embeddings: Tensor, batch: Batch, cache: HeadCache) -> tuple[Tensor, Tensor]:
        """Input of the attention [T, 2h], and the residual [T, h]."""
        assert batch.prev_slots is not None, "a batch without prev_slots"
        hidden = self._ops.read_hidden(cache.hidden, batch.prev_slots)
        normalized = self._hidden_norm(hidden)
        pair = self._ops.concat((self._embedding_norm(embeddings), normalized))
        return pair, normalized if self._config.norm_before_residual else hidden

    def _context(self, batch: Batch) -> ForwardContext:
        layer_type = self._config.layer.layer_types[0]
        metadata = self._ops.build_attention_metadata(batch, layer_type.window, 1)
        positions = batch.mrope_positions if self.uses_mrope else batch.positions
        assert positions is not None, "batch without M-RoPE positions"
        tables = self._rope.cos_sin, self._rope.query_cos_sin
        return ForwardContext(batch, *tables, metadata, positions, layer_type.rope.mrope_sections)

    def _load_fc(self, precision: Precision, weights: Weights) -> Linear:
        """fc, and the norms before it."""
        config, size = self._config, self._config.target_hidden_size
        joined = len(self.aux_layers) * size
        self._fc_norm = self._load_norm(weights, "input_norm", joined) if config.norm_before_fc else None
        names = [f"fc_norm.{index}" for index in range(len(self.aux_layers))] if config.fc_norm else []
        self._aux_norms = [self._load_norm(weights, name, size) for name in names]
        outputs = {"fc": config.layer.hidden_size}
        return Linear(self._ops, load_linear(self._ops, weights, precision.linear_format, joined, outputs))

    def _load_embedding(
        self, target: Decoder, precision: Precision, weights: Weights
    ) -> tuple[Embedding, bool]:
        """The head's own embedding, or the target's; and whether the target's first input is the same."""
        config = self._config.layer
        if weights.has("embed_tokens.weight"):
            outputs = {"embed_tokens": config.vocab_size}
            weight = load_linear(self._ops, weights, precision.embedding_format, config.hidden_size, outputs)
            return Embedding(self._ops, weight, precision.dtype), False
        if config.hidden_size != target.config.hidden_size:
            problem = f"has no embed_tokens, and its hidden size {config.hidden_size} is not the model's"
            raise _misfit(f"{problem}, {target.config.hidden_size}")
        embedding = Embedding(self._ops, target.embedding_weight, precision.dtype)
        return embedding, target.config.embedding_scale * target.config.input_scale == 1.0

    def _load_lm_head(self, target: Decoder, precision: Precision, weights: Weights) -> Linear:
        """The head's own output layer, or the target's."""
        config, size = self._config, self._config.layer.hidden_size
        if not weights.has("lm_head.weight") and config.draft_vocab_size == target.vocab_size:
            if size != target.config.hidden_size:
                raise _misfit(f"has no lm_head, and its hidden size {size} is not the model's")
            return target.lm_head
        outputs = {"lm_head": config.draft_vocab_size}
        weight = load_linear(self._ops, weights, precision.embedding_format, size, outputs)
        return Linear(self._ops, weight, torch.float32)

    def _load_norm(self, weights: Weights, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._ops, weights.tensor(f"{name}.weight", size), self._config.layer.eps)


def check_target(config: Eagle3Config, target: DecoderConfig) -> tuple[int, ...]:
    """The layers whose input the head reads. Raises CheckpointError for a target of another shape."""
    layer, num_layers = config.layer, len(target.layer_types)
    if config.target_hidden_size != target.hidden_size:
        sizes = f"{config.target_hidden_size}, this one has {target.hidden_size}"
        raise _misfit(f"is made for a model of hidden size {sizes}")
    if layer.vocab_size != target.vocab_size:
        sizes = f"{layer.vocab_size} tokens, this one has {target.vocab_size}"
        raise _misfit(f"is made for a model with {sizes}")
    if config.draft_vocab_size > layer.vocab_size:
        raise _misfit(f"has draft_vocab_size {config.draft_vocab_size}, its model {layer.vocab_size} tokens")
    aux_layers = config.aux_layers or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= each <= num_layers for each in aux_layers):
        raise _misfit(f"reads layers {', '.join(map(str, aux_layers))}, the model has {num_layers}")
    return aux_layers


def check_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Raises CheckpointError for ids that are outside of the vocabulary, or not unique."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise _misfit(f"has d2t with ids outside of the model's vocabulary of {vocab_size}")
    if len(set(ids.tolist())) < len(ids):
        raise _misfit("has d2t that maps two of its tokens to the same id")
    return ids


def _misfit(reason: str) -> CheckpointError:
    return CheckpointError(f"the EAGLE-3 head {reason}", "draft_model")
