"""An encoder in the caller's own process and thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foreword.config import Config
from foreword.core.vectors import only_value
from foreword.encoders.base import Encoder
from foreword.encoders.inputs import Pair, batches, pairs_of, texts_of
from foreword.encoders.loader import load_encoder
from foreword.encoders.messages import EncoderInfo, Input
from foreword.encoders.recipe import Recipe, read_recipe
from foreword.encoders.texts import EncoderTexts
from foreword.hardware import probe
from foreword.kernels.ops import Ops
from foreword.kernels.registry import select
from foreword.models.hub import resolve_path

__all__ = ["LocalEncoder", "load_local"]


class LocalEncoder:
    """A loaded encoder; one caller at a time.

    texts  makes token ids of texts
    """

    def __init__(self, encoder: Encoder, info: EncoderInfo, texts: EncoderTexts) -> None:
        self._encoder = encoder
        self.info = info
        self.texts = texts

    def encode(self, token_ids: Sequence[Sequence[int]], pooling: str | None = None) -> list[bytes]:
        """The vector of each text, float32 [H] as bytes, not normalized. Raises InvalidRequest."""
        return self._all(texts_of(self.info, token_ids, pooling))

    def rank(self, pairs: Sequence[Pair]) -> list[float]:
        """The score of each pair. Raises InvalidRequest."""
        return [only_value(vector) for vector in self._all(pairs_of(self.info, pairs))]

    @torch.inference_mode()
    def compute(self, inputs: Sequence[Input]) -> list[bytes]:
        """All of them in one batch: a vector each, or a score as a vector of one value."""
        rows = self._encoder.rows(inputs)
        hidden = torch.split(self._encoder.forward(rows), rows.sizes)
        if self.info.kind == "rank":
            return [_bytes(self._score(states)) for states in hidden]
        return [_bytes(_pooled(states, str(item.pooling))) for states, item in zip(hidden, inputs, strict=True)]

    def _all(self, inputs: Sequence[Input]) -> list[bytes]:
        return [vector for batch in batches(inputs) for vector in self.compute(batch)]

    def _score(self, states: Tensor) -> Tensor:
        config, head = self._encoder.config, self._encoder.head
        assert head is not None
        logit = head(_pooled(states, config.head_pooling)[None])
        return torch.sigmoid(logit) if config.score == "sigmoid" else logit


def load_local(config: Config, ops: Ops | None = None) -> LocalEncoder:
    """The encoder that `config.embedding_model` names. Raises ConfigError or CheckpointError.

    It computes on the CPU, also beside a GPU: that is the generating model's.
    """
    assert config.embedding_model is not None
    path = resolve_path(config.embedding_model)
    ops = ops or select("cpu", threads=encoder_threads(config), isa=config.cpu_isa)
    encoder, parameters = load_encoder(path, ops)
    info = _info(path, encoder, parameters, read_recipe(path))
    return LocalEncoder(encoder, info, EncoderTexts.from_directory(path, info))


def encoder_threads(config: Config) -> int:
    """As many as the generating engine may have."""
    return config.threads or probe("cpu").cores


def _info(path: Path, encoder: Encoder, parameters: int, recipe: Recipe) -> EncoderInfo:
    config = encoder.config
    return EncoderInfo(
        name=path.resolve().name,
        architecture=config.architecture,
        kind="embed" if config.score is None else "rank",
        hidden=config.hidden,
        max_tokens=min(config.max_tokens, recipe.max_tokens or config.max_tokens),
        parameters=parameters,
        vocab_size=config.vocab_size,
        pooling=recipe.pooling,
        normalize=recipe.normalize,
        backend=encoder.ops.name,
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
    )


def _pooled(states: Tensor, pooling: str) -> Tensor:
    """Hidden states [t, H] of one text -> [H]"""
    if pooling == "mean":
        return states.mean(0)
    if pooling == "max":
        return states.amax(0)
    return states[0 if pooling == "cls" else -1]


def _bytes(vector: Tensor) -> bytes:
    return vector.numpy().tobytes()
