"""The interface of text encoders, their config and batch.

T  rows: the tokens of all texts, without padding
H  hidden size
N  texts

A vector's bits depend only on its text: linear layers are row-invariant (kernels/ops.py), and torch
operations whose result may depend on the shape run on one text at a time (`VarlenBatch.map_texts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from foreword.embedding.encoder_messages import EncoderInput
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.weights.config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shape and options of a checkpoint."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    eps: float
    activation: str
    max_tokens: int  # limit of a text
    num_positions: int  # rows of the position table
    score_activation: str | None  # for a ranker's logit: "sigmoid" or "identity"; None: not a ranker
    first_position: int = 0  # position of a text's first token
    pad_id: int | None = None  # this token always has position `first_position - 1`
    num_types: int = 0  # rows of the type table; 0: no table
    head_pooling: str = "cls"  # pooling of a ranker: "cls" or "mean"


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """A batch without padding."""

    token_ids: Tensor  # int64 [T]
    type_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    seq_lens: list[int]  # rows of each text [N]

    def map_texts(self, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply `operation` to the rows [t, ...] of each text -> [T, ...]"""
        pieces = [operation(piece) for piece in torch.split(x, self.seq_lens)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class RankerHead(Protocol):
    """The layers that score a pair of texts."""

    def __call__(self, vector: Tensor) -> Tensor:
        """The pooled vector of one pair, [1, H] -> its logit [1, 1]"""


class TextEncoder(ABC):
    """A loaded encoder; one subclass per architecture."""

    prefix: ClassVar[str]  # before the body's tensor names in a checkpoint with a head
    unused_prefixes: ClassVar[Mapping[str, str]]  # prefixes of unused tensors -> reason

    def __init__(self, config: EncoderConfig, ops: Ops, body: Weights, checkpoint: Weights) -> None:
        """`body` holds the encoder's tensors, `checkpoint` all tensors."""
        self.config = config
        self.ops = ops
        self.load(body)
        self.head = self.load_head(body, checkpoint) if config.score_activation is not None else None

    @classmethod
    @abstractmethod
    def read_config(cls, config: ConfigReader) -> EncoderConfig:
        """Parses config.json. Raises CheckpointError for an unsupported option."""

    @abstractmethod
    def load(self, body: Weights) -> None:
        """Build the model."""

    @abstractmethod
    def load_head(self, body: Weights, checkpoint: Weights) -> RankerHead:
        """Build the ranking head."""

    @abstractmethod
    def forward(self, batch: VarlenBatch) -> Tensor:
        """The last layer's hidden states, float32 [T, H]."""

    def build_batch(self, inputs: Sequence[EncoderInput]) -> VarlenBatch:
        token_ids: list[int] = []
        type_ids: list[int] = []
        positions: list[int] = []
        for item in inputs:
            token_ids += item.token_ids
            # Tokenizers number the texts of a pair even for a model with one type.
            has_types = item.type_ids and self.config.num_types > 1
            type_ids += item.type_ids if has_types else [0] * len(item.token_ids)
            positions += self._position_ids(item.token_ids)
        return VarlenBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            type_ids=torch.tensor(type_ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            seq_lens=[len(item.token_ids) for item in inputs],
        )

    def _position_ids(self, token_ids: Sequence[int]) -> list[int]:
        """RoBERTa's positions: a padding token has the position before the first, and is not counted."""
        first, pad_id = self.config.first_position, self.config.pad_id
        positions, next_position = [], first
        for token_id in token_ids:
            positions.append(first - 1 if token_id == pad_id else next_position)
            next_position += token_id != pad_id
        return positions
