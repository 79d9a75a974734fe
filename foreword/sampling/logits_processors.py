"""What becomes of a row of logits before its token is taken: an ordered pipeline, one class a step.

A step sees only rows that asked for it, in place, and every row by itself: what it computes are single
float32 values, so that a row comes out the same alone and among others.

What steps must know of their rows goes to the device before any of them runs, all at once: nothing waits in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import numpy as np
from torch import Tensor

from foreword.core.batch import Arrays, SampleRow
from foreword.core.request import Request
from foreword.kernels.ops import DraftSamplingParams, Ops
from foreword.sampling.penalties import WORD_BITS, Floats, Ids

__all__ = [
    "PIPELINE",
    "LogitsProcessor",
    "active_processors",
    "draft_sampling_params",
    "find_runs",
    "masking_fields",
    "may_mask_all",
    "only_filters",
    "rng_keys",
]

Rows = Sequence[SampleRow]
ALL_BITS = -1


class LogitsProcessor(Protocol):
    """One step of the pipeline: first the host tells what it takes, for all steps of all rows; then the device does it."""

    def is_active(self, request: Request) -> bool:
        """Whether the request asked for it."""

    def gather(self, rows: Rows, vocab_size: int) -> Arrays | None:
        """What apply() must know of rows that asked for the step; None: it leaves each of them as it is."""

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        """Change logits float32 [n, V], in place; `gathered` of these n rows, on their device."""


class GrammarMask:
    """Only what `structured` lets follow; rows that it leaves free are untouched."""

    def is_active(self, request: Request) -> bool:
        return request.params.structured is not None

    def gather(self, rows: Rows, vocab_size: int) -> Arrays | None:
        masks = [row.grammar.mask(row.draft) if row.grammar is not None else None for row in rows]
        if all(mask is None for mask in masks):
            return None
        words = np.full((len(rows), -(-vocab_size // WORD_BITS)), ALL_BITS, np.int32)
        for line, mask in zip(words, masks, strict=True):
            if mask is not None:  # an id beyond it may not follow
                known = min(len(mask), len(line))
                line[:known], line[known:] = mask.numpy()[:known], 0
        return (words,)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_mask(logits, *gathered)


class AllowedIds:
    """Only `allowed_token_ids` can be sampled."""

    def is_active(self, request: Request) -> bool:
        return request.params.allowed_token_ids is not None

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.stack([row.penalty_state.allowed_mask(vocab_size).numpy() for row in rows]),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_mask(logits, *gathered)


class LogitsBiasBase(ABC):
    """Amounts are added to the logits of some ids. -inf masks one; a broken value, NaN or +inf, stays broken."""

    def gather(self, rows: Rows, vocab_size: int) -> Arrays | None:
        found = [self.amounts(row) for row in rows]
        starts, ids = _flatten([own for own, _ in found])
        return (starts, ids, np.concatenate([own for _, own in found])) if len(ids) else None

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.add_bias(logits, *gathered)

    @abstractmethod
    def amounts(self, row: SampleRow) -> tuple[Ids, Floats]:
        """Ids, none twice, and what is added to them."""


class LogitBias(LogitsBiasBase):
    """`logit_bias` is added."""

    def is_active(self, request: Request) -> bool:
        return bool(request.params.logit_bias)

    def amounts(self, row: SampleRow) -> tuple[Ids, Floats]:
        return row.penalty_state.logit_bias()


class BadWords(LogitsBiasBase):
    """The last id of a bad word is masked where the history ends with its other ids."""

    def is_active(self, request: Request) -> bool:
        return bool(request.bad_words_ids)

    def amounts(self, row: SampleRow) -> tuple[Ids, Floats]:
        words = row.state.request.bad_words_ids
        recent = row.last_tokens(max(map(len, words)) - 1)
        return _mask_ids(
            {
                word[-1]
                for word in words
                if len(word) - 1 <= len(recent) and recent[len(recent) - len(word) + 1 :] == word[:-1]
            }
        )


class MinTokens(LogitsBiasBase):
    """Nothing that would end the answer before `min_tokens` tokens, unless its grammar lets nothing else follow."""

    def is_active(self, request: Request) -> bool:
        return request.params.min_tokens > 0

    def amounts(self, row: SampleRow) -> tuple[Ids, Floats]:
        if row.num_output >= row.state.params.min_tokens or (
            row.grammar is not None and row.grammar.must_end(row.draft)
        ):
            return _mask_ids(())
        return _mask_ids({*row.state.request.eos_token_ids, *row.state.params.stop_token_ids})


class RepetitionPenalty:
    """Ids of prompt and output: positive logits are divided by the penalty, negative ones multiplied."""

    def is_active(self, request: Request) -> bool:
        return request.params.repetition_penalty != 1.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        penalties = np.array([row.state.params.repetition_penalty for row in rows], np.float32)
        return (*_flatten([row.seen_ids() for row in rows]), penalties)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_repetition_penalty(logits, *gathered)


class CountPenalties(LogitsBiasBase):
    """`presence_penalty` once and `frequency_penalty` times its count off each id of the output."""

    def is_active(self, request: Request) -> bool:
        return request.params.presence_penalty != 0.0 or request.params.frequency_penalty != 0.0

    def amounts(self, row: SampleRow) -> tuple[Ids, Floats]:
        ids, counts = row.output_counts()
        penalties = row.state.params.presence_penalty + row.state.params.frequency_penalty * counts
        return ids, -penalties.astype(np.float32)


class Dry(LogitsBiasBase):
    """An id that would go on with a repeat of the last tokens costs `dry_multiplier * dry_base ** (length - allowed length)`."""

    def is_active(self, request: Request) -> bool:
        return request.params.uses_dry

    def amounts(self, row: SampleRow) -> tuple[Ids, Floats]:
        ids, penalties = row.dry_penalties()
        return ids, -penalties


class TopNSigma:
    """Only what is at most `top_n_sigma` standard deviations below the likeliest. The temperature scales both."""

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.top_n_sigma > 0.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([row.state.params.top_n_sigma for row in rows], np.float64),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_top_n_sigma(logits, *gathered)


class Temperature:
    """Logits are divided by the temperature, once."""

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.temperature != 1.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([row.state.params.temperature for row in rows], np.float32),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_temperature(logits, *gathered)


class TopK:
    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.top_k > 0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([min(row.state.params.top_k, vocab_size) for row in rows], np.int64),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_top_k(logits, *gathered)


class TypicalP:
    """The tokens whose surprise is nearest to the expected one, up to this probability."""

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.typical_p < 1.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([row.state.params.typical_p for row in rows], np.float64),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_typical_p(logits, *gathered)


class TopP:
    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.top_p < 1.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([row.state.params.top_p for row in rows], np.float64),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_top_p(logits, *gathered)


class MinP:
    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.min_p > 0.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([row.state.params.min_p for row in rows], np.float64),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_min_p(logits, *gathered)


class Xtc:
    """With `xtc_probability`, all but the least likely of the tokens of at least `xtc_threshold` are excluded."""

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.xtc_probability > 0.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        chances = np.array([row.state.params.xtc_probability for row in rows], np.float64)
        return (
            *rng_keys(rows),
            chances,
            np.array([row.state.params.xtc_threshold for row in rows], np.float64),
        )

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_xtc(logits, *gathered)


# As in llama.cpp, but that the temperature comes before the filters, as in vLLM.
PIPELINE: tuple[LogitsProcessor, ...] = (
    GrammarMask(),
    AllowedIds(),
    LogitBias(),
    BadWords(),
    MinTokens(),
    RepetitionPenalty(),
    CountPenalties(),
    Dry(),
    TopNSigma(),
    Temperature(),
    TopK(),
    TypicalP(),
    TopP(),
    MinP(),
    Xtc(),
)


def may_mask_all(processors: Sequence[LogitsProcessor]) -> bool:
    """Whether these steps could leave no token."""
    return any(type(step) in MASKING_PROCESSORS for step in processors)


def masking_fields(request: Request) -> tuple[str, ...]:
    """What in a request masks tokens, as its caller calls it."""
    structured = request.params.structured
    names = (MASKING_PROCESSORS.get(type(step)) for step in active_processors(request))
    return tuple(structured.field if structured and name == "structured" else name for name in names if name)


def find_runs(selected: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(line, end) of the longest runs of wanted rows."""
    line = 0
    for end in range(len(selected) + 1):
        if end == len(selected) or not selected[end]:
            if line < end:
                yield line, end
            line = end + 1


