"""From a checkpoint's directory to an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from foreword.embedding.base import EncoderConfig, TextEncoder
from foreword.embedding.bert import Bert
from foreword.embedding.distilbert import DistilBert
from foreword.embedding.modernbert import ModernBert
from foreword.embedding.mpnet import MPNet
from foreword.embedding.roberta import Roberta
from foreword.errors import CheckpointError
from foreword.kernels.ops import Matrix, Ops
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader, read_json
from foreword.models.weights import FileWeights, PrefixedWeights

__all__ = ["ARCHITECTURES", "load_encoder"]

ARCHITECTURES: Mapping[str, type[TextEncoder]] = MappingProxyType(
    {
        "bert": Bert,
        "camembert": Roberta,
        "distilbert": DistilBert,
        "modernbert": ModernBert,
        "mpnet": MPNet,
        "roberta": Roberta,
        "xlm-roberta": Roberta,
    }
)
LEGACY_NAMES = MappingProxyType({"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"})


def load_encoder(path: Path, ops: Ops) -> tuple[TextEncoder, int]:
    """The encoder in `path`, and its number of parameters.

    Raises CheckpointError, which names the option, the tensor or the file.
    """
    architecture, config = _read_config(path)
    files = FileWeights(path)
    headed = any(name.startswith(architecture.prefix) for name in files.names)
    whole = (
        LegacyNames(files)
        if any(name.endswith(tuple(LEGACY_NAMES.values())) for name in files.names)
        else files
    )
    encoder = architecture(config, ops, whole.prefixed(architecture.prefix if headed else ""), whole)
    files.check_all_read(ignored=_unused_tensors(architecture, files.names))
    return encoder, files.num_parameters


class LegacyNames:
    """Tensors of a checkpoint from the days when norms had a gamma and a beta."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def num_parameters(self) -> int:
        return self._weights.num_parameters

    def tensor(self, name: str, *shape: int) -> Tensor:
        for new, old in LEGACY_NAMES.items():
            if name.endswith(new):
                name = name.removesuffix(new) + old
        return self._weights.tensor(name, *shape)

    def weights(
        self, out_features: Mapping[str, int], in_features: int
    ) -> AbstractContextManager[Sequence[Matrix]]:
        return self._weights.weights(out_features, in_features)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)


def _read_config(path: Path) -> tuple[type[TextEncoder], EncoderConfig]:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json", "embedding_model")
    reader = ConfigReader(read_json(file), str(file))
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{file}: model_type {model_type!r:.80} is no encoder that is supported; known: {known}. Decoders embed as the "
            "served model",
            "embedding_model",
        )
    architecture = ARCHITECTURES[model_type]
    config = architecture.read_config(reader)
    reader.check_all_read()
    return architecture, config


def _unused_tensors(architecture: type[TextEncoder], names: frozenset[str]) -> dict[str, str]:
    """Tensors of the file that are of no use, and why."""
    found = {}
    for name in names:
        for beginning, why in architecture.unused_prefixes.items():
            if name.removeprefix(architecture.prefix).startswith(beginning):
                found[name] = why
    return found
