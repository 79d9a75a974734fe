"""The compiled product uses one instruction for every number of rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from foreword.kernels.triton import gemm, variants
from foreword.kernels.triton.gemm import HOPPER_TILES, TILES, Tile, device_tiles, pick_tile
from foreword.kernels.triton.gemm_pack import (
    GROUP_SCALED_FORMATS,
    ROW_SCALED_FORMATS,
    columns_per_block,
    values_per_word,
)
from tests.support.triton_compile import MAX_SHARED, KernelBinary, KernelSource, compile_all

INSTRUCTIONS = {
    80: r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{0}\.{0}\.f32",
    89: r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{0}\.{0}\.f32",
    90: r"wgmma\.mma_async\.sync\.aligned\.m64n{1}k16\.f32\.{0}\.{0}",
}
DOT_COLUMNS = {"dense": 64}  # n on Hopper; of other formats: 32
FORMATS = ("int8", "fp8", "int4", "q8_0", "mxfp4", "fp8_blocks", "grouped4_128", "grouped8_64")
COPY_OF_16_BYTES = r"cp\.async\.cg\.shared\.global.*, 0x10,"
SOME_DIVISIONS = 8  # of indices, each with a conversion
HOPPER = torch.device("cuda", 0)


def tiles_of(capability: int) -> Mapping[str, Sequence[Tile]]:
    return HOPPER_TILES if capability == 90 else TILES


def source(
    capability: int,
    form: str,
    tile: Tile,
    split_mode: str,
    activation: str | None = None,
    even: bool = True,
    x: str = "bf16",
    pdl: bool = False,
    experts: bool = False,
) -> KernelSource:
    """gemm_kernel() launched for a shape that is a multiple of 16; gate and up of experts gather rows."""
    scales = (
        {"scales": "*fp32"}
        if form in ROW_SCALED_FORMATS
        else {"scales": "*i32"}
        if form in GROUP_SCALED_FORMATS
        else {}
    )
    residual = {"add_to": f"*{x}"} if activation is None and not experts else {}
    groups = {"row_tiles": "*i32"} if experts else {}
    groups |= {"input_rows": "*i32"} if experts and activation is not None else {}
    integers = dict.fromkeys(("T", "N", "K", "BLOCKS", "SPLITS"), "i32")
    arguments = {
        "x": f"*{x}",
        "w": f"*{x}" if form == "dense" else "*i16",
        **scales,
        "bias": "*fp32",
        **residual,
        "y": "*fp32" if experts and activation is None else f"*{x}",
    }
    arguments |= {"partial_sums": "*fp32", "tile_counters": "*i32", **groups, **integers}
    optional = ("scales", "add_to", "row_tiles", "input_rows")
    constants = {name: None for name in optional if name not in arguments}
    constants |= {"FORMAT": form, "ACTIVATION": activation, "SPLIT_MODE": split_mode, "EVEN_K": even}
    constants |= {"BM": tile.bm, "BN": tile.bn, "DOT_N": tile.dot_n, "BK": columns_per_block(form)}
    constants |= {"GROUP_M": 8, "PDL": pdl, "PREFETCH": tile.num_stages}
    divisible = [name for name, kind in arguments.items() if kind.startswith("*") or name in ("N", "K")]
    kernel = "foreword.kernels.triton.gemm:gemm_kernel"
    return KernelSource(
        kernel, arguments, constants, capability, tile.num_warps, tile.num_stages, False, divisible
    )


def sources(capability: int) -> Iterator[KernelSource]:
    """Every tile, format, split mode, activation and type; each format with its largest tile and a small one.

    Ada (89) has Ampere's instructions and less shared memory: there, the largest tiles, which may not fit,
    and the smallest of MXFP4, which spills.
    """
    dense, quantized = tiles_of(capability)["dense"], tiles_of(capability)["quantized"]
    for form in FORMATS:
        yield source(capability, form, quantized[-1], "serial", "silu")
    yield source(capability, "mxfp4", quantized[0], "split_k")
    yield source(capability, "dense", dense[-1], "none", "silu", experts=True)
    yield source(capability, "int4", quantized[-1], "none", "gpt_oss", experts=True)
    if capability == 89:
        yield source(capability, "dense", dense[-1], "split_k")
        return
    yield from (source(capability, "dense", tile, "split_k") for tile in dense)
    yield source(capability, "dense", dense[-1], "none", "silu")
    yield source(capability, "dense", dense[0], "split_k", "gelu", even=False, x="fp16")
    small_tiles = itertools.cycle(quantized[:-1])
    yield from (source(capability, form, next(small_tiles), "split_k") for form in FORMATS if form != "mxfp4")
    yield source(capability, "int4", quantized[0], "none", x="fp16")
    yield source(capability, "dense", dense[0], "none", "silu", experts=True)
    yield from (source(capability, "dense", tile, "serial", experts=True) for tile in (dense[0], dense[-1]))
    yield source(capability, "int4", quantized[0], "split_k", "silu", experts=True)


def check(made: KernelBinary, each: KernelSource) -> None:
    capability, form, constants = each.capability, each.constants["FORMAT"], each.constants
    dtype = each.arguments["x"].removeprefix("*").replace("fp", "f")
    instruction = INSTRUCTIONS[capability].format(dtype, DOT_COLUMNS.get(form, 32))
    (product,) = made.products
    assert re.fullmatch(instruction, product.rstrip(";")), product
    # Experts before Hopper: two accumulators of 128 x 128 and the bounds of a tile, between splits of K. On
    # Ada the smallest tile of MXFP4 spills a few registers too.
    may_spill = capability < 90 and ("row_tiles" in each.arguments or (form, capability) == ("mxfp4", 89))
    assert made.stack <= 16 * may_spill and made.spills <= 9 * may_spill
    assert made.shared <= MAX_SHARED[capability]
    # No slow conversion of weights, and no instruction that ptxas serializes: it would be awaited alone.
    assert sum(made.opcodes.get(opcode, 0) for opcode in ("F2F", "I2F")) < SOME_DIVISIONS
    assert made.count(r"wgmma\.wait_group") == 0 or made.opcodes["WARPGROUP"] < 2 * made.opcodes["HGMMA"]
    # Weight blocks are copied asynchronously: in all stages but one before the loop, and once within it.
    words = constants["BM"] * constants["BK"] // values_per_word(form)
    per_block = words * 2 // (16 * 32 * each.num_warps)
    assert made.count(COPY_OF_16_BYTES) >= per_block * each.num_stages
    assert made.count(r"cp\.async\.wait_group") > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.full), 90])
def test_one_instruction_serves_all_row_counts(capability: int) -> None:
    every = list(sources(capability))
    for made, each in zip(compile_all(every), every, strict=True):
        check(made, each)


def test_last_program_reads_after_barriers() -> None:
    """A barrier, an acq_rel count with GPU scope, a barrier, then reads past the L1 cache."""
    (made,) = compile_all([source(90, "dense", HOPPER_TILES["dense"][0], "split_k")])
    order = re.findall(r"st\.global|bar\.sync|atom\.\S+|ld\.global\.cg", made.ptx)
    count = next(i for i, step in enumerate(order) if step.startswith("atom"))
    assert order[count] == "atom.global.gpu.acq_rel.add.u32"
    assert order[count - 1] == "bar.sync" and "st.global" in order[:count]
    assert (
        order[count + 1] == "bar.sync"
        and "ld.global.cg" in order[count:]
        and "ld.global.cg" not in order[:count]
    )


@pytest.mark.parametrize("form", ["dense", "int4"])
def test_dependent_launch_touches_memory_after_the_wait(form: str) -> None:
    """Only prefetches of weights precede it: neighbours write x, and share the workspace."""
    tile = pick_tile(form, 2, 1, 2, HOPPER_TILES)
    (made,) = compile_all([source(90, form, tile, "split_k", pdl=True)])
    steps = re.findall(r"griddepcontrol\.\w+|prefetch\.L2|(?:ld|st|atom|cp\.async\.c.)\S*\.global", made.ptx)
    wait = steps.index("griddepcontrol.wait")
    assert steps[:wait] == ["prefetch.L2"] * tile.num_stages
    assert steps[wait + 1] == "griddepcontrol.launch_dependents" and "prefetch.L2" not in steps[wait:]


@pytest.mark.parametrize(
    ("name", "capability", "variant", "columns"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "", {"dense": {16, 32, 64, 128}, "quantized": {16, 32, 64}}),
        ("NVIDIA H200", (9, 0), "", {"dense": {64}, "quantized": {32}}),
        ("NVIDIA H20-3e", (9, 0), "", {"dense": {16}, "quantized": {16}}),
        ("NVIDIA H200", (9, 0), "linear_wide_tiles", {"dense": {64}, "quantized": {32}}),
        ("NVIDIA H200", (9, 0), "linear_two_programs", {"dense": {64}, "quantized": {32}}),
        ("NVIDIA H200", (9, 0), "linear_unpadded", {"dense": {16, 32, 64, 128}, "quantized": {16, 32, 64}}),
        ("NVIDIA GeForce RTX 5090", (12, 0), "", {"dense": {16, 32, 64, 128}, "quantized": {16, 32, 64}}),
    ],
)
def test_hopper_has_one_instruction_for_each_format(
    name: str,
    capability: tuple[int, int],
    variant: str,
    columns: dict[str, set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(variants, "enabled_variants", lambda: frozenset({variant}))
    tables = device_tiles.__wrapped__(HOPPER)
    assert {kind: {tile.dot_n for tile in tables[kind]} for kind in columns} == columns
    assert all(tile.bn % tile.dot_n == 0 for tiles in tables.values() for tile in tiles)


def test_wide_tiles_are_for_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accumulators of 128 x 256 values do not fit the registers."""
    monkeypatch.setattr(gemm, "is_enabled", lambda name: name == "linear_wide_tiles")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    tables = device_tiles.__wrapped__(HOPPER)
    widths = [[pick_tile("dense", 2, rows, splits, tables).bn for rows in (1, 128, 129)] for splits in (1, 2)]
    assert widths == [[64, 128, 256], [64, 128, 128]]
    wide = pick_tile("dense", 2, 129, 1, tables)
    (made,) = compile_all([source(90, "dense", wide, "none", "silu")])
    check(made, source(90, "dense", wide, "none", "silu"))
