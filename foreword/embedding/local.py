"""An encoder in the caller's process and thread, and its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.config.options import Config
from foreword.embedding.bert import Bert, DistilBert, MPNet, Roberta
from foreword.embedding.encoder import EncoderConfig, TextEncoder
from foreword.embedding.encoder_messages import (
    EncoderInfo,
    EncoderInput,
    TokenizedPair,
    scalar,
    split_batches,
    validate_pairs,
    validate_texts,
)
from foreword.embedding.encoder_tokenizer import EncoderTokenizer
from foreword.embedding.modernbert import ModernBert
from foreword.embedding.sentence_transformers import read_pooling_config
from foreword.errors import CheckpointError, shown
from foreword.kernels.ops import Ops
from foreword.kernels.registry import select_backend
from foreword.planning.hardware import probe_hardware
from foreword.weights.config_reader import ConfigReader, read_json
from foreword.weights.hub import resolve_path
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


class LocalEncoder:
    """A loaded encoder. Not thread-safe."""

    def __init__(self, encoder: TextEncoder, info: EncoderInfo, tokenizer: EncoderTokenizer) -> None:
        self._encoder = encoder
        self.info = info
        self.tokenizer = tokenizer

    def encode(self, token_ids: Sequence[Sequence[int]], pooling: str | None = None) -> list[bytes]:
        """Vectors of texts, float32 [H] as bytes, not normalized. Raises InvalidRequest."""
        return self._compute_all(validate_texts(self.info, token_ids, pooling))

    def score(self, pairs: Sequence[TokenizedPair]) -> list[float]:
        """Scores of pairs. Raises InvalidRequest."""
        return [scalar(vector) for vector in self._compute_all(validate_pairs(self.info, pairs))]

    @torch.inference_mode()
    def compute_batch(self, inputs: Sequence[EncoderInput]) -> list[bytes]:
        """Vectors of one batch; a score is a vector of one dimension."""
        batch = self._encoder.build_batch(inputs)
        hidden = torch.split(self._encoder.forward(batch), batch.seq_lens)
        if self.info.task == "rank":
            vectors = [self._compute_score(states) for states in hidden]
        else:
            vectors = [_pool(states, str(item.pooling)) for states, item in zip(hidden, inputs, strict=True)]
        return [vector.numpy().tobytes() for vector in vectors]

    def _compute_all(self, inputs: Sequence[EncoderInput]) -> list[bytes]:
        return [vector for batch in split_batches(inputs) for vector in self.compute_batch(batch)]

    def _compute_score(self, states: Tensor) -> Tensor:
        config, head = self._encoder.config, self._encoder.head
        assert head is not None
        logit = head(_pool(states, config.head_pooling)[None])
        return torch.sigmoid(logit) if config.score_activation == "sigmoid" else logit


def load_local_encoder(config: Config, ops: Ops | None = None) -> LocalEncoder:
    """Load `config.embedding_model`, always on the CPU. Raises ConfigError or CheckpointError."""
    assert config.embedding_model is not None
    path = resolve_path(config.embedding_model)
    ops = ops or select_backend("cpu", threads=num_encoder_threads(config), isa=config.cpu_isa)
    encoder, num_parameters = load_encoder(path, ops)
    shape, pooling_config = encoder.config, read_pooling_config(path)
    info = EncoderInfo(
        name=path.resolve().name,
        architecture=shape.architecture,
        task="embed" if shape.score_activation is None else "rank",
        hidden_size=shape.hidden_size,
        max_tokens=min(shape.max_tokens, pooling_config.max_tokens or shape.max_tokens),
        num_parameters=num_parameters,
        vocab_size=shape.vocab_size,
        pooling=pooling_config.pooling,
        normalize=pooling_config.normalize,
        backend=ops.name,
        prompts=pooling_config.prompts,
        default_prompt=pooling_config.default_prompt,
    )
    return LocalEncoder(encoder, info, EncoderTokenizer.from_directory(path, info))


def num_encoder_threads(config: Config) -> int:
    """As many threads as the engine."""
    return config.threads or probe_hardware("cpu").cores


def _pool(states: Tensor, pooling: str) -> Tensor:
    """Hidden states [t, H] of one text -> [H]"""
    if pooling == "mean":
        return states.mean(0)
    if pooling == "max":
        return states.amax(0)
    return states[0 if pooling == "cls" else -1]


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
            f"{file}: model_type {shown(model_type)} is not a supported encoder ({known}); "
            "a decoder embeds as the served model",
            "embedding_model",
        )
    architecture = ARCHITECTURES[model_type]
    config = architecture.read_config(reader)
    reader.check_all_read()
    return architecture, config
