"""Rotary position embedding, fused with writing K and V to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foreword.core.batch import KVLayer
from foreword.kernels.ops import MRopeSections
from foreword.kernels.triton.gemm_pack import to_float8
from foreword.kernels.triton.variants import launches_dependents

VALUES_PER_PROGRAM = 1024
NUM_WARPS = 2
ROUND_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: x + this - this rounds float32 to integers, ties to even


@triton.jit
def _load_cos_sin(cos_sin, positions, row, angle, inside, HALF: tl.constexpr, MROPE_SECTIONS: tl.constexpr):
    """Cosines and sines [BLOCK] of a row. MROPE_SECTIONS: empty, or three sections and `interleaved`."""
    if len(MROPE_SECTIONS) == 0:
        place = tl.load(positions + row) * (2 * HALF) + angle
    else:
        if MROPE_SECTIONS[3]:
            turn = angle % 3
            end = tl.where(turn == 1, 3 * MROPE_SECTIONS[1], 3 * MROPE_SECTIONS[2])
            axis = tl.where((turn != 0) & (angle < end), turn, 0)
        else:
            axis = (angle >= MROPE_SECTIONS[0]).to(tl.int32)
            axis += (angle >= MROPE_SECTIONS[0] + MROPE_SECTIONS[1]).to(tl.int32)
        place = tl.load(positions + row * 3 + axis, mask=inside, other=0) * (2 * HALF) + angle
    cos = tl.load(cos_sin + place, mask=inside, other=0.0)
    return cos, tl.load(cos_sin + place + HALF, mask=inside, other=0.0)


@triton.jit
def _quantize(x, scale, usable, dtype: tl.constexpr):
    """float32 x [HEADS, n] / scale [HEADS] -> int8 or uint8 (float8 bits); 0 if the scale is unusable."""
    divisor = tl.where(usable, scale, 1.0)[:, None] + tl.zeros_like(x)
    scaled = tl.where(usable[:, None], tl.div_rn(x, divisor), 0.0)
    if dtype == tl.uint8:
        return to_float8(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    else:
        return tl.minimum(tl.maximum(scaled + ROUND_MAGIC - ROUND_MAGIC, -127.0), 127.0).to(tl.int8)


@triton.jit
def _rotate_heads(
    source, source_head, cos_sin, positions, row, target, target_stride, scales, target_row, first,
    ROTATE: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    MROPE_SECTIONS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Copy HEADS heads from `first` on of one row of source, rotated if ROTATE, to row target_row of target.

    target is [., COUNT, D] with target_stride values a row, quantized if scales [., COUNT] are given.
    """
    head = first + tl.arange(0, HEADS)
    angle = tl.arange(0, BLOCK)
    exists = (head < COUNT)[:, None]
    inside = exists & (angle < HALF)[None, :]
    at = source + head[:, None] * source_head + angle[None, :]
    into = target + target_row * target_stride + head[:, None] * D + angle[None, :]
    left = tl.load(at, mask=inside, other=0.0)
    right = tl.load(at + HALF, mask=inside, other=0.0)
    if ROTATE:
        cos, sin = _load_cos_sin(cos_sin, positions, row, angle, angle < HALF, HALF, MROPE_SECTIONS)
        wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
        left = (wide_left * cos[None, :] - wide_right * sin[None, :]).to(source.dtype.element_ty)
        right = (wide_right * cos[None, :] + wide_left * sin[None, :]).to(source.dtype.element_ty)
    tail = tl.arange(0, REST)
    in_rest = exists & (tail < D - 2 * HALF)[None, :]
    rest = tl.load(source + head[:, None] * source_head + 2 * HALF + tail[None, :], mask=in_rest, other=0.0)
    rest_into = target + target_row * target_stride + head[:, None] * D + 2 * HALF + tail[None, :]
    if scales is None:
        tl.store(into, left.to(target.dtype.element_ty), mask=inside)
        tl.store(into + HALF, right.to(target.dtype.element_ty), mask=inside)
        if D > 2 * HALF:
            tl.store(rest_into, rest.to(target.dtype.element_ty), mask=in_rest)
    else:
        left, right, rest = left.to(tl.float32), right.to(tl.float32), rest.to(tl.float32)
        largest = tl.maximum(_max_abs(left), _max_abs(right))
        if D > 2 * HALF:
            largest = tl.maximum(largest, _max_abs(rest))
        max_value: tl.constexpr = 448.0 if target.dtype.element_ty == tl.uint8 else 127.0
        scale = tl.div_rn(largest, tl.full([HEADS], max_value, tl.float32))
        scale = tl.where(largest < float("inf"), scale, float("inf"))
        usable = (scale > 0) & (scale < float("inf"))
        tl.store(into, _quantize(left, scale, usable, target.dtype.element_ty), mask=inside)
        tl.store(into + HALF, _quantize(right, scale, usable, target.dtype.element_ty), mask=inside)
        if D > 2 * HALF:
            tl.store(rest_into, _quantize(rest, scale, usable, target.dtype.element_ty), mask=in_rest)
        tl.store(scales + target_row * COUNT + head, scale, mask=head < COUNT)


