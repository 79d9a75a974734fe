"""Checks that this GPU computes a row with the same bits in every batch; run once when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from foreword.core.batch import Chunk, KVLayer, build_batch
from foreword.kernels.ops import Ops
from foreword.kernels.triton import attention

__all__ = ["ROW_COUNTS", "check_attention_invariance", "check_row_invariance"]

# On both sides of each threshold in gemm.py. K of the first shape has three splits, in their own programs or
# one; the second shape is a multiple of nothing, and its K is one split.
ROW_COUNTS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 100, 128, 130, 257)
SHAPES = ((6144, 1024), (200, 500))
BFLOAT16_CAPABILITY = (8, 0)  # compute capability with bfloat16
BLOCK_SIZE = 16
DRAFT_ROWS = 6

Span = tuple[int, int]


def check_row_invariance(
    ops: Ops,
    device: torch.device | str,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> str | None:
    """The first product whose rows get other bits in a batch than alone, or None.

    shapes are of weights [N, K], in each dtype of the GPU and in int8. Compilation takes most of the time,
    and Triton caches it on disk.
    """
    device = torch.device(device)
    for dtype in _dtypes(device):
        generator = torch.Generator().manual_seed(0)
        formats = (str(dtype).removeprefix("torch."), *(("int8",) if dtype == _dtypes(device)[0] else ()))
        for size, width in shapes:
            matrix, x, residual = (
                torch.randn(shape, generator=generator).to(device, dtype)
                for shape in ((size, width), (max(row_counts), width), (max(row_counts), size))
            )
            for weight_format in formats:
                for name, run in _linear_layers(ops, weight_format, matrix, x, residual):
                    count = _first_differing(row_counts, run)
                    if count:
                        batch = f"{count} rows"
                        return f"a {name} layer in {weight_format} gives other bits for {batch} than for one"
    return None


def check_attention_invariance(
    ops: Ops,
    device: torch.device | str,
    kv_heads: int = 8,
    group: int = 4,
    dim: int = 128,
    num_rows: int = 64,
) -> str | None:
    """The first batch where a row's attention has other bits than in a prompt chunk of num_rows, or None.

    Batches: single rows, drafts, chunks and many requests of each, for tiles of all widths, with one program
    per split, half as many, and one. The rows lie on both sides of the third split; requests share blocks.
    """
    device = torch.device(device)
    start = 2 * attention.SPLIT - num_rows // 2
    blocks = range(1, -(-(start + num_rows) // BLOCK_SIZE) + 1)
    slots = (len(blocks) + 1) * BLOCK_SIZE
    for dtype in _dtypes(device):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((num_rows, kv_heads * group, dim), *[(slots, kv_heads, dim)] * 2)
        )
        cache = KVLayer(k, v)

        def run(spans: Sequence[Span], q: Tensor = q, cache: KVLayer = cache) -> Tensor:
            chunks = [Chunk([0] * (last - first), start + first, blocks, 1) for first, last in spans]
            batch = build_batch(chunks, BLOCK_SIZE, 1, str(device), with_request_index=True)
            return ops.attention(torch.cat([q[first:last] for first, last in spans]), cache, batch, dim**-0.5)

        whole = run([(0, num_rows)])
        for name, spans in _batches(num_rows, kv_heads):
            if not torch.equal(run(spans), torch.cat([whole[first:last] for first, last in spans])):
                dtype_name = str(dtype).removeprefix("torch.")
                return f"attention in {dtype_name} gives other bits for {name} than for a prompt chunk"
    return None


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Activation dtypes of the device, the default first."""
    if device.type == "cpu":
        return (torch.float32,)
    new = torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
    return (torch.bfloat16, torch.float16) if new else (torch.float16,)


def _linear_layers(
    ops: Ops, weight_format: str, matrix: Tensor, x: Tensor, residual: Tensor
) -> Iterator[tuple[str, Callable[[slice], Tensor]]]:
    """(name, function from a slice of x to its output rows)"""
    weight = ops.pack_linear([matrix], weight_format, matrix[:, 0])
    yield "linear", lambda rows: ops.linear(x[rows], weight, None, residual[rows])
    yield "gated linear", lambda rows: ops.linear_gated_act(x[rows], weight, "silu")


def _first_differing(row_counts: Sequence[int], run: Callable[[slice], Tensor]) -> int | None:
    """The first row count whose bits differ from its rows alone, or None.

    Rows alone are compared with both ends of the largest batch, and that batch with all others.
    """
    whole = run(slice(0, max(row_counts)))
    for row in (0, len(whole) - 1):
        if not torch.equal(run(slice(row, row + 1))[0], whole[row]):
            return len(whole)
    return next((count for count in row_counts if not torch.equal(run(slice(0, count)), whole[:count])), None)


def _batches(num_rows: int, kv_heads: int) -> Iterator[tuple[str, list[Span]]]:
    """(name, rows of each request of a batch)"""
    alone, draft, chunk = (num_rows - 1, num_rows), (num_rows - DRAFT_ROWS, num_rows), (0, num_rows)
    enough = -(-attention.TARGET_NUM_PROGRAMS // kv_heads)
    for row in (0, num_rows // 2 - 1, num_rows // 2, num_rows - 1):
        yield "a row alone", [(row, row + 1)]
    yield "a draft", [draft]
    yield "requests of all kinds", [chunk, draft, alone]
    for count in (-(-enough // 2), enough):
        yield f"{count} rows of as many requests", [alone] * count
        yield f"drafts of {count} requests", [draft] * count
    yield f"chunks of {enough} requests", [chunk] * enough
