"""Temperature and the filters of the pipeline: top-n-sigma, top-k, typical-p, top-p, min-p, XTC.

Ids rank by (value descending, id ascending). A filter keeps the id that crosses its bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from foreword.core.batch import Arrays, SampleRow
from foreword.core.request import Request
from foreword.kernels.ops import Ops
from foreword.sampling.penalties import Ids

Rows = Sequence[SampleRow]


class TopNSigma:
    """Keeps logits at most `top_n_sigma` standard deviations below the maximum, at any temperature."""

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.top_n_sigma > 0.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        return (np.array([row.state.params.top_n_sigma for row in rows], np.float64),)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_top_n_sigma(logits, *gathered)


class Temperature:
    """Divides the logits by the temperature."""

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
    """Keeps the ids whose surprisal is closest to the entropy, up to a total probability of `typical_p`."""

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
    """With `xtc_probability`, excludes all ids above `xtc_threshold` except the least likely of them."""

    def is_active(self, request: Request) -> bool:
        return not request.params.greedy and request.params.xtc_probability > 0.0

    def gather(self, rows: Rows, vocab_size: int) -> Arrays:
        probabilities = np.array([row.state.params.xtc_probability for row in rows], np.float64)
        thresholds = np.array([row.state.params.xtc_threshold for row in rows], np.float64)
        return (*rng_keys(rows), probabilities, thresholds)

    def apply(self, ops: Ops, logits: Tensor, *gathered: Tensor) -> None:
        ops.apply_xtc(logits, *gathered)


def rng_keys(rows: Rows) -> tuple[Ids, Ids]:
    """Keys of the rows' noise: bits of the seeds int64 [R], positions int64 [R]."""
    seeds = np.array([row.state.request.seed for row in rows], np.uint64).view(np.int64)
    return seeds, np.array([len(row.state.tokens) + len(row.draft) for row in rows], np.int64)
