"""Interfaces between the engine and models."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foreword.core.batch import Batch, HeadCache, HeadShape, LayerCache
from foreword.core.images import PromptImage
from foreword.planning.memory import ModelInfo


@dataclass(frozen=True, slots=True)
class Precision:
    """Data type of activations and weight formats, as in Ops.pack_linear."""

    dtype: torch.dtype  # activations
    linear_format: str
    embedding_format: str  # embedding and head

    @classmethod
    def from_dtypes(
        cls, dtype: str, weight_dtype: str | None = None, quantization: str | None = None
    ) -> Precision:
        """With quantization the embedding and the head are int8: their errors decide the token directly."""
        plain = weight_dtype or dtype
        return cls(getattr(torch, dtype), quantization or plain, "int8" if quantization else plain)


class KVCache(Protocol):
    """The KV cache, by layer."""

    @property
    def head(self) -> HeadCache | None:
        """Memory of a trained head."""

    def layer(self, index: int) -> LayerCache:
        """K and V of one layer, or its state."""


@dataclass(frozen=True, slots=True)
class MarkovStep:
    """A Markov head's output for one token of each draft."""

    bias: Tensor  # float32 [R, V of the target], added to its logits
    state: Tensor  # input of the next step
    logprobs: (
        Tensor | None
    )  # float32 [R]: log-probability that the target accepts it; None: no confidence head


class MarkovHead(Protocol):
    """Logits of a pass whose tokens are sampled one after the other, since each depends on those before."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, h] of a pass -> float32 [R, V of the target], without the bias."""

    def initial_state(self, num_drafts: int) -> Tensor:
        """[num_drafts, width]"""

    def step(self, hidden: Tensor, token_ids: Tensor, state: Tensor) -> MarkovStep:
        """hidden [R, h] of the next token of each draft; token_ids int64 [R] before it; state [R, width]"""


@dataclass(frozen=True, slots=True)
class ParallelDraft:
    """How a head drafts several tokens in one pass: over the last token, and masks behind it."""

    mask_token_id: int
    max_tokens: int  # limit of a draft
    samples_last_token: bool  # its row drafts the first token; else that of the first mask does
    reads_mask_state: bool  # masks read the hidden state of HeadCache.mask_slot
    markov: MarkovHead | None = field(default=None, compare=False, repr=False)

    @property
    def max_rows(self) -> int:
        return self.num_rows(self.max_tokens)

    def num_rows(self, num_tokens: int) -> int:
        """Rows of a draft of `num_tokens`: without a row of the last token for the first, one more."""
        return num_tokens + (not self.samples_last_token)


class Head(Protocol):
    """A trained head: it drafts token p + 1 from token p and the target's hidden state at position p - 1.

    Its memory lies at the slots of the target's tokens. Each pass of the target commits its rows there, so a
    draft begins without computing known tokens again.
    """

    method: str  # name of its drafter
    info: ModelInfo
    cache_shape: HeadShape
    aux_layers: tuple[int, ...]  # read at their input; the number of layers: output of the last one
    has_fixed_position: bool  # draft rows see the target's tokens alone, from the position of the last one

    @property
    def parallel(self) -> ParallelDraft | None:
        """None: each pass drafts one token."""

    @property
    def uses_mrope(self) -> bool:
        """Whether batches need mrope_positions."""

    def set_max_model_len(self, max_model_len: int) -> None:
        """As of a model."""

    def commit(
        self, batch: Batch, embeddings: Tensor, aux_hidden_states: Sequence[Tensor], cache: HeadCache
    ) -> None:
        """Write hidden states, K and V of all rows of a pass of the target.

        embeddings [T, H]: input of its first layer; aux_hidden_states [T, H] of each of `aux_layers`
        """

    def compile_draft(self, kv_cache: KVCache) -> Callable[[Batch], Tensor]:
        """Compile one pass over draft rows: logits of sampled rows, float32 [R, V] of the target's V.

        A row reads the hidden state of the slot before, and writes its own, with K and V.
        """


class VisionEncoder(Protocol):
    """Encodes one image at a time, so that features depend on the image alone."""

    feature_size: int  # H, or a multiple of it with DeepStack features

    def encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Features [num_tokens, feature_size] in the decoder's data type, on the engine's device.

        It runs in pieces between decode steps. Each yield is the cost since the last one, in multiply-adds
        of linear layers. A piece is a block of the encoder, or less for a large image.
        """

    def make_max_image(self, max_tokens: int) -> PromptImage:
        """The black image that takes most memory, of at most `max_tokens` tokens if there are any."""
