"""Attention over a paged KV cache in plain torch, row-invariant by construction.

The rows of each request are cut into query tiles of ROWS, its positions into KV tiles of WIDTH that are
aligned to absolute position. Each pair of tiles is one product of fixed shape, and a row merges the KV
tiles that it sees in order of position: nothing in that depends on the row's place, on its neighbours
or on how the prompt was cut. Everything is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import SCRATCH_BLOCK, Batch

__all__ = ["Plan", "attend", "plan_attention"]

ROWS = 16
WIDTH = 256
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Step:
    """The next KV tile of each query tile that has one left: the first `count` query tiles.

    blocks   int64 [count * WIDTH / block_size]    where it lies
    hidden   bool [count, 1, ROWS, 1, WIDTH]       positions that a row must not see; None: it sees all
    outside  bool [count, WIDTH, 1, 1]             positions that no row sees; None with `hidden`
    blind    bool [count, 1, ROWS, 1, 1]           rows that see nothing of it; None: every row sees some
    """

    count: int
    blocks: Tensor
    hidden: Tensor | None
    outside: Tensor | None
    blind: Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers with one window share in one forward pass; n query tiles.

    rows    int64 [n * ROWS]   the batch's row at each place of a tile (the last one repeated)
    places  int64 [rows used]  the place of each row of the batch, padding excluded
    """

    rows: Tensor
    places: Tensor
    steps: tuple[Step, ...]
    block_size: int


class QueryTile(NamedTuple):
    """Rows [row, row + size) of one request, at positions from `start`; its KV tiles are [first, last]."""

    request: int
    row: int
    size: int
    start: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.start + self.size


class Partial(NamedTuple):
    """Softmax over some positions: maximum and sum [n, Hk, ROWS, G, 1], weighted values [n, Hk, ROWS, G, D]."""

    top: Tensor
    total: Tensor
    values: Tensor


def plan_attention(batch: Batch, window: int | None = None) -> Plan:
    """Cut the batch into tiles and find out what each row sees of them."""
    assert WIDTH % batch.block_size == 0
    tiles = sorted(_query_tiles(batch, window), key=lambda tile: tile.first - tile.last)
    device = batch.positions.device
    rows = [tile.row + min(place, tile.size - 1) for tile in tiles for place in range(ROWS)]
    places = [0] * batch.row_starts[-1]
    for index, tile in enumerate(tiles):
        places[tile.row : tile.row + tile.size] = range(index * ROWS, index * ROWS + tile.size)
    rows_at = torch.tensor(rows, dtype=torch.int64, device=device)
    return Plan(
        rows=rows_at,
        places=torch.tensor(places, dtype=torch.int64, device=device),
        steps=tuple(_steps(batch, tiles, batch.positions[rows_at].view(-1, ROWS), window)),
        block_size=batch.block_size,
    )


