"""Attention over a paged KV cache in plain torch, row-invariant by construction.

Rows of a request are cut into query tiles of Q_TILE, positions into KV tiles of KV_TILE, both aligned to
absolute position. Each pair of tiles is one product of fixed shape with a row's place given by its position
(a product may round its first and last rows differently), and a row merges its KV tiles in order of position.
So the bits depend neither on neighbouring rows nor on prefill chunks. All math is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.batch import NULL_BLOCK, Batch, KVLayer

Q_TILE = 8
KV_TILE = 256
VECTOR_MULTIPLE = 64  # values without a remainder in any CPU's vector loop
GRAIN_SIZE = 32768  # values, a multiple of KV_TILE; torch splits larger element-wise work among threads
TILES_PER_GROUP = 8
LOG2_E = math.log2(math.e)
MIN_SCORE = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class KVTileStep:
    """The next KV tile of the first num_tiles query tiles: those that have one left."""

    num_tiles: int
    block_ids: Tensor  # int64 [unique KV tiles * KV_TILE / block_size]
    kv_tile_index: tuple[int, ...]  # the unique KV tile that each query tile reads
    mask: Tensor | None  # float32 [num_tiles, 1, Q_TILE, 1, KV_TILE]: -inf where masked, else 0; None: all 0
    fully_masked: Tensor | None  # bool [num_tiles, 1, Q_TILE, 1, 1]: rows that see nothing; None: no such row


@dataclass(frozen=True, slots=True)
class TileGroup:
    """A few query tiles computed together, so that their data stays in a core's cache."""

    padded_rows: Tensor  # int64 [n * Q_TILE]: batch row of each place; padding repeats a row of its tile
    valid_places: Tensor  # int64 [rows of the group]: the places that are not padding
    valid_rows: Tensor  # int64 [rows of the group]: their batch rows
    steps: tuple[KVTileStep, ...]


@dataclass(frozen=True, slots=True)
class ReferenceAttnMetadata:
    """The tiles and masks that all layers with one window share in a forward pass."""

    groups: tuple[TileGroup, ...]
    block_size: int


class QueryTile(NamedTuple):
    """Consecutive rows of one request, all between two multiples of Q_TILE."""

    request: int
    first_row: int
    num_rows: int
    start_position: int
    last_seen: tuple[int, int]  # last position that its first and its last row see
    first_kv_tile: int
    last_kv_tile: int  # inclusive


class SoftmaxState(NamedTuple):
    """Online softmax over some positions."""

    max_score: Tensor  # [n, Hk, Q_TILE, G, 1], of scores to base 2
    exp_sum: Tensor  # [n, Hk, Q_TILE, G, 1]
    values: Tensor  # [n, Hk, Q_TILE, G, Dv]: weighted sum


def build_attention_metadata(
    batch: Batch, window: int | None = None, first: int = 0, causal: bool = True
) -> ReferenceAttnMetadata:
    """Cut the batch into tiles, and compute the mask of each pair of tiles."""
    assert KV_TILE % batch.block_size == 0
    tiles = sorted(
        _iter_query_tiles(batch, window, causal), key=lambda tile: tile.first_kv_tile - tile.last_kv_tile
    )
    blocks_per_tile = KV_TILE // batch.block_size
    tables = F.pad(
        batch.block_tables, (0, -batch.block_tables.shape[1] % blocks_per_tile), value=NULL_BLOCK
    ).view(batch.block_tables.shape[0], -1, blocks_per_tile)
    groups = (tiles[index : index + TILES_PER_GROUP] for index in range(0, len(tiles), TILES_PER_GROUP))
    return ReferenceAttnMetadata(
        tuple(_build_group(batch, group, tables, window, first, causal) for group in groups), batch.block_size
    )


