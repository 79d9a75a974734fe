"""Compiled attention for other GPUs: bits follow from the compiler's layouts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from foreword.kernels.triton import attention
from tests.support.triton_compile import MAX_SHARED, KernelBinary, KernelSource, argument_types, compile_all

BATCH = argument_types(
    "tiles:*i32 request_index,positions,block_tables:*i64 "
    "num_requests,table_width,max_splits,num_columns,q_row,q_head:i32 scale,softcap:fp32"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
def gpu(capability: int) -> Iterator[torch.device]:
    """A device of this compute capability."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10))
        yield torch.device("cuda")


def source(
    capability: int,
    columns: int,
    stored: str = "bf16",
    dim: int = 128,
    whole: bool = False,
    dtype: str = "bf16",
    pdl: bool = False,
    sinks: bool = False,
    rest: int = 0,
) -> KernelSource:
    """The kernel as TritonAttention launches it; `rest` values of K beside V are latent attention's."""
    quantized = stored in ("i8", "u8")
    with gpu(capability) as device:
        tile = attention.tile_shape(device, DTYPES[dtype], dim)
        itemsize = 1 if quantized else DTYPES[dtype].itemsize
        stages = attention.num_stages(device, tile.block_kv * (dim + rest if rest else 2 * dim) * itemsize)
    scales = {"k_scale": "*fp32", "v_scale": "*fp32"} if quantized else {}
    shared = {} if whole else {"partials": "*fp32", "split_stats": "*fp32", "counters": "*i32"}
    arguments = {
        "q": f"*{dtype}",
        "k": f"*{stored}",
        "v": f"*{stored}",
        **scales,
        **({"sinks": "*fp32"} if sinks else {}),
        "out": f"*{dtype}",
        **shared,
        **BATCH,
    }
    absent = {"k_scale", "v_scale", "sinks", "partials", "split_stats", "counters"} - arguments.keys()
    constants = dict.fromkeys(absent) | {
        "KV_HEADS": 1 if rest else 8,
        "GROUP": 16 if rest else 4,
        "HEADS": 16 if rest else 4,
        "D": dim,
        "REST": rest,
        "BLOCK_SIZE": 16,
        "WINDOW": 0,
        "FIRST": 0,
        "SOFTCAP": False,
        "SPLIT": attention.SPLIT,
        "BLOCK_KV": tile.block_kv,
        "BLOCK_D": dim,
        "BLOCK_REST": max(rest, 16),
        "NQ": columns,
        "FLOAT8": stored == "u8" and capability >= 89,
        "WHOLE": whole,
        "STAGES": stages,
        "PDL": pdl,
    }
    divisible = [name for name, kind in arguments.items() if kind.startswith("*")] + ["q_row", "q_head"]
    return KernelSource(
        "foreword.kernels.triton.attention_kernel:attend",
        arguments,
        constants,
        capability,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
        divisible=divisible,
    )


def sources_of_an_engine(capability: int, stored: str, dim: int, dtype: str = "bf16") -> list[KernelSource]:
    """Kernels that an engine launches for full attention: every tile shape, with and without splits.

    All of them in the ordinary types; else each tile shape and each mode once.
    """
    with gpu(capability) as device:
        tile = attention.tile_shape(device, DTYPES[dtype], dim)
    columns = sorted({tile.min_columns, tile.max_columns})
    kernels = [(count, whole) for count in columns for whole in (False, True)]
    if (stored, dim, dtype) != ("bf16", 128, "bf16"):
        kernels = [kernels[0], kernels[-1]]
    return [source(capability, count, stored, dim, whole, dtype) for count, whole in kernels]


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
    sources = [source(capability, columns, "i8") for capability in (80, 90) for columns in (16, 32)]
    all_made = compile_all([*sources, source(90, 32, "i8", whole=True)])
    for made in all_made:
        assert order_of_sums(made) == order_of_sums(all_made[0])


def test_warp_count_change_is_detected() -> None:
    """Negative control."""
    made, other = compile_all([source(80, 16, "i8"), replace(source(80, 16, "i8"), num_warps=2)])
    assert order_of_sums(made) != order_of_sums(other)


# Ada (89) has Ampere's instructions, but converts float8 itself and has less shared memory.
ENGINES = [
    (90, "bf16", 128, "bf16"),
    (80, "bf16", 128, "bf16"),
    *(
        pytest.param(*engine, marks=pytest.mark.full)
        for engine in (
            (90, "i8", 128, "bf16"),
            (90, "u8", 128, "bf16"),
            (90, "bf16", 64, "bf16"),
            (90, "bf16", 256, "bf16"),
            (90, "fp16", 128, "fp16"),
            (80, "i8", 128, "bf16"),
            (80, "u8", 128, "bf16"),
            (80, "bf16", 256, "bf16"),
            (89, "u8", 128, "bf16"),
            (89, "bf16", 256, "bf16"),
        )
    ),
]