@triton.jit
def _max_abs(x):
    """Largest magnitude of x [HEADS, n] -> [HEADS]; infinite for non-finite values."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_and_cache_kernel(
    q, k, v, out, k_cache, v_cache, k_scale, v_scale, cos_sin, positions, slots,
    q_row, q_head, k_row, k_head, v_row, v_head, k_stride, v_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ROTATE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    MROPE_SECTIONS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    V_D: tl.constexpr, V_HALF: tl.constexpr, V_HEADS: tl.constexpr, V_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of q heads, then of k heads, then of v heads). PDL: see launches_dependents().

    q, out and k have D values a head, v has V_D; k_stride, v_stride: values from one slot to the next.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    if Q_HEADS > 0:  # noqa: SIM102 (known when it is compiled)
        if tile < q_tiles:
            _rotate_heads(
                q + row * q_row, q_head, cos_sin, positions, row, out, Q_HEADS * D, None, row, tile * HEADS,
                ROTATE, Q_HEADS, D, HALF, MROPE_SECTIONS, HEADS, BLOCK, REST,
            )  # fmt: skip
    if KV_HEADS > 0:
        tile -= q_tiles
        slot = tl.load(slots + row)
        if (tile >= 0) & (tile < kv_tiles):
            _rotate_heads(
                k + row * k_row, k_head, cos_sin, positions, row, k_cache, k_stride, k_scale, slot,
                tile * HEADS, ROTATE, KV_HEADS, D, HALF, MROPE_SECTIONS, HEADS, BLOCK, REST,
            )  # fmt: skip
        if tile >= kv_tiles:
            _rotate_heads(
                v + row * v_row, v_head, cos_sin, positions, row, v_cache, v_stride, v_scale, slot,
                (tile - kv_tiles) * V_HEADS, False, KV_HEADS, V_D, V_HALF, MROPE_SECTIONS, V_HEADS, V_BLOCK,
                1,
            )  # fmt: skip


def rope(
    x: Tensor, cos_sin: Tensor, positions: Tensor, mrope_sections: MRopeSections | None = None
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rope(x, None, None, out, None, cos_sin, positions, mrope_sections, None)
    return out


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    mrope_sections: MRopeSections | None,
    cache: KVLayer,
    slots: Tensor,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch_rope(q, k, v, out, cache, cos_sin, positions, mrope_sections, slots)
    return out


def write_kv(k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
    _launch_rope(None, k, v, None, cache, None, None, None, slots)


def _launch_rope(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor | None,
    cache: KVLayer | None,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    mrope_sections: MRopeSections | None,
    slots: Tensor | None,
) -> None:
    """Absent inputs are None: q and out, or k, v, cache and slots, or cos_sin and positions (no rotation)."""
    first = k if q is None else q
    assert first is not None
    num_rows, _, dim = first.shape
    rotary = dim // 2 * 2 if cos_sin is None else cos_sin.shape[1]
    if not num_rows:
        return
    assert all(x is None or x.stride(-1) == 1 for x in (q, k, v))
    assert positions is None or positions.is_contiguous()
    q_heads = 0 if q is None else q.shape[1]
    kv_heads = 0 if k is None else k.shape[1]
    most_heads = triton.next_power_of_2(max(q_heads, kv_heads))
    block, heads = _tile_heads(rotary // 2, most_heads)
    value_dim = dim if v is None else v.shape[2]
    value_half = value_dim // 2
    value_block, value_heads = _tile_heads(value_half, most_heads)
    stored: tuple[Tensor | None, ...] = (None,) * 4
    slot_strides = 0, 0
    if cache is not None:
        stored = _as_bytes(cache.own_keys), _as_bytes(cache.v), cache.k_scale, cache.v_scale
        slot_strides = cache.k.stride(0), cache.v.stride(0)
    strides = [stride for x in (q, k, v) for stride in ((0, 0) if x is None else x.stride()[:2])]
    sections = () if mrope_sections is None else (*mrope_sections.sections, mrope_sections.interleaved)
    pdl = launches_dependents(first.device)
    tiles = triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads) + triton.cdiv(kv_heads, value_heads)
    _rope_and_cache_kernel[num_rows, tiles](
        *(q, k, v, out, *stored, cos_sin, positions, slots, *strides, *slot_strides),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        ROTATE=cos_sin is not None,
        D=dim,
        HALF=rotary // 2,
        MROPE_SECTIONS=sections,
        HEADS=heads,
        BLOCK=block,
        REST=triton.next_power_of_2(max(dim - rotary, 1)),
        V_D=value_dim,
        V_HALF=value_half,
        V_HEADS=value_heads,
        V_BLOCK=value_block,
        PDL=pdl,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


def _tile_heads(half: int, most_heads: int) -> tuple[int, int]:
    """BLOCK and HEADS of _rotate_heads() for vectors of two such halves."""
    block = triton.next_power_of_2(max(half, 1))
    return block, min(max(VALUES_PER_PROGRAM // (2 * block), 1), most_heads)


def _as_bytes(values: Tensor) -> Tensor:
    assert values.stride(-1) == 1
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
