"""Sampling in C++ (`csrc/`), called through ctypes: the same bits as `reference_sampling`, much sooner."""

from __future__ import annotations

import ctypes
import os
import weakref

import torch
from torch import Tensor

from foreword.errors import ConfigError
from foreword.kernels.cpu.library import ISAS
from foreword.kernels.reference_sampling import ReferenceSampling

__all__ = ["NativeSampling"]


class NativeSampling(ReferenceSampling):
    """Overrides the operations on rows of logits; what is not float32, contiguous and on the CPU goes to torch."""

    def __init__(self, library: ctypes.CDLL, isa: str = "portable", threads: int = 1) -> None:
        super().__init__()
        self._library = library
        self._machine: int = library.foreword_machine_new(ISAS.index(isa), threads)
        if not self._machine:
            raise ConfigError(f"threads: the system does not grant {threads} threads; fewer would work", "threads")
        # Not at exit: another thread may still compute, and the threads end with the process anyway.
        weakref.finalize(self, _delete, library, self._machine, os.getpid()).atexit = False

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[R, V] -> float32 [R]"""
        if not _fits(logits):
            return super().log_sum_exp(logits)
        out = torch.empty(logits.shape[0], dtype=torch.float32)
        self._library.foreword_log_sum_exp(self._machine, *_rows(logits), out.data_ptr())
        return out

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        """[R, V] -> int64 [R, k]"""
        if not _fits(logits):
            return super().top_ids(logits, k)
        assert 0 <= k <= logits.shape[1]
        out = torch.empty(logits.shape[0], k, dtype=torch.int64)
        self._library.foreword_top_ids(self._machine, *_rows(logits), k, out.data_ptr())
        return out

    def keep_allowed(self, logits: Tensor, masks: Tensor) -> None:
        if not _fits(logits):
            return super().keep_allowed(logits, masks)
        assert masks.dtype == torch.int32 and masks.dim() == 2 and masks.shape[0] == logits.shape[0]
        masks = masks.cpu().contiguous()
        self._library.foreword_keep_allowed(self._machine, *_rows(logits), masks.data_ptr(), masks.shape[1])

    def add_at(self, logits: Tensor, starts: Tensor, ids: Tensor, amounts: Tensor) -> None:
        if not _fits(logits):
            return super().add_at(logits, starts, ids, amounts)
        starts, ids = _ids_per_row(starts, ids, logits)
        assert amounts.dtype == torch.float32 and amounts.shape == ids.shape
        amounts = amounts.cpu().contiguous()
        self._library.foreword_add_at(self._machine, *_rows(logits), starts.data_ptr(), ids.data_ptr(), amounts.data_ptr())

    def penalize(self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor) -> None:
        if not _fits(logits):
            return super().penalize(logits, starts, ids, penalties)
        starts, ids = _ids_per_row(starts, ids, logits)
        penalties = _per_row(penalties, logits, torch.float32)
        self._library.foreword_penalize(self._machine, *_rows(logits), starts.data_ptr(), ids.data_ptr(), penalties.data_ptr())

    def keep_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        if not _fits(logits):
            return super().keep_top_n_sigma(logits, n)
        n = _per_row(n, logits, torch.float64)
        self._library.foreword_keep_top_n_sigma(self._machine, *_rows(logits), n.data_ptr())

    def keep_top_k(self, logits: Tensor, k: Tensor) -> None:
        if not _fits(logits):
            return super().keep_top_k(logits, k)
        k = _per_row(k, logits, torch.int64)
        self._library.foreword_keep_top_k(self._machine, *_rows(logits), k.data_ptr())

    def keep_top_p(self, logits: Tensor, p: Tensor) -> None:
        if not _fits(logits):
            return super().keep_top_p(logits, p)
        p = _per_row(p, logits, torch.float64)
        self._library.foreword_keep_top_p(self._machine, *_rows(logits), p.data_ptr())

    def keep_typical_p(self, logits: Tensor, p: Tensor) -> None:
        if not _fits(logits):
            return super().keep_typical_p(logits, p)
        p = _per_row(p, logits, torch.float64)
        self._library.foreword_keep_typical_p(self._machine, *_rows(logits), p.data_ptr())

    def keep_min_p(self, logits: Tensor, p: Tensor) -> None:
        if not _fits(logits):
            return super().keep_min_p(logits, p)
        p = _per_row(p, logits, torch.float64)
        self._library.foreword_keep_min_p(self._machine, *_rows(logits), p.data_ptr())

    def exclude_top(self, logits: Tensor, seeds: Tensor, positions: Tensor, chances: Tensor, thresholds: Tensor) -> None:
        if not _fits(logits):
            return super().exclude_top(logits, seeds, positions, chances, thresholds)
        keys = [_per_row(values, logits, torch.int64) for values in (seeds, positions)]
        bounds = [_per_row(values, logits, torch.float64) for values in (chances, thresholds)]
        self._library.foreword_exclude_top(self._machine, *_rows(logits), *(values.data_ptr() for values in (*keys, *bounds)))

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        """[R, V] -> int64 [R]"""
        if not _fits(logits):
            return super().sample(logits, seeds, positions, greedy)
        seeds = _per_row(seeds, logits, torch.int64)
        positions = _per_row(positions, logits, torch.int64)
        greedy = _per_row(greedy, logits, torch.bool)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._library.foreword_sample(
            self._machine, *_rows(logits), seeds.data_ptr(), positions.data_ptr(), greedy.data_ptr(), out.data_ptr()
        )
        return out


def _delete(library: ctypes.CDLL, machine: int, owner: int) -> None:
    """A forked child has no threads to wait for: it leaves its copy alone."""
    if os.getpid() == owner:
        library.foreword_machine_delete(machine)


def _fits(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.dim() == 2 and logits.is_contiguous()


def _rows(logits: Tensor) -> tuple[int, int, int]:
    return logits.data_ptr(), logits.shape[0], logits.shape[1]


def _ids_per_row(starts: Tensor, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """As _per_row: starts [R+1] of ids [N]."""
    assert starts.dtype == ids.dtype == torch.int64 and starts.shape == (logits.shape[0] + 1,) and ids.dim() == 1
    return starts.cpu().contiguous(), ids.cpu().contiguous()


def _per_row(values: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Checked, since C++ reads it through a pointer. The caller keeps the result alive over the call."""
    assert values.dtype == dtype and values.shape == logits.shape[:1], f"wanted {dtype} [{logits.shape[0]}]"
    return values.cpu().contiguous()
