"""Qwen's models that see, with themselves: the same bits whatever the chunks, the threads, the size of a piece."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.core.images import PromptImage
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.reference.backend import ReferenceOps, ReferenceWeight, cu_seqlens_to_lens
from foreword.models.vision import qwen_block
from foreword.models.vision.layers import ATTENTION_COST_FACTOR
from tests.models.vision.test_qwen import SIZES, prompt_of
from tests.support.cpu_kernels import cpu_ops_by_threads
from tests.support.forward_helpers import ForwardHelper
from tests.support.vision_checkpoints import random_image, write_vision_checkpoint

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BACKENDS = ("reference", *supported_isas())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunks_and_single_tokens_give_the_same_bits(family: str, dtype: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path / family, family, dtype=dtype)
    check_chunks(ForwardHelper(path, dtype=dtype, block_size=4), path)


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("family", FAMILIES)
def test_native_kernels_agree_with_the_reference_and_with_themselves(family: str, isa: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path / family, family)
    ours, plain = ForwardHelper(path, ops=CpuOps(isa, threads=1), block_size=4), ForwardHelper(path)
    prompt, pictures = prompt_of([random_image(path, seed, *size) for seed, size in enumerate(SIZES)])
    for picture in pictures:
        torch.testing.assert_close(ours.encode(picture), plain.encode(picture), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        ours.logits(prompt, 0, pictures), plain.logits(prompt, 0, pictures), atol=1e-3, rtol=0
    )
    assert ours.greedy(prompt, 32, pictures) == plain.greedy(prompt, 32, pictures)
    check_chunks(ours, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near(family: str, tmp_path: Path):
    """Every backend within a tenth of the logits' spread, and each by bits whatever the chunks."""
    path = write_vision_checkpoint(tmp_path / family, family)
    prompt, pictures = prompt_of([random_image(path, seed, *size) for seed, size in enumerate(SIZES)])
    expected = ForwardHelper(path).logits(prompt, 0, pictures)
    for ops in (ReferenceOps(), *(CpuOps(isa, threads=1) for isa in supported_isas())):
        ours = ForwardHelper(path, dtype="bfloat16", ops=ops, block_size=4)
        assert ours.encode(pictures[0]).dtype == torch.bfloat16
        assert (ours.logits(prompt, 0, pictures) - expected).norm() < 0.1 * expected.norm()
        check_chunks(ours, path)


def check_chunks(ours: ForwardHelper, path: Path) -> None:
    """Chunks begin and end within pictures; behind the prompt rows go through what is compiled, and without features."""
    prompt, pictures = prompt_of([random_image(path, seed, *size) for seed, size in enumerate(SIZES)])
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
    singly = torch.cat(
        [ours.logits([one], len(prompt) + number, pictures) for number, one in enumerate(text)]
    )
    assert torch.equal(together.view(torch.int32), singly.view(torch.int32))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_depend_on_the_picture_alone(family: str, name: str, tmp_path: Path):
    """Not on threads, nor on what is encoded meanwhile, nor on how large a piece is."""
    path = write_vision_checkpoint(tmp_path / family, family)
    first, second = random_image(path, 1, 48, 40), random_image(path, 2, 30, 90)
    drivers = [
        ForwardHelper(path, ops=ops)
        for ops in ([ReferenceOps()] if name == "reference" else cpu_ops_by_threads(name))
    ]
    expected = drivers[0].encode(first)
    for driver in drivers:
        tower = driver.model.vision_encoder
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
    driver = ForwardHelper(path, ops=ReferenceOps() if name == "reference" else cpu_ops_by_threads(name)[1])
    picture = random_image(path, 3, 90, 70)
    whole, pieces = driver.encode(picture), count_pieces(driver, picture)
    for bound in ("ATTN_CHUNK_PAIRS", "LINEAR_CHUNK_ROWS", "MERGE_CHUNK_CELLS"):
        monkeypatch.setattr(
            qwen_block,
            bound,
            {"ATTN_CHUNK_PAIRS": 3000, "LINEAR_CHUNK_ROWS": 20, "MERGE_CHUNK_CELLS": 3}[bound],
        )
    finer = driver.encode(picture)
    assert torch.equal(whole, finer) if name != "reference" else (whole - finer).abs().max() < 1e-5
    assert count_pieces(driver, picture) > 3 * pieces


def count_pieces(driver: ForwardHelper, picture: PromptImage) -> int:
    assert driver.model.vision_encoder is not None
    with torch.inference_mode():
        return len(list(driver.model.vision_encoder.encode(picture)))


class Counting(ReferenceOps):
    """Counts multiply-adds."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def linear(
        self,
        x: Tensor,
        weight: ReferenceWeight,
        dtype: torch.dtype | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        self.products += len(x) * weight.values.numel()
        return super().linear(x, weight, dtype, add_to)

    def varlen_attention(self, q: Tensor, k: Tensor, v: Tensor, *starts_and_scale: Any) -> Tensor:
        q_starts, kv_starts, _ = starts_and_scale
        pairs = sum(
            q * k for q, k in zip(cu_seqlens_to_lens(q_starts), cu_seqlens_to_lens(kv_starts), strict=True)
        )
        self.products += ATTENTION_COST_FACTOR * 2 * pairs * q[0].numel()
        return super().varlen_attention(q, k, v, *starts_and_scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_picture_costs_is_told_piece_by_piece(family: str, tmp_path: Path):
    ops = Counting()
    driver = ForwardHelper(write_vision_checkpoint(tmp_path, family), ops=ops)
    tower, told = driver.model.vision_encoder, 0
    assert tower is not None
    with torch.inference_mode():
        for products in tower.encode(random_image(tmp_path, 0, 90, 70)):
            told += products
            assert told == ops.products
