"""Rows of logits for tests: ordinary, coarse (many ties), masked and non-finite; a negative control."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from foreword.kernels.reference.backend import ReferenceOps, TypedWeight

ROW_KINDS = ("plain", "flat", "steep", "ties", "equal", "few", "huge", "tied scores", "zeros")
NON_FINITE_KINDS = ("masked", "nan", "-nan", "inf")


def make_row(row_kind: str, width: int, seed: int) -> Tensor:
    """float32 [width]"""
    generator = torch.Generator().manual_seed(seed)
    scale = {"flat": 0.01, "steep": 30.0, "huge": 1e30}.get(row_kind, 3.0)
    row = torch.randn(width, generator=generator) * scale
    place = int(torch.randint(width, (), generator=generator))
    if row_kind == "ties":
        row.round_()
    elif row_kind == "equal":
        row.fill_(1.5)
    elif row_kind == "tied scores":
        row = row.round() * 1e10  # too coarse for noise to break ties
    elif row_kind == "few":
        row[torch.rand(width, generator=generator) < 0.9] = -torch.inf
        row[place] = 1.0
    elif row_kind == "zeros":
        row = torch.where(row < 0, -0.0, 0.0)
    elif row_kind in NON_FINITE_KINDS:
        row.fill_(-torch.inf) if row_kind == "masked" else row[place : place + 1].fill_(float(row_kind))
    return row


def random_rows(
    kinds: tuple[str, ...] = ROW_KINDS + NON_FINITE_KINDS, max_width: int = 600
) -> st.SearchStrategy[Tensor]:
    """float32 [1..6, 1..max_width]"""
    lines = st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 2**31)), min_size=1, max_size=6)
    build = lambda width, chosen: torch.stack([make_row(kind, width, seed) for kind, seed in chosen])  # noqa: E731
    return st.builds(build, st.integers(1, max_width), lines)


class RowDependentOps(ReferenceOps):
    """The negative control of exactness: the number of rows chooses where each sum of a product is split.

    Ordinary torch does so too, but not on every processor nor for every shape and type.
    """

    def _matmul(self, x: Tensor, weight: TypedWeight) -> Tensor:
        split = 1 + x.shape[0] % (x.shape[1] - 1)
        head = F.linear(x[:, :split], weight.matrix[:, :split], weight.bias)
        return head + F.linear(x[:, split:], weight.matrix[:, split:])
