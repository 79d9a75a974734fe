"""Qwen VL models: the same bits for any chunks, threads and piece sizes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.core.images import PromptImage
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.reference.backend import ReferenceOps, ReferenceWeight, cu_seqlens_to_lens
from foreword.models.vision import qwen_tower
from foreword.models.vision.vision_layers import ATTENTION_COST_FACTOR
from tests.models.vision.test_qwen import SIZES, prompt_of
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test
from tests.support.forward_helpers import ForwardHelper
from tests.support.vision_checkpoints import random_image, write_vision_checkpoint

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ISAS = isas_under_test()[-1:]  # tests of the kernels have every instruction set
BACKENDS = ("reference", *ISAS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunked_prefill_gives_the_same_bits(family: str, dtype: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path / family, family, dtype=dtype)
    check_chunks(ForwardHelper(path, dtype=dtype, block_size=4), path)


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_native_kernels_agree_with_the_reference(isa: str, family: str, tmp_path: Path):
    path = write_vision_checkpoint(tmp_path / family, family)
    ours, plain = ForwardHelper(path, ops=CpuOps(isa, threads=1), block_size=4), ForwardHelper(path)
    prompt, images = prompt_of([random_image(path, seed, *size) for seed, size in enumerate(SIZES)])
    for image in images:
        torch.testing.assert_close(ours.encode(image), plain.encode(image), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        ours.logits(prompt, 0, images), plain.logits(prompt, 0, images), atol=1e-3, rtol=0
    )
    assert ours.greedy(prompt, 32, images) == plain.greedy(prompt, 32, images)
    check_chunks(ours, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close_to_float32(family: str, tmp_path: Path):
    """Within a tenth of the logits' spread on every backend; the same bits for any chunks."""
    path = write_vision_checkpoint(tmp_path / family, family)
    prompt, images = prompt_of([random_image(path, seed, *size) for seed, size in enumerate(SIZES)])
    expected = ForwardHelper(path).logits(prompt, 0, images)
    for ops in (ReferenceOps(), *(CpuOps(isa, threads=1) for isa in ISAS)):
        ours = ForwardHelper(path, dtype="bfloat16", ops=ops, block_size=4)
        assert ours.encode(images[0]).dtype == torch.bfloat16
        assert (ours.logits(prompt, 0, images) - expected).norm() < 0.1 * expected.norm()
        check_chunks(ours, path)


def check_chunks(ours: ForwardHelper, path: Path) -> None:
    """Chunks begin and end within images; rows after the prompt use the compiled forward."""
    prompt, images = prompt_of([random_image(path, seed, *size) for seed, size in enumerate(SIZES)])
    whole = ours.logits(prompt, 0, images)
    bounds = [
        0,
        1,
        images[0].start + 3,
        images[1].start,
        images[2].start + 1,
        images[2].end,
        len(prompt) - 2,
        len(prompt) - 1,
    ]
    bounds.append(len(prompt))
    chunks = torch.cat([ours.logits(prompt[start:end], start, images) for start, end in pairwise(bounds)])
    assert torch.equal(chunks.view(torch.int32), whole.view(torch.int32)) and whole.isfinite().all()
    text = [65, 66, 67, 68]
    together = ours.logits(text, len(prompt), images)
    singly = torch.cat([ours.logits([one], len(prompt) + number, images) for number, one in enumerate(text)])
    assert torch.equal(together.view(torch.int32), singly.view(torch.int32))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_depend_on_the_image_alone(family: str, name: str, tmp_path: Path):
    """Not on threads, other images or piece sizes."""
    path = write_vision_checkpoint(tmp_path / family, family)
    first, second = random_image(path, 1, 48, 40), random_image(path, 2, 30, 90)
    drivers = [
        ForwardHelper(path, ops=ops)
        for ops in ([ReferenceOps()] if name == "reference" else cpu_ops_by_threads(name))
    ]
    expected = drivers[0].encode(first)
    for driver in drivers:
        encoder = driver.model.vision_encoder
        assert encoder is not None
        found = []
        work = [encoder.encode(image) for image in (second, first, first)]
        with torch.inference_mode():
            while work:
                for one in list(work):
                    try:
                        next(one)
                    except StopIteration as done:
                        found.append(done.value)
                        work.remove(one)
        assert sum(torch.equal(one, expected) for one in found if one.shape == expected.shape) == 2


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BACKENDS)
def test_smaller_pieces_keep_native_bits(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Torch's features are close, native ones equal."""
    path = write_vision_checkpoint(tmp_path / family, family)
    driver = ForwardHelper(path, ops=ReferenceOps() if name == "reference" else cpu_ops_by_threads(name)[1])
    image = random_image(path, 3, 90, 70)
    whole, pieces = driver.encode(image), count_pieces(driver, image)
    for bound in ("ATTN_CHUNK_PAIRS", "LINEAR_CHUNK_ROWS", "MERGE_CHUNK_CELLS"):
        monkeypatch.setattr(
            qwen_tower,
            bound,
            {"ATTN_CHUNK_PAIRS": 3000, "LINEAR_CHUNK_ROWS": 20, "MERGE_CHUNK_CELLS": 3}[bound],
        )
    finer = driver.encode(image)
    assert torch.equal(whole, finer) if name != "reference" else (whole - finer).abs().max() < 1e-5
    assert count_pieces(driver, image) > 3 * pieces


def count_pieces(driver: ForwardHelper, image: PromptImage) -> int:
    assert driver.model.vision_encoder is not None
    with torch.inference_mode():
        return len(list(driver.model.vision_encoder.encode(image)))


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
def test_pieces_report_their_multiply_adds(family: str, tmp_path: Path):
    ops = Counting()
    driver = ForwardHelper(write_vision_checkpoint(tmp_path, family), ops=ops)
    encoder, total = driver.model.vision_encoder, 0
    assert encoder is not None
    with torch.inference_mode():
        for products in encoder.encode(random_image(tmp_path, 0, 90, 70)):
            total += products
            assert total == ops.products
