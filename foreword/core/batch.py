"""The flat batch of one forward pass, and the letters of every shape in this package.

T  rows of the forward pass (one token each, padded to the backend's row tile)
R  sampled rows (rows whose logits are needed)
B  requests in the step
M  longest block table in the step
D  dimension of one head
H  hidden size
V  vocabulary size
Hq, Hk  query heads, key/value heads
S  slots of the KV cache (blocks x block_size); a slot holds one token
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from foreword.core.images import MRopePositions
from foreword.core.request import NO_LORA, RequestState
from foreword.core.states import NO_ANCHOR, SEGMENT, StateShape
from foreword.core.structured_output import RequestGrammar

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Ints = npt.NDArray[np.int64]

ALIGNMENT = 16  # bytes; kernels use vector loads only at such addresses
TEXT_ONLY_POSITIONS = MRopePositions(())  # positions of a request without images
NULL_BLOCK = 0  # never given to a request: padding rows write and read here
NULL_BYTE = bytes([NULL_BLOCK])
BLOCK_ID_BYTES = array("q").itemsize


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Copy the arrays to the device in one asynchronous transfer; on a CPU the tensors share their memory.

    Torch keeps the pinned buffer alive until the copy has read it.
    """
    sources = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return sources
    starts = list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for source, start in zip(sources, starts, strict=False):
        _view_at(pinned, start, source).copy_(source)
    buffer = pinned.to(device, non_blocking=True)
    return [_view_at(buffer, start, source) for source, start in zip(sources, starts, strict=False)]