# Steps that may leave no token, and the parameters they follow; every other step leaves some of what it gets.
MASKING_PROCESSORS: Mapping[type, str] = MappingProxyType(
    {
        GrammarMask: "structured",
        AllowedIds: "allowed_token_ids",
        BadWords: "bad_words",
        MinTokens: "min_tokens",
    }
)

FILTER_PROCESSORS = (Temperature, TopK, TopP, MinP)


def active_processors(request: Request) -> tuple[LogitsProcessor, ...]:
    """The steps that a request asked for, in order."""
    return tuple(step for step in PIPELINE if step.is_active(request))


def only_filters(request: Request) -> bool:
    """Temperature and filters are all of its sampling: no row depends on anything but its logits, its seed and its place."""
    return all(type(step) in FILTER_PROCESSORS for step in active_processors(request))


def draft_sampling_params(request: Request, vocab_size: int) -> DraftSamplingParams:
    """How a request that is_plain() samples of rows with so many ids."""
    params = request.params
    top_k = min(params.top_k, vocab_size)
    return DraftSamplingParams(
        request.seed, params.greedy, params.temperature, top_k, params.top_p, params.min_p
    )


def rng_keys(rows: Rows) -> tuple[Ids, Ids]:
    """What the noise of rows is keyed by: seeds int64 [R] (their bits), positions int64 [R]."""
    seeds = np.array([row.state.request.seed for row in rows], np.uint64).view(np.int64)
    return seeds, np.array([row.position for row in rows], np.int64)


def _mask_ids(ids: Collection[int]) -> tuple[Ids, Floats]:
    return np.fromiter(ids, np.int64, len(ids)), np.full(len(ids), -np.inf, np.float32)


def _flatten(ids_by_row: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Where the ids of each row begin, int64 [R+1], and those of all rows in one int64 [N]."""
    starts = np.array(list(accumulate(map(len, ids_by_row), initial=0)), np.int64)
    return starts, ids_by_row[0] if len(ids_by_row) == 1 else np.concatenate(ids_by_row)
