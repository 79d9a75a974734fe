"""Mixtures of experts on Triton: rows are grouped by expert on the device, and gemm.py multiplies the groups.

A (row, rank) pair is a row's choice of one expert, rank 0 for the largest logit. Pairs get places in order
of (expert, row), so an expert's pairs are neighbours: one product of weights and pairs for all experts. Each
place is computed alone, and a row adds its places in order of rank: no bit depends on the grouping, and
nothing is added by atomics. Grids have programs for the worst case of T rows, and those in excess exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foreword.kernels.ops import ExpertsConfig, PackedExperts, PackedHeads, PackedLinear
from foreword.kernels.triton.elementwise import act
from foreword.kernels.triton.gemm_pack import PackedWeight, stack
from foreword.kernels.triton.linear import RowGroups, TritonLinear
from foreword.kernels.triton.variants import launches_dependents

GROUP_BLOCK = 1024  # pairs that a program of _group_kernel() reads at a time
COMBINE_BLOCK = 1024  # values of a program of _combine_kernel()
TAKEN = tl.constexpr(-(1 << 31))  # key of an expert that is chosen already: below that of -inf
NAN_BITS = tl.constexpr(0x7FC00000)  # above infinity: NaN comes first


@dataclass(frozen=True, slots=True)
class StackedExperts:
    gate_up: PackedWeight
    down: PackedWeight
    bias: Tensor | None  # float32 [E]
    scales: Tensor | None  # float32 [E]


class TritonExperts(TritonLinear):
    """Mixin of TritonOps."""

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> PackedExperts:
        return StackedExperts(stack(gate_up), stack(down), bias, scales)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: PackedExperts,
        config: ExpertsConfig,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """See Ops.experts: the products of linear_gated_act() and linear() with a weight for each place."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not len(x):
            return out
        pairs, pdl = len(x) * config.top_k, launches_dependents(x.device)
        chosen = torch.empty(pairs, dtype=torch.int32, device=x.device)
        shares = torch.empty(pairs, dtype=torch.float32, device=x.device)
        _route_kernel[(len(x),)](
            *(logits.contiguous(), weights.bias, weights.scales, chosen, shares, config.scale),
            config.tolerance,
            TOP_K=config.top_k,
            NUM_EXPERTS=config.num_experts,
            RENORMALIZE=config.renormalize,
            SIGMOID=config.scoring == "sigmoid",
            MIXER=config.scoring == "sparse_mixer",
            NUM_GROUPS=config.num_groups,
            TOPK_GROUPS=config.topk_groups,
            RANKS=triton.next_power_of_2(config.top_k),
            BLOCK=max(triton.next_power_of_2(config.num_experts), 32),
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
        places, input_rows = torch.empty_like(chosen), torch.empty_like(chosen)
        rows_per_expert = -(-pairs // config.num_experts)
        row_tiles: dict[int, Tensor] = {}
        for weight in (weights.gate_up, weights.down):
            tile_rows = self._pick_tile(x, weight, rows_per_expert).bn
            if tile_rows not in row_tiles:
                row_tiles[tile_rows] = self._group(chosen, places, input_rows, config, tile_rows, pdl)
        groups = RowGroups(pairs, rows_per_expert, row_tiles, input_rows)
        width = weights.gate_up.rows // (1 + config.gated)
        activation = config.activation if config.gated else None
        inner = self._launch_gemm(x, weights.gate_up, width, x.dtype, activation, None, groups)
        if not config.gated:
            inner = act(inner, config.activation)
        groups = replace(groups, input_rows=None)
        outputs = self._launch_gemm(inner, weights.down, weights.down.rows, torch.float32, None, None, groups)
        _combine_kernel[(len(x), triton.cdiv(x.shape[1], COMBINE_BLOCK))](
            *(outputs, places, shares, None if add_to is None else add_to.contiguous(), out),
            TOP_K=config.top_k,
            WIDTH=x.shape[1],
            BLOCK=COMBINE_BLOCK,
            PDL=pdl,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
        return out

    def pack_heads(self, heads: Sequence[PackedLinear]) -> PackedHeads:
        return stack(heads)

    def linear_by_head(self, x: Tensor, weights: PackedHeads, append: Tensor | None = None) -> Tensor:
        """See Ops.linear_by_head: the rows of a head are those of an expert."""
        rows, heads, _ = x.shape
        if not rows:
            return x.new_empty(0, heads, weights.rows + (0 if append is None else append.shape[2]))
        tile_rows = self._pick_tile(x, weights, rows).bn
        head = torch.arange(heads, dtype=torch.int32, device=x.device)[:, None]
        start = torch.arange(0, rows, tile_rows, dtype=torch.int32, device=x.device)
        first, end = head * rows + start, ((head + 1) * rows).expand(-1, len(start))
        tiles = torch.stack((head.expand_as(first), first, end), -1).view(-1, 3)
        row = torch.arange(rows, dtype=torch.int32, device=x.device)
        groups = RowGroups(rows * heads, rows, {tile_rows: tiles}, (row * heads + head).view(-1))
        flat = x.reshape(rows * heads, -1)
        y = self._launch_gemm(flat, weights, weights.rows, x.dtype, None, None, groups)
        y = y.view(heads, rows, -1).transpose(0, 1)
        return y.contiguous() if append is None else torch.cat((y, append), -1)

    def _group(
        self,
        chosen: Tensor,
        places: Tensor,
        input_rows: Tensor,
        config: ExpertsConfig,
        tile_rows: int,
        pdl: bool,
    ) -> Tensor:
        """Write places and input_rows [pairs]; returns row_tiles of gemm_kernel() for BN = tile_rows."""
        num_tiles = max_row_tiles(len(chosen), config, tile_rows)
        tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=chosen.device)
        _group_kernel[(config.num_experts,)](
            *(chosen, places, input_rows, tiles, len(chosen), num_tiles),
            TOP_K=config.top_k,
            BINS=max(triton.next_power_of_2(config.num_experts), 32),
            TILE_ROWS=tile_rows,
            BLOCK=GROUP_BLOCK,
            PDL=pdl,
            launch_pdl=pdl,
        )
        return tiles


def max_row_tiles(num_pairs: int, config: ExpertsConfig, tile_rows: int) -> int:
    """The most tiles of one expert's rows each, whatever the choices.

    A chosen expert has one tile that may not be full, and at most all rows.
    """
    num_rows, num_chosen = num_pairs // config.top_k, min(config.num_experts, num_pairs)
    most = num_chosen + (num_pairs - num_chosen) // tile_rows
    return min(most, num_chosen * -(-num_rows // tile_rows))


@triton.jit
def _sort_key(values):
    """float32 -> int32 in the same order: zeros are equal, NaN comes last."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    bits = tl.where(values != values, NAN_BITS, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _choose_groups(
    keys, values, expert, inside,
    SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK]: 1 for experts of the chosen groups of SIZE."""
    group = expert // SIZE
    group_keys = tl.full(keys.shape, TAKEN, tl.int32)  # by expert: that of its group
    for number in range(NUM_GROUPS):
        mine = inside & (group == number)
        own = tl.where(mine, keys, TAKEN)
        best = tl.min(tl.where(own == tl.max(own, 0), expert, NUM_GROUPS * SIZE), 0)
        score = tl.sum(tl.where(expert == best, values, 0.0), 0)
        if SUM_OF_TWO and SIZE > 1:
            own = tl.where(expert == best, TAKEN, own)
            second = tl.min(tl.where(own == tl.max(own, 0), expert, NUM_GROUPS * SIZE), 0)
            score += tl.sum(tl.where(expert == second, values, 0.0), 0)
        group_keys = tl.where(mine, _sort_key(score), group_keys)
    chosen = tl.zeros(keys.shape, tl.int32)
    for _ in range(TOPK_GROUPS):
        best = tl.min(tl.where(group_keys == tl.max(group_keys, 0), group, NUM_GROUPS), 0)
        chosen = tl.where(inside & (group == best), 1, chosen)
        group_keys = tl.where(group == best, TAKEN, group_keys)
    return chosen


@triton.jit
def _mixer_share(values, own, available, tolerance):
    """Share of a logit `own` in the softmax over the available values near it; see ExpertsConfig."""
    scale = tl.maximum(tl.abs(values), own)
    is_ratio = (scale > 0.0) & (scale < float("inf"))  # equal zeros are near, and infinities not
    distances = tl.div_rn(own - values, tl.where(is_ratio, scale, 1.0))
    is_near = available & ~(distances > tolerance)
    return 1.0 / tl.sum(tl.where(is_near, tl.exp(values - own), 0.0), 0)


@triton.jit
def _route_kernel(
    logits, bias, scales, chosen, shares, scale, tolerance,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    MIXER: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Experts of the TOP_K largest scores of a row, ties to the lowest id, and their weights.

    Scores are logits, and weights shares of the softmax; or (SIGMOID) scores and weights are sigmoids. With
    a bias [NUM_EXPERTS], scores are sigmoids, or shares of all experts, plus the bias. Weights are
    multiplied by scale, and by scales [NUM_EXPERTS] unless it is None. logits float32 [T, NUM_EXPERTS];
    chosen int32 and shares float32 [T, TOP_K], in order of falling scores. MIXER with its tolerance,
    NUM_GROUPS and TOPK_GROUPS: see ExpertsConfig.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < NUM_EXPERTS
    values = tl.load(logits + row * NUM_EXPERTS + expert, mask=inside, other=-float("inf"))
    weights = values
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-values))
        values = weights
    elif bias is not None:
        powers = tl.exp(values - tl.max(values, 0))
        values = powers / tl.sum(powers, 0)
    if bias is not None:
        values += tl.load(bias + expert, mask=inside, other=0.0)
    keys = tl.where(inside, _sort_key(values), TAKEN)
    if TOPK_GROUPS < NUM_GROUPS:
        chosen_groups = _choose_groups(
            keys, values, expert, inside, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, TOPK_GROUPS, SIGMOID
        )
        keys = tl.where(chosen_groups == 1, keys, TAKEN)
    ranks = tl.arange(0, RANKS)
    top_values = tl.zeros([RANKS], tl.float32)
    factors = tl.zeros([RANKS], tl.float32) + scale
    highest, total = 0.0, 0.0
    for rank in range(TOP_K):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        value = tl.sum(tl.where(expert == best, weights, 0.0), 0)
        if MIXER:
            value = _mixer_share(values, value, inside & (keys > TAKEN), tolerance)
        highest = tl.where(rank == 0, value, highest)
        total += value if SIGMOID else tl.exp(value - highest)
        top_values = tl.where(ranks == rank, value, top_values)
        if scales is not None:
            factors = tl.where(ranks == rank, tl.load(scales + best) * scale, factors)
        keys = tl.where(expert == best, TAKEN, keys)
        tl.store(chosen + row * TOP_K + rank, best)
    if bias is not None and not SIGMOID:  # the largest logit need not be of the first choice
        highest = tl.max(tl.where(ranks < TOP_K, top_values, -float("inf")), 0)
        total = tl.sum(tl.where(ranks < TOP_K, tl.exp(top_values - highest), 0.0), 0)
    if MIXER:
        total = 1.0
    elif not RENORMALIZE:
        if bias is not None and not SIGMOID:
            highest = tl.max(weights, 0)
        total = 1.0 if SIGMOID else tl.sum(tl.where(inside, tl.exp(weights - highest), 0.0), 0)
    powers = top_values if SIGMOID or MIXER else tl.exp(top_values - highest)
    tl.store(shares + row * TOP_K + ranks, powers / total * factors, mask=ranks < TOP_K)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group_kernel(
    chosen, places, input_rows, tiles, num_pairs, num_tiles,
    TOP_K: tl.constexpr, BINS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one expert behind those of lower experts; grid (experts).

    chosen int32 [pairs]; places and input_rows int32 [pairs]: the place of each pair, the row of each place;
    tiles int32 [num_tiles, 3]: see gemm_kernel().
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    me = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        inside = start + lane < num_pairs
        experts = tl.load(chosen + start + lane, mask=inside, other=0)
        counts += tl.histogram(experts, BINS, mask=inside)
    expert = tl.arange(0, BINS)
    tile_counts = (counts + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(expert < me, counts, 0), 0)
    end = first + tl.sum(tl.where(expert == me, counts, 0), 0)
    first_tile = tl.sum(tl.where(expert < me, tile_counts, 0), 0)
    place = first
    for start in range(0, num_pairs, BLOCK):
        pair = start + lane
        mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == me
        at = place + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(places + pair, at, mask=mine)
        tl.store(input_rows + at, pair // TOP_K, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    for start in range(first, end, TILE_ROWS):
        tile = tiles + 3 * (first_tile + (start - first) // TILE_ROWS)
        tl.store(tile, me)
        tl.store(tile + 1, start)
        tl.store(tile + 2, end)
    if me == 0:
        for tile in range(tl.sum(tile_counts, 0), num_tiles):
            tl.store(tiles + 3 * tile, -1)


@triton.jit
def _combine_kernel(
    outputs, places, shares, add_to, out,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over ranks of outputs[its place] * share, in order of ranks, plus add_to[row]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(TOP_K):
        place = tl.load(places + row * TOP_K + rank).to(tl.int64)
        share = tl.load(shares + row * TOP_K + rank)
        total += tl.load(outputs + place * WIDTH + column, mask=inside, other=0.0) * share
    if add_to is not None:
        total += tl.load(add_to + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)
