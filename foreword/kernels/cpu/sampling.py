"""Sampling in C++ (`csrc/`), called through ctypes: the same bits as `reference_sampling`, much sooner."""

from __future__ import annotations

import ctypes
import os
import weakref

import torch
from torch import Tensor

from foreword.errors import ConfigError
from foreword.kernels.cpu.library import ISAS
from foreword.kernels.reference.sampling import ReferenceSampling

__all__ = ["NativeSampling"]


class NativeSampling(ReferenceSampling):
    """Overrides the operations on rows of logits; what is not float32, contiguous and on the CPU goes to torch."""

    def __init__(self, library: ctypes.CDLL, isa: str = "portable", threads: int = 1) -> None:
        super().__init__()
        self._library = library
        self._cpu_context: int = library.foreword_machine_new(ISAS.index(isa), threads)
        if not self._cpu_context:
            raise ConfigError(
                f"threads: the system does not grant {threads} threads; fewer would work", "threads"
            )
        # Not at exit: another thread may still compute, and the threads end with the process anyway.
        weakref.finalize(self, _delete_context, library, self._cpu_context, os.getpid()).atexit = False

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[R, V] -> float32 [R]"""
        if not _is_supported(logits):
            return super().log_sum_exp(logits)
        out = torch.empty(logits.shape[0], dtype=torch.float32)
        self._library.foreword_log_sum_exp(self._cpu_context, *_row_args(logits), out.data_ptr())
        return out

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        """[R, V] -> int64 [R, k]"""
        if not _is_supported(logits):
            return super().top_ids(logits, k)
        assert 0 <= k <= logits.shape[1]
        out = torch.empty(logits.shape[0], k, dtype=torch.int64)
        self._library.foreword_top_ids(self._cpu_context, *_row_args(logits), k, out.data_ptr())
        return out

    def apply_mask(self, logits: Tensor, masks: Tensor) -> None:
        if not _is_supported(logits):
            return super().apply_mask(logits, masks)
        assert masks.dtype == torch.int32 and masks.dim() == 2 and masks.shape[0] == logits.shape[0]
        masks = masks.cpu().contiguous()
        self._library.foreword_keep_allowed(
            self._cpu_context, *_row_args(logits), masks.data_ptr(), masks.shape[1]
        )

    def add_bias(self, logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
        if not _is_supported(logits):
            return super().add_bias(logits, starts, ids, biases)
        starts, ids = _check_ids(starts, ids, logits)
        assert biases.dtype == torch.float32 and biases.shape == ids.shape
        biases = biases.cpu().contiguous()
        self._library.foreword_add_at(
            self._cpu_context, *_row_args(logits), starts.data_ptr(), ids.data_ptr(), biases.data_ptr()
        )

    def apply_repetition_penalty(
        self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor
    ) -> None:
        if not _is_supported(logits):
            return super().apply_repetition_penalty(logits, starts, ids, penalties)
        starts, ids = _check_ids(starts, ids, logits)
        penalties = _check_per_row(penalties, logits, torch.float32)
        self._library.foreword_penalize(
            self._cpu_context, *_row_args(logits), starts.data_ptr(), ids.data_ptr(), penalties.data_ptr()
        )

    def apply_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        if not _is_supported(logits):
            return super().apply_top_n_sigma(logits, n)
        n = _check_per_row(n, logits, torch.float64)
        self._library.foreword_keep_top_n_sigma(self._cpu_context, *_row_args(logits), n.data_ptr())

    def apply_top_k(self, logits: Tensor, k: Tensor) -> None:
        if not _is_supported(logits):
            return super().apply_top_k(logits, k)
        k = _check_per_row(k, logits, torch.int64)
        self._library.foreword_keep_top_k(self._cpu_context, *_row_args(logits), k.data_ptr())

    def apply_top_p(self, logits: Tensor, p: Tensor) -> None:
        if not _is_supported(logits):
            return super().apply_top_p(logits, p)
        p = _check_per_row(p, logits, torch.float64)
        self._library.foreword_keep_top_p(self._cpu_context, *_row_args(logits), p.data_ptr())

    def apply_typical_p(self, logits: Tensor, p: Tensor) -> None:
        if not _is_supported(logits):
            return super().apply_typical_p(logits, p)
        p = _check_per_row(p, logits, torch.float64)
        self._library.foreword_keep_typical_p(self._cpu_context, *_row_args(logits), p.data_ptr())

    def apply_min_p(self, logits: Tensor, p: Tensor) -> None:
        if not _is_supported(logits):
            return super().apply_min_p(logits, p)
        p = _check_per_row(p, logits, torch.float64)
        self._library.foreword_keep_min_p(self._cpu_context, *_row_args(logits), p.data_ptr())

    def apply_xtc(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor
    ) -> None:
        if not _is_supported(logits):
            return super().apply_xtc(logits, seeds, positions, probabilities, thresholds)
        keys = [_check_per_row(values, logits, torch.int64) for values in (seeds, positions)]
        bounds = [_check_per_row(values, logits, torch.float64) for values in (probabilities, thresholds)]
        self._library.foreword_exclude_top(
            self._cpu_context, *_row_args(logits), *(values.data_ptr() for values in (*keys, *bounds))
        )

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        """[R, V] -> int64 [R]"""
        if not _is_supported(logits):
            return super().sample(logits, seeds, positions, greedy)
        seeds = _check_per_row(seeds, logits, torch.int64)
        positions = _check_per_row(positions, logits, torch.int64)
        greedy = _check_per_row(greedy, logits, torch.bool)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._library.foreword_sample(
            self._cpu_context,
            *_row_args(logits),
            seeds.data_ptr(),
            positions.data_ptr(),
            greedy.data_ptr(),
            out.data_ptr(),
        )
        return out


def _delete_context(library: ctypes.CDLL, cpu_context: int, owner_pid: int) -> None:
    """A forked child has no threads to wait for: it leaves its copy alone."""
    if os.getpid() == owner_pid:
        library.foreword_machine_delete(cpu_context)


def _is_supported(logits: Tensor) -> bool:
    return (
        logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.dim() == 2
        and logits.is_contiguous()
    )


def _row_args(logits: Tensor) -> tuple[int, int, int]:
    return logits.data_ptr(), logits.shape[0], logits.shape[1]


def _check_ids(starts: Tensor, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """As _per_row: starts [R+1] of ids [N]."""
    assert (
        starts.dtype == ids.dtype == torch.int64 and starts.shape == (logits.shape[0] + 1,) and ids.dim() == 1
    )
    return starts.cpu().contiguous(), ids.cpu().contiguous()


def _check_per_row(values: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Checked, since C++ reads it through a pointer. The caller keeps the result alive over the call."""
    assert values.dtype == dtype and values.shape == logits.shape[:1], f"wanted {dtype} [{logits.shape[0]}]"
    return values.cpu().contiguous()
