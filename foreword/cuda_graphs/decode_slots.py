"""The slot table of a decode loop: state and sampling parameters of each request, as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foreword.core.batch import Batch
from foreword.core.request import NO_LORA
from foreword.cuda_graphs.capture import CudaGraphPool
from foreword.kernels.ops import DraftSamplingParams, Ops
from foreword.kernels.reference.decode_ops import DecodeOps, SlotField

NO_TOP_K = 1 << 40
SIGN_BIT = 1 << 63


class SamplerClass(IntEnum):
    """The part of the sampling pipeline that a step runs: more than needed changes no bit, but costs time."""

    PLAIN = 0
    FILTERED = 1


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Sizes of the buffers."""

    max_rows: int  # rows of a captured pass
    max_requests: int  # requests at once; each has a row
    max_blocks: int  # blocks of the longest block table
    uses_mrope: bool
    device: torch.device
    uses_lora: bool = False


class GraphOps(Ops, Protocol):
    """A backend with supports_graphs."""

    eager: bool  # capture nothing
    decode_ops: DecodeOps


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """The model of a decode loop or draft loop."""

    ops: GraphOps
    forward: Callable[[Batch], Tensor]  # returns logits [R, V]
    graph_forward: Callable[[Batch], Tensor]  # the same, as graphs; a result is valid until the next call
    graphs: CudaGraphPool
    limits: DecodeLimits
    vocab_size: int  # V
    block_size: int
    never_sampled_ids: Tensor  # int64 [U], on the device


@dataclass(frozen=True, slots=True)
class SlotView:
    """Columns of a slot table, int64 [len(SlotField), n]."""

    values: Tensor

    def __getitem__(self, field: SlotField) -> Tensor:
        """int64 [n]"""
        return self.values[field]

    def floats(self, field: SlotField) -> Tensor:
        """float64 [n]"""
        return self.values.view(torch.float64)[field]

    @property
    def alive(self) -> Tensor:
        """bool [n]"""
        return self.values[SlotField.ALIVE] != 0


def choose_sampler_class(sampling_params: Sequence[DraftSamplingParams]) -> SamplerClass:
    """The lowest class that serves all requests."""
    filtered = any(not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in sampling_params)
    return SamplerClass.FILTERED if filtered else SamplerClass.PLAIN


def pack_slots(
    last_token_ids: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    mrope_offsets: Sequence[int],
    sampling_params: Sequence[DraftSamplingParams],
    lora_slots: Sequence[int] | int = NO_LORA,
) -> Tensor:
    """Columns of n live requests, int64 [len(SlotField), n], on the host; each has a last token."""
    params = sampling_params
    table = np.zeros((len(SlotField), len(last_token_ids)), np.int64)
    table[SlotField.ALIVE] = 1
    table[SlotField.LENGTH] = num_tokens
    table[SlotField.PREV_TOKEN] = [ids[-2] if len(ids) > 1 else 0 for ids in last_token_ids]
    table[SlotField.LAST_TOKEN] = [ids[-1] for ids in last_token_ids]
    table[SlotField.MROPE_OFFSET] = mrope_offsets
    table[SlotField.LORA_SLOT] = lora_slots
    table[SlotField.SEED] = [p.seed - 2 * SIGN_BIT if p.seed >= SIGN_BIT else p.seed for p in params]
    table[SlotField.GREEDY] = [p.greedy for p in params]
    table[SlotField.TOP_K] = [NO_TOP_K if p.greedy or p.top_k <= 0 else p.top_k for p in params]
    floats = table.view(np.float64)
    floats[SlotField.TEMPERATURE] = [1.0 if p.greedy else p.temperature for p in params]
    floats[SlotField.TOP_P] = [1.0 if p.greedy else p.top_p for p in params]
    floats[SlotField.MIN_P] = [0.0 if p.greedy else p.min_p for p in params]
    return torch.from_numpy(table)


def copy_to_device(values: Tensor, target: Tensor) -> None:
    """Copy from the host without waiting; torch keeps the pinned memory until the copy has read it."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def sample_slots(
    ops: Ops,
    logits: Tensor,
    slots: SlotView,
    positions: Tensor,
    never_sampled_ids: Tensor,
    sampler_class: SamplerClass,
) -> Tensor:
    """Sample each row, bit for bit as sampling/sampler.py: logits float32 [R, V], overwritten -> int64 [R].

    slots              R columns
    positions          int64 [R]: absolute index of each sampled token
    never_sampled_ids  int64 [U]
    """
    if never_sampled_ids.numel():
        logits.index_fill_(1, never_sampled_ids, -torch.inf)
    ops.apply_temperature(logits, slots.floats(SlotField.TEMPERATURE).float())
    if sampler_class == SamplerClass.FILTERED:
        ops.apply_top_k(logits, slots[SlotField.TOP_K].clamp(max=logits.shape[1]))
        ops.apply_top_p(logits, slots.floats(SlotField.TOP_P))
        ops.apply_min_p(logits, slots.floats(SlotField.MIN_P))
    return ops.sample(logits, slots[SlotField.SEED], positions, slots[SlotField.GREEDY] != 0)
