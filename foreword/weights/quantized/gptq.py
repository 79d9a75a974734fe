"""Unpacks matrices of GPTQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.kernels.ops import GroupedInts
from foreword.weights.quantized.scheme import (
    CHUNK,
    FLOATS,
    WORD_BITS,
    GroupedScheme,
    SchemeError,
    StoredTensor,
    read_scales,
    unpack_words,
)


@dataclass(frozen=True, slots=True)
class GPTQ(GroupedScheme):
    """Words of values along K; column i belongs to group g_idx[i]."""

    zero_offset: int  # added to stored zeros: 1 in checkpoint_format gptq, 0 in gptq_v2
    needs_g_idx: bool = False  # desc_act

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        groups = self.num_groups(columns)
        return {
            "qweight": StoredTensor(("I32",), ((self._words(columns), rows),)),
            "qzeros": StoredTensor(("I32",), ((groups, self._words(rows)),)),
            "scales": StoredTensor(FLOATS, ((groups, rows),)),
            "g_idx": StoredTensor(("I32", "I64"), ((columns,),), optional=not self.needs_g_idx),
        }

    def matrix(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> GroupedInts:
        order = self._input_order(tensors["g_idx"], columns) if "g_idx" in tensors else None
        values = _transpose_words(tensors["qweight"], self.bits, order).view(torch.uint8)
        # Words are added as a whole: v1 subtracted 1 from each field, with borrows into the next one.
        ones = sum(1 << shift for shift in range(0, WORD_BITS, self.bits))
        zeros = unpack_words(tensors["qzeros"] + ones * self.zero_offset, self.bits).t().contiguous()
        scales = read_scales(tensors, "scales").t().contiguous()
        return self._grouped(values, scales, zeros, columns, order)

    def _input_order(self, groups: Tensor, columns: int) -> Tensor | None:
        """Columns by group, int64 [K]; None if they are so already."""
        size, count = self.group_size or columns, self.num_groups(columns)
        low, high = (int(bound) for bound in groups.aminmax())
        if low < 0 or high >= count:
            raise SchemeError("g_idx", f"holds group {low if low < 0 else high}; there are {count}, from 0")
        sizes = torch.bincount(groups, minlength=count)
        if not bool((sizes == size).all()):
            wrong = int((sizes != size).nonzero()[0])
            raise SchemeError("g_idx", f"has {int(sizes[wrong])} columns in group {wrong}, not {size}")
        order = torch.argsort(groups, stable=True)
        return None if torch.equal(order, torch.arange(columns, device=order.device)) else order


def _transpose_words(words: Tensor, bits: int, order: Tensor | None) -> Tensor:
    """Packed values int32 [K * bits / 32, N] -> [N, K * bits / 32]; columns by `order` int64 [K]."""
    if order is None:
        return words.t().contiguous()
    per_word, mask = WORD_BITS // bits, (1 << bits) - 1
    rows, shifts = order // per_word, (order % per_word * bits).to(torch.int32)[:, None]
    result = torch.empty(words.shape[::-1], dtype=torch.int32, device=words.device)
    for first in range(0, words.shape[1], CHUNK):
        chunk = words[:, first : first + CHUNK].contiguous()
        packed = torch.zeros_like(chunk)
        for place in range(per_word):
            values = chunk.index_select(0, rows[place::per_word])
            values.bitwise_right_shift_(shifts[place::per_word]).bitwise_and_(mask)
            packed |= values.bitwise_left_shift_(bits * place)
        result[first : first + CHUNK] = packed.t()
    return result
