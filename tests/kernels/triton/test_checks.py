"""The GPU self-checks accept row-invariant kernels and name the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foreword.kernels.ops import AttentionMetadata
from foreword.kernels.triton import attention
from foreword.kernels.triton.backend import TritonOps
from foreword.kernels.triton.checks import (
    ROW_COUNTS,
    SHAPES,
    check_attention_invariance,
    check_row_invariance,
)
from foreword.kernels.triton.gemm import TILES, pick_split_mode, pick_tile
from foreword.kernels.triton.gemm_pack import PackedWeight, num_splits
from foreword.kernels.triton.linear import TritonLinear
from tests.support.device import DEVICE
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

COUNTS = (1, 17, 33)
NAME = "float32" if IS_INTERPRETED else "bfloat16"
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
    assert check_row_invariance(TritonLinear(), DEVICE, [(40, 300)], COUNTS) is None


def test_splits_that_depend_on_rows_fail() -> None:
    found = check_row_invariance(ByRows(), DEVICE, [(40, 600)], COUNTS)
    assert found == f"a linear layer in {NAME} gives other bits for 33 rows than for one"


@pytest.mark.usefixtures("small_tiles")
def test_row_invariant_attention_passes() -> None:
    assert check_attention_invariance(TritonOps(eager=True), DEVICE, **SMALL) is None


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("rows", "name"), [(1, "a row alone"), (6, "a draft"), (36, "chunks of 3 requests")])
def test_attention_splits_that_depend_on_rows_fail(rows: int, name: str) -> None:
    found = check_attention_invariance(ByRequests(rows), DEVICE, **SMALL)
    assert found == f"attention in {NAME} gives other bits for {name} than for a prompt chunk"


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_every_tile_and_split_mode_is_checked(form: str) -> None:
    """With serial splits there are many row tiles, and these are the widest."""
    tried = set()
    for outputs, inputs in SHAPES:
        for rows in ROW_COUNTS:
            tile = pick_tile(form, 2, rows)
            tiles = -(-outputs // tile.bm) * -(-rows // tile.bn)
            tried.add((tile, pick_split_mode(tiles, tile, num_splits(outputs, inputs, form), rows)))
    tiles = TILES["dense" if form == "dense" else "quantized"]
    assert tried >= {(tile, parts) for tile in tiles for parts in ("none", "split_k")} | {
        (tiles[-1], "serial")
    }


@pytest.mark.skipif(IS_INTERPRETED, reason="without a GPU there is nothing to check")
def test_this_gpu_is_exact() -> None:
    assert check_row_invariance(TritonLinear(), DEVICE) is None
    assert check_attention_invariance(TritonOps(eager=True), DEVICE) is None
