"""The compiled product uses the same instructions for every number of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from foreword.kernels.triton.gemm import TILES, Tile
from foreword.kernels.triton.gemm_pack import GROUP_SCALED_FORMATS, ROW_SCALED_FORMATS, columns_per_block
from tests.support.triton_compile import MAX_SHARED, KernelBinary, KernelSource, compile_all

FAMILY = {
    80: r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{0}\.{0}\.f32",
    90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.{0}\.{0}",
}
COPY_OF_16_BYTES = r"cp\.async\.cg\.shared\.global.*, 0x10,"


def source(
    capability: int,
    form: str,
    tile: Tile,
    parts: str,
    activation: str | None = None,
    even: bool = True,
    x: str = "bf16",
) -> KernelSource:
    """gemm_kernel() launched for a shape that is a multiple of 16."""
    scales = (
        {"scales": "*fp32"}
        if form in ROW_SCALED_FORMATS
        else {"scales": "*i32"}
        if form in GROUP_SCALED_FORMATS
        else {}
    )
    residual = {"add_to": f"*{x}"} if activation is None else {}
    integers = dict.fromkeys(("T", "N", "K", "BLOCKS", "SPLITS"), "i32")
    arguments = {
        "x": f"*{x}",
        "w": f"*{x}" if form == "dense" else "*i16",
        **scales,
        "bias": "*fp32",
        **residual,
        "y": f"*{x}",
    }
    arguments |= {"partial_sums": "*fp32", "tile_counters": "*i32", **integers}
    constants = {name: None for name in ("scales", "add_to") if name not in arguments}
    constants |= {
        "FORMAT": form,
        "FLOAT8": capability >= 89,
        "ACTIVATION": activation,
        "SPLIT_MODE": parts,
        "EVEN_K": even,
    }
    constants |= {"BM": tile.bm, "BN": tile.bn, "BK": columns_per_block(form), "GROUP_M": 8}
    divisible = [name for name, kind in arguments.items() if kind.startswith("*") or name in ("N", "K")]
    kernel = "foreword.kernels.triton.gemm:gemm_kernel"
    return KernelSource(
        kernel, arguments, constants, capability, tile.num_warps, tile.num_stages, False, divisible
    )


def sources(capability: int) -> Iterator[KernelSource]:
    dense, quantized = TILES["dense"], TILES["quantized"]
    yield from (source(capability, "dense", tile, "split_k") for tile in dense)
    yield source(capability, "dense", dense[-1], "serial")
    yield source(capability, "dense", dense[-1], "none", "silu")
    yield source(capability, "dense", dense[0], "split_k", "gelu", even=False, x="fp16")
    for form in (*ROW_SCALED_FORMATS, *GROUP_SCALED_FORMATS):
        yield source(capability, form, quantized[0], "split_k")
        yield source(capability, form, quantized[-1], "serial", "silu")


def check(made: KernelBinary, each: KernelSource) -> None:
    capability, constants = each.capability, each.constants
    family = FAMILY[capability].format(each.arguments["x"].removeprefix("*").replace("fp", "f"))
    assert made.products and all(re.fullmatch(family, product.rstrip(";")) for product in made.products), (
        made.products
    )
    assert made.stack == made.spills == 0 and made.shared <= MAX_SHARED[capability]
    # Weight blocks are copied asynchronously: in all stages but one before the loop, and once within it.
    words = constants["BM"] * constants["BK"] // {"dense": 1, "int4": 4}.get(constants["FORMAT"], 2)
    per_block = words * 2 // (16 * 32 * each.num_warps)
    assert made.count(COPY_OF_16_BYTES) >= per_block * each.num_stages
    assert made.count(r"cp\.async\.wait_group") > 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("capability", [80, 90])
def test_one_instruction_family_serves_all_row_counts(capability: int) -> None:
    every = list(sources(capability))
    for made, each in zip(compile_all(every), every, strict=True):
        check(made, each)


def test_last_program_reads_after_barriers() -> None:
    """A barrier, an acq_rel count with GPU scope, a barrier, then reads past the L1 cache."""
    (made,) = compile_all([source(90, "dense", TILES["dense"][0], "split_k")])
    order = re.findall(r"st\.global|bar\.sync|atom\.\S+|ld\.global\.cg", made.ptx)
    count = next(i for i, step in enumerate(order) if step.startswith("atom"))
    assert order[count] == "atom.global.gpu.acq_rel.add.u32"
    assert order[count - 1] == "bar.sync" and "st.global" in order[:count]
    assert (
        order[count + 1] == "bar.sync"
        and "ld.global.cg" in order[count:]
        and "ld.global.cg" not in order[:count]
    )
