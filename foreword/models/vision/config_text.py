"""The decoder within a config of a model that sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from foreword.models.architectures import read_decoder
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig

__all__ = ["read_image_token_id", "read_text_decoder"]

# What a text_config means that does not say: files on the hub hold only what differs from these.
LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
}
TEXT_CONFIG_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            **LLAMA_DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
        "mistral": {
            **LLAMA_DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        "qwen2": {
            **LLAMA_DEFAULTS,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
    }
)


def read_text_decoder(config: ConfigReader, default_model_type: str) -> tuple[type[Decoder], DecoderConfig]:
    """The `text_config` of a config, which has the last word on data type and tying. The head is that of the whole model: it
    knows no cap, whatever the text_config says.

    default  its model_type where it does not say
    Raises CheckpointError.
    """
    text = config.get_section("text_config") or ConfigReader({}, f"{config.source}: text_config")
    text = text.with_defaults(TEXT_CONFIG_DEFAULTS.get(str(text.get("model_type", default_model_type)), {}))
    architecture, decoder = read_decoder(text, default_model_type)
    tied = config.get_bool("tie_word_embeddings", False) or decoder.tie_word_embeddings
    dtype = config.get_dtype() if "dtype" in config or "torch_dtype" in config else decoder.dtype
    return architecture, replace(decoder, tie_word_embeddings=tied, dtype=dtype, logit_softcap=None)


def read_image_token_id(config: ConfigReader, decoder_config: DecoderConfig) -> int:
    """The placeholder's id, by either of its names. It has a row in the embedding, though nobody reads it."""
    key = "image_token_id" if "image_token_id" in config else "image_token_index"
    token_id = config.get_int(key, low=0)
    if token_id >= decoder_config.vocab_size:
        raise config.error(
            key, f"{token_id} is beyond the vocab_size {decoder_config.vocab_size} of the text_config"
        )
    return token_id
