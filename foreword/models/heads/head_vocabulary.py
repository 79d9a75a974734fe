"""Embedding and output layer of a trained head: its own, or the target's; and whether they fit."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.weights import Weights
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import Precision


def head_mismatch(name: str, reason: str) -> CheckpointError:
    """A head, by the name of its kind, that does not fit the target."""
    return CheckpointError(f"the {name} head {reason}", "draft_model")


def check_target(name: str, config: DecoderConfig, target_hidden_size: int, target: DecoderConfig) -> None:
    """Raises CheckpointError for a target of another shape; config: of the head's layers."""
    if target_hidden_size != target.hidden_size:
        sizes = f"{target_hidden_size}, this one has {target.hidden_size}"
        raise head_mismatch(name, f"is made for a model of hidden size {sizes}")
    if config.vocab_size != target.vocab_size:
        sizes = f"{config.vocab_size} tokens, this one has {target.vocab_size}"
        raise head_mismatch(name, f"is made for a model with {sizes}")


def check_aux_layers(name: str, aux_layers: tuple[int, ...], num_layers: int) -> None:
    """Raises CheckpointError for layers that the target lacks."""
    if not all(0 <= each <= num_layers for each in aux_layers):
        layers = ", ".join(map(str, aux_layers))
        raise head_mismatch(name, f"reads layers {layers}, the model has {num_layers}")


def check_draft_vocab(
    name: str, config: DecoderConfig, draft_vocab_size: int, mask_token_id: int | None
) -> None:
    """Raises CheckpointError for a draft vocabulary or a mask token beyond the vocabulary."""
    if draft_vocab_size > config.vocab_size:
        raise head_mismatch(
            name, f"has draft_vocab_size {draft_vocab_size}, its model {config.vocab_size} tokens"
        )
    if mask_token_id is not None and mask_token_id >= config.vocab_size:
        raise head_mismatch(name, f"has mask token {mask_token_id}, its model {config.vocab_size} tokens")


def check_ids(name: str, ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """Raises CheckpointError for ids that are outside of the vocabulary, or not unique."""
    if ids is None:
        return None
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise head_mismatch(name, f"has d2t with ids outside of the model's vocabulary of {vocab_size}")
    if len(set(ids.tolist())) < len(ids):
        raise head_mismatch(name, "has d2t that maps two of its tokens to the same id")
    return ids


def load_embedding(
    name: str,
    target: Decoder,
    ops: Ops,
    config: DecoderConfig,
    precision: Precision,
    weights: Weights,
    scale: float = 1.0,
) -> tuple[Embedding, bool]:
    """The embedding, times `scale`, and whether it is the head's own."""
    if weights.has("embed_tokens.weight"):
        outputs = {"embed_tokens": config.vocab_size}
        weight = load_linear(ops, weights, precision.embedding_format, config.hidden_size, outputs)
        return Embedding(ops, weight, precision.dtype, scale), True
    if config.hidden_size != target.config.hidden_size:
        problem = f"has no embed_tokens, and its hidden size {config.hidden_size} is not the model's"
        raise head_mismatch(name, f"{problem}, {target.config.hidden_size}")
    return Embedding(ops, target.embedding_weight, precision.dtype, scale), False


def load_lm_head(
    name: str,
    target: Decoder,
    ops: Ops,
    config: DecoderConfig,
    precision: Precision,
    weights: Weights,
    draft_vocab_size: int,
) -> Linear:
    """The output layer: the head's own, or `target.lm_head`."""
    size = config.hidden_size
    if not weights.has("lm_head.weight") and draft_vocab_size == target.vocab_size:
        if size != target.config.hidden_size:
            raise head_mismatch(name, f"has no lm_head, and its hidden size {size} is not the model's")
        return target.lm_head
    outputs = {"lm_head": draft_vocab_size}
    weight = load_linear(ops, weights, precision.embedding_format, size, outputs)
    return Linear(ops, weight, torch.float32)


class DraftLogits:
    """Hidden states [R, h] -> logits, float32 [R, V] of the target's vocabulary; -inf: never drafted."""

    def __init__(
        self,
        ops: Ops,
        lm_head: Linear,
        vocab_size: int,
        vocab_ids: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """vocab_size  of the target
        vocab_ids  int64 [rows of lm_head]: the target's id of each; None: the same ids
        """
        self._ops = ops
        self._lm_head = lm_head
        self._vocab_size = vocab_size
        self._vocab_ids = vocab_ids
        self._softcap = softcap

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._lm_head(x)
        if self._softcap is not None:
            logits = self._ops.softcap(logits, self._softcap)
        if self._vocab_ids is None:
            return logits
        return self._ops.expand_vocab(logits, self._vocab_ids, self._vocab_size)