def download(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start to copy tensors to the host: the result waits for the copies and returns them.

    Later work on the device may overwrite the tensors.
    """
    if not tensors[0].is_cuda:
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[Tensor]:
        done.synchronize()
        return copies

    return wait


def _view_at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from `start` on, with the dtype and shape of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


class Chunk(NamedTuple):
    """Consecutive rows of one request: tokens [start, start + len(token_ids)) and the blocks of their KV."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_sampled: int  # how many of the last rows are sampled
    mrope_positions: MRopePositions | None = None  # None: positions are the indices
    image_features: Sequence[tuple[int, Tensor]] = ()  # (first row within the chunk, [rows, width])
    lora_slot: int = NO_LORA
    state_slot: int = 0  # ring of its rows in layers with state; 0: dummy rows
    anchors: Sequence[int] = ()  # anchor ids of the segments from that of `start` to that of the next row


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Rows whose input is a feature of an image instead of a token's embedding."""

    rows: Tensor  # int64 [N]
    values: Tensor  # [N, width]: the embedding [H], then what is added after the first layers, if wider


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward pass."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]: absolute index of the token within its request
    slots: Tensor  # int64 [T]: where its K and V are written
    block_tables: Tensor  # int64 [B+1, M]: block ids by request, then NULL_BLOCK; last line for padding
    query_start_loc: tuple[int, ...]  # B+1: request b has rows [b] to [b+1]; rows after the last are padding
    seq_lens: tuple[int, ...]  # B: position after the request's last row
    sample_rows: Tensor  # int64 [R]: rows whose logits are needed, ordered by request and position
    block_size: int  # tokens per block
    mrope_positions: Tensor | None = None  # int64 [T, 3]: time, row and column, for M-RoPE models
    image_features: ImageFeatures | None = None
    request_index: Tensor | None = None  # int64 [T]: see request_index_of()
    lora_slots: Tensor | None = None  # int64 [T]: the row's adapter, -1 for none; None: LoRA is off
    state_slots: Tensor | None = None  # int64 [B]: ring of each request; None: no layer has state
    # int64 [B, segments]: anchors from that of the first row's segment on; NO_ANCHOR: zeros, or not kept
    anchor_tables: Tensor | None = None
    # int64 [T]: slot of the token before, 0 for the first one; None: the model has no trained head
    prev_slots: Tensor | None = None


def build_batch(
    chunks: Sequence[Chunk],
    block_size: int,
    row_tile: int,
    device: str,
    mrope: bool = False,
    with_request_index: bool = False,
    with_lora: bool = False,
    with_states: bool = False,
    with_prev_slots: bool = False,
) -> Batch:
    """Lay the chunks out as one flat batch, padded to a multiple of `row_tile` rows."""
    rows = _lay_out_rows(chunks, block_size)
    padding = -len(rows.token_ids) % row_tile
    for values in (rows.token_ids, rows.positions, rows.slots):
        values.extend([0] * padding)
    flat = (rows.token_ids, rows.positions, rows.slots, rows.sampled)
    arrays = [*(np.array(values, np.int64) for values in flat), _block_tables(chunks)]
    optional: dict[str, Array] = {}
    if mrope:
        optional["mrope_positions"] = _mrope_positions(chunks, padding)
    if with_request_index:
        optional["request_index"] = _request_index(rows.starts, len(rows.token_ids))
    if with_lora:
        optional["lora_slots"] = _lora_slots(chunks, padding)
    if with_states:
        optional |= _state_arrays(chunks)
    if with_prev_slots:
        optional["prev_slots"] = _prev_slots(chunks, block_size, padding)
    tensors = upload([*arrays, *optional.values()], torch.device(device))
    return Batch(
        token_ids=tensors[0],
        positions=tensors[1],
        slots=tensors[2],
        sample_rows=tensors[3],
        block_tables=tensors[4],
        query_start_loc=tuple(rows.starts),
        seq_lens=tuple(rows.seq_lens),
        block_size=block_size,
        image_features=_image_features(chunks, rows.starts, device),
        **dict(zip(optional, tensors[5:], strict=True)),
    )


class _Rows(NamedTuple):
    """Columns of a batch before padding."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    sampled: list[int]
    starts: list[int]
    seq_lens: list[int]


def _lay_out_rows(chunks: Sequence[Chunk], block_size: int) -> _Rows:
    rows = _Rows([], [], [], [], [0], [])
    token_ids, positions, slots, sampled, starts, seq_lens = rows
    for chunk_ids, start, blocks, num_sampled, *_ in chunks:
        end = start + len(chunk_ids)
        assert len(blocks) * block_size >= end, "a row without a slot"
        token_ids += chunk_ids
        starts.append(len(token_ids))
        seq_lens.append(end)
        if end == start + 1 and num_sampled:  # as below, without ranges: most requests decode
            positions.append(start)
            slots.append(blocks[start // block_size] * block_size + start % block_size)
            sampled.append(len(token_ids) - 1)
        else:
            positions += range(start, end)
            slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
            sampled += range(len(token_ids) - num_sampled, len(token_ids))
    return rows


def _block_tables(chunks: Sequence[Chunk]) -> Ints:
    """[B + 1, M]; the last one is that of padding."""
    width, tables = max([len(chunk.blocks) for chunk in chunks], default=1), bytearray()
    for chunk in chunks:
        tables += array("q", chunk.blocks).tobytes().ljust(width * BLOCK_ID_BYTES, NULL_BYTE)
    tables += bytes(width * BLOCK_ID_BYTES)
    return np.frombuffer(tables, np.int64).reshape(len(chunks) + 1, width)


def at_fixed_positions(batch: Batch, positions: Sequence[int]) -> Batch:
    """The batch with its i-th row at positions[i], which sees no later token; a request has one row."""
    assert batch.query_start_loc == tuple(range(len(positions) + 1)), "a request without one row"
    values = torch.tensor(positions, device=batch.positions.device)
    padded = F.pad(values, (0, len(batch.positions) - len(positions)))
    # Blocks behind may be scratch of a head, which the target's cache does not have
    last_blocks = F.pad(values // batch.block_size, (0, 1))[:, None]
    columns = torch.arange(batch.block_tables.shape[1], device=values.device)
    tables = batch.block_tables.masked_fill(columns > last_blocks, NULL_BLOCK)
    seq_lens = tuple(position + 1 for position in positions)
    return replace(batch, positions=padded, seq_lens=seq_lens, block_tables=tables)


def request_index_of(batch: Batch) -> Tensor:
    """int64 [T]: request of each row, B for padding."""
    return upload([_request_index(batch.query_start_loc, len(batch.token_ids))], batch.token_ids.device)[0]


def _request_index(starts: Sequence[int], num_rows: int) -> Ints:
    return np.repeat(np.arange(len(starts)), np.diff(np.array([*starts, num_rows])))


def _lora_slots(chunks: Sequence[Chunk], padding: int) -> Ints:
    slots = np.array([chunk.lora_slot for chunk in chunks] + [NO_LORA], np.int64)
    return np.repeat(slots, [len(chunk.token_ids) for chunk in chunks] + [padding])


def _prev_slots(chunks: Sequence[Chunk], block_size: int, padding: int) -> Ints:
    slots: list[int] = []
    for token_ids, start, blocks, *_ in chunks:
        before = range(start - 1, start - 1 + len(token_ids))
        slots += (blocks[p // block_size] * block_size + p % block_size if p >= 0 else 0 for p in before)
    return np.array(slots + [0] * padding, np.int64)


def _state_arrays(chunks: Sequence[Chunk]) -> dict[str, Array]:
    """state_slots and anchor_tables of a Batch."""
    tables = np.full(
        (len(chunks), max([num_segments(chunk) for chunk in chunks], default=1)), NO_ANCHOR, np.int64
    )
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.anchors)] = chunk.anchors
    slots = np.array([chunk.state_slot for chunk in chunks], np.int64)
    return {"state_slots": slots, "anchor_tables": tables}


def num_segments(chunk: Chunk) -> int:
    """Segments from that of the chunk's first row to that of the row after it."""
    return (chunk.start + len(chunk.token_ids)) // SEGMENT - chunk.start // SEGMENT + 1


def _mrope_positions(chunks: Sequence[Chunk], padding: int) -> Ints:
    """[T, 3]"""
    parts = [
        (chunk.mrope_positions or TEXT_ONLY_POSITIONS).rows(chunk.start, chunk.start + len(chunk.token_ids))
        for chunk in chunks
    ]
    return np.concatenate([*parts, np.zeros((padding, 3), np.int64)])


def _image_features(chunks: Sequence[Chunk], starts: Sequence[int], device: str) -> ImageFeatures | None:
    placed = [
        (first + row, values)
        for chunk, first in zip(chunks, starts, strict=False)
        for row, values in chunk.image_features
    ]
    if not placed:
        return None
    rows = torch.cat([torch.arange(row, row + len(values)) for row, values in placed])
    return ImageFeatures(rows.to(device), torch.cat([values for _, values in placed]))


@dataclass(frozen=True, slots=True)
class KVLayer:
    """K and V of one layer, each [S, Hk, D].

    int8 and float8_e4m3fn have a scale for each slot and head: the vector's largest magnitude / 127 or / 448.
    With latent attention Hk is 1, and V [S, 1, Dv] is a view of the first Dv values of K: v_scale is theirs,
    and k_scale that of K's other values.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None  # float32 [S, Hk], written once with its vector
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.k.shape[:2] == self.v.shape[:2] and self.k.dtype == self.v.dtype
        assert not self.is_latent or (self.k.shape[1] == 1 and self.k.data_ptr() == self.v.data_ptr())
        assert (self.k_scale is None) == (self.v_scale is None)

    @property
    def is_latent(self) -> bool:
        """V is a view of K."""
        return self.v.shape[2] != self.k.shape[2]

    @property
    def own_keys(self) -> Tensor:
        """The values of K that are none of V: [S, Hk, D], or [S, 1, D - Dv] with latent attention."""
        return self.k[..., self.v.shape[2] :] if self.is_latent else self.k


@dataclass(frozen=True, slots=True)
class StateLayer:
    """State of one layer (core/states.py). A slot has a ring of P rows: position p is at p mod P.

    Anchor i is the state before the first token of a segment: the K - 1 inputs before it, and a matrix.
    """

    shape: StateShape
    inputs: Tensor  # [slots, P, C]: of the convolution
    tails: Tensor  # [anchors, K - 1, C]
    keys: Tensor  # [slots, P, key heads, key dim], normalized
    updates: Tensor  # [slots, P, value heads, value dim]
    decays: Tensor  # float32 [slots, P, value heads]: sums of log decays since the anchor
    matrices: Tensor  # float32 [anchors, value heads, key dim, value dim]


class KVShape(NamedTuple):
    """Shape of a layer's K and V."""

    heads: int  # Hk
    head_dim: int  # D
    source: int | None = None  # earlier layer whose K and V this one reads; None: it has its own
    latent_dim: int | None = None  # Dv of latent attention, whose V is a view of K

    @property
    def values_per_token(self) -> int:
        """Values in the KV cache."""
        return self.vectors_per_token * self.head_dim // (1 if self.latent_dim is None else 2)

    @property
    def vectors_per_token(self) -> int:
        """Each has a scale where values are scaled."""
        return 2 * self.heads if self.source is None else 0


class HeadShape(NamedTuple):
    """Memory of a trained head for each token of the target."""

    layers: tuple[KVShape, ...]  # empty: it reads K and V of the target alone
    hidden_size: int  # W: width of the hidden states that it reads and recycles; 0: none


class HeadCache(NamedTuple):
    """Memory of a trained head at the slots of the target's KV cache, and of draft tokens behind them.

    Slot of token p: the hidden state that is read with token p + 1, and K and V of token p. The last hidden
    state is that of no token: rows of masks read it.
    """

    layers: tuple[KVLayer, ...]
    hidden: Tensor  # [S + 1, W] of the activations' type

    @property
    def mask_slot(self) -> int:
        return self.hidden.shape[0] - 1


class HybridShape(NamedTuple):
    """Shape of a layer with attention and a state side by side, or with neither."""

    kv: KVShape | None = None
    state: StateShape | None = None


class HybridLayer(NamedTuple):
    """Memory of HybridShape."""

    kv: KVLayer | None
    state: StateLayer | None


CacheShape = KVShape | StateShape | HybridShape
LayerCache = KVLayer | StateLayer | HybridLayer


def kv_shape_of(shape: CacheShape) -> KVShape | None:
    if isinstance(shape, HybridShape):
        return shape.kv
    return shape if isinstance(shape, KVShape) else None


def state_shape_of(shape: CacheShape) -> StateShape | None:
    if isinstance(shape, HybridShape):
        return shape.state
    return shape if isinstance(shape, StateShape) else None


class SampleRow(NamedTuple):
    """A row that samples the token after `state.tokens + draft`."""

    state: RequestState
    draft: tuple[int, ...] = ()  # draft tokens before the row; its history is prompt, output and these

    @property
    def grammar(self) -> RequestGrammar | None:
        return self.state.grammar

    @property
    def position(self) -> int:
        """Absolute index of the sampled token: the counter of its noise."""
        return len(self.state.tokens) + len(self.draft)

    @property
    def num_output(self) -> int:
        """Output tokens before the sampled one."""
        return self.state.num_output + len(self.draft)

    def last_tokens(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens of the history, or all of a shorter one."""
        kept = max(count - len(self.draft), 0)
        older = self.state.tokens[max(len(self.state.tokens) - kept, 0) :]
        return (*older, *self.draft[max(len(self.draft) - count, 0) :])
