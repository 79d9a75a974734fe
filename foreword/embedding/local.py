"""An encoder in the caller's own process and thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foreword.config.hardware import probe_hardware
from foreword.config.options import Config
from foreword.embedding.base import TextEncoder
from foreword.embedding.loader import load_encoder
from foreword.embedding.messages import (
    EncoderInfo,
    EncoderInput,
    TokenizedPair,
    split_batches,
    validate_pairs,
    validate_texts,
)
from foreword.embedding.sentence_transformers import PoolingConfig, read_pooling_config
from foreword.embedding.tokenizer import EncoderTokenizer
from foreword.embedding.vectors import scalar
from foreword.kernels.ops import Ops
from foreword.kernels.registry import select_backend
from foreword.models.hub import resolve_path

__all__ = ["LocalEncoder", "load_local_encoder"]


class LocalEncoder:
    """A loaded encoder; one caller at a time.

    texts  makes token ids of texts
    """

    def __init__(self, encoder: TextEncoder, info: EncoderInfo, tokenizer: EncoderTokenizer) -> None:
        self._encoder = encoder
        self.info = info
        self.tokenizer = tokenizer

    def encode(self, token_ids: Sequence[Sequence[int]], pooling: str | None = None) -> list[bytes]:
        """The vector of each text, float32 [H] as bytes, not normalized. Raises InvalidRequest."""
        return self._compute_all(validate_texts(self.info, token_ids, pooling))

    def score(self, pairs: Sequence[TokenizedPair]) -> list[float]:
        """The score of each pair. Raises InvalidRequest."""
        return [scalar(vector) for vector in self._compute_all(validate_pairs(self.info, pairs))]

    @torch.inference_mode()
    def compute_batch(self, inputs: Sequence[EncoderInput]) -> list[bytes]:
        """All of them in one batch: a vector each, or a score as a vector of one value."""
        rows = self._encoder.build_batch(inputs)
        hidden = torch.split(self._encoder.forward(rows), rows.seq_lens)
        if self.info.task == "rank":
            return [_to_bytes(self._compute_score(states)) for states in hidden]
        return [
            _to_bytes(_pool(states, str(item.pooling))) for states, item in zip(hidden, inputs, strict=True)
        ]

    def _compute_all(self, inputs: Sequence[EncoderInput]) -> list[bytes]:
        return [vector for batch in split_batches(inputs) for vector in self.compute_batch(batch)]

    def _compute_score(self, states: Tensor) -> Tensor:
        config, head = self._encoder.config, self._encoder.head
        assert head is not None
        logit = head(_pool(states, config.head_pooling)[None])
        return torch.sigmoid(logit) if config.score_activation == "sigmoid" else logit


def load_local_encoder(config: Config, ops: Ops | None = None) -> LocalEncoder:
    """The encoder that `config.embedding_model` names. Raises ConfigError or CheckpointError.

    It computes on the CPU, also beside a GPU: that is the generating model's.
    """
    assert config.embedding_model is not None
    path = resolve_path(config.embedding_model)
    ops = ops or select_backend("cpu", threads=num_encoder_threads(config), isa=config.cpu_isa)
    encoder, parameters = load_encoder(path, ops)
    info = _encoder_info(path, encoder, parameters, read_pooling_config(path))
    return LocalEncoder(encoder, info, EncoderTokenizer.from_directory(path, info))


def num_encoder_threads(config: Config) -> int:
    """As many as the generating engine may have."""
    return config.threads or probe_hardware("cpu").cores


def _encoder_info(
    path: Path, encoder: TextEncoder, num_parameters: int, pooling_config: PoolingConfig
) -> EncoderInfo:
    config = encoder.config
    return EncoderInfo(
        name=path.resolve().name,
        architecture=config.architecture,
        task="embed" if config.score_activation is None else "rank",
        hidden_size=config.hidden_size,
        max_tokens=min(config.max_tokens, pooling_config.max_tokens or config.max_tokens),
        num_parameters=num_parameters,
        vocab_size=config.vocab_size,
        pooling=pooling_config.pooling,
        normalize=pooling_config.normalize,
        backend=encoder.ops.name,
        prompts=pooling_config.prompts,
        default_prompt=pooling_config.default_prompt,
    )


def _pool(states: Tensor, pooling: str) -> Tensor:
    """Hidden states [t, H] of one text -> [H]"""
    if pooling == "mean":
        return states.mean(0)
    if pooling == "max":
        return states.amax(0)
    return states[0 if pooling == "cls" else -1]


def _to_bytes(vector: Tensor) -> bytes:
    return vector.numpy().tobytes()
