"""The pipeline of logits processors: masks, biases, penalties and filters that run before sampling.

A processor changes only rows that requested it, each independently, so results do not depend on the batch.
The parameters of all processors are uploaded at once before the first runs, so the device never waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from foreword.core.batch import Arrays, SampleRow
from foreword.core.request import Request
from foreword.kernels.ops import DraftSamplingParams, Ops
from foreword.sampling.penalties import WORD_BITS, Floats, Ids, get_penalty_state

Rows = Sequence[SampleRow]
ALL_BITS = -1  # int32 mask word that allows 32 ids


class LogitsProcessor(Protocol):
    """One step of the pipeline: gather() on the host for all rows, then apply() on the device."""

    def is_active(self, request: Request) -> bool:
        """Whether the request uses the processor."""

    def gather(self, rows: Rows, vocab_size: int) -> Arrays | None:
        """Parameters of rows whose requests use the processor; None: no row changes."""

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        """Change logits float32 [n, V] in place; `gathered` are the uploaded parameters of these rows."""


class GrammarMask:
    """Only ids that `structured` allows; unconstrained rows stay as they are."""

    def is_active(self, request: Request) -> bool:
        return request.params.structured is not None

    def gather(self, rows: Rows, vocab_size: int) -> Arrays | None:
        masks = [row.grammar.mask(row.draft) if row.grammar is not None else None for row in rows]
        if all(mask is None for mask in masks):
            return None
        words = np.full((len(rows), -(-vocab_size // WORD_BITS)), ALL_BITS, np.int32)
        for line, mask in zip(words, masks, strict=True):
            if mask is not None:  # ids outside of the mask are not allowed
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
        return (np.stack([get_penalty_state(row.state).allowed_mask(vocab_size).numpy() for row in rows]),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_mask(logits, *gathered)


class LogitsBiasBase(ABC):
    """Adds a bias to the logits of some ids; -inf masks an id. NaN and +inf logits stay non-finite."""

    def gather(self, rows: Rows, vocab_size: int) -> Arrays | None:
        biases = [self.biases(row) for row in rows]
        starts, ids = _flatten([row_ids for row_ids, _ in biases])
        return (starts, ids, np.concatenate([values for _, values in biases])) if len(ids) else None

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.add_bias(logits, *gathered)

    @abstractmethod
    def biases(self, row: SampleRow) -> tuple[Ids, Floats]:
        """Distinct ids and their biases."""


class LogitBias(LogitsBiasBase):
    """Adds `logit_bias`."""

    def is_active(self, request: Request) -> bool:
        return bool(request.params.logit_bias)

    def biases(self, row: SampleRow) -> tuple[Ids, Floats]:
        return get_penalty_state(row.state).logit_bias()


class BadWords(LogitsBiasBase):
    """Masks the last id of a bad word if the history ends with its other ids."""

    def is_active(self, request: Request) -> bool:
        return bool(request.bad_words_ids)

    def biases(self, row: SampleRow) -> tuple[Ids, Floats]:
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
    """Masks stop ids before `min_tokens` output tokens, unless the grammar allows nothing else."""

    def is_active(self, request: Request) -> bool:
        return request.params.min_tokens > 0

    def biases(self, row: SampleRow) -> tuple[Ids, Floats]:
        if row.num_output >= row.state.params.min_tokens:
            return _mask_ids(())
        if row.grammar is not None and row.grammar.must_end(row.draft):  # may take long: only if it matters
            return _mask_ids(())
        return _mask_ids({*row.state.request.eos_token_ids, *row.state.params.stop_token_ids})


class RepetitionPenalty:
    """Divides positive logits of ids in prompt and output by the penalty, and multiplies negative ones."""

    def is_active(self, request: Request) -> bool:
        return request.params.repetition_penalty != 1.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        penalties = np.array([row.state.params.repetition_penalty for row in rows], np.float32)
        seen = [get_penalty_state(row.state).seen_ids(row.state.tokens, row.draft) for row in rows]
        return (*_flatten(seen), penalties)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_repetition_penalty(logits, *gathered)


class CountPenalties(LogitsBiasBase):
    """Subtracts `presence_penalty` and count times `frequency_penalty` from each id of the output."""

    def is_active(self, request: Request) -> bool:
        return request.params.presence_penalty != 0.0 or request.params.frequency_penalty != 0.0

    def biases(self, row: SampleRow) -> tuple[Ids, Floats]:
        ids, counts = get_penalty_state(row.state).output_counts(row.state.tokens, row.draft)
        penalties = row.state.params.presence_penalty + row.state.params.frequency_penalty * counts
        return ids, -penalties.astype(np.float32)


class Dry(LogitsBiasBase):
    """Subtracts `dry_multiplier * dry_base ** (length - allowed length)` from ids that continue a repeat."""

    def is_active(self, request: Request) -> bool:
        return request.params.uses_dry

    def biases(self, row: SampleRow) -> tuple[Ids, Floats]:
        ids, penalties = get_penalty_state(row.state).dry_penalties(row.state.tokens, row.draft)
        return ids, -penalties


class RowFilter:
    """Temperature or a filter, with a number for each row; greedy requests use none."""

    def __init__(self, name: str, dtype: npt.DTypeLike, is_used: Callable[[float], bool]) -> None:
        """name  of the request's parameter, and of the operation: apply_NAME"""
        self._name = name
        self._dtype = dtype
        self._is_used = is_used
        self._value_of = attrgetter(f"state.params.{name}")

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and self._is_used(getattr(request.params, self._name))

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array(list(map(self._value_of, rows)), self._dtype),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        getattr(ops, f"apply_{self._name}")(logits, *gathered)