def _query_tiles(batch: Batch, window: int | None) -> Iterator[QueryTile]:
    for request, end in enumerate(batch.ends):
        low, high = batch.row_starts[request], batch.row_starts[request + 1]
        for row in range(low, high, ROWS):
            count = min(ROWS, high - row)
            start = end - (high - row)
            first_seen = 0 if window is None else max(start - window + 1, 0)
            yield QueryTile(request, row, count, start, first_seen // WIDTH, (start + count - 1) // WIDTH)


def _steps(batch: Batch, tiles: list[QueryTile], positions: Tensor, window: int | None) -> Iterator[Step]:
    """positions int64 [n, ROWS]; `tiles` are sorted by their number of KV tiles, most first."""
    device = positions.device
    blocks_a_tile = WIDTH // batch.block_size
    width = batch.block_tables.shape[1]
    tables = F.pad(batch.block_tables, (0, -width % blocks_a_tile), value=SCRATCH_BLOCK)
    tables = tables.view(tables.shape[0], -1, blocks_a_tile)
    requests = torch.tensor([tile.request for tile in tiles], dtype=torch.int64, device=device)
    firsts = torch.tensor([tile.first for tile in tiles], dtype=torch.int64, device=device)
    within = torch.arange(WIDTH, device=device)
    for number in range(max((tile.last - tile.first + 1 for tile in tiles), default=0)):
        active = [tile for tile in tiles if tile.first + number <= tile.last]
        count = len(active)
        column = firsts[:count] + number
        blocks = tables[requests[:count], column].view(-1)
        if all(_sees_all(tile, tile.first + number, window) for tile in active):
            yield Step(count, blocks, None, None, None)
            continue
        hidden = _hidden(column[:, None] * WIDTH + within, positions[:count], window)
        blind = None
        if any(_has_blind_row(tile, tile.first + number, window) for tile in active):
            blind = hidden.all(2)[:, None, :, None, None]
        yield Step(count, blocks, hidden[:, None, :, None, :], hidden.all(1)[:, :, None, None], blind)


def _hidden(columns: Tensor, rows: Tensor, window: int | None) -> Tensor:
    """Positions columns [n, WIDTH] and rows [n, ROWS] -> bool [n, ROWS, WIDTH]: outside (row - window, row]."""
    hidden = columns[:, None, :] > rows[:, :, None]
    if window is not None:
        hidden |= columns[:, None, :] <= rows[:, :, None] - window
    return hidden


def _sees_all(tile: QueryTile, kv_tile: int, window: int | None) -> bool:
    in_past = (kv_tile + 1) * WIDTH - 1 <= tile.start
    return in_past and (window is None or kv_tile * WIDTH > tile.end - 1 - window)


def _has_blind_row(tile: QueryTile, kv_tile: int, window: int | None) -> bool:
    ahead = kv_tile * WIDTH > tile.start
    return ahead or (window is not None and (kv_tile + 1) * WIDTH - 1 <= tile.end - 1 - window)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, scale: float, softcap: float | None, row_by_row: bool = False
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]; zeros where the plan has no row.

    Rows of a tile share their products with V, where the weight 0 of a position that one row must not
    see meets another row's value. That is exact unless the value is not finite (0 x NaN is NaN): then
    everything is computed once more with each row's values selected for it alone.
    """
    out = q.new_zeros(q.shape)
    if not plan.steps:
        return out
    num_rows, heads, dim = plan.places.shape[0], q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    queries = q.index_select(0, plan.rows).view(-1, ROWS, kv_heads, heads // kv_heads, dim)
    queries = (queries.permute(0, 2, 1, 3, 4).to(torch.float32) * scale).contiguous()
    state = _tile(queries, k_cache, v_cache, plan, plan.steps[0], softcap, row_by_row)
    for step in plan.steps[1:]:
        part = _tile(queries[: step.count], k_cache, v_cache, plan, step, softcap, row_by_row)
        _merge(state, part, step)
    tiles = (state.values / state.total).permute(0, 2, 1, 3, 4).reshape(-1, heads, dim)
    if not row_by_row and not math.isfinite(tiles.sum().item()):
        return attend(q, k_cache, v_cache, plan, scale, softcap, row_by_row=True)
    out[:num_rows] = tiles.index_select(0, plan.places)
    return out


def _tile(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, step: Step, softcap: float | None, row_by_row: bool
) -> Partial:
    """Softmax of queries [n, Hk, ROWS, G, D] over one KV tile each. A row that sees nothing gets top LOWEST."""
    scores = _products(q, _gather(k_cache, plan.block_size, step).permute(0, 2, 3, 1))
    if softcap is not None:
        scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
    if step.hidden is not None:
        scores.masked_fill_(step.hidden, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp_min_(LOWEST)
    weights = scores.sub_(top).exp_()
    values = _gather(v_cache, plan.block_size, step)
    weighed = _weigh_row_by_row(weights, values, step) if row_by_row else _weigh(weights, values, step)
    return Partial(top, weights.sum(-1, keepdim=True), weighed)


def _gather(cache: Tensor, block_size: int, step: Step) -> Tensor:
    """[S, Hk, D] -> float32 [count, WIDTH, Hk, D]"""
    heads, dim = cache.shape[1:]
    blocks = cache.view(-1, block_size, heads, dim).index_select(0, step.blocks)
    return blocks.view(step.count, WIDTH, heads, dim).to(torch.float32)


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """[n, Hk, ROWS, G, K] x [n, Hk, K, N] -> [n, Hk, ROWS, G, N], each of the n by a call of its own."""
    shape = rows.shape[:-1] + columns.shape[-1:]
    flat = rows.view(rows.shape[0], rows.shape[1], -1, rows.shape[-1])
    if rows.shape[0] == 1:
        return torch.bmm(flat[0], columns[0]).view(shape)
    out = rows.new_empty(*flat.shape[:-1], columns.shape[-1])
    for left, right, result in zip(flat.unbind(), columns.unbind(), out.unbind(), strict=True):
        torch.bmm(left, right, out=result)
    return out.view(shape)


def _weigh(weights: Tensor, values: Tensor, step: Step) -> Tensor:
    """weights [n, Hk, ROWS, G, WIDTH], values [n, WIDTH, Hk, D] -> [n, Hk, ROWS, G, D]

    Adding 0 makes -0 to +0: the sign of a zero could tell of values that the row must not see.
    """
    if step.outside is not None:
        values = values.masked_fill(step.outside, 0.0)
    return _products(weights, values.permute(0, 2, 1, 3)).add_(0.0)


def _weigh_row_by_row(weights: Tensor, values: Tensor, step: Step) -> Tensor:
    """The same, with the values that a row must not see selected away for each row alone."""
    if step.hidden is None:
        return _weigh(weights, values, step)
    out = weights.new_empty(*weights.shape[:-1], values.shape[-1])
    for row in range(ROWS):
        seen = values.masked_fill(step.hidden[:, 0, row, 0, :, None, None], 0.0)
        out[:, :, row] = _products(weights, seen.permute(0, 2, 1, 3))[:, :, row]
    return out.add_(0.0)


def _merge(state: Partial, part: Partial, step: Step) -> None:
    """Add the next positions to the first `count` tiles, in place. A row that sees none of them keeps its bits."""
    old = Partial(*(tensor[: step.count] for tensor in state))
    top = torch.maximum(old.top, part.top)
    keep, add = torch.exp(old.top - top), torch.exp(part.top - top)
    total = old.total * keep + part.total * add
    values = old.values * keep + part.values * add
    for target, merged in zip(old, (top, total, values), strict=True):
        target.copy_(merged if step.blind is None else torch.where(step.blind, target, merged))
