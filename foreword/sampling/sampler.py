"""From rows of logits to tokens: log-probabilities, the pipeline, keyed noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.core.events import TokenLogprob
from foreword.core.rows import SampleRow
from foreword.kernels.hashes import hash_of
from foreword.kernels.ops import Ops
from foreword.sampling.steps import PIPELINE, Step, keys_of, may_mask_all, spans, steps_of

__all__ = ["BROKEN", "NOTHING_LEGAL", "Sampled", "Sampler"]

BROKEN = -1  # in place of a token: the logits are not finite
NOTHING_LEGAL = -2  # in place of a token: what the request asks for masks every one
PROBE = 64  # ids that nearly always tell whether a row holds any value


@dataclass(frozen=True, slots=True)
class Sampled:
    """What R rows yielded.

    token_ids  BROKEN or NOTHING_LEGAL where there is none
    logprobs   None for rows that did not ask, or have no token
    hashes     64-bit hashes of the raw logits in test mode, else empty
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    hashes: list[int]


@dataclass(frozen=True, slots=True)
class _Raw:
    """Rows before the pipeline: logits [n, V], log of their sum float32 [n], likeliest ids int64 [n, k]."""

    logits: Tensor
    log_sum: Tensor
    top: Tensor


class Sampler:
    """Samples rows; holds no state of any request.

    unused_ids  ids below vocab_size that no token has; they are never sampled, and not part of any distribution
    """

    def __init__(self, ops: Ops, vocab_size: int, unused_ids: Sequence[int], test_mode: bool = False) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._unused = torch.tensor(sorted(unused_ids), dtype=torch.int64)
        self._test_mode = test_mode

    @property
    def hashing(self) -> bool:
        """Whether rows are hashed, as in test mode."""
        return self._test_mode

    @property
    def unused_ids(self) -> Tensor:
        """int64 [U], ascending."""
        return self._unused

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow], logprobs: bool = True) -> Sampled:
        """Sample logits float32 [R, V], which are overwritten; rows[r] says what line r is for.

        logprobs=False leaves log-probabilities out even where requests ask for them.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        hashes = [hash_of(line) for line in logits] if self._test_mode else []
        self._mask_unused(logits)
        asked = [i for i, row in enumerate(rows) if row.state.params.logprobs is not None] if logprobs else []
        raw = self._raw(logits[asked], max(rows[i].state.params.logprobs or 0 for i in asked)) if asked else None
        wanted = _wanted(rows)
        limited = [r for r, steps in enumerate(wanted) if may_mask_all(steps)]
        alive = _alive(logits, limited) if limited else ()
        for step, line, end in _runs(wanted):
            step.apply(self._ops, logits[line:end], rows[line:end])
        token_ids = self._sample(logits, rows)
        for r in alive:
            if token_ids[r] == BROKEN and float(logits[r].amax()) == -torch.inf:
                token_ids[r] = NOTHING_LEGAL
        found: list[TokenLogprob | None] = [None] * len(rows)
        if raw is not None:
            params = [rows[i].state.params for i in asked]
            scored = self._score(raw, [token_ids[i] for i in asked], [one.logprobs or 0 for one in params])
            chosen = _scores_of(raw, [one.logprob_token_ids for one in params])
            for i, logprob, scores in zip(asked, scored, chosen, strict=True):
                if token_ids[i] >= 0:
                    found[i] = replace(logprob, asked=scores) if scores else logprob
        return Sampled(token_ids, found, hashes)

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], num: int) -> list[TokenLogprob]:
        """Log-probabilities of the tokens targets[r] that follow logits [R, V], and of the `num` likeliest."""
        self._mask_unused(logits)
        return self._score(self._raw(logits, num), targets, [num] * len(targets))

    def _sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        device = logits.device
        seeds, positions = keys_of(rows, device)
        greedy = torch.tensor([row.state.params.greedy for row in rows], dtype=torch.bool, device=device)
        token_ids: list[int] = self._ops.sample(logits, seeds, positions, greedy).tolist()
        return token_ids

    def _mask_unused(self, logits: Tensor) -> None:
        if self._unused.numel():
            self._unused = self._unused.to(logits.device)
            logits.index_fill_(1, self._unused, -torch.inf)

    def _raw(self, logits: Tensor, num: int) -> _Raw:
        return _Raw(logits, self._ops.log_sum_exp(logits), self._ops.top_ids(logits, min(num, self._vocab_size)))

    def _score(self, raw: _Raw, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprob]:
        """Log-probabilities of one id a row (any id where it is -1), with the nums[r] likeliest."""
        chosen = torch.tensor(token_ids, dtype=torch.int64, device=raw.logits.device).clamp(min=0)[:, None]
        value = raw.logits.gather(1, chosen)
        log_sum = raw.log_sum[:, None]
        own = (value - log_sum)[:, 0].tolist()
        ranks = _ranks(raw.logits, value, chosen)
        top_ids = raw.top.tolist()
        top = (raw.logits.gather(1, raw.top) - log_sum).tolist()
        return [
            TokenLogprob(token_id, own[r], ranks[r], tuple(zip(top_ids[r][:num], top[r][:num], strict=True)))
            for r, (token_id, num) in enumerate(zip(token_ids, nums, strict=True))
        ]


def _scores_of(raw: _Raw, ids: Sequence[Sequence[int]]) -> list[tuple[tuple[int, float], ...]]:
    """(id, logprob) of ids[r] in row r. An id beyond the vocabulary is as unlikely as can be."""
    if not any(ids):
        return [()] * len(ids)
    width = max(map(len, ids))
    columns = torch.tensor([[*own, *[0] * (width - len(own))] for own in ids], dtype=torch.int64, device=raw.logits.device)
    known = columns < raw.logits.shape[1]
    values = raw.logits.gather(1, torch.where(known, columns, 0)) - raw.log_sum[:, None]
    scores = torch.where(known, values, -torch.inf).tolist()
    return [tuple(zip(own, line, strict=False)) for own, line in zip(ids, scores, strict=True)]


def _wanted(rows: Sequence[SampleRow]) -> list[tuple[Step, ...]]:
    """The steps of each row."""
    wanted: list[tuple[Step, ...]] = []
    for r, row in enumerate(rows):
        again = r > 0 and row.state is rows[r - 1].state
        wanted.append(wanted[-1] if again else steps_of(row.state.request))
    return wanted


def _runs(wanted: Sequence[tuple[Step, ...]]) -> Iterator[tuple[Step, int, int]]:
    """(step, line, end) in the pipeline's order: consecutive rows that asked for the step."""
    asked = {step for steps in wanted for step in steps}
    for step in PIPELINE:
        if step in asked:
            for line, end in spans([step in steps for steps in wanted]):
                yield step, line, end


def _alive(logits: Tensor, lines: Sequence[int]) -> list[int]:
    """Those lines that are not -inf throughout; one with a NaN is not among them."""
    highest = logits[:, :PROBE].amax(dim=1).tolist()
    return [line for line in lines if highest[line] > -torch.inf or float(logits[line].amax()) > -torch.inf]


def _ranks(logits: Tensor, value: Tensor, chosen: Tensor) -> list[int]:
    """1 + how many ids come before the chosen one by (value descending, id ascending)."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > value) | ((logits == value) & (ids < chosen))
    ranks: list[int] = (1 + before.count_nonzero(dim=1)).tolist()
    return ranks
