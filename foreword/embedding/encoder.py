"""The interface of text encoders, their config and batch, and the options of config.json that they share.

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
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.embedding.encoder_messages import EncoderInput
from foreword.errors import shown
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.weights.config_reader import ConfigReader

RANKER_SUFFIX = "ForSequenceClassification"
SCORE_ACTIVATIONS = MappingProxyType(
    {"torch.nn.modules.activation.Sigmoid": "sigmoid", "torch.nn.modules.linear.Identity": "identity"}
)
TRAINING_OPTIONS = (
    *("attention_probs_dropout_prob", "classifier_dropout", "dropout", "gradient_checkpointing"),
    *("hidden_dropout_prob", "matryoshka_dimensions"),
)
UNUSED_HEAD_OPTIONS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "tie_word_embeddings"),
)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
    }
)


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


def ignore_unused(config: ConfigReader) -> None:
    """Mark options without effect on inference as read."""
    for key in (*TRAINING_OPTIONS, *UNUSED_HEAD_OPTIONS):
        config.get(key, None)


def read_activation(config: ConfigReader, key: str) -> str:
    """The name of an activation in ACTIVATIONS."""
    return config.get_choice(key, tuple(ACTIVATIONS), "gelu")


def read_score_activation(config: ConfigReader) -> str | None:
    """The activation of a ranker's logit; None for a checkpoint without a ranking head.

    Default is a sigmoid, as in sentence-transformers and vLLM.
    """
    named = config.get("sbert_ce_default_activation_function", None)
    nested = config.get_section("sentence_transformers")
    if nested is not None:
        nested.get("version", None)
        named = nested.get("activation_fn", named)
        nested.check_all_read()
    architectures = config.get("architectures", None)
    names = architectures if isinstance(architectures, list) else []
    if not any(str(name).endswith(RANKER_SUFFIX) for name in names):
        return None
    id2label = config.get_section("id2label")
    labels = config.get_int("num_labels", 2) if id2label is None else len(id2label.keys)
    if labels != 1:
        raise config.error("id2label", f"names {labels} labels; a ranker has one")
    if named is not None and named not in SCORE_ACTIVATIONS:
        raise config.error(
            "sentence_transformers",
            f"activation_fn must be one of {', '.join(SCORE_ACTIVATIONS)}, got {shown(named)}",
        )
    return SCORE_ACTIVATIONS[named] if named else "sigmoid"
