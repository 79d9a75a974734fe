"""Latent attention on Triton: V as a view of K, products by head, and rows that do not depend on others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.backend import TritonFastMath, TritonOps
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.scattered_kv import ScatteredKV, agree
from tests.support.triton_interpreter import exact_dot

pytestmark = pytest.mark.usefixtures("on_device")

CACHES = (torch.float32, torch.int8, torch.float8_e4m3fn)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed))


@pytest.mark.parametrize("cached", CACHES)
def test_attention_matches_reference(cached: torch.dtype) -> None:
    options = {"row_tile": 1, "request_index": True, "latent_dim": 48}
    cache = ScatteredKV([300, 40], 1, 56, cached, torch.float32, **options)
    spans = [(0, 250, 300), (1, 39, 40)]
    with exact_dot():
        ours = cache.run(TritonOps(), spans, 6)
    theirs = cache.run(ReferenceOps(), spans, 6)
    for place, row in ours.items():
        assert row.shape == (6, 48)
        torch.testing.assert_close(row, theirs[place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", CACHES)
def test_rows_do_not_depend_on_cuts_and_neighbours(cached: torch.dtype) -> None:
    options = {"row_tile": 1, "request_index": True, "latent_dim": 48}
    cache = ScatteredKV([300, 40], 1, 56, cached, torch.float32, **options)
    with exact_dot():
        whole = cache.run(TritonOps(), [(0, 270, 300), (1, 30, 40)], 6)
        for spans in ([(0, 299, 300)], [(0, 270, 280), (1, 39, 40)], [(0, 285, 299)]):
            agree(cache.run(TritonOps(), spans, 6), whole)


@pytest.mark.parametrize("cached", [torch.float32, torch.int8])
def test_keys_and_values_are_written_like_the_reference(cached: torch.dtype) -> None:
    latent, own, angles = normal(9, 1, 48, seed=1), normal(9, 1, 8, seed=2) * 50, normal(30, 8, seed=3)
    q, positions, slots = normal(9, 6, 8, seed=4), torch.arange(9), torch.arange(9) * 2
    layers, queries = [], []
    for ops in (TritonOps(), ReferenceOps()):
        k = torch.zeros(20, 1, 56, dtype=cached)
        scales = [torch.zeros(20, 1) for _ in range(2)] if cached == torch.int8 else []
        layers.append(KVLayer(k, k[..., :48], *scales))
        queries.append(ops.rope_and_cache(q, own, latent, angles, positions, None, layers[-1], slots))
    assert same_bits(*queries) and torch.equal(layers[0].k, layers[1].k)
    for name in ("k_scale", "v_scale"):
        ours, theirs = (getattr(layer, name) for layer in layers)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["float32", "int8", "fp8", "int4"])
def test_product_by_head_is_the_ordinary_product(kind: str) -> None:
    """Bit for bit, for every number of rows; appended values are copied."""
    ops = TritonOps()
    packed = [ops.pack_linear([normal(70, 64, seed=head)], kind) for head in range(3)]
    x, append = normal(40, 3, 64, seed=7), normal(40, 3, 6, seed=8)
    weights = ops.pack_heads(packed)
    with exact_dot():
        expected = torch.stack([ops.linear(x[:, head].contiguous(), packed[head]) for head in range(3)], 1)
        for rows in (1, 2, 17, 40):
            assert same_bits(ops.linear_by_head(x[:rows], weights), expected[:rows]), rows
        joined = ops.linear_by_head(x, weights, append)
        assert same_bits(joined, torch.cat((expected, append), -1))
    assert ops.linear_by_head(x[:0], weights).shape == (0, 3, 70)


def test_fast_math_packs_its_own_weights() -> None:
    results = []
    for ops in (TritonFastMath(), ReferenceOps()):
        packed = [ops.pack_linear([normal(20, 64, seed=head)], "float32") for head in range(3)]
        results.append(ops.linear_by_head(normal(5, 3, 64, seed=7), ops.pack_heads(packed)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
