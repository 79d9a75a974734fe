"""What all encoders have in common: their shape, the flat batch, and how vectors and scores come out of it.

T  rows (one token each, of all texts one behind the other, without padding)
H  hidden size
N  texts

The bits of a text's vector depend on nothing but the text: linear layers are row-invariant (kernels/ops.py); everything
else that torch may compute differently for another shape runs on the rows of one text alone (`Rows.each`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from foreword.embedding.messages import EncoderInput
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.config import ConfigReader

__all__ = ["EncoderConfig", "RankerHead", "TextEncoder", "VarlenBatch"]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shape and options of a checkpoint.

    max_tokens      longest text
    positions       rows of the position table
    first_position  of a text's first token in that table
    pad_id          a token that keeps `first_position - 1`, wherever it stands; None: none does
    types           rows of the type table; 0: there is none
    score           what becomes of a ranker's logit: "sigmoid" or "identity"; None: the checkpoint has no such head
    head_pooling    "cls" or "mean": what a ranker's head reads
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    eps: float
    activation: str
    max_tokens: int
    num_positions: int
    score_activation: str | None
    first_position: int = 0
    pad_id: int | None = None
    num_types: int = 0
    head_pooling: str = "cls"


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """A flat batch.

    token_ids, type_ids, positions  int64 [T]
    starts                          N+1 ints: rows of text n are starts[n] to starts[n + 1]
    """

    token_ids: Tensor
    type_ids: Tensor
    positions: Tensor
    cu_seqlens: tuple[int, ...]

    @property
    def seq_lens(self) -> list[int]:
        """Rows of each text."""
        return [end - begin for begin, end in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)]

    def map_texts(self, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`operation` on the rows [t, ...] of each text alone -> [T, ...]"""
        pieces = [operation(piece) for piece in torch.split(x, self.seq_lens)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class RankerHead(Protocol):
    """Layers that make a score."""

    def __call__(self, vector: Tensor) -> Tensor:
        """The pooled vector of one pair, [1, H] -> its logit [1, 1]"""


class TextEncoder(ABC):
    """A loaded encoder. A subclass, one to an architecture, reads the config and builds the layers."""

    prefix: ClassVar[str]  # of the body's tensors where the checkpoint has a head
    unused_prefixes: ClassVar[
        Mapping[str, str]
    ]  # beginnings of names of tensors that are of no use here: why

    def __init__(self, config: EncoderConfig, ops: Ops, body: Weights, checkpoint: Weights) -> None:
        """body: tensors of the model; whole: those of the checkpoint, with the names they have there."""
        self.config = config
        self.ops = ops
        self.load(body)
        self.head = self.load_head(body, checkpoint) if config.score_activation is not None else None

    @classmethod
    @abstractmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """What config.json says. Raises CheckpointError for what this architecture does not honour."""

    @abstractmethod
    def load(self, body: Weights) -> None:
        """Build the model."""

    @abstractmethod
    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """Build what makes a score of a pair's vector."""

    @abstractmethod
    def forward(self, batch: VarlenBatch) -> Tensor:
        """Hidden states behind the last layer, float32 [T, H]."""

    def build_batch(self, inputs: Sequence[EncoderInput]) -> VarlenBatch:
        """Lay texts out as one batch."""
        starts = [0]
        for item in inputs:
            starts.append(starts[-1] + len(item.token_ids))
        return VarlenBatch(
            token_ids=torch.tensor([i for item in inputs for i in item.token_ids], dtype=torch.int64),
            type_ids=torch.tensor(
                [i for item in inputs for i in _type_ids(self.config, item)], dtype=torch.int64
            ),
            positions=torch.tensor(
                [i for item in inputs for i in _position_ids(self.config, item)], dtype=torch.int64
            ),
            cu_seqlens=tuple(starts),
        )


def _type_ids(config: EncoderConfig, item: EncoderInput) -> Sequence[int]:
    """Where there is one type (or none), tokenizers may number texts all the same."""
    return item.type_ids if item.type_ids and config.num_types > 1 else [0] * len(item.token_ids)


def _position_ids(config: EncoderConfig, item: EncoderInput) -> Sequence[int]:
    count = len(item.token_ids)
    if config.pad_id is None or config.pad_id not in item.token_ids:
        return range(config.first_position, config.first_position + count)
    return _positions_skipping_padding(item.token_ids, config.pad_id, config.first_position)


def _positions_skipping_padding(token_ids: Sequence[int], pad_id: int, first_position: int) -> list[int]:
    """Positions as RoBERTa counts them: a token of padding has the one before the first, and is not counted."""
    positions, next_position = [], first_position
    for token_id in token_ids:
        positions.append(first_position - 1 if token_id == pad_id else next_position)
        next_position += token_id != pad_id
    return positions
