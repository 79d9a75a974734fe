"""Qwen's models that see, with themselves: the same bits whatever the chunks, the threads, the size of a piece."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.core.pictures import Picture
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import isas
from foreword.kernels.reference import Packed, Reference, sizes_of
from foreword.models.vision import qwen_block
from foreword.models.vision.parts import ATTENTION_PACE
from tests.kernels.cpu_helpers import machines
from tests.models.driving import Driver
from tests.models.vision.test_qwen import SIZES, prompt_of
from tests.vision_checkpoints import random_picture, write_vision_checkpoint

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BACKENDS = ("reference", *isas())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunks_and_single_tokens_give_the_same_bits(family: str, dtype: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path / family, family, dtype=dtype)
    check_chunks(Driver(path, dtype=dtype, block_size=4), path)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("family", FAMILIES)
def test_native_kernels_agree_with_the_reference_and_with_themselves(family: str, isa: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path / family, family)
    ours, plain = Driver(path, ops=CpuOps(isa, threads=1), block_size=4), Driver(path)
    prompt, pictures = prompt_of([random_picture(path, seed, *size) for seed, size in enumerate(SIZES)])
    for picture in pictures:
        torch.testing.assert_close(ours.encode(picture), plain.encode(picture), atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.logits(prompt, 0, pictures), plain.logits(prompt, 0, pictures), atol=1e-3, rtol=0)
    assert ours.greedy(prompt, 32, pictures) == plain.greedy(prompt, 32, pictures)
    check_chunks(ours, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near(family: str, tmp_path: Path):
    """Every backend within a tenth of the logits' spread, and each by bits whatever the chunks."""
    path = write_vision_checkpoint(tmp_path / family, family)
    prompt, pictures = prompt_of([random_picture(path, seed, *size) for seed, size in enumerate(SIZES)])
    expected = Driver(path).logits(prompt, 0, pictures)
    for ops in (Reference(), *(CpuOps(isa, threads=1) for isa in isas())):
        ours = Driver(path, dtype="bfloat16", ops=ops, block_size=4)
        assert ours.encode(pictures[0]).dtype == torch.bfloat16
        assert (ours.logits(prompt, 0, pictures) - expected).norm() < 0.1 * expected.norm()
        check_chunks(ours, path)


def check_chunks(ours: Driver, path: Path) -> None:
    """Chunks begin and end within pictures; behind the prompt rows go through what is compiled, and without features."""
    prompt, pictures = prompt_of([random_picture(path, seed, *size) for seed, size in enumerate(SIZES)])
    whole = ours.logits(prompt, 0, pictures)
    bounds = [
        0,
        1,
        pictures[0].start + 3,
        pictures[1].start,
        pictures[2].start + 1,
        pictures[2].end,
        len(prompt) - 2,
        len(prompt) - 1,
    ]
    bounds.append(len(prompt))
    chunks = torch.cat([ours.logits(prompt[start:end], start, pictures) for start, end in pairwise(bounds)])
    assert torch.equal(chunks.view(torch.int32), whole.view(torch.int32)) and whole.isfinite().all()
    text = [65, 66, 67, 68]
    together = ours.logits(text, len(prompt), pictures)
    singly = torch.cat([ours.logits([one], len(prompt) + number, pictures) for number, one in enumerate(text)])
    assert torch.equal(together.view(torch.int32), singly.view(torch.int32))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_depend_on_the_picture_alone(family: str, name: str, tmp_path: Path):
    """Not on threads, nor on what is encoded meanwhile, nor on how large a piece is."""
    path = write_vision_checkpoint(tmp_path / family, family)
    first, second = random_picture(path, 1, 48, 40), random_picture(path, 2, 30, 90)
    drivers = [Driver(path, ops=ops) for ops in ([Reference()] if name == "reference" else machines(name))]
    expected = drivers[0].encode(first)
    for driver in drivers:
        tower = driver.model.tower
        assert tower is not None
        found = []
        work = [tower.encode(picture) for picture in (second, first, first)]
        with torch.inference_mode():
            while work:
                for one in list(work):
                    try:
                        next(one)
                    except StopIteration as done:
                        found.append(done.value)
                        work.remove(one)
        assert sum(torch.equal(one, expected) for one in found if one.shape == expected.shape) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_piece_may_be_small(family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Attention and layers cut finer: the bits of native kernels stay, and torch's are near."""
    path = write_vision_checkpoint(tmp_path / family, family)
    driver = Driver(path, ops=Reference() if name == "reference" else machines(name)[1])
    picture = random_picture(path, 3, 90, 70)
    whole, pieces = driver.encode(picture), count_pieces(driver, picture)
    for bound in ("PAIRS", "ROWS", "CELLS"):
        monkeypatch.setattr(qwen_block, bound, {"PAIRS": 3000, "ROWS": 20, "CELLS": 3}[bound])
    finer = driver.encode(picture)
    assert torch.equal(whole, finer) if name != "reference" else (whole - finer).abs().max() < 1e-5
    assert count_pieces(driver, picture) > 3 * pieces


def count_pieces(driver: Driver, picture: Picture) -> int:
    assert driver.model.tower is not None
    with torch.inference_mode():
        return len(list(driver.model.tower.encode(picture)))


class Counting(Reference):
    """Counts multiply-adds."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def linear(self, x: Tensor, weight: Packed, dtype: torch.dtype | None = None, add_to: Tensor | None = None) -> Tensor:
        self.products += len(x) * weight.values.numel()
        return super().linear(x, weight, dtype, add_to)

    def attend_sections(self, q: Tensor, k: Tensor, v: Tensor, *starts_and_scale: Any) -> Tensor:
        q_starts, kv_starts, _ = starts_and_scale
        pairs = sum(q * k for q, k in zip(sizes_of(q_starts), sizes_of(kv_starts), strict=True))
        self.products += ATTENTION_PACE * 2 * pairs * q[0].numel()
        return super().attend_sections(q, k, v, *starts_and_scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_picture_costs_is_told_piece_by_piece(family: str, tmp_path: Path):
    ops = Counting()
    driver = Driver(write_vision_checkpoint(tmp_path, family), ops=ops)
    tower, told = driver.model.tower, 0
    assert tower is not None
    with torch.inference_mode():
        for products in tower.encode(random_picture(tmp_path, 0, 90, 70)):
            told += products
            assert told == ops.products
