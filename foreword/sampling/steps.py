"""What becomes of a row of logits before its token is taken: an ordered pipeline, one class a step.

A step sees only rows that asked for it, in place, and every row by itself: what it computes are single
float32 values, so that a row comes out the same alone and among others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foreword.core.ledger import Floats, Ids
from foreword.core.request import Request
from foreword.core.rows import SampleRow
from foreword.kernels.ops import DraftSampling, Ops

__all__ = ["PIPELINE", "Step", "filters_of", "is_plain", "keys_of", "masking_fields", "may_mask_all", "spans", "steps_of"]

Rows = Sequence[SampleRow]


class Step(Protocol):
    """One step of the pipeline."""

    def active(self, request: Request) -> bool:
        """Whether the request asked for it."""

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        """Change logits float32 [n, V], in place; row i is that of rows[i], and asked for the step."""


class Grammar:
    """Only what `structured` lets follow; rows that it leaves free are untouched."""

    def active(self, request: Request) -> bool:
        return request.params.structured is not None

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        masks = [row.grammar.mask(row.draft) if row.grammar is not None else None for row in rows]
        for line, end in spans([mask is not None for mask in masks]):
            found = [mask for mask in masks[line:end] if mask is not None]
            ops.keep_allowed(logits[line:end], torch.stack(found).to(logits.device))


class AllowedIds:
    """Only `allowed_token_ids` can be sampled."""

    def active(self, request: Request) -> bool:
        return request.params.allowed_token_ids is not None

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        words = torch.stack([row.ledger.allowed(logits.shape[1]) for row in rows])
        ops.keep_allowed(logits, words.to(logits.device))


class LogitBias:
    """`logit_bias` is added."""

    def active(self, request: Request) -> bool:
        return bool(request.params.logit_bias)

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        _add(ops, logits, [row.ledger.bias() for row in rows])


class BadWords:
    """The last id of a bad word is masked where the history ends with its other ids."""

    def active(self, request: Request) -> bool:
        return bool(request.bad_words_ids)

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        _mask(logits, [self._completing(row) for row in rows])

    def _completing(self, row: SampleRow) -> set[int]:
        words = row.state.request.bad_words_ids
        recent = row.recent(max(map(len, words)) - 1)
        return {word[-1] for word in words if len(word) - 1 <= len(recent) and recent[len(recent) - len(word) + 1 :] == word[:-1]}


class MinTokens:
    """Nothing that would end the answer before `min_tokens` tokens, unless its grammar lets nothing else follow."""

    def active(self, request: Request) -> bool:
        return request.params.min_tokens > 0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        _mask(logits, [self._ending(row) for row in rows])

    def _ending(self, row: SampleRow) -> set[int]:
        if row.num_output >= row.state.params.min_tokens or (row.grammar is not None and row.grammar.only_end(row.draft)):
            return set()
        return {*row.state.request.eos_token_ids, *row.state.params.stop_token_ids}


class RepetitionPenalty:
    """Ids of prompt and output: positive logits are divided by the penalty, negative ones multiplied."""

    def active(self, request: Request) -> bool:
        return request.params.repetition_penalty != 1.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        starts, ids = _flat(logits, [row.seen() for row in rows])
        penalties = _column(logits, [row.state.params.repetition_penalty for row in rows], torch.float32)
        ops.penalize(logits, starts, ids, penalties)


class CountPenalties:
    """`presence_penalty` once and `frequency_penalty` times its count off each id of the output."""

    def active(self, request: Request) -> bool:
        return request.params.presence_penalty != 0.0 or request.params.frequency_penalty != 0.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        _add(ops, logits, [self._amounts(row) for row in rows])

    def _amounts(self, row: SampleRow) -> tuple[Ids, Floats]:
        ids, counts = row.counts()
        penalties = row.state.params.presence_penalty + row.state.params.frequency_penalty * counts
        return ids, -penalties.astype(np.float32)


class Dry:
    """An id that would go on with a repeat of the last tokens costs `dry_multiplier * dry_base ** (length - allowed length)`."""

    def active(self, request: Request) -> bool:
        return request.params.dry

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        found = [row.dry() for row in rows]
        if any(len(ids) for ids, _ in found):
            _add(ops, logits, [(ids, -penalties) for ids, penalties in found])


class TopNSigma:
    """Only what is at most `top_n_sigma` standard deviations below the likeliest. The temperature scales both."""

    def active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.top_n_sigma > 0.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        ops.keep_top_n_sigma(logits, _column(logits, [row.state.params.top_n_sigma for row in rows], torch.float64))


class Temperature:
    """Logits are divided by the temperature, once."""

    def active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.temperature != 1.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        ops.divide(logits, _column(logits, [row.state.params.temperature for row in rows], torch.float32))


class TopK:
    def active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.top_k > 0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        ops.keep_top_k(logits, _column(logits, [min(row.state.params.top_k, logits.shape[1]) for row in rows], torch.int64))


class TypicalP:
    """The tokens whose surprise is nearest to the expected one, up to this probability."""

    def active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.typical_p < 1.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        ops.keep_typical_p(logits, _column(logits, [row.state.params.typical_p for row in rows], torch.float64))


class TopP:
    def active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.top_p < 1.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        ops.keep_top_p(logits, _column(logits, [row.state.params.top_p for row in rows], torch.float64))


class MinP:
    def active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.min_p > 0.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        ops.keep_min_p(logits, _column(logits, [row.state.params.min_p for row in rows], torch.float64))


class Xtc:
    """With `xtc_probability`, all but the least likely of the tokens of at least `xtc_threshold` are excluded."""

    def active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.xtc_probability > 0.0

    def apply(self, ops: Ops, logits: Tensor, rows: Rows) -> None:
        keys = keys_of(rows, logits.device)
        chances = _column(logits, [row.state.params.xtc_probability for row in rows], torch.float64)
        thresholds = _column(logits, [row.state.params.xtc_threshold for row in rows], torch.float64)
        ops.exclude_top(logits, *keys, chances, thresholds)


# As in llama.cpp, but that the temperature comes before the filters, as in vLLM.
PIPELINE: tuple[Step, ...] = (
    Grammar(),
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


def may_mask_all(steps: Sequence[Step]) -> bool:
    """Whether these steps could leave no token."""
    return any(type(step) in MASKING for step in steps)


def masking_fields(request: Request) -> tuple[str, ...]:
    """What in a request masks tokens, as its caller calls it."""
    structured = request.params.structured
    names = (MASKING.get(type(step)) for step in steps_of(request))
    return tuple(structured.field if structured and name == "structured" else name for name in names if name)


def spans(wanted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(line, end) of the longest runs of wanted rows."""
    line = 0
    for end in range(len(wanted) + 1):
        if end == len(wanted) or not wanted[end]:
            if line < end:
                yield line, end
            line = end + 1


