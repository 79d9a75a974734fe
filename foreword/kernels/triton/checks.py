"""Whether this card's products are the same for every number of rows: tried once when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foreword.kernels.ops import Ops

__all__ = ["ROW_COUNTS", "check_rows"]

# On both sides of what tiles.py decides by; with this shape each tile and each place of the parts of K comes up.
ROW_COUNTS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 100, 128, 130, 257)
SHAPE = (6144, 1024)


def check_rows(
    ops: Ops, device: torch.device | str, shape: tuple[int, int] = SHAPE, row_counts: Sequence[int] = ROW_COUNTS
) -> str | None:
    """None if the bits of every row are those of the row alone, else the first product that differs.

    In bfloat16 (float32 on a processor), with weights [N, K] of this shape as they are and in 8 bits. These are two dozen short
    launches for each kind; what takes time is compiling them, and Triton keeps that on disk.
    """
    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    rows = max(row_counts)
    matrix, x, residual = (
        torch.randn(size, generator=generator).to(device, dtype) for size in (shape, (rows, shape[1]), (rows, shape[0]))
    )
    for kind in (str(dtype).removeprefix("torch."), "int8"):
        weight = ops.pack_linear([matrix], kind, matrix[:, 0])
        products: dict[str, Callable[[slice], Tensor]] = {
            "linear": lambda t, w=weight: ops.linear(x[t], w, None, residual[t]),  # type: ignore[misc]
            "gated linear": lambda t, w=weight: ops.linear_gated(x[t], w, "silu"),  # type: ignore[misc]
        }
        for name, run in products.items():
            count = _differing(row_counts, run)
            if count:
                return f"a {name} layer in {kind} gives other bits for {count} rows than for one"
    return None


def _differing(row_counts: Sequence[int], run: Callable[[slice], Tensor]) -> int | None:
    """The first number of rows whose bits are not those of its rows alone. Rows alone are compared with both ends of the largest
    batch, and that one with all others."""
    whole = run(slice(0, max(row_counts)))
    for row in (0, len(whole) - 1):
        if not torch.equal(run(slice(row, row + 1))[0], whole[row]):
            return len(whole)
    return next((count for count in row_counts if not torch.equal(run(slice(0, count)), whole[:count])), None)