@pytest.mark.parametrize(("capability", "stored", "dim", "dtype"), ENGINES)
def test_all_kernels_of_an_engine_have_the_same_instructions(
    capability: int, stored: str, dim: int, dtype: str
) -> None:
    """No document says that two shapes of the instruction give the same bits."""
    sources = sources_of_an_engine(capability, stored, dim, dtype)
    all_made = compile_all(sources)
    kind = dtype.replace("fp", "f")  # in PTX
    products = {product for made in all_made for product in made.products}
    if capability == 90:
        # With 256 dimensions, two warp groups share the columns of QK^T, and each has all of PV.
        sizes = {"n16", "n32"} if dim == 256 else {"n32"}
        pattern = rf"wgmma\.mma_async\.sync\.aligned\.m64(n\d+)k16\.f32\.{kind}\.{kind}"
        assert {re.fullmatch(pattern, product)[1] for product in products} == sizes
        assert all(made.products == all_made[0].products for made in all_made)
    else:
        assert products == {f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"}
    assert all(made.operands == all_made[0].operands for made in all_made), "k has other places"
    for source_, made in zip(sources, all_made, strict=True):
        assert made.shared <= MAX_SHARED[capability]
        # Of a quantized cache, a program of all splits copies 8 bytes at a time.
        size = "0x(8|10)" if stored in ("i8", "u8") and source_.constants["WHOLE"] else "0x10"
        copies = rf"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], {size}"
        # With 256 dimensions, Triton does not pipeline a program of all splits into 99 KiB
        if not (capability == 89 and dim == 256 and source_.constants["WHOLE"]):
            assert made.count(copies) >= 2, "keys are not copied in vectors"
        weights = attention.BLOCK_KV * source_.constants["NQ"] // (4 * 32)  # of a thread
        passes = 1 if stored in ("i8", "u8") else 2
        assert made.count(r"fma\.rn\.f32") == passes * weights, "products other than weights are fused"


@pytest.mark.full
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (80, "fp32"), (89, "bf16"), (90, "bf16")])
def test_wide_heads_fit_the_shared_memory(capability: int, dtype: str) -> None:
    """512 values, as in global layers of Gemma 4."""
    stored = ("bf16", "i8") if dtype == "bf16" else (dtype,)
    for kind in stored:
        all_made = compile_all(sources_of_an_engine(capability, kind, 512, dtype))
        for made in all_made:
            assert made.shared <= MAX_SHARED[capability]
            assert dtype == "fp32" or made.stack <= 512  # float32 has no tensor cores
            assert made.products == all_made[0].products


@pytest.mark.parametrize(("capability", "stored"), [(80, "bf16"), (80, "u8"), (90, "bf16"), (90, "i8")])
def test_latent_attention_compiles(capability: int, stored: str) -> None:
    """DeepSeek's 512 values of V and 64 more of K: one copy of the keys, with and without splits."""
    with gpu(capability) as device:
        columns = attention.tile_shape(device, torch.bfloat16, 512).max_columns
    sources = [source(capability, columns, stored, 512, whole, rest=64) for whole in (False, True)]
    all_made = compile_all(sources)
    assert all(made.products == all_made[0].products for made in all_made)
    for made in all_made:
        assert made.shared <= MAX_SHARED[capability]
        assert made.stack <= 640, "values do not fit the registers"  # 520 for float8 on Ampere


def test_unpadded_tiles_have_another_instruction() -> None:
    """Negative control: what the variant "attention_unpadded" does."""
    made, other = compile_all([source(90, 32), source(90, 16)])
    assert made.products != other.products


def test_two_programs_share_a_multiprocessor() -> None:
    """Of 65,536 registers and 228 KiB of shared memory, 1 KiB of which CUDA takes for a program."""
    sources = sources_of_an_engine(90, "bf16", 128)
    for source_, made in zip(sources, compile_all(sources), strict=True):
        assert source_.num_warps * 32 * made.registers <= 65536 // 2
        assert made.shared + 1024 <= 228 * 1024 // 2
        assert made.stack <= 128


@pytest.mark.parametrize("capability", [80, 90])
def test_sinks_are_merged_after_all_positions(capability: int) -> None:
    """The same sums and products with sinks as without, and no more programs' registers."""
    for whole in (False, True):
        made, without = compile_all(
            [source(capability, 32, dim=64, whole=whole, sinks=sinks) for sinks in (True, False)]
        )
        assert (made.products, made.operands) == (without.products, without.operands)
        assert order_of_sums(made) == order_of_sums(without)
        assert made.count(r"fma\.rn\.f32") == without.count(r"fma\.rn\.f32")
        assert made.registers * 4 * 32 <= 65536 // 2 and made.stack <= 128


def test_float8_is_converted_by_the_hardware() -> None:
    made, without = compile_all([source(90, 32, "u8"), source(80, 32, "u8")])
    assert made.count(r"cvt\.rn\.f16x2\.e4m3x2") > 0 and not made.count(r"cvt\.rn\.bf16\.f16")
    assert not without.count("e4m3x2")


def test_dependent_launch_waits_before_it_reads() -> None:
    made, without = compile_all([source(90, 32, pdl=True), source(90, 32)])
    assert made.ptx.index("griddepcontrol.wait") < made.ptx.index("griddepcontrol.launch_dependents")
    assert made.ptx.index("griddepcontrol.wait") < re.search(r"ld\.global|cp\.async", made.ptx).start()
    assert "griddepcontrol" not in without.ptx