# Steps that may leave no token, and the parameters they follow; every other step leaves some of what it gets.
MASKING: Mapping[type, str] = MappingProxyType(
    {Grammar: "structured", AllowedIds: "allowed_token_ids", BadWords: "bad_words", MinTokens: "min_tokens"}
)

PLAIN = (Temperature, TopK, TopP, MinP)


def steps_of(request: Request) -> tuple[Step, ...]:
    """The steps that a request asked for, in order."""
    return tuple(step for step in PIPELINE if step.active(request))


def is_plain(request: Request) -> bool:
    """Temperature and filters are all of its sampling: no row depends on anything but its logits, its seed and its place."""
    return all(type(step) in PLAIN for step in steps_of(request))


def filters_of(request: Request, vocab_size: int) -> DraftSampling:
    """How a request that is_plain() samples of rows with so many ids."""
    params = request.params
    top_k = min(params.top_k, vocab_size)
    return DraftSampling(request.seed, params.greedy, params.temperature, top_k, params.top_p, params.min_p)


def keys_of(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the noise of rows is keyed by: seeds int64 [R] (their bits), positions int64 [R]."""
    seeds = torch.tensor([_signed(row.state.request.seed) for row in rows], dtype=torch.int64, device=device)
    return seeds, torch.tensor([row.position for row in rows], dtype=torch.int64, device=device)


def _signed(seed: int) -> int:
    """The bits of a 64-bit seed as torch can hold them."""
    return seed - (1 << 64) if seed >> 63 else seed


def _column(logits: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=logits.device)


def _places(logits: Tensor, ids: Sequence[Iterable[int]]) -> tuple[Tensor, Tensor]:
    """Coordinates of ids[r] in row r. An id beyond the vocabulary is nowhere: it cannot be sampled anyway."""
    vocab_size = logits.shape[1]
    lines: list[int] = []
    columns: list[int] = []
    for line, own in enumerate(ids):
        inside = [token_id for token_id in own if token_id < vocab_size]
        lines += [line] * len(inside)
        columns += inside
    return _column(logits, lines, torch.int64), _column(logits, columns, torch.int64)


def _mask(logits: Tensor, ids: Sequence[Iterable[int]]) -> None:
    places = _places(logits, ids)
    logits[places] = _masked(logits[places])


def _masked(values: Tensor) -> Tensor:
    """-inf, but NaN and +inf stay: a mask must not hide that a row is broken."""
    return torch.where(values < torch.inf, -torch.inf, values)


def _flat(logits: Tensor, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Ids of all rows in one int64 [N], and where those of each row begin, int64 [R+1]."""
    starts = torch.tensor(list(accumulate(map(len, ids), initial=0)), dtype=torch.int64, device=logits.device)
    return starts, torch.from_numpy(ids[0] if len(ids) == 1 else np.concatenate(ids)).to(logits.device)


def _add(ops: Ops, logits: Tensor, amounts: Sequence[tuple[Ids, Floats]]) -> None:
    """Add amounts to the logits of ids, row by row."""
    starts, ids = _flat(logits, [own for own, _ in amounts])
    added = np.concatenate([own for _, own in amounts])
    ops.add_at(logits, starts, ids, torch.from_numpy(added).to(logits.device))
