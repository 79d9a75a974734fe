"""Unpacks matrices of AWQ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foreword.kernels.ops import GroupedInts
from foreword.weights.quantized.scheme import (
    CHUNK,
    FLOATS,
    GroupedScheme,
    StoredTensor,
    read_scales,
    unpack_words,
)

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, lowest first
# Swaps that transpose 8 words of 8 nibbles: distance of the words, shift, and the bits that stay.
NIBBLE_SWAPS = ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F))


class AWQ(GroupedScheme):
    """Layout `gemm`: words of 8 columns (of a row of the transposed matrix), in the order of AWQ_COLUMNS."""

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        groups, words = self.num_groups(columns), self._words(rows)
        self._words(columns)
        return {
            "qweight": StoredTensor(("I32",), ((columns, words),)),
            "qzeros": StoredTensor(("I32",), ((groups, words),)),
            "scales": StoredTensor(FLOATS, ((groups, rows),)),
        }

    def matrix(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> GroupedInts:
        values = _transpose_nibbles(tensors["qweight"]).view(torch.uint8)
        zeros = unpack_words(tensors["qzeros"], self.bits)
        zeros = zeros.reshape(len(zeros), -1, len(AWQ_COLUMNS))
        columns_first = torch.empty_like(zeros)
        columns_first[..., list(AWQ_COLUMNS)] = zeros
        zeros = columns_first.flatten(1).t().contiguous()
        return self._grouped(values, read_scales(tensors, "scales").t().contiguous(), zeros, columns)


def _transpose_nibbles(words: Tensor) -> Tensor:
    """AWQ's words int32 [K, N / 8] -> int32 [N, K / 8], of 8 values along K, lowest first."""
    num_words, num_columns = len(words) // 8, words.shape[1] * 8
    result = torch.empty(words.shape[1], 8, num_words, dtype=torch.int32, device=words.device)
    for first in range(0, words.shape[1], CHUNK):
        chunk = words[:, first : first + CHUNK].reshape(num_words, 8, -1).transpose(0, 1).contiguous()
        for distance, shift, mask in NIBBLE_SWAPS:
            low, high = chunk.view(-1, 2, distance, *chunk.shape[1:]).unbind(1)
            moved = (low >> shift).bitwise_xor_(high).bitwise_and_(mask)
            high ^= moved
            low ^= moved.bitwise_left_shift_(shift)
        for nibble, column in enumerate(AWQ_COLUMNS):
            result[first : first + CHUNK, column] = chunk[nibble].t()
    return result.view(num_columns, num_words)
