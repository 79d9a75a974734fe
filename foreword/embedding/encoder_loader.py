"""Loads an encoder from a checkpoint directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from foreword.embedding.bert import Bert, DistilBert, MPNet, Roberta
from foreword.embedding.encoder import EncoderConfig, TextEncoder
from foreword.embedding.modernbert import ModernBert
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.weights.config_reader import ConfigReader, read_json
from foreword.weights.safetensors_weights import SafetensorsWeights

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
    """The encoder in `path` and its number of parameters. Raises CheckpointError."""
    architecture, config = _read_config(path)
    weights = EncoderWeights(path)
    has_head = any(name.startswith(architecture.prefix) for name in weights.names)
    body = weights.prefixed(architecture.prefix if has_head else "")
    encoder = architecture(config, ops, body, weights)
    unused = {
        name: reason
        for name in weights.names
        for start, reason in architecture.unused_prefixes.items()
        if name.removeprefix(architecture.prefix).startswith(start)
    }
    weights.check_all_read(ignored=unused)
    return encoder, weights.num_parameters


class EncoderWeights(SafetensorsWeights):
    """Weights whose norms may have their old names, gamma and beta."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        for new, old in LEGACY_NAMES.items():
            legacy = name.removesuffix(new) + old
            if name.endswith(new) and legacy in self.names:
                name = legacy
        return super().tensor(name, *shape)


def _read_config(path: Path) -> tuple[type[TextEncoder], EncoderConfig]:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json", "embedding_model")
    reader = ConfigReader(read_json(file), str(file))
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{file}: model_type {model_type!r:.80} is not a supported encoder ({known}); "
            "a decoder embeds as the served model",
            "embedding_model",
        )
    architecture = ARCHITECTURES[model_type]
    config = architecture.read_config(reader)
    reader.check_all_read()
    return architecture, config
