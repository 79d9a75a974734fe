"""Gemma 2: norms before and after each branch, soft caps, every other layer with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foreword.core.kv import KVLayer
from foreword.layers.attention import Pass
from foreword.models.common import read_common, read_windows
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, Layer, Parts

__all__ = ["Gemma2", "gemma_options"]

HEAD_DIM = 256
WINDOW = 4096
SCORE_SOFTCAP = 50.0
LOGIT_SOFTCAP = 30.0
QUERY_SCALAR = 256


def gemma_options(config: ConfigReader, base: DecoderConfig) -> DecoderConfig:
    """What Gemma 2 and 3 add: norm weights that start from 1, a scaled embedding, their own score scale."""
    config.expect("use_bidirectional_attention", False)
    return replace(
        base,
        scale=config.number("query_pre_attn_scalar", QUERY_SCALAR) ** -0.5,
        norm_offset=1.0,
        embedding_scale=base.hidden**0.5,
    )


class Gemma2Layer:
    """Each branch: norm, attention or MLP, norm; then it is added to what it read."""

    def __init__(self, parts: Parts) -> None:
        self._add = parts.ops.add
        self._before_attention = parts.norm("input_layernorm")
        self._attention = parts.attention("self_attn")
        self._after_attention = parts.norm("post_attention_layernorm")
        self._before_mlp = parts.norm("pre_feedforward_layernorm")
        self._mlp = parts.mlp("mlp")
        self._after_mlp = parts.norm("post_feedforward_layernorm")

    def __call__(self, x: Tensor, shared: Pass, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._add(x, self._after_attention(self._attention(self._before_attention(x), shared, cache)))
        return self._add(x, self._after_mlp(self._mlp(self._before_mlp(x))))


class Gemma2(Decoder):
    """Layers 0, 2, 4 ... look back `sliding_window` positions, the others to the beginning."""

    @classmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gemma2`"""
        bias = config.flag("attention_bias", False)
        window = config.optional_whole("sliding_window", absent=WINDOW)
        base = read_common(
            config,
            "gemma2",
            windows=read_windows(config, window, lambda index: window is not None and index % 2 == 0),
            head_dim=HEAD_DIM,
            qkv_bias=bias,
            out_bias=bias,
            activation_key="hidden_activation",
            tied=True,
        )
        return replace(
            gemma_options(config, base),
            score_softcap=config.optional_number("attn_logit_softcapping", absent=SCORE_SOFTCAP),
            logit_softcap=config.optional_number("final_logit_softcapping", absent=LOGIT_SOFTCAP),
        )

    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""
        return Gemma2Layer(parts)
