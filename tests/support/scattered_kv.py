"""KV of requests in scattered blocks, under the attention tests of every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, KVLayer, build_batch
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.cpu_kernels import same_bits

REFERENCE = ReferenceOps()
Rows = dict[tuple[int, int], Tensor]  # the output of (request, position)
Spans = list[tuple[int, int, int]]  # rows [start, end) of a request


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the default device."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def agree(left: Rows, right: Rows) -> None:
    """All rows of `left` have the same bits in `right`."""
    for key, value in left.items():
        assert same_bits(value, right[key]), key


class ScatteredKV:
    """Unwritten slots hold `garbage`; in a cache with scales, any value with a scale of NaN."""

    def __init__(
        self,
        lengths: list[int],
        kv_heads: int = 2,
        dim: int = 16,
        cached: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.bfloat16,
        *,
        block_size: int = 16,
        row_tile: int = 4,
        garbage: float = math.nan,
        request_index: bool = False,
        seed: int = 0,
        latent_dim: int = 0,
    ) -> None:
        """latent_dim  of latent attention: V is the first values of K"""
        self.dtype, self.dim, self.block_size, self.row_tile = dtype, dim, block_size, row_tile
        self._lengths = lengths
        self._request_index = request_index
        needed = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed), device="cpu") + 1
        self.blocks = [chosen.tolist() for chosen in order.split(needed)]
        shape = ((sum(needed) + 1) * block_size, kv_heads, dim)
        value = 99 if cached == torch.int8 else garbage
        values = [torch.full(shape, value).to(cached) for _ in range(2)]
        if latent_dim:
            values[1] = values[0][..., :latent_dim]
        has_scales = cached.itemsize == 1
        scales = [torch.full(shape[:2], math.nan) for _ in range(2)] if has_scales else []
        self.kv = KVLayer(*values, *scales)
        for request, length in enumerate(lengths):
            sizes = self.kv.own_keys.shape[2], self.kv.v.shape[2]
            k, v = (
                randn(length, kv_heads, size, seed=first + request, dtype=dtype)
                for first, size in zip((100, 200), sizes, strict=True)
            )
            if not has_scales:
                k, v = k.to(cached), v.to(cached)
            REFERENCE.write_kv(k, v, self.kv, torch.tensor(self.slots(request, length)))

    def slot(self, request: int, position: int) -> int:
        block, place = divmod(position, self.block_size)
        return self.blocks[request][block] * self.block_size + place

    def slots(self, request: int, length: int) -> list[int]:
        return [self.slot(request, position) for position in range(length)]

    def batch(self, spans: Spans, row_tile: int | None = None) -> Batch:
        """Rows of each span, in this order."""
        chunks = [
            Chunk([0] * (end - start), start, self.blocks[request][: -(-end // self.block_size)], 1)
            for request, start, end in spans
        ]
        device = str(torch.get_default_device())
        tile = row_tile or self.row_tile
        return build_batch(chunks, self.block_size, tile, device, with_request_index=self._request_index)

    def queries(self, batch: Batch, spans: Spans, heads: int) -> Tensor:
        """Queries of a batch, a function of request and position; padding is NaN."""
        q = torch.full((len(batch.positions), heads, self.dim), math.nan, dtype=self.dtype)
        for (request, start, end), row in zip(spans, batch.query_start_loc, strict=False):
            q[row : row + end - start] = self._queries(request, heads)[start:end]
        return q

    def run(
        self, ops: Ops, spans: Spans, heads: int = 6, row_tile: int | None = None, **options: Any
    ) -> Rows:
        """Outputs by (request, position); those of padding must be zero."""
        batch = self.batch(spans, row_tile)
        queries = self.queries(batch, spans, heads)
        out = ops.attention(queries, self.kv, batch, self.dim**-0.5, **options)
        assert not out[batch.query_start_loc[-1] :].any(), "padding is not zero"
        places = [(request, position) for request, start, end in spans for position in range(start, end)]
        return dict(zip(places, out, strict=False))

    def textbook(
        self,
        start: int,
        length: int,
        heads: int,
        dtype: torch.dtype,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """[length - start, heads, Dv]: rows [start, length) of request 0, every step in `dtype`."""
        slots, group = self.slots(0, length), heads // self.kv.k.shape[1]
        k, v = (
            _values(part, scale)[slots].repeat_interleave(group, 1).transpose(0, 1).to(dtype)
            for part, scale in ((self.kv.own_keys, self.kv.k_scale), (self.kv.v, self.kv.v_scale))
        )
        k = torch.cat((v, k), -1) if self.kv.is_latent else k
        queries = self._queries(0, heads)[start:length].to(dtype).transpose(0, 1)
        scores = queries @ k.transpose(1, 2) * self.dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(length)
        last = position[start:, None] if causal else torch.full((length - start, 1), length - 1)
        seen = position[None, :] <= last
        if window is not None:
            seen &= position[None, :] > last - window
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, len(seen), 1)), -1)
        return (scores.softmax(-1)[..., :length] @ v).transpose(0, 1)

    def _queries(self, request: int, heads: int) -> Tensor:
        """All rows at once: torch's random numbers depend on how many are drawn."""
        return randn(self._lengths[request], heads, self.dim, seed=300 + request, dtype=self.dtype)


def _values(part: Tensor, scale: Tensor | None) -> Tensor:
    return part.double() if scale is None else part.double() * scale.double()[..., None]


def check_not_causal(
    requests: ScatteredKV, run: Callable[..., Rows], heads: int, start: int, length: int
) -> None:
    """Rows [start, length) of request 0 see each other, and no other request; the last as if causal.

    run(spans, **options): outputs of the rows of all spans
    """
    spans = [(1, 0, 5), (0, start, length), (2, 3, 9)]
    for window in (None, length - start + 2, 3):
        rows = run(spans, window=window, causal=False)
        expected = requests.textbook(start, length, heads, torch.float64, window, causal=False)
        actual = torch.stack([rows[0, position] for position in range(start, length)])
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-4)
        causal = run(spans, window=window)
        assert all(torch.equal(rows[last], causal[last]) for last in ((0, length - 1), (1, 4), (2, 8)))


def check_first(run: Callable[..., Rows], length: int, first: int) -> None:
    """Rows that see positions from `first` on have the bits of rows whose window begins there.

    run(spans, **options): outputs of request 0, of `length` tokens
    """
    rows = run([(0, 0, length)], first=first)
    assert not any(bool(rows[0, position].any()) for position in range(first)), "zeros where nothing is seen"
    for position in {first, first + 1, (first + length) // 2, length - 1}:
        alone = [(0, position, position + 1)]
        agree(run(alone, window=position + 1 - first), rows)
        agree(run(alone, first=first), rows)
    agree(run([(0, first, length)], first=first, window=length), rows)