class TopK(RowFilter):
    """A larger number than the vocabulary's size, which may be one of more than 64 bits, keeps all ids."""

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([min(row.state.params.top_k, vocab_size) for row in rows], np.int64),)


class Xtc:
    """With `xtc_probability`, excludes all ids above `xtc_threshold` except the least likely of them."""

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.xtc_probability > 0.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        probabilities = np.array([row.state.params.xtc_probability for row in rows], np.float64)
        thresholds = np.array([row.state.params.xtc_threshold for row in rows], np.float64)
        seeds = np.array([row.state.request.seed for row in rows], np.uint64).view(np.int64)
        positions = np.array([row.position for row in rows], np.int64)
        return seeds, positions, probabilities, thresholds

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_xtc(logits, *gathered)


TEMPERATURE = RowFilter("temperature", np.float32, lambda temperature: temperature != 1.0)
TOP_K = TopK("top_k", np.int64, lambda k: k > 0)
TOP_P = RowFilter("top_p", np.float64, lambda p: p < 1.0)
MIN_P = RowFilter("min_p", np.float64, lambda p: p > 0.0)

# The order of llama.cpp, with the temperature before the filters as in vLLM.
PIPELINE: tuple[LogitsProcessor, ...] = (
    GrammarMask(),
    AllowedIds(),
    LogitBias(),
    BadWords(),
    MinTokens(),
    RepetitionPenalty(),
    CountPenalties(),
    Dry(),
    RowFilter("top_n_sigma", np.float64, lambda n: n > 0.0),
    TEMPERATURE,
    TOP_K,
    RowFilter("typical_p", np.float64, lambda p: p < 1.0),
    TOP_P,
    MIN_P,
    Xtc(),
)


# Processors that may mask every id, and their parameters; the others always keep some id.
MASKING_PROCESSORS: Mapping[type, str] = MappingProxyType(
    {
        GrammarMask: "structured",
        AllowedIds: "allowed_token_ids",
        BadWords: "bad_words",
        MinTokens: "min_tokens",
    }
)
# Those that need more than logits, seed and position, or that a draft loop does not have
NO_DRAFT_PROCESSORS = tuple(step for step in PIPELINE if step not in (TEMPERATURE, TOP_K, TOP_P, MIN_P))


def active_processors(request: Request) -> tuple[LogitsProcessor, ...]:
    """The processors that a request uses, in order."""
    return tuple(step for step in PIPELINE if step.is_active(request))


def masking_fields(request: Request) -> tuple[str, ...]:
    """Request fields that mask tokens, by the names the caller uses."""
    structured = request.params.structured
    names = (MASKING_PROCESSORS.get(type(step)) for step in active_processors(request))
    return tuple(structured.field if structured and name == "structured" else name for name in names if name)


def only_filters(request: Request) -> bool:
    """Whether sampling needs only logits, seed and position: temperature and filters, no history."""
    return not any(step.is_active(request) for step in NO_DRAFT_PROCESSORS)


def draft_sampling_params(request: Request, vocab_size: int) -> DraftSamplingParams:
    """Sampling parameters of a request with only_filters(), for rows of `vocab_size` ids."""
    params = request.params
    top_k = min(params.top_k, vocab_size)
    return DraftSamplingParams(
        request.seed, params.greedy, params.temperature, top_k, params.top_p, params.min_p
    )


def find_runs(selected: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(start, end) of each maximal run of selected rows."""
    start = 0
    for end in range(len(selected) + 1):
        if end == len(selected) or not selected[end]:
            if start < end:
                yield start, end
            start = end + 1


def _mask_ids(ids: Collection[int]) -> tuple[Ids, Floats]:
    return np.fromiter(ids, np.int64, len(ids)), np.full(len(ids), -np.inf, np.float32)


def _flatten(ids_by_row: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Start of each row's ids, int64 [R+1], and the ids of all rows, int64 [N]."""
    starts = np.array(list(accumulate(map(len, ids_by_row), initial=0)), np.int64)
    return starts, ids_by_row[0] if len(ids_by_row) == 1 else np.concatenate(ids_by_row)
