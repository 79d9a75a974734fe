"""RoPE and KV cache writes have the bits of the reference: single products and sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import KVLayer
from foreword.kernels.ops import MRopeSections
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.rope import rope, rope_and_cache, write_kv
from tests.support.budget import examples
from tests.support.triton_compile import KernelSource, compile_all

pytestmark = pytest.mark.usefixtures("on_device")

REFERENCE = ReferenceOps()
AXES = [
    None,
    MRopeSections((4, 4, 4)),
    MRopeSections((6, 4, 2)),
    MRopeSections((4, 4, 4), True),
    MRopeSections((6, 3, 3), True),
    MRopeSections((8, 3, 1), True),
]
STORED = [torch.float32, torch.int8, torch.float8_e4m3fn]


def cache(slots: int, heads: int, dim: int, dtype: torch.dtype) -> KVLayer:
    scales = [torch.zeros(slots, heads) for _ in range(2)] if dtype.itemsize == 1 else []
    return KVLayer(*(torch.zeros(slots, heads, dim).to(dtype) for _ in range(2)), *scales)


def tensors(layer: KVLayer) -> list[Tensor]:
    stored = [part.view(torch.uint8) if part.itemsize == 1 else part for part in (layer.k, layer.v)]
    return [*stored, *(scale for scale in (layer.k_scale, layer.v_scale) if scale is not None)]


@settings(max_examples=examples(20))
@given(
    rows=st.integers(0, 4),
    heads=st.sampled_from([(1, 1), (4, 2), (14, 2), (3, 3)]),
    dim=st.sampled_from([24, 25, 40]),
    axes=st.sampled_from(AXES),
    stored=st.sampled_from(STORED),
)
def test_fused_launch_matches_reference(
    rows: int, heads: tuple[int, int], dim: int, axes: MRopeSections | None, stored: torch.dtype
) -> None:
    torch.manual_seed(rows)
    q_heads, kv_heads = heads
    qkv = torch.randn(rows, q_heads + 2 * kv_heads, dim)
    q, k, v = qkv[:, :q_heads], qkv[:, q_heads:-kv_heads], qkv[:, -kv_heads:]
    table, slots = torch.randn(50, 24), torch.randperm(9)[:rows]
    positions = torch.randint(0, 50, (rows,) if axes is None else (rows, 3))
    ours, theirs = (cache(9, kv_heads, dim, stored) for _ in range(2))
    turned = rope_and_cache(q, k, v, table, positions, axes, ours, slots)
    assert torch.equal(turned, REFERENCE.rope_and_cache(q, k, v, table, positions, axes, theirs, slots))
    assert torch.equal(turned, rope(q, table, positions, axes))
    for left, right in zip(tensors(ours), tensors(theirs), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dim", [1, 7, 16])
def test_unquantized_vectors_are_copied(stored: torch.dtype, dim: int) -> None:
    k, v = torch.randn(3, 2, dim), torch.randn(3, 2, dim) * 1e-3
    v[2] = 0.0
    ours, theirs = (cache(9, 2, dim, stored) for _ in range(2))
    slots = torch.tensor([8, 0, 3])
    write_kv(k, v, ours, slots)
    REFERENCE.write_kv(k, v, theirs, slots)
    for left, right in zip(tensors(ours), tensors(theirs), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stored", STORED[1:])
def test_non_finite_vectors_have_non_finite_scales(bad: float, stored: torch.dtype) -> None:
    k, v = torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    k[1, 0, 5] = bad
    layer = cache(4, 2, 16, stored)
    write_kv(k, v, layer, torch.tensor([1, 2]))
    assert layer.k_scale is not None
    assert not layer.k_scale[2, 0].isfinite() and layer.k_scale[[1, 1, 2], [0, 1, 1]].isfinite().all()
    assert not layer.k[2, 0].float().any()


def test_keys_are_rounded_before_they_are_stored() -> None:
    """In float16: the interpreter truncates bfloat16 instead of rounding it."""
    x, table, positions = torch.randn(2, 2, 16).half(), torch.randn(8, 16), torch.tensor([3, 7])
    slots = torch.tensor([1, 2])
    for stored in (torch.float16, torch.int8):
        ours, theirs = (cache(4, 2, 16, stored) for _ in range(2))
        turned = rope_and_cache(x, x, x, table, positions, None, ours, slots)
        assert torch.equal(turned, REFERENCE.rope_and_cache(x, x, x, table, positions, None, theirs, slots))
        assert all(
            torch.equal(left, right) for left, right in zip(tensors(ours), tensors(theirs), strict=True)
        )


def test_rope_compiles_without_spilling() -> None:
    sources = []
    for capability, stored, scales in ((80, "*u8", "*fp32"), (90, "*bf16", None), (90, "*i8", "*fp32")):
        arguments = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
        arguments |= dict.fromkeys(("k_cache", "v_cache"), stored)
        arguments |= {} if scales is None else dict.fromkeys(("k_scale", "v_scale"), scales)
        arguments |= {"cos_sin": "*fp32", "positions": "*i64", "slots": "*i64"}
        strides = [f"{name}_{kind}" for name in "qkv" for kind in ("row", "head")]
        strides += ["k_stride", "v_stride"]
        arguments |= dict.fromkeys(strides, "i32")
        constants = {
            "Q_HEADS": 32,
            "KV_HEADS": 8,
            "ROTATE": True,
            "D": 128,
            "HALF": 64,
            "MROPE_SECTIONS": (),
            "HEADS": 8,
            "BLOCK": 64,
            "REST": 1,
            "V_D": 128,
            "V_HALF": 64,
            "V_HEADS": 8,
            "V_BLOCK": 64,
            "PDL": stored == "*bf16",
        }
        constants |= {"k_scale": None, "v_scale": None} if scales is None else {}
        divisible = [name for name, kind in arguments.items() if kind.startswith("*")] + strides
        sources.append(
            KernelSource(
                "foreword.kernels.triton.rope:_rope_and_cache_kernel",
                arguments,
                constants,
                capability,
                num_warps=2,
                enable_fp_fusion=False,
                divisible=divisible,
            )
        )
    for source, each in zip(sources, compile_all(sources), strict=True):
        assert (
            each.stack == each.spills == 0
            and each.count(r"ld\.global\.v4")
            and not each.count(r"fma\.rn\.f32 ")
        )
        before, *after = each.ptx.split("griddepcontrol.wait")
        assert bool(after) == source.constants["PDL"]
        assert not after or "ld.global" not in before, "q, k and v are read before they are written"


def test_absent_inputs_are_not_compiled() -> None:
    """q alone, and keys and values without rotation."""
    constants = {
        "D": 128,
        "HALF": 64,
        "MROPE_SECTIONS": (),
        "HEADS": 8,
        "BLOCK": 64,
        "REST": 1,
        "V_D": 128,
        "V_HALF": 64,
        "V_HEADS": 8,
        "V_BLOCK": 64,
        "PDL": False,
        "k_scale": None,
        "v_scale": None,
    }
    strides = {f"{name}_{kind}": "i32" for name in "qkv" for kind in ("row", "head")}
    strides |= {"k_stride": "i32", "v_stride": "i32"}
    there = {"q": "*bf16", "out": "*bf16", "cos_sin": "*fp32", "positions": "*i64"}
    stored = {"k": "*bf16", "v": "*bf16", "k_cache": "*bf16", "v_cache": "*bf16", "slots": "*i64"}
    kernel = "foreword.kernels.triton.rope:_rope_and_cache_kernel"
    only_q = {"Q_HEADS": 8, "KV_HEADS": 0, "ROTATE": True, **dict.fromkeys(stored)}
    only_kv = {"Q_HEADS": 0, "KV_HEADS": 8, "ROTATE": False, **dict.fromkeys(there)}
    turned, written = compile_all(
        [
            KernelSource(kernel, there | strides, constants | only_q),
            KernelSource(kernel, stored | strides, constants | only_kv),
        ]
    )
    assert turned.count(r"mul\.\S*f32") and not written.count(r"mul\.\S*f32")
