"""Attention over a paged KV cache in plain torch, row-invariant by construction.

The rows of each request are cut into query tiles of ROWS, its positions into KV tiles of WIDTH, both
aligned to absolute position. Each pair of tiles is one product of fixed shape, in which a row's place is
given by its position (a product may round its first and its last rows differently), and a row merges the
KV tiles that it sees in order of position: nothing in that depends on the row's neighbours or on how the
prompt was cut. Everything is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import NULL_BLOCK, Batch, KVLayer

__all__ = ["ReferenceAttnMetadata", "attend", "build_attention_metadata"]

Q_TILE = 8
KV_TILE = 256
GRAIN_SIZE = 32768  # a multiple of WIDTH
TILES_PER_GROUP = 8
LOG2_E = math.log2(math.e)
MIN_SCORE = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class KVTileStep:
    """The next KV tile of each query tile that has one left: the first `count` query tiles.

    blocks   int64 [different KV tiles * WIDTH / block_size]  where they lie
    sources  which of them each query tile reads
    mask     float32 [count, 1, ROWS, 1, WIDTH]  -inf where a row must not see a position, else 0; None: all 0
    blind    bool [count, 1, ROWS, 1, 1]         rows that see nothing of it; None: every row sees some
    """

    num_tiles: int
    block_ids: Tensor
    kv_tile_index: tuple[int, ...]
    mask: Tensor | None
    fully_masked: Tensor | None


@dataclass(frozen=True, slots=True)
class TileGroup:
    """A few query tiles that are computed together, so that what they need stays in the cache of a core.

    filled  int64 [n * ROWS]    the batch's row at each place; a place without one repeats another row of its tile
    places  int64 [rows here]   the places that count, and
    rows    int64 [rows here]   the batch's rows that stand there
    """

    padded_rows: Tensor
    valid_places: Tensor
    valid_rows: Tensor
    steps: tuple[KVTileStep, ...]


@dataclass(frozen=True, slots=True)
class ReferenceAttnMetadata:
    """What all layers with one window share in one forward pass."""

    groups: tuple[TileGroup, ...]
    block_size: int


class QueryTile(NamedTuple):
    """Rows [row, row + size) of one request, at positions from `start`, all between two multiples of ROWS.

    Its KV tiles are [first, last].
    """

    request: int
    first_row: int
    num_rows: int
    start_position: int
    first_kv_tile: int
    last_kv_tile: int

    @property
    def end_position(self) -> int:
        return self.start_position + self.num_rows


class SoftmaxState(NamedTuple):
    """Softmax over some positions: maximum (of scores to base 2) and sum [n, Hk, ROWS, G, 1], weighted values
    [n, Hk, ROWS, G, D]."""

    max_score: Tensor
    exp_sum: Tensor
    values: Tensor


def build_attention_metadata(batch: Batch, window: int | None = None) -> ReferenceAttnMetadata:
    """Cut the batch into tiles and find out what each row sees of them."""
    assert KV_TILE % batch.block_size == 0
    tiles = sorted(_iter_query_tiles(batch, window), key=lambda tile: tile.first_kv_tile - tile.last_kv_tile)
    tables = _tables_by_tile(batch)
    groups = (tiles[index : index + TILES_PER_GROUP] for index in range(0, len(tiles), TILES_PER_GROUP))
    return ReferenceAttnMetadata(
        tuple(_build_group(batch, group, tables, window) for group in groups), batch.block_size
    )


def _tables_by_tile(batch: Batch) -> Tensor:
    """Block tables cut into KV tiles, [B+1, tiles, blocks a tile]; scratch fills the last one up."""
    tables = batch.block_tables
    blocks_a_tile = KV_TILE // batch.block_size
    padded = F.pad(tables, (0, -tables.shape[1] % blocks_a_tile), value=NULL_BLOCK)
    return padded.view(tables.shape[0], -1, blocks_a_tile)


def _build_group(batch: Batch, tiles: list[QueryTile], tables: Tensor, window: int | None) -> TileGroup:
    filled: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for tile in tiles:
        first = len(filled) + tile.start_position % Q_TILE
        filled += [tile.first_row] * Q_TILE
        filled[first : first + tile.num_rows] = own = range(tile.first_row, tile.first_row + tile.num_rows)
        places += range(first, first + tile.num_rows)
        rows += own
    at = torch.tensor(filled, dtype=torch.int64, device=tables.device)
    steps = _iter_kv_steps(tiles, tables, batch.positions[at].view(-1, Q_TILE), window)
    return TileGroup(at, at.new_tensor(places), at.new_tensor(rows), tuple(steps))


def _iter_query_tiles(batch: Batch, window: int | None) -> Iterator[QueryTile]:
    for request, end in enumerate(batch.seq_lens):
        row = batch.query_start_loc[request]
        start = end - (batch.query_start_loc[request + 1] - row)
        while start < end:
            size = min(Q_TILE - start % Q_TILE, end - start)
            first_seen = 0 if window is None else max(start - window + 1, 0)
            yield QueryTile(request, row, size, start, first_seen // KV_TILE, (start + size - 1) // KV_TILE)
            row, start = row + size, start + size


def _iter_kv_steps(
    tiles: list[QueryTile], tables: Tensor, positions: Tensor, window: int | None
) -> Iterator[KVTileStep]:
    """positions int64 [n, ROWS]; `tiles` are sorted by their number of KV tiles, most first."""
    for number in range(tiles[0].last_kv_tile - tiles[0].first_kv_tile + 1):
        pairs = [
            (tile, tile.first_kv_tile + number)
            for tile in tiles
            if tile.first_kv_tile + number <= tile.last_kv_tile
        ]
        order = {
            key: index
            for index, key in enumerate(dict.fromkeys((tile.request, kv_tile) for tile, kv_tile in pairs))
        }
        at = torch.tensor(list(order), dtype=torch.int64, device=tables.device)
        sources = tuple(order[tile.request, kv_tile] for tile, kv_tile in pairs)
        mask, blind = _build_mask(pairs, positions[: len(pairs)], window)
        yield KVTileStep(len(pairs), tables[at[:, 0], at[:, 1]].view(-1), sources, mask, blind)


def _build_mask(
    pairs: list[tuple[QueryTile, int]], positions: Tensor, window: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """`mask` and `blind` of a Step; pairs of a query tile and a KV tile, positions int64 [pairs, ROWS]."""
    if all(_is_unmasked(tile, kv_tile, window) for tile, kv_tile in pairs):
        return None, None
    columns = torch.tensor(
        [[kv_tile * KV_TILE] for _, kv_tile in pairs], dtype=torch.int64, device=positions.device
    )
    hidden = _build_hidden(columns + torch.arange(KV_TILE, device=positions.device), positions, window)
    mask = torch.where(hidden, -math.inf, 0.0)[:, None, :, None, :]
    if not any(_has_fully_masked_row(tile, kv_tile, window) for tile, kv_tile in pairs):
        return mask, None
    return mask, hidden.all(2)[:, None, :, None, None]


def _build_hidden(columns: Tensor, rows: Tensor, window: int | None) -> Tensor:
    """Positions columns [n, WIDTH] and rows [n, ROWS] -> bool [n, ROWS, WIDTH]: outside (row - window, row]."""
    hidden = columns[:, None, :] > rows[:, :, None]
    if window is not None:
        hidden |= columns[:, None, :] <= rows[:, :, None] - window
    return hidden


def _is_unmasked(tile: QueryTile, kv_tile: int, window: int | None) -> bool:
    in_past = (kv_tile + 1) * KV_TILE - 1 <= tile.start_position
    return in_past and (window is None or kv_tile * KV_TILE > tile.end_position - 1 - window)


def _has_fully_masked_row(tile: QueryTile, kv_tile: int, window: int | None) -> bool:
    ahead = kv_tile * KV_TILE > tile.start_position
    return ahead or (window is not None and (kv_tile + 1) * KV_TILE - 1 <= tile.end_position - 1 - window)


def attend(
    q: Tensor, cache: KVLayer, metadata: ReferenceAttnMetadata, scale: float, softcap: float | None
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]; zeros where the plan has no row.

    What a row must not see is masked by adding -inf to its score, and then weighs 0: exact, and it says nothing
    of the values, unless a key or value there is not finite (0 x NaN is NaN; slots that nobody wrote may hold
    anything). Then the group is computed once more, and such values are selected away for each row alone.
    """
    out = q.new_zeros(q.shape)
    for group in metadata.groups:
        queries = _gather_queries(q, cache.k.shape[1], group) * (
            scale if softcap is not None else scale * LOG2_E
        )
        result = _attend_group(queries, cache, metadata.block_size, group, softcap, select_values=False)
        if not math.isfinite(result.sum().item()):
            result = _attend_group(queries, cache, metadata.block_size, group, softcap, select_values=True)
        tiles = result.permute(0, 2, 1, 3, 4).reshape(-1, *q.shape[1:])
        out.index_copy_(0, group.valid_rows, tiles.index_select(0, group.valid_places).to(q.dtype))
    return out


