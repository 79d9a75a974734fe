"""From a checkpoint directory to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from foreword.config import ModelFacts
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.models.base import Model, Precision
from foreword.models.config import ConfigReader, read_json
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.gemma2 import Gemma2
from foreword.models.gemma3_text import Gemma3Text
from foreword.models.llama import Llama
from foreword.models.mistral import Mistral
from foreword.models.phi3 import Phi3
from foreword.models.qwen2 import Qwen2
from foreword.models.qwen3 import Qwen3
from foreword.models.weights import CountedWeights, FileWeights, ShapesOnly

__all__ = ["ARCHITECTURES", "load_model", "read_facts"]

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
NEEDED_FOR_FACTS = 1  # positions: tables by position are not what read_facts is after


def read_facts(path: Path) -> ModelFacts:
    """What config.json tells, without reading weights. Raises CheckpointError."""
    architecture, config = _read_config(path)
    return architecture(config, ShapesOnly(), Precision.of("float32"), CountedWeights(), "cpu", NEEDED_FOR_FACTS).facts


def load_model(
    path: Path,
    ops: Ops,
    precision: Precision,
    device: str,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """The model in `path`.

    max_model_len  longest context it will be used for
    progress       gets bytes done and bytes in all
    Raises CheckpointError, which names the option, the tensor or the file.
    """
    architecture, config = _read_config(path)
    weights = FileWeights(path, device, progress)
    model = architecture(config, ops, precision, weights, device, max_model_len)
    weights.finish(ignore={"lm_head.weight": "a copy of the embedding"} if config.tied else None)
    return model


def _read_config(path: Path) -> tuple[type[Decoder], DecoderConfig]:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    reader = ConfigReader(read_json(file), str(file))
    model_type = reader.raw("model_type")
    if model_type not in ARCHITECTURES:
        raise CheckpointError(f"{file}: model_type {model_type!r} is not supported; known: {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[model_type]
    config = architecture.read(reader)
    reader.finish()
    return architecture, config
