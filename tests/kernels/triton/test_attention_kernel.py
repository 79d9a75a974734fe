"""Compiled attention for other GPUs: bits follow from the compiler's layouts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import torch

from foreword.kernels.triton import attention
from tests.support.triton_compile import MAX_SHARED, KernelBinary, KernelSource, compile_all

POINTERS = {"tiles": "*i32", "request_index": "*i64", "positions": "*i64", "block_tables": "*i64"}
NUMBERS = {
    "num_requests": "i32",
    "table_width": "i32",
    "max_splits": "i32",
    "q_row": "i32",
    "q_head": "i32",
    "scale": "fp32",
    "softcap": "fp32",
}


def source(
    capability: int, columns: int, stored: str = "bf16", dim: int = 128, whole: bool = False
) -> KernelSource:
    """The kernel as TritonAttention launches it on a data center GPU."""
    values = 2 if stored == "bf16" else 1
    stages = attention.num_stages(torch.device("cpu"), 2 * attention.BLOCK_KV * dim * values)
    scales = {} if stored == "bf16" else {"k_scale": "*fp32", "v_scale": "*fp32"}
    shared = {} if whole else {"partials": "*fp32", "split_stats": "*fp32", "counters": "*i32"}
    arguments = {
        "q": "*bf16",
        "k": f"*{stored}",
        "v": f"*{stored}",
        **scales,
        "out": "*bf16",
        **shared,
        **POINTERS,
        **NUMBERS,
    }
    absent = {"k_scale", "v_scale", "partials", "split_stats", "counters"} - arguments.keys()
    constants = dict.fromkeys(absent) | {
        "KV_HEADS": 8,
        "GROUP": 4,
        "HEADS": 4,
        "D": dim,
        "BLOCK_SIZE": 16,
        "WINDOW": 0,
        "SOFTCAP": False,
        "SPLIT": attention.SPLIT,
        "BLOCK_KV": attention.BLOCK_KV,
        "BLOCK_D": dim,
        "NQ": columns,
        "WHOLE": whole,
        "STAGES": stages,
    }
    divisible = [name for name, kind in arguments.items() if kind.startswith("*")] + ["q_row", "q_head"]
    return KernelSource(
        "foreword.kernels.triton.attention_kernel:attend",
        arguments,
        constants,
        capability,
        num_warps=8 if capability == 90 or dim > 128 else 4,
        enable_fp_fusion=False,
        divisible=divisible,
    )


def order_of_sums(made: KernelBinary) -> tuple[list[int], float, float]:
    """Lane distances of float sums, and how often 8 and 4 occur for each 16.

    A column's sum over positions adds a thread's values, then lanes (16, 8, 4 apart), then warps, through
    shared memory and again across lanes.
    """
    shuffled = {
        target: int(distance)
        for target, distance in re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+), %\w+, (\d+),", made.ptx)
    }
    copies = dict(re.findall(r"mov\.b32\s+(%\w+), (%\w+);", made.ptx))
    counted: Counter[int] = Counter()
    for operands in re.findall(r"add(?:\.rn)?\.f32\s+%\w+, (%\w+, %\w+);", made.ptx):
        for operand in operands.split(", "):
            distance = shuffled.get(copies.get(operand, operand))
            if distance is not None:
                counted[distance] += 1
    return sorted(counted), counted[8] / counted[16], counted[4] / counted[16]


def test_all_column_counts_sum_in_the_same_order() -> None:
    """Over int8, which needs no second pass: all sums across lanes are those of weights."""
    sources = [source(90, columns, "i8", whole=True) for columns in (16, 32, 64)] + [
        source(80, 16, "i8"),
        source(80, 32, "i8"),
    ]
    all_made = compile_all(sources)
    for made in all_made:
        assert order_of_sums(made) == order_of_sums(all_made[0])
        assert not made.count(r"fma\.rn\.f32"), "a product and a sum were fused"


def test_warp_count_change_is_detected() -> None:
    """Negative control."""
    made, other = compile_all([source(80, 16, "i8"), replace(source(80, 16, "i8"), num_warps=2)])
    assert order_of_sums(made) != order_of_sums(other)


def test_launches_fit_and_share_one_instruction_family() -> None:
    hopper = compile_all(
        [source(90, 16), source(90, 64, whole=True), source(90, 16, "u8"), source(90, 32, dim=256)]
    )
    ampere = compile_all([source(80, 32)])
    assert all(re.search(r"m64n\d+k16\.f32\.bf16", product) for made in hopper for product in made.products)
    assert all("m16n8k16.row.col.f32.bf16" in product for made in ampere for product in made.products)
    for capability, launches in ((90, hopper), (80, ampere)):
        for made in launches:
            assert made.products and made.shared <= MAX_SHARED[capability]
            assert made.count(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10") >= 2, (
                "keys are not copied 16 bytes at a time"
            )
    assert [made.spills for made in (hopper[0], hopper[2])] == [0, 0]
    assert all(made.stack <= 448 for made in (*hopper, *ampere))
