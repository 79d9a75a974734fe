"""Sampling in C++ (`csrc/`) through ctypes: the same bits as `reference.sampling`, much faster."""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from foreword.errors import ConfigError
from foreword.kernels.cpu.library import ISAS


class NativeSampling:
    """Operations on rows of logits, contiguous on the CPU."""

    def __init__(self, library: ctypes.CDLL, isa: str = "portable", threads: int = 1) -> None:
        super().__init__()
        self._library = library
        self._cpu_context: int = library.foreword_machine_new(ISAS.index(isa), threads)
        if not self._cpu_context:
            raise ConfigError(f"threads: the system does not grant {threads} threads; use fewer", "threads")
        # Not at exit: another thread may still compute, and the process ends the threads anyway.
        weakref.finalize(self, delete_context, library, self._cpu_context, os.getpid()).atexit = False

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.float32)
        self._call(self._library.foreword_log_sum_exp, logits, out)
        return out

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        assert 0 <= k <= logits.shape[1]
        out = torch.empty(logits.shape[0], k, dtype=torch.int64)
        self._call(self._library.foreword_top_ids, logits, k, out)
        return out

    def apply_mask(self, logits: Tensor, masks: Tensor) -> None:
        assert masks.dtype == torch.int32 and masks.dim() == 2 and masks.shape[0] == logits.shape[0]
        masks = masks.cpu().contiguous()
        self._call(self._library.foreword_keep_allowed, logits, masks, masks.shape[1])

    def mask_ids(self, logits: Tensor, ids: Tensor) -> None:
        assert ids.dtype == torch.int64 and ids.is_contiguous() and ids.is_cpu
        self._call(self._library.foreword_mask_ids, logits, ids, len(ids))

    def add_bias(self, logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
        starts, ids = _check_ids(starts, ids, logits)
        assert biases.dtype == torch.float32 and biases.shape == ids.shape
        self._call(self._library.foreword_add_at, logits, starts, ids, len(ids), biases.cpu().contiguous())

    def apply_repetition_penalty(
        self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor
    ) -> None:
        starts, ids = _check_ids(starts, ids, logits)
        penalties = _check_per_row(penalties, logits, torch.float32)
        self._call(self._library.foreword_penalize, logits, starts, ids, len(ids), penalties)

    def apply_temperature(self, logits: Tensor, temperatures: Tensor) -> None:
        temperatures = _check_per_row(temperatures, logits, torch.float32)
        self._call(self._library.foreword_apply_temperature, logits, temperatures)

    def apply_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        self._call(self._library.foreword_keep_top_n_sigma, logits, _check_per_row(n, logits, torch.float64))

    def apply_top_k(self, logits: Tensor, k: Tensor) -> None:
        self._call(self._library.foreword_keep_top_k, logits, _check_per_row(k, logits, torch.int64))

    def apply_top_p(self, logits: Tensor, p: Tensor) -> None:
        self._call(self._library.foreword_keep_top_p, logits, _check_per_row(p, logits, torch.float64))

    def apply_typical_p(self, logits: Tensor, p: Tensor) -> None:
        self._call(self._library.foreword_keep_typical_p, logits, _check_per_row(p, logits, torch.float64))

    def apply_min_p(self, logits: Tensor, p: Tensor) -> None:
        self._call(self._library.foreword_keep_min_p, logits, _check_per_row(p, logits, torch.float64))

    def apply_xtc(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor
    ) -> None:
        keys = [_check_per_row(values, logits, torch.int64) for values in (seeds, positions)]
        bounds = [_check_per_row(values, logits, torch.float64) for values in (probabilities, thresholds)]
        self._call(self._library.foreword_exclude_top, logits, *keys, *bounds)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        seeds = _check_per_row(seeds, logits, torch.int64)
        positions = _check_per_row(positions, logits, torch.int64)
        greedy = _check_per_row(greedy, logits, torch.bool)
        out = torch.from_numpy(np.empty(logits.shape[0], np.int64))
        self._call(self._library.foreword_sample, logits, seeds, positions, greedy, out)
        return out

    def sample_to_host(
        self, logits: Tensor, seeds: array[int], positions: array[int], greedy: array[int]
    ) -> list[int]:
        _check_logits(logits)
        num_rows, vocab_size = logits.shape
        assert len(seeds) == len(positions) == len(greedy) == num_rows
        token_ids = array("q", bytes(8 * num_rows))
        addresses = [values.buffer_info()[0] for values in (seeds, positions, greedy, token_ids)]
        self._library.foreword_sample(self._cpu_context, logits.data_ptr(), num_rows, vocab_size, *addresses)
        return token_ids.tolist()

    def _call(self, function: Callable[..., None], logits: Tensor, *args: Tensor | int) -> None:
        """Call a C function on rows of logits; tensors are passed as pointers."""
        _check_logits(logits)
        pointers = (value.data_ptr() if isinstance(value, Tensor) else value for value in args)
        function(self._cpu_context, logits.data_ptr(), *logits.shape, *pointers)


def delete_context(library: ctypes.CDLL, cpu_context: int, owner_pid: int) -> None:
    """Delete the context in its own process only: a forked child has no threads to join."""
    if os.getpid() == owner_pid:
        library.foreword_machine_delete(cpu_context)


def _check_logits(logits: Tensor) -> None:
    """Check the device, dtype and layout that the kernels assume."""
    assert logits.is_cpu and logits.dtype == torch.float32 and logits.dim() == 2 and logits.is_contiguous()


def _check_ids(starts: Tensor, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """starts [R+1] and ids [N], checked as by _check_per_row()."""
    assert starts.dtype == ids.dtype == torch.int64
    assert starts.shape == (logits.shape[0] + 1,) and ids.dim() == 1
    return starts.cpu().contiguous(), ids.cpu().contiguous()


def _check_per_row(values: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Check values [R], which C++ reads through a pointer; the caller keeps the result alive."""
    is_per_row = values.dtype == dtype and values.dim() == 1 and len(values) == len(logits)
    assert is_per_row, f"wanted {dtype} [{len(logits)}]"
    return values if values.is_cpu and values.is_contiguous() else values.cpu().contiguous()
