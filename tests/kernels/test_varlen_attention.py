"""Bidirectional attention on every backend: against float64, with independent sections."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from tests.support.cpu_kernels import cpu_ops_by_threads, isas_under_test, randn, same_bits

BACKENDS = ("reference", *isas_under_test())
TYPES = (torch.float32, torch.bfloat16)
each_backend = pytest.mark.parametrize("name", BACKENDS)
each_type = pytest.mark.parametrize("dtype", TYPES)


def backend(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else cpu_ops_by_threads(name)[1]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """float64"""
    q, k, v = (one.double().transpose(0, 1) for one in (q, k, v))
    return ((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1)


@each_backend
@each_type
@pytest.mark.parametrize(
    ("dim", "q_starts", "kv_starts"), [(16, (0, 5), (0, 700)), (20, (0, 1, 4, 12), (0, 64, 67, 600))]
)
def test_rows_attend_to_their_whole_section(
    name: str, dtype: torch.dtype, dim: int, q_starts: tuple[int], kv_starts: tuple[int]
):
    q, k, v = (
        randn(rows, 3, dim, seed=seed, dtype=dtype)
        for seed, rows in enumerate((q_starts[-1], kv_starts[-1], kv_starts[-1]))
    )
    found = backend(name).varlen_attention(q, k, v, q_starts, kv_starts, 0.3)
    parts = zip(q_starts, q_starts[1:], kv_starts, kv_starts[1:], strict=False)
    expected = torch.cat([plain(q[a:b], k[c:d], v[c:d], 0.3) for a, b, c, d in parts])
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@each_backend
@each_type
def test_sections_are_independent(name: str, dtype: torch.dtype):
    starts = (0, 9, 10, 74, 90)
    q, k, v = (randn(90, 2, 24, seed=seed, dtype=dtype) for seed in range(3))
    whole = backend(name).varlen_attention(q, k, v, starts, starts, 0.2)
    poisoned = k.clone()
    poisoned[:10] = math.nan
    assert same_bits(backend(name).varlen_attention(q, poisoned, v, starts, starts, 0.2)[10:], whole[10:])
    for a, b in pairwise(starts):
        alone = backend(name).varlen_attention(q[a:b], k[a:b], v[a:b], (0, b - a), (0, b - a), 0.2)
        assert same_bits(alone, whole[a:b])


@pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
@pytest.mark.parametrize("isa", isas_under_test())
def test_native_rows_do_not_depend_on_query_chunks(isa: str):
    """Nor on threads; q, k and v are slices of one matrix."""
    qkv = randn(300, 3, 2, 40, seed=4)
    q, k, v = qkv.unbind(1)
    whole = cpu_ops_by_threads(isa)[0].varlen_attention(q, k, v, (0, 300), (0, 300), 0.15)
    for ops in cpu_ops_by_threads(isa):
        pieces = [
            ops.varlen_attention(q[a : a + 77], k, v, (0, len(q[a : a + 77])), (0, 300), 0.15)
            for a in range(0, 300, 77)
        ]
        assert same_bits(torch.cat(pieces), whole)


@pytest.mark.skipif(not supported_isas(), reason="the native library is not built")
def test_varlen_attention_cannot_be_traced():
    ops = CpuOps()
    with pytest.raises(AssertionError, match="cannot be part of a compiled pass"):
        ops.compile(
            lambda _: ops.varlen_attention(
                torch.zeros(3, 1, 4), *[torch.zeros(3, 1, 4)] * 2, (0, 3), (0, 3), 1.0
            )
        )
