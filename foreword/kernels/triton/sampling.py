"""Sampling on the GPU: the bits of `reference.sampling`, without a sort or a synchronization.

Launches depend on shapes alone. Filters take a parameter for each row; programs of a neutral one (k =
vocabulary size, p = 1, min_p = 0, temperature 1) end at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.kernels.reference.sampling import ReferenceSampling
from foreword.kernels.triton.sampling_kernels import (
    add_bias,
    apply_mask,
    apply_min_p,
    apply_repetition_penalty,
    apply_temperature,
    apply_top_n_sigma,
    apply_xtc,
    sample,
)
from foreword.kernels.triton.topk import apply_top_k, apply_top_p, apply_typical_p, log_sum_exp, top_ids

MAX_TOP_IDS = 64  # ids found by repeated search; more are sorted


class TritonSampling(ReferenceSampling):
    """Mixin of TritonOps: operations on logits float32 [R, V] with contiguous rows."""

    sampling_block = 2048  # ids of one program, a power of two; no result depends on it

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        _check_logits(logits)
        return log_sum_exp(logits, self.sampling_block)

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        _check_logits(logits)
        assert 0 <= k <= logits.shape[1]
        if not 0 < k <= MAX_TOP_IDS:
            return super().top_ids(logits, k)
        return top_ids(logits, k, MAX_TOP_IDS, self.sampling_block)

    def apply_mask(self, logits: Tensor, masks: Tensor) -> None:
        _check_logits(logits)
        assert masks.dtype == torch.int32 and masks.dim() == 2 and masks.shape[0] == logits.shape[0]
        apply_mask(logits, masks if masks.stride(1) == 1 else masks.contiguous(), self.sampling_block)

    def add_bias(self, logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
        _check_ids(logits, starts, ids)
        assert biases.dtype == torch.float32 and biases.shape == ids.shape
        add_bias(logits, starts.contiguous(), ids.contiguous(), biases.contiguous())

    def apply_repetition_penalty(
        self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor
    ) -> None:
        _check_ids(logits, starts, ids)
        penalties = _per_row(penalties, logits, torch.float32)
        apply_repetition_penalty(logits, starts.contiguous(), ids.contiguous(), penalties)

    def apply_temperature(self, logits: Tensor, temperatures: Tensor) -> None:
        _check_logits(logits)
        apply_temperature(logits, _per_row(temperatures, logits, torch.float32), self.sampling_block)

    def apply_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        _check_logits(logits)
        apply_top_n_sigma(logits, _per_row(n, logits, torch.float64), self.sampling_block)

    def apply_top_k(self, logits: Tensor, k: Tensor) -> None:
        _check_logits(logits)
        apply_top_k(logits, _per_row(k, logits, torch.int64), self.sampling_block)

    def apply_top_p(self, logits: Tensor, p: Tensor) -> None:
        _check_logits(logits)
        apply_top_p(logits, _per_row(p, logits, torch.float64), self.sampling_block)

    def apply_typical_p(self, logits: Tensor, p: Tensor) -> None:
        _check_logits(logits)
        apply_typical_p(logits, _per_row(p, logits, torch.float64), self.sampling_block)

    def apply_min_p(self, logits: Tensor, p: Tensor) -> None:
        _check_logits(logits)
        apply_min_p(logits, _per_row(p, logits, torch.float64), self.sampling_block)

    def apply_xtc(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor
    ) -> None:
        _check_logits(logits)
        seeds, positions = (_per_row(values, logits, torch.int64) for values in (seeds, positions))
        probabilities, thresholds = (
            _per_row(values, logits, torch.float64) for values in (probabilities, thresholds)
        )
        apply_xtc(logits, seeds, positions, probabilities, thresholds, self.sampling_block)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        _check_logits(logits)
        seeds, positions = (_per_row(values, logits, torch.int64) for values in (seeds, positions))
        return sample(logits, seeds, positions, _per_row(greedy, logits, torch.bool), self.sampling_block)


def _check_logits(logits: Tensor) -> None:
    """Check the dtype and layout that the kernels assume."""
    assert logits.dtype == torch.float32 and logits.dim() == 2
    assert logits.stride(1) == 1 or logits.shape[1] == 1


def _check_ids(logits: Tensor, starts: Tensor, ids: Tensor) -> None:
    _check_logits(logits)
    assert starts.dtype == ids.dtype == torch.int64
    assert starts.shape == (logits.shape[0] + 1,) and ids.dim() == 1


def _per_row(values: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    assert values.dtype == dtype and values.shape == logits.shape[:1], f"wanted {dtype} [{logits.shape[0]}]"
    return values.contiguous()
