"""Gemma 1, and 2: norms before and after each branch, softcaps, a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.layers.attention import ForwardContext
from foreword.layers.mlp import MLP, MoE
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    ACTIVATIONS,
    DecoderConfig,
    read_decoder_config,
    read_layer_windows,
    read_window,
)
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 256
WINDOW = 4096
SCORE_SOFTCAP = 50.0
LOGIT_SOFTCAP = 30.0
QUERY_PRE_ATTN_SCALAR = 256
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def apply_gemma_options(config: ConfigReader, base: DecoderConfig) -> DecoderConfig:
    """Options of Gemma 2 and 3: norm weights with offset 1, a scaled embedding, a score scale."""
    config.require_value("use_bidirectional_attention", False)
    return replace(
        base,
        attn_scale=config.get_float("query_pre_attn_scalar", QUERY_PRE_ATTN_SCALAR) ** -0.5,
        norm_offset=1.0,
        embedding_scale=base.hidden_size**0.5,
    )


class Gemma(Llama):
    """Gemma 1: Llama's layers with an offset of norm weights and a scaled embedding."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gemma`"""
        config.require_value("use_bidirectional_attention", False)
        config.require_value("hidden_activation", "gelu_pytorch_tanh")
        base = read_decoder_config(
            config,
            "gemma",
            head_dim=HEAD_DIM,
            bias_key="attention_bias",
            # "gelu" in older files means its tanh form
            activation=config.get_choice("hidden_act", ACTIVATIONS | {"gelu": "gelu_tanh"}, "gelu"),
            tie_word_embeddings=True,
        )
        return replace(base, norm_offset=1.0, embedding_scale=base.hidden_size**0.5)


class Gemma2Layer:
    """Each branch: norm, attention or MLP, norm, residual."""

    def __init__(
        self, builder: LayerBuilder, norms: Sequence[str] = NORMS, mlp: MLP | MoE | None = None
    ) -> None:
        """norms  names, in order; mlp  instead of the MLP under Llama's names"""
        self._add = builder.ops.add
        self._attention = builder.attention("self_attn")
        self._mlp = mlp or builder.mlp("mlp")
        input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm = map(builder.norm, norms)
        self._input_norm, self._post_attention_norm = input_norm, post_attention_norm
        self._pre_mlp_norm, self._post_mlp_norm = pre_mlp_norm, post_mlp_norm

    def __call__(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attend(x, context, cache)
        return self._add(x, self._post_mlp_norm(self._mlp(self._pre_mlp_norm(x))))

    def _attend(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        return self._add(x, self._post_attention_norm(self._attention(self._input_norm(x), context, cache)))


class Gemma2(Decoder):
    """Layers 0, 2, 4 ... have a sliding window, the others full attention."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gemma2`"""
        window = read_window(config, WINDOW)
        base = read_decoder_config(
            config,
            "gemma2",
            windows=read_layer_windows(config, window, lambda index: window is not None and index % 2 == 0),
            head_dim=HEAD_DIM,
            bias_key="attention_bias",
            activation_key="hidden_activation",
            tie_word_embeddings=True,
        )
        return replace(
            apply_gemma_options(config, base),
            attn_softcap=config.get_optional_float("attn_logit_softcapping", default=SCORE_SOFTCAP),
            logit_softcap=config.get_optional_float("final_logit_softcapping", default=LOGIT_SOFTCAP),
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return Gemma2Layer(builder)