def _gather_queries(q: Tensor, kv_heads: int, group: TileGroup) -> Tensor:
    """[T, Hq, D] -> float32 [n, Hk, ROWS, G, D]"""
    heads, dim = q.shape[1:]
    tiles = q.index_select(0, group.padded_rows).view(-1, Q_TILE, kv_heads, heads // kv_heads, dim)
    return tiles.permute(0, 2, 1, 3, 4).contiguous().to(torch.float32)


def _attend_group(
    q: Tensor, cache: KVLayer, block_size: int, group: TileGroup, softcap: float | None, select_values: bool
) -> Tensor:
    """float32 [n, Hk, ROWS, G, D] -> the same"""
    state: SoftmaxState | None = None
    for step in group.steps:
        keys = _gather_kv(cache.k, cache.k_scale, block_size, step)
        values = _gather_kv(cache.v, cache.v_scale, block_size, step)
        part = _attend_tile(q[: step.num_tiles], keys, values, step, softcap, select_values)
        if state is None:
            state = part
        else:
            _merge(state, part, step)
    assert state is not None
    return state.values / state.exp_sum


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, step: KVTileStep, softcap: float | None, select_values: bool
) -> SoftmaxState:
    """Softmax of queries [n, Hk, ROWS, G, D] over one KV tile each. A row that sees nothing gets top LOWEST."""
    scores = _batched_matmul(q, keys.permute(0, 2, 3, 1), step.kv_tile_index)
    if softcap is not None:
        scores = torch.tanh(scores.div_(softcap)).mul_(softcap * LOG2_E)
    if step.mask is not None:
        scores = (
            scores.masked_fill_(step.mask.isneginf(), -math.inf) if select_values else scores.add_(step.mask)
        )
    top = scores.amax(-1, keepdim=True).clamp_min_(MIN_SCORE)
    weights = _exp2(scores.sub_(top))
    weigh = _weigh_row_by_row if select_values else _weigh_values
    return SoftmaxState(top, weights.sum(-1, keepdim=True), weigh(weights, values.permute(0, 2, 1, 3), step))


