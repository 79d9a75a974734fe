"""The decoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: those of Qwen2 and Qwen3, with positions in three directions."""

from __future__ import annotations

from dataclasses import replace

from foreword.kernels.ops import Axes
from foreword.models.common import read_common, read_head_dim
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig, Kind
from foreword.models.qwen2 import read_qwen_windows
from foreword.models.qwen3 import HEAD_DIM
from foreword.models.rope import read_rope

__all__ = ["OTHER_TOKENS", "read_qwen2_text", "read_qwen3_text"]

ONE_BY_ONE = Axes((16, 24, 24))
IN_TURNS = Axes((24, 20, 20), interleaved=True)
OTHER_TOKENS = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")  # of templates
QWEN2_THETA, QWEN3_THETA = 1000000.0, 500000.0  # where a config does not say


def read_qwen2_text(config: ConfigReader) -> DecoderConfig:
    """Of Qwen2-VL and Qwen2.5-VL: files on the hub have its options at the top, newer ones in a `text_config`."""
    text = config.table("text_config")
    if text is None:
        return _read_qwen2(config)
    return _nested(config, text, _read_qwen2(text))


def read_qwen3_text(config: ConfigReader) -> DecoderConfig:
    """Of Qwen3-VL."""
    text = config.table("text_config")
    if text is None:
        raise config.refuse("text_config", "is missing")
    head_dim = read_head_dim(text, HEAD_DIM)
    rope = read_rope(text, head_dim, text.whole("max_position_embeddings"), QWEN3_THETA, IN_TURNS)
    bias = text.flag("attention_bias", False)
    kinds = [Kind(window, rope) for window in read_qwen_windows(text)]
    read = read_common(text, "qwen3_vl", kinds=kinds, head_dim=HEAD_DIM, qkv_bias=bias, out_bias=bias)
    return _nested(config, text, read)


def _read_qwen2(config: ConfigReader) -> DecoderConfig:
    rope = read_rope(config, read_head_dim(config), config.whole("max_position_embeddings"), QWEN2_THETA, ONE_BY_ONE)
    return read_common(config, "qwen2_vl", kinds=[Kind(window, rope) for window in read_qwen_windows(config)], qkv_bias=True)


def _nested(config: ConfigReader, text: ConfigReader, read: DecoderConfig) -> DecoderConfig:
    """Options that may stand on either level; some writers repeat all of the text's at the top."""
    for key in ("image_token_id", *OTHER_TOKENS):
        text.raw(key, None)
    text.finish()
    config.repeats(text)
    tied = config.flag("tie_word_embeddings", False) or read.tied
    return replace(read, tied=tied, dtype=read.dtype if "dtype" in text or "torch_dtype" in text else config.dtype())
