"""Architectures of decoders by the name that checkpoints give them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foreword.errors import CheckpointError
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.gemma2 import Gemma2
from foreword.models.gemma3_text import Gemma3Text
from foreword.models.llama import Llama
from foreword.models.mistral import Mistral
from foreword.models.phi3 import Phi3
from foreword.models.qwen2 import Qwen2
from foreword.models.qwen3 import Qwen3

__all__ = ["ARCHITECTURES", "read_decoder"]

ARCHITECTURES: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "gemma2": Gemma2,
        "gemma3_text": Gemma3Text,
        "llama": Llama,
        "mistral": Mistral,
        "phi3": Phi3,
        "qwen2": Qwen2,
        "qwen3": Qwen3,
    }
)


def read_decoder(reader: ConfigReader, default: str | None = None) -> tuple[type[Decoder], DecoderConfig]:
    """The decoder that a config describes, every option of it honoured.

    default  its model_type where the config does not say
    Raises CheckpointError.
    """
    model_type = reader.get("model_type", *([] if default is None else [default]))
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"{reader.source}: model_type {model_type!r:.80} is not supported; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    architecture = ARCHITECTURES[model_type]
    config = architecture.read_config(reader)
    reader.check_all_read()
    return architecture, config