def _gather_kv(cache: Tensor, scales: Tensor | None, block_size: int, step: KVTileStep) -> Tensor:
    """[S, Hk, D], perhaps with scales [S, Hk] -> float32 [different KV tiles, WIDTH, Hk, D]"""
    values = _gather_blocks(cache, block_size, step).to(torch.float32)
    return values if scales is None else values.mul_(_gather_blocks(scales, block_size, step)[..., None])


def _gather_blocks(cache: Tensor, block_size: int, step: KVTileStep) -> Tensor:
    """[S, ...] -> [different KV tiles, WIDTH, ...]"""
    stored = (
        cache.view(torch.uint8) if cache.itemsize == 1 else cache
    )  # torch does not select from all types of a byte
    blocks = stored.view(-1, block_size, *cache.shape[1:]).index_select(0, step.block_ids)
    return blocks.view(-1, KV_TILE, *cache.shape[1:]).view(cache.dtype)


def _batched_matmul(rows: Tensor, columns: Tensor, kv_tile_index: tuple[int, ...]) -> Tensor:
    """[n, Hk, ROWS, G, K] x [different, Hk, K, N] -> [n, Hk, ROWS, G, N], each of the n by a call of its own."""
    count, kv_heads, _, group, inner = rows.shape
    out = rows.new_empty(count, kv_heads, Q_TILE * group, columns.shape[-1])
    right = columns.unbind()
    for left, source, result in zip(
        rows.view(count, kv_heads, -1, inner).unbind(), kv_tile_index, out.unbind(), strict=True
    ):
        torch.bmm(left, right[source], out=result)
    return out.view(count, kv_heads, Q_TILE, group, -1)


def _exp2(x: Tensor) -> Tensor:
    """In place. Torch gives a thread at least GRAIN values; a piece that begins anywhere but at a row would end in a
    scalar loop with other bits."""
    for piece in torch.split(x.view(-1), GRAIN_SIZE):
        piece.exp2_()
    return x


def _weigh_values(weights: Tensor, values: Tensor, step: KVTileStep) -> Tensor:
    """weights [n, Hk, ROWS, G, WIDTH], values [different, Hk, WIDTH, D] -> [n, Hk, ROWS, G, D]

    Adding 0 makes -0 to +0: the sign of a zero could tell of values that the row must not see.
    """
    return _batched_matmul(weights, values, step.kv_tile_index).add_(0.0)


def _weigh_row_by_row(weights: Tensor, values: Tensor, step: KVTileStep) -> Tensor:
    """The same, with the values that a row must not see selected away for each row alone."""
    if step.mask is None:
        return _weigh_values(weights, values, step)
    own = values[list(step.kv_tile_index)]
    out = weights.new_empty(*weights.shape[:-1], values.shape[-1])
    for row in range(Q_TILE):
        seen = own.masked_fill(step.mask[:, :, row, 0, :, None].isneginf(), 0.0)
        out[:, :, row] = _batched_matmul(weights, seen, tuple(range(step.num_tiles)))[:, :, row]
    return out.add_(0.0)


def _merge(state: SoftmaxState, part: SoftmaxState, step: KVTileStep) -> None:
    """Add the next positions to the first `count` tiles, in place. A row that sees none of them keeps its bits."""
    old = SoftmaxState(*(tensor[: step.num_tiles] for tensor in state))
    top = torch.maximum(old.max_score, part.max_score)
    keep, add = (torch.exp((share.max_score - top).div_(LOG2_E)) for share in (old, part))
    total = old.exp_sum * keep + part.exp_sum * add
    values = old.values * keep + part.values * add
    for target, merged in zip(old, (top, total, values), strict=True):
        target.copy_(merged if step.fully_masked is None else torch.where(step.fully_masked, target, merged))
