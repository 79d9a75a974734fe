"""EAGLE-3 heads: a layer over the target's hidden states of three depths. Source: arXiv 2503.01840.

P-EAGLE heads draft all tokens in one pass: masks stand for the tokens and hidden states not yet known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foreword.core.batch import Batch, HeadCache, HeadShape, KVLayer
from foreword.errors import CheckpointError
from foreword.kernels.ops import MRopeSections, Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.norm import RMSNorm
from foreword.layers.weights import Weights
from foreword.models.architectures import read_decoder
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import MROPE_KEYS, DecoderConfig, read_mrope_sections
from foreword.models.heads.aux_head import AuxHead, AuxHeadConfig
from foreword.models.interfaces import KVCache, ParallelDraft, Precision
from foreword.models.layer_builder import LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

NUM_AUX_LAYERS = 3
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # P-EAGLE's: in speculators, in others
MASK_TOKENS = 8  # drafted in one pass if the config does not say how many: as published heads are trained
# Of the first layer: in the original's files, in those of speculators, and in GGUF files by our names
LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.")
# Model types of the layer, all built as Llama's
LAYER_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
WINDOW_KEYS = ("max_window_layers", "use_sliding_window", "sliding_window")  # Qwen's
# What training and the training framework write, without effect here
UNUSED_KEYS = ("embed_requires_grad", "has_no_defaults_at_init", "speculators_config", "speculators_version")
TARGET_KEYS = ("decoder_sparse_step", "target_model_type")  # the target's own, copied by SpecForge
# eagle_config of NVIDIA's ModelOpt: these are what EAGLE-3 is
EAGLE_CONFIG_VALUES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


@dataclass(frozen=True, slots=True)
class Eagle3Config(AuxHeadConfig):
    """Options of a head; P-EAGLE has `parallel`."""

    norm_before_residual: bool = False  # the residual is the normalized hidden state
    norm_before_fc: bool = False  # one norm over all layers together
    fc_norm: bool = False  # a norm for each layer
    norm_output: bool = False  # the recycled hidden state is normalized (EAGLE-3.1)

    @classmethod
    def read(cls, config: ConfigReader) -> Eagle3Config:
        """config.json in the original's or speculators' format. Raises CheckpointError."""
        section = config.get_section("transformer_layer_config")
        is_original = section is None
        config = _without_copies(config) if is_original else config
        parallel = _read_parallel(config)
        head = config if section is None else config.without(UNUSED_KEYS)
        aux_layers = _read_aux_layers(head)
        # speculators writes norm_before_residual; readers of its format take true where EAGLE-3 lacks it
        default = not is_original and parallel is None
        options = {"norm_before_residual": head.get_bool("norm_before_residual", default)}
        options |= {name: head.get_bool(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        if options["norm_before_fc"] and options["fc_norm"]:
            raise head.error("fc_norm", "excludes norm_before_fc")
        target_hidden_size = head.get_optional_int("target_hidden_size")
        draft_vocab_size = head.get_optional_int("draft_vocab_size")
        if section is None:
            layer = _read_layer(head)
        else:
            for key in ("speculators_model_type", "transformer_layer_config", *MASK_KEYS):
                head.get(key, None)
            head.require_value("tie_word_embeddings", False)
            layer = _read_layer(_without_copies(section).with_defaults({"dtype": head.get_dtype()}))
            head.check_all_read()
        return cls(
            replace(layer, takes_lora=False),
            aux_layers,
            parallel,
            draft_vocab_size or layer.vocab_size,
            target_hidden_size or layer.hidden_size,
            **options,
        )


def _without_copies(config: ConfigReader) -> ConfigReader:
    """Without what SpecForge copies from the target; windows stay where they are turned on."""
    if config.get_bool("use_sliding_window", False):
        return config.without(TARGET_KEYS)
    if "use_sliding_window" not in config:
        return config.without((*TARGET_KEYS, "max_window_layers"))
    return config.without((*TARGET_KEYS, *WINDOW_KEYS)).with_defaults({"sliding_window": None})


def _read_layer(config: ConfigReader) -> DecoderConfig:
    if config.get("model_type", "llama") not in LAYER_TYPES:
        raise config.error("model_type", f"must be one of {', '.join(LAYER_TYPES)} in a head")
    scaling = config.get_section("rope_scaling")
    if scaling is None or "mrope_section" not in scaling:
        return read_decoder(config, "llama")[1]
    given = config.get("rope_scaling")
    plain = {name: value for name, value in given.items() if name not in MROPE_KEYS}
    layer = read_decoder(config.with_value("rope_scaling", plain), "llama")[1]
    default = MRopeSections((0, 0, 0), scaling.get_bool("mrope_interleaved", False))
    return _with_mrope(layer, read_mrope_sections(scaling, layer.layer_types[0].rope.rotary_dim, default))


def _with_mrope(layer: DecoderConfig, sections: MRopeSections | None) -> DecoderConfig:
    """The layers with M-RoPE of these sections; None: without."""
    types = tuple(
        replace(each, rope=replace(each.rope, mrope_sections=sections)) for each in layer.layer_types
    )
    return replace(layer, layer_types=types)


def _read_parallel(config: ConfigReader) -> ParallelDraft | None:
    """How a P-EAGLE head drafts in one pass; None: the head is EAGLE-3."""
    mask_keys = [key for key in MASK_KEYS if key in config]
    for key in mask_keys:
        config.get(key)
    is_parallel = config.get_bool("parallel_drafting", bool(mask_keys))
    kinds = [config.get("speculators_model_type", None), *(config.get_strs("architectures") or ())]
    if not is_parallel and not any(str(kind).lower().startswith("peagle") for kind in kinds):
        return None
    if not mask_keys:
        names = ", ".join(MASK_KEYS)
        raise CheckpointError(f"{config.source}: a P-EAGLE head needs the id of its mask token: {names}")
    speculators = config.get_section("speculators_config")
    methods = [] if speculators is None else speculators.get_sections("proposal_methods")
    num_tokens = methods[0].get_int("speculative_tokens", MASK_TOKENS) if methods else MASK_TOKENS
    return ParallelDraft(config.get_int(mask_keys[0], low=0), num_tokens, True, True)


def _read_aux_layers(head: ConfigReader) -> tuple[int, ...]:
    """Layers that the config names, if any: outside of `eagle_config` by their input, in it by their output.

    vLLM reads the former alone; ModelOpt and SpecForge write the latter, and SGLang reads them.
    """
    eagle = head.get_section("eagle_config") or ConfigReader({}, f"{head.source}: eagle_config")
    for name, value in EAGLE_CONFIG_VALUES.items():
        eagle.require_value(name, value)
    named, offset = (eagle, 1) if AUX_LAYERS_KEY in eagle else (head, 0)
    values: Any = named.get(AUX_LAYERS_KEY, None)
    eagle.check_all_read()
    if not values:
        return ()
    if (
        not isinstance(values, list)
        or len(values) != NUM_AUX_LAYERS
        or not all(type(x) is int for x in values)
    ):
        raise named.error(AUX_LAYERS_KEY, f"must be a list of {NUM_AUX_LAYERS} layers, got {values!r:.60}")
    return tuple(each + offset for each in values)


class Eagle3(AuxHead):
    """See Head. fc(aux_hidden_states) [T, h] and the embedding of a token become a pair [T, 2h].

    The first layer reads pairs; others are a decoder's, which then run over all known tokens too.
    """

    NAME = "EAGLE-3"
    method = "eagle3"

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
        """See AuxHead."""
        num_layers = len(target.config.layer_types)
        aux_layers = config.aux_layers or (2, num_layers // 2, num_layers - 3)
        layer = config.layer if target.uses_mrope else _with_mrope(config.layer, None)  # axes are equal
        self._config = config = replace(config, aux_layers=aux_layers, layer=layer)
        prefix = next((each for each in LAYER_PREFIXES if weights.has(f"{each}hidden_norm.weight")), "")
        body = weights.prefixed(prefix or LAYER_PREFIXES[0])
        outer = weights.prefixed("model.") if prefix.startswith("model.") else weights
        options = (target, ops, precision, weights, device, max_model_len, vocab_ids)
        super().__init__(config, *options, outer)
        size, target_size = layer.hidden_size, config.target_hidden_size
        joined, names = len(aux_layers) * target_size, range(len(aux_layers) if config.fc_norm else 0)
        self._fc_norm = self._load_norm(weights, "input_norm", joined) if config.norm_before_fc else None
        self._aux_norms = [self._load_norm(weights, f"fc_norm.{index}", target_size) for index in names]
        self._mask_state = None if config.parallel is None else self._load_mask_state(weights, precision)
        builder = LayerBuilder(ops, layer, precision, 0, body, head_inputs=2 * size)
        self._embedding_norm, self._hidden_norm = builder.norm("input_layernorm"), builder.norm("hidden_norm")
        self._attention = builder.attention("self_attn")
        self._mlp_norm = builder.norm("post_attention_layernorm")
        self._mlp = builder.feed_forward()
        self._later_layers = [
            LlamaLayer(
                LayerBuilder(ops, layer, precision, i, outer.prefixed(f"layers.{i}."), head_inputs=size)
            )
            for i in range(1, len(layer.layer_types))
        ]
        self._norm = self._load_norm(outer, "norm", size)
        scale = target.config.embedding_scale * target.config.input_scale
        # The input of the target's first layer
        self._reads_target_input = not self._has_own_embedding and scale == 1.0
        self.cache_shape = HeadShape(layer.kv_shapes, size)
        self.info = self._describe()

    def commit(
        self, batch: Batch, embeddings: Tensor, aux_hidden_states: Sequence[Tensor], cache: HeadCache
    ) -> None:
        """See Head."""
        ops = self._ops
        ops.write_hidden(self._fc(self._join(aux_hidden_states)), cache.hidden, batch.slots)
        if not self._reads_target_input:
            embeddings = self._embedding(batch.token_ids)
        pair, residual = self._pair(embeddings, batch, cache)
        contexts = self._contexts(batch)
        if not self._later_layers:
            self._attention.write_kv(pair, contexts[0], cache.layers[0])
            return
        x = self._first_layer(pair, residual, contexts[0], cache.layers[0])
        *inner, last = zip(self._later_layers, contexts[1:], cache.layers[1:], strict=True)
        for layer, context, memory in inner:
            x = layer(x, context, memory)
        last[0].write_kv(x, *last[1:])

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """See Head."""
        cache = kv_cache.head
        assert cache is not None
        if self._mask_state is not None:
            parts = [part.repeat(self._ops.row_tile, 1) for part in self._mask_state]
            cache.hidden[cache.mask_slot] = self._fc(self._join(parts))[0]

        def draft(batch: Batch) -> Tensor:
            ops = self._ops
            pair, residual = self._pair(self._embedding(batch.token_ids), batch, cache)
            contexts = self._contexts(batch)
            x = self._first_layer(pair, residual, contexts[0], cache.layers[0])
            later = zip(self._later_layers, contexts[1:], cache.layers[1:], strict=True)
            for layer, context, memory in later:
                x = layer(x, context, memory)
            y = self._norm(x)
            if self.parallel is None:
                ops.write_hidden(y if self._config.norm_output else x, cache.hidden, batch.slots)
            return self._logits(ops.index_rows(y, batch.sample_rows))

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

    def _first_layer(
        self, pair: Tensor, residual: Tensor, context: ForwardContext, memory: KVLayer
    ) -> Tensor:
        """[T, 2h] -> [T, h]"""
        x = self._attention(pair, context, memory, residual)
        return self._mlp(self._mlp_norm(x), x)

    def _load_mask_state(self, weights: Weights, precision: Precision) -> list[Tensor]:
        """`mask_hidden`, in place of the auxiliary hidden states: [1, H] for each layer."""
        joined = len(self.aux_layers) * self._config.target_hidden_size
        try:
            state = weights.tensor("mask_hidden", 1, 1, joined)  # speculators' name
        except CheckpointError:
            state = weights.tensor("mask_hidden", 1, joined)
        return list(
            torch.split(state.view(1, joined).to(precision.dtype), self._config.target_hidden_size, 1)
        )

    def _load_norm(self, weights: Weights, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._ops, weights.tensor(f"{name}.weight", size), self._config.layer.eps)
