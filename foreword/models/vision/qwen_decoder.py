"""The decoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: those of Qwen2 and Qwen3, with positions in three directions."""

from __future__ import annotations

from dataclasses import replace

from foreword.kernels.ops import MRopeSections
from foreword.models.common import read_decoder_config, read_head_dim
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig, LayerType
from foreword.models.qwen2 import read_qwen_layer_windows
from foreword.models.qwen3 import HEAD_DIM
from foreword.models.rope import read_rope

__all__ = ["IGNORED_TOKEN_KEYS", "read_qwen2_decoder", "read_qwen3_decoder"]

QWEN2_MROPE_SECTIONS = MRopeSections((16, 24, 24))
QWEN3_MROPE_SECTIONS = MRopeSections((24, 20, 20), interleaved=True)
IGNORED_TOKEN_KEYS = (
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)  # of templates
QWEN2_THETA, QWEN3_THETA = 1000000.0, 500000.0  # where a config does not say


def read_qwen2_decoder(config: ConfigReader) -> DecoderConfig:
    """Of Qwen2-VL and Qwen2.5-VL: files on the hub have its options at the top, newer ones in a `text_config`."""
    text = config.get_section("text_config")
    if text is None:
        return _read_qwen2(config)
    return _merge_text_config(config, text, _read_qwen2(text))


def read_qwen3_decoder(config: ConfigReader) -> DecoderConfig:
    """Of Qwen3-VL."""
    text = config.get_section("text_config")
    if text is None:
        raise config.error("text_config", "is missing")
    head_dim = read_head_dim(text, HEAD_DIM)
    rope = read_rope(
        text, head_dim, text.get_int("max_position_embeddings"), QWEN3_THETA, QWEN3_MROPE_SECTIONS
    )
    bias = text.get_bool("attention_bias", False)
    kinds = [LayerType(window, rope) for window in read_qwen_layer_windows(text)]
    read = read_decoder_config(
        text, "qwen3_vl", layer_types=kinds, head_dim=HEAD_DIM, qkv_bias=bias, out_bias=bias
    )
    return _merge_text_config(config, text, read)


def _read_qwen2(config: ConfigReader) -> DecoderConfig:
    rope = read_rope(
        config,
        read_head_dim(config),
        config.get_int("max_position_embeddings"),
        QWEN2_THETA,
        QWEN2_MROPE_SECTIONS,
    )
    return read_decoder_config(
        config,
        "qwen2_vl",
        layer_types=[LayerType(window, rope) for window in read_qwen_layer_windows(config)],
        qkv_bias=True,
    )


def _merge_text_config(
    config: ConfigReader, text: ConfigReader, decoder_config: DecoderConfig
) -> DecoderConfig:
    """Options that may stand on either level; some writers repeat all of the text's at the top."""
    for key in ("image_token_id", *IGNORED_TOKEN_KEYS):
        text.get(key, None)
    text.check_all_read()
    config.ignore_repeats_of(text)
    tied = config.get_bool("tie_word_embeddings", False) or decoder_config.tie_word_embeddings
    return replace(
        decoder_config,
        tie_word_embeddings=tied,
        dtype=decoder_config.dtype if "dtype" in text or "torch_dtype" in text else config.get_dtype(),
    )
