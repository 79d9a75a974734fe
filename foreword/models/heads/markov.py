"""Markov heads of DSpark: the logits of a token depend on the draft's tokens before it; and confidence heads.

Source: SpecForge and DeepSpec (`markov_head.py`, `AcceptRatePredictor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.ops import Ops
from foreword.layers.linear import Embedding, Linear, load_linear
from foreword.layers.weights import Weights
from foreword.models.heads.head_vocabulary import DraftLogits
from foreword.models.interfaces import MarkovStep, Precision

KINDS = ("vanilla", "gated", "rnn")
CONFIDENCE = "confidence_head.proj"


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """kind: what a token's bias is made of.

    vanilla  the token before, through two tables of low rank
    gated    the same, times a gate of the hidden state and the token before
    rnn      a state over all tokens of the draft, the token before and the hidden state
    """

    rank: int = 0  # 0: no Markov head
    kind: str = "vanilla"
    uses_confidence: bool = False  # the checkpoint may have no confidence head all the same
    confidence_reads_token: bool = (
        True  # the confidence head reads the token before, not only the hidden state
    )


NO_MARKOV_HEAD = MarkovConfig()


class DSparkMarkovHead:
    """See interfaces.MarkovHead."""

    def __init__(
        self,
        config: MarkovConfig,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        hidden_size: int,
        vocab_sizes: tuple[int, int],
        vocab_ids: Tensor | None,
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """vocab_sizes  of the target and of the draft
        vocab_ids  as in DraftLogits
        logits  of hidden states without the bias
        """
        self.logits = logits
        self._config = config
        self._ops = ops
        self._dtype = precision.dtype
        rank, body = config.rank, weights.prefixed("markov_head.")
        tables = (ops, body, precision.embedding_format, rank)
        embedding = load_linear(*tables, {"markov_w1": vocab_sizes[0]})
        output = Linear(ops, load_linear(*tables, {"markov_w2": vocab_sizes[1]}), torch.float32)
        self._embedding = Embedding(ops, embedding, precision.dtype)
        self._output = DraftLogits(ops, output, vocab_sizes[0], vocab_ids)
        name, width, size = {
            "vanilla": ("", 0, 0),
            "gated": ("gate_proj", hidden_size + rank, rank),
            "rnn": ("joint_proj", hidden_size + 2 * rank, 3 * rank),
        }[config.kind]
        self._proj = self._load_linear(body, precision, name, width, size) if name else None
        self._confidence: Linear | None = None
        if config.uses_confidence and weights.has(f"{CONFIDENCE}.weight"):
            width = hidden_size + rank * config.confidence_reads_token
            self._confidence = self._load_linear(weights, precision, CONFIDENCE, width, 1)

    def initial_state(self, num_drafts: int) -> Tensor:
        """See interfaces.MarkovHead."""
        return torch.zeros(num_drafts, self._config.rank, dtype=self._dtype)

    def step(self, hidden: Tensor, token_ids: Tensor, state: Tensor) -> MarkovStep:
        """See interfaces.MarkovHead."""
        token = self._embedding(token_ids)
        latent, logprobs = token, None
        if self._config.kind == "gated":
            latent = token * self._project((hidden, token)).sigmoid().to(token.dtype)
        elif self._config.kind == "rnn":
            gate, candidate, value = self._project((state.to(token.device), token, hidden)).chunk(3, -1)
            gate = gate.sigmoid()
            state = (gate * state + (1 - gate) * candidate.tanh()).to(token.dtype)
            latent = value.tanh().to(token.dtype)
        if self._confidence is not None:
            parts = (hidden, token) if self._config.confidence_reads_token else (hidden,)
            score = self._confidence(self._ops.concat(parts))[:, 0]
            logprobs = F.logsigmoid(score).nan_to_num(nan=-torch.inf)
        return MarkovStep(self._output(latent), state, logprobs)

    def _load_linear(
        self, weights: Weights, precision: Precision, name: str, width: int, size: int
    ) -> Linear:
        weight = load_linear(self._ops, weights, precision.linear_format, width, {name: size}, bias=True)
        return Linear(self._ops, weight, torch.float32)

    def _project(self, parts: tuple[Tensor, ...]) -> Tensor:
        assert self._proj is not None
        return self._proj(self._ops.concat(parts))
