"""The GPU self-checks accept row-invariant kernels and name the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foreword.kernels.ops import AttentionMetadata
from foreword.kernels.triton import attention
from foreword.kernels.triton.backend import TritonOps
from foreword.kernels.triton.checks import (
    HEAD_SHAPE,
    LAYER_SHAPE,
    ROW_COUNTS,
    _difference,
    attention_mismatches,
    row_mismatches,
)
from foreword.kernels.triton.gemm import HOPPER_TILES, TILES, Tile, pick_split_mode, pick_tile
from foreword.kernels.triton.gemm_pack import PackedWeight, num_splits
from foreword.kernels.triton.linear import TritonLinear
from tests.support.device import DEVICE
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

COUNTS = (1, 17, 33)
NAME = "float32" if IS_INTERPRETED else "bfloat16"
TYPES = (getattr(torch, NAME), NAME, NAME)
SMALL = {"kv_heads": 1, "group": 2, "dim": 16, "num_rows": 12}


class ByRows(TritonLinear):
    """Splits of K depend on the number of rows, as in ordinary libraries."""

    def linear(
        self, x: Tensor, weight: PackedWeight, dtype: torch.dtype | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        return super().linear(x, replace(weight, splits=1 if len(x) > 16 else weight.splits), dtype, add_to)


class ByRequests(TritonOps):
    """Attention splits depend on the number of rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(eager=True)
        self.rows = rows

    def attention(self, q: Tensor, *rest: object, **options: AttentionMetadata) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if len(q) == self.rows:
                patch.setattr(attention, "SPLIT", 48)
            return super().attention(q, *rest, **options)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with exact_dot():
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "BLOCK_KV", 16)
    monkeypatch.setattr(attention, "TARGET_NUM_PROGRAMS", 3)


def test_row_invariant_products_pass() -> None:
    shapes = [(40, 300), (24, 100)]
    assert list(row_mismatches(TritonLinear(), DEVICE, *TYPES, shapes, COUNTS)) == []


def test_splits_that_depend_on_rows_fail() -> None:
    """Each mismatch is listed, with its kernel and its first value."""
    found = list(row_mismatches(ByRows(), DEVICE, *TYPES, [(40, 600), (24, 100)], COUNTS))
    parts = r"\(tile \d+ x \d+, \d splits split_k; \d+ of \d+ values, at \[\d+, \d+\] [-\d.e]+ and [-\d.e]+\)"
    assert len(found) == 3 and all("a linear layer" in each for each in found)
    assert re.fullmatch(
        f"a linear layer in {NAME} gives other bits for 33 rows than for one {parts}", found[0]
    )


@pytest.mark.usefixtures("small_tiles")
def test_row_invariant_attention_passes() -> None:
    assert list(attention_mismatches(TritonOps(eager=True), DEVICE, TYPES[0], **SMALL)) == []


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("rows", "name"), [(1, "a row alone"), (6, "a draft"), (36, "chunks of 3 requests")])
def test_attention_splits_that_depend_on_rows_fail(rows: int, name: str) -> None:
    found = next(attention_mismatches(ByRequests(rows), DEVICE, TYPES[0], **SMALL))
    assert found.startswith(f"attention in {NAME} gives other bits for {name} than for a prompt chunk (")


@pytest.mark.parametrize("table", [TILES, HOPPER_TILES], ids=["ampere", "hopper"])
@pytest.mark.parametrize("form", ["dense", "int8"])
def test_every_tile_and_split_mode_is_checked(form: str, table: Mapping[str, Sequence[Tile]]) -> None:
    """With serial splits there are many row tiles, and these are the widest."""
    tried = set()
    for outputs, inputs in (LAYER_SHAPE, HEAD_SHAPE):
        for rows in ROW_COUNTS:
            splits = num_splits(outputs, inputs, form)
            tile = pick_tile(form, 2, rows, splits, table)
            tiles = -(-outputs // tile.bm) * -(-rows // tile.bn)
            tried.add((tile, pick_split_mode(tiles, tile, splits, rows)))
    tiles = table["dense" if form == "dense" else "quantized"]
    assert tried >= {(tile, parts) for tile in tiles for parts in ("none", "split_k")} | {
        (tiles[-1], "serial")
    }


@pytest.mark.skipif(IS_INTERPRETED, reason="without a GPU there is nothing to check")
def test_this_gpu_is_exact() -> None:
    assert list(row_mismatches(TritonLinear(), DEVICE, *TYPES)) == []
    assert list(attention_mismatches(TritonOps(eager=True), DEVICE, TYPES[0])) == []


def test_signs_of_zeros_are_bits() -> None:
    values = torch.tensor([[1.0, 0.0], [2.0, -0.0]])
    assert not _difference(values, values.clone())
    assert _difference(values, values.abs()) == "1 of 4 values, at [1, 1] -0.0 and 0.0"
