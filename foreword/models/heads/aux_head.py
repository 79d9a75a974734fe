"""Base of EAGLE-3 and DFlash heads, which read the target's hidden states of several layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from foreword.core.batch import Batch, HeadShape
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.rope import Rope
from foreword.layers.weights import Weights
from foreword.models.decoder import Decoder, describe_model, layer_contexts
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import ParallelDraft, Precision
from foreword.planning.memory import ModelInfo


@dataclass(frozen=True, slots=True)
class AuxHeadConfig:
    """Options of a head; `layer` describes its layers as those of a decoder."""

    layer: DecoderConfig
    aux_layers: tuple[int, ...]  # as in Head; (): chosen by the target's number of layers
    parallel: ParallelDraft | None  # None: each pass drafts one token
    draft_vocab_size: int
    target_hidden_size: int


class AuxHead:
    """See Head. The embedding and the output layer are its own, or the target's."""

    NAME: ClassVar[str]  # in errors
    FIRST_POSITION: ClassVar[int] = 1  # that attention sees: no hidden state precedes the first token
    method: str
    has_fixed_position = False
    info: ModelInfo
    cache_shape: HeadShape

    def __init__(
        self,
        config: AuxHeadConfig,
        target: Decoder,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
        max_model_len: int,
        vocab_ids: Tensor | None,
        outer: Weights | None = None,
        embedding_scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """vocab_ids int64 [draft vocabulary]: the target's id of each logit; None: the same ids.

        outer  of the embedding, if that is elsewhere
        Raises CheckpointError for a head that does not fit the target.
        """
        self._aux_config = config
        self._target = target
        self._ops = ops
        self._device = device
        self._check_target(vocab_ids)
        self.aux_layers = config.aux_layers
        self.parallel = config.parallel
        self._weights = weights
        self._parameters_before = weights.num_parameters
        size = config.layer.hidden_size
        joined = len(config.aux_layers) * config.target_hidden_size
        self._fc = Linear(ops, load_linear(ops, weights, precision.linear_format, joined, {"fc": size}))
        outer = outer or weights
        self._has_own_embedding = outer.has("embed_tokens.weight")
        self._has_own_lm_head = config.draft_vocab_size != target.vocab_size or weights.has("lm_head.weight")
        for name, is_own in (("embed_tokens", self._has_own_embedding), ("lm_head", self._has_own_lm_head)):
            if not is_own and size != target.config.hidden_size:
                problem = f"has no {name}, and its hidden size {size} is not the model's"
                raise head_mismatch(self.NAME, f"{problem}, {target.config.hidden_size}")
        embedding = target.embedding_weight
        if self._has_own_embedding:
            rows = {"embed_tokens": config.layer.vocab_size}
            embedding = load_linear(ops, outer, precision.embedding_format, size, rows)
        self._embedding = Embedding(ops, embedding, precision.dtype, embedding_scale)
        lm_head = target.lm_head
        if self._has_own_lm_head:
            rows = {"lm_head": config.draft_vocab_size}
            packed = load_linear(ops, weights, precision.embedding_format, size, rows)
            lm_head = Linear(ops, packed, torch.float32)
        self._logits = DraftLogits(ops, lm_head, target.vocab_size, vocab_ids, softcap)
        self.set_max_model_len(max_model_len)

    @property
    def uses_mrope(self) -> bool:
        return self._aux_config.layer.layer_types[0].uses_mrope

    def set_max_model_len(self, max_model_len: int) -> None:
        """Prepare for contexts of this length, whatever the head's own limit: positions are relative."""
        self._rope = Rope(self._aux_config.layer.layer_types[0].rope, max_model_len, self._device)

    def _contexts(self, batch: Batch) -> list[ForwardContext]:
        layer_types = self._aux_config.layer.layer_types
        return layer_contexts(self._ops, batch, layer_types, self._rope, self.FIRST_POSITION)

    def _describe(self, markov_parameters: int = 0) -> ModelInfo:
        """Call it when all weights are loaded."""
        config, parallel = self._aux_config, self.parallel
        own_rows = config.layer.vocab_size * self._has_own_embedding + config.draft_vocab_size
        own_parameters = own_rows * config.layer.hidden_size if self._has_own_lm_head else 0
        return replace(
            describe_model(config.layer, self._weights.num_parameters - self._parameters_before, 0),
            architecture=self.method,
            context_len=self._target.info.context_len,
            vocab_size=self._target.vocab_size,
            embedding_parameters=own_parameters + markov_parameters,
            markov_parameters=markov_parameters,
            is_head=True,
            hidden_values_per_token=self.cache_shape.hidden_size,
            draft_tokens_per_pass=1 if parallel is None else parallel.max_tokens,
            draft_extra_rows=0 if parallel is None else parallel.num_rows(0),
        )

    def _check_target(self, vocab_ids: Tensor | None) -> None:
        """Raises CheckpointError for a head that does not fit the target."""
        config, target = self._aux_config, self._target.config
        vocab_size, num_layers = config.layer.vocab_size, len(target.layer_types)
        mask = None if config.parallel is None else config.parallel.mask_token_id
        problem = None
        if config.target_hidden_size != target.hidden_size:
            sizes = f"{config.target_hidden_size}, this one has {target.hidden_size}"
            problem = f"is made for a model of hidden size {sizes}"
        elif vocab_size != target.vocab_size:
            sizes = f"{vocab_size} tokens, this one has {target.vocab_size}"
            problem = f"is made for a model with {sizes}"
        elif not all(0 <= each <= num_layers for each in config.aux_layers):
            problem = f"reads layers {', '.join(map(str, config.aux_layers))}, the model has {num_layers}"
        elif config.draft_vocab_size > vocab_size:
            problem = f"has draft_vocab_size {config.draft_vocab_size}, its model {vocab_size} tokens"
        elif mask is not None and mask >= vocab_size:
            problem = f"has mask token {mask}, its model {vocab_size} tokens"
        elif vocab_ids is not None and not 0 <= int(vocab_ids.min()) <= int(vocab_ids.max()) < vocab_size:
            problem = f"has d2t with ids outside of the model's vocabulary of {vocab_size}"
        elif vocab_ids is not None and len(set(vocab_ids.tolist())) < len(vocab_ids):
            problem = "has d2t that maps two of its tokens to the same id"
        if problem is not None:
            raise head_mismatch(self.NAME, problem)


def head_mismatch(name: str, reason: str) -> CheckpointError:
    """A head, by the name of its kind, that does not fit the target."""
    return CheckpointError(f"the {name} head {reason}", "draft_model")


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