def _build_group(
    batch: Batch, tiles: list[QueryTile], tables: Tensor, window: int | None, first: int, causal: bool
) -> TileGroup:
    """tables int64 [B+1, KV tiles, blocks per tile]"""
    padded: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for tile in tiles:
        place = len(padded) + tile.start_position % Q_TILE
        tile_rows = range(tile.first_row, tile.first_row + tile.num_rows)
        padded += [tile.first_row] * Q_TILE
        padded[place : place + tile.num_rows] = tile_rows
        places += range(place, place + tile.num_rows)
        rows += tile_rows
    padded_rows = torch.tensor(padded, dtype=torch.int64, device=tables.device)
    positions = batch.positions[padded_rows].view(-1, Q_TILE)
    if not causal:
        positions = positions.new_tensor([[tile.last_seen[1]] * Q_TILE for tile in tiles])
    steps = _iter_kv_steps(tiles, tables, positions, window, first)
    return TileGroup(padded_rows, padded_rows.new_tensor(places), padded_rows.new_tensor(rows), tuple(steps))


def _iter_query_tiles(batch: Batch, window: int | None, causal: bool) -> Iterator[QueryTile]:
    for request, end in enumerate(batch.seq_lens):
        row = batch.query_start_loc[request]
        start = end - (batch.query_start_loc[request + 1] - row)
        while start < end:
            size = min(Q_TILE - start % Q_TILE, end - start)
            last_seen = (start, start + size - 1) if causal else (end - 1, end - 1)
            first_seen = 0 if window is None else max(last_seen[0] - window + 1, 0)
            kv_tiles = first_seen // KV_TILE, last_seen[1] // KV_TILE
            yield QueryTile(request, row, size, start, last_seen, *kv_tiles)
            row, start = row + size, start + size


def _iter_kv_steps(
    tiles: list[QueryTile], tables: Tensor, positions: Tensor, window: int | None, first: int
) -> Iterator[KVTileStep]:
    """positions int64 [n, Q_TILE]; `tiles` are sorted by their number of KV tiles, most first."""
    for number in range(tiles[0].last_kv_tile - tiles[0].first_kv_tile + 1):
        pairs = [
            (tile, tile.first_kv_tile + number)
            for tile in tiles
            if tile.first_kv_tile + number <= tile.last_kv_tile
        ]
        keys = [(tile.request, kv_tile) for tile, kv_tile in pairs]
        order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        unique = torch.tensor(list(order), dtype=torch.int64, device=tables.device)
        block_ids = tables[unique[:, 0], unique[:, 1]].view(-1)
        mask, fully_masked = _build_mask(pairs, positions[: len(pairs)], window, first)
        yield KVTileStep(len(pairs), block_ids, tuple(order[key] for key in keys), mask, fully_masked)


def _build_mask(
    pairs: list[tuple[QueryTile, int]], positions: Tensor, window: int | None, first: int
) -> tuple[Tensor | None, Tensor | None]:
    """mask and fully_masked of a KVTileStep; pairs (query tile, KV tile), positions int64 [pairs, Q_TILE]."""
    if all(_is_unmasked(tile, kv_tile, window, first) for tile, kv_tile in pairs):
        return None, None
    device = positions.device
    starts = torch.tensor([[kv_tile * KV_TILE] for _, kv_tile in pairs], dtype=torch.int64, device=device)
    columns = (starts + torch.arange(KV_TILE, device=device))[:, None, :]
    hidden = (columns > positions[:, :, None]) | (columns < first)  # [pairs, Q_TILE, KV_TILE]
    if window is not None:
        hidden |= columns <= positions[:, :, None] - window
    mask = torch.where(hidden, -math.inf, 0.0)[:, None, :, None, :]
    if not any(_has_fully_masked_row(tile, kv_tile, window, first) for tile, kv_tile in pairs):
        return mask, None
    return mask, hidden.all(2)[:, None, :, None, None]


def _is_unmasked(tile: QueryTile, kv_tile: int, window: int | None, first: int) -> bool:
    lowest, highest = tile.last_seen
    in_past = first <= kv_tile * KV_TILE and (kv_tile + 1) * KV_TILE - 1 <= lowest
    return in_past and (window is None or kv_tile * KV_TILE > highest - window)


def _has_fully_masked_row(tile: QueryTile, kv_tile: int, window: int | None, first: int) -> bool:
    lowest, highest = tile.last_seen
    ahead = max(kv_tile * KV_TILE, first) > lowest or (kv_tile + 1) * KV_TILE <= first
    return ahead or (window is not None and (kv_tile + 1) * KV_TILE - 1 <= highest - window)


def attend(
    q: Tensor,
    cache: KVLayer,
    metadata: ReferenceAttnMetadata,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, Dv]; zeros for rows without a tile. sinks float32 [Hq].

    Adding -inf to the score of a masked position makes its weight 0, which is exact for finite values. But
    0 x NaN is NaN, and unwritten slots may hold anything: if the result is not finite, the group is computed
    again, and masked values are replaced by 0 for each row.
    """
    out = q.new_zeros(*q.shape[:2], cache.v.shape[2])
    head_sinks = None if sinks is None else sinks.view(1, cache.k.shape[1], 1, -1, 1) * LOG2_E
    for group in metadata.groups:
        queries = _gather_queries(q, cache.k.shape[1], group)
        queries *= scale if softcap is not None else scale * LOG2_E
        result = _attend_group(queries, cache, metadata.block_size, group, softcap, head_sinks)
        if not math.isfinite(result.sum().item()):
            result = _attend_group(
                queries, cache, metadata.block_size, group, softcap, head_sinks, select_values=True
            )
        tiles = result.permute(0, 2, 1, 3, 4).reshape(-1, *out.shape[1:])
        out.index_copy_(0, group.valid_rows, tiles.index_select(0, group.valid_places).to(q.dtype))
    return out


def _gather_queries(q: Tensor, kv_heads: int, group: TileGroup) -> Tensor:
    """[T, Hq, D] -> float32 [n, Hk, Q_TILE, G, D]"""
    heads, dim = q.shape[1:]
    tiles = q.index_select(0, group.padded_rows).view(-1, Q_TILE, kv_heads, heads // kv_heads, dim)
    return tiles.permute(0, 2, 1, 3, 4).contiguous().to(torch.float32)


def _attend_group(
    q: Tensor,
    cache: KVLayer,
    block_size: int,
    group: TileGroup,
    softcap: float | None,
    sinks: Tensor | None,
    select_values: bool = False,
) -> Tensor:
    """q float32 [n, Hk, Q_TILE, G, D] -> [n, Hk, Q_TILE, G, Dv]; sinks [1, Hk, 1, G, 1]"""
    state: SoftmaxState | None = None
    for step in group.steps:
        keys = _gather_kv(cache.own_keys, cache.k_scale, block_size, step)
        values = _gather_kv(cache.v, cache.v_scale, block_size, step)
        if cache.is_latent:
            keys = torch.cat((values, keys), -1)
        part = _attend_tile(q[: step.num_tiles], keys, values, step, softcap, select_values)
        if state is None:
            state = part
        else:
            _merge(state, part, step)
    assert state is not None
    if sinks is None:  # the sum of a row that sees nothing is 0, as its values are
        return state.values / torch.where(state.exp_sum == 0, 1.0, state.exp_sum)
    return state.values / (state.exp_sum + map_values(torch.exp2, sinks - state.max_score))


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, step: KVTileStep, softcap: float | None, select_values: bool
) -> SoftmaxState:
    """Softmax of q [n, Hk, Q_TILE, G, D] over one KV tile each; MIN_SCORE for a fully masked row."""
    scores = _batched_matmul(q, keys.permute(0, 2, 3, 1), step.kv_tile_index)
    if softcap is not None:
        scores = map_values(torch.tanh, scores.div_(softcap)).mul_(softcap * LOG2_E)
    if step.mask is not None:
        if select_values:
            scores.masked_fill_(step.mask.isneginf(), -math.inf)
        else:
            scores.add_(step.mask)
    top = scores.amax(-1, keepdim=True).clamp_min_(MIN_SCORE)
    weights = map_values(torch.exp2, scores.sub_(top))
    weigh = _weigh_row_by_row if select_values else _weigh_values
    return SoftmaxState(top, weights.sum(-1, keepdim=True), weigh(weights, values.permute(0, 2, 1, 3), step))


def _gather_kv(cache: Tensor, scales: Tensor | None, block_size: int, step: KVTileStep) -> Tensor:
    """cache [S, Hk, D], scales [S, Hk] -> float32 [unique KV tiles, KV_TILE, Hk, D]"""
    values = _gather_blocks(cache, block_size, step).to(torch.float32)
    return values if scales is None else values.mul_(_gather_blocks(scales, block_size, step)[..., None])


def _gather_blocks(cache: Tensor, block_size: int, step: KVTileStep) -> Tensor:
    """[S, ...] -> [unique KV tiles, KV_TILE, ...]"""
    # index_select lacks float8.
    stored = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    blocks = stored.view(-1, block_size, *cache.shape[1:]).index_select(0, step.block_ids)
    return blocks.view(-1, KV_TILE, *cache.shape[1:]).view(cache.dtype)


def _batched_matmul(rows: Tensor, columns: Tensor, kv_tile_index: tuple[int, ...]) -> Tensor:
    """[n, Hk, Q_TILE, G, K] x [unique, Hk, K, N] -> [n, Hk, Q_TILE, G, N]: one call for each of n."""
    count, kv_heads, _, group, inner = rows.shape
    out = rows.new_empty(count, kv_heads, Q_TILE * group, columns.shape[-1])
    right = columns.unbind()
    for left, source, result in zip(
        rows.view(count, kv_heads, -1, inner).unbind(), kv_tile_index, out.unbind(), strict=True
    ):
        torch.bmm(left, right[source], out=result)
    return out.view(count, kv_heads, Q_TILE, group, -1)


def map_values(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), value by value, in whole vectors of one thread.

    Torch ends its loops, each thread's too, with scalars: their bits differ, so a value's place would matter.
    """
    values = x.reshape(-1).contiguous()  # a strided loop is one of scalars
    padded = F.pad(values, (0, -len(values) % VECTOR_MULTIPLE)) if len(values) % VECTOR_MULTIPLE else values
    pieces = [function(piece) for piece in torch.split(padded, GRAIN_SIZE)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[: len(values)].view(x.shape)


def _weigh_values(weights: Tensor, values: Tensor, step: KVTileStep) -> Tensor:
    """weights [n, Hk, Q_TILE, G, KV_TILE], values [unique, Hk, KV_TILE, D] -> [n, Hk, Q_TILE, G, D]

    Adding 0 turns -0 into +0: the sign of a zero could depend on masked values.
    """
    return _batched_matmul(weights, values, step.kv_tile_index).add_(0.0)


def _weigh_row_by_row(weights: Tensor, values: Tensor, step: KVTileStep) -> Tensor:
    """_weigh_values() with masked values replaced by 0, for each row separately."""
    if step.mask is None:
        return _weigh_values(weights, values, step)
    tile_values = values[list(step.kv_tile_index)]
    out = weights.new_empty(*weights.shape[:-1], values.shape[-1])
    for row in range(Q_TILE):
        visible = tile_values.masked_fill(step.mask[:, :, row, 0, :, None].isneginf(), 0.0)
        out[:, :, row] = _batched_matmul(weights, visible, tuple(range(step.num_tiles)))[:, :, row]
    return out.add_(0.0)


def _merge(state: SoftmaxState, part: SoftmaxState, step: KVTileStep) -> None:
    """Merge the next KV tile into the first num_tiles query tiles; fully masked rows keep their bits."""
    old = SoftmaxState(*(tensor[: step.num_tiles] for tensor in state))
    top = torch.maximum(old.max_score, part.max_score)
    keep, add = (map_values(torch.exp, (each.max_score - top).div_(LOG2_E)) for each in (old, part))
    total = old.exp_sum * keep + part.exp_sum * add
    values = old.values * keep + part.values * add
    for target, merged in zip(old, (top, total, values), strict=True):
        target.copy_(merged if step.fully_masked is None else torch.where(step.fully_masked, target, merged))
