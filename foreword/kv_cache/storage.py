"""Device memory of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from foreword.core.batch import (
    CacheShape,
    HeadCache,
    HeadShape,
    HybridLayer,
    HybridShape,
    KVLayer,
    KVShape,
    LayerCache,
    StateLayer,
)
from foreword.core.states import NO_STATES, StateShape, StateSizes
from foreword.utils.mapped_memory import HugePages, MemoryFile

SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)


class KVStorage:
    """K and V of every layer in blocks 1..num_blocks; padding rows read and write block 0.

    A layer may read those of an earlier one. Layers with state have rings and anchors instead, or both; slot
    0 and anchor 0 are for dummy rows. A trained head has the same blocks, and more for its draft tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[CacheShape],
        dtype: str,  # type of K and V: "float32", "bfloat16", "float16", "int8" or "fp8" (float8_e4m3fn)
        device: str = "cpu",
        states: StateSizes = NO_STATES,
        state_dtype: torch.dtype = torch.float32,  # that of activations
        head: HeadShape | None = None,
        num_draft_blocks: int = 0,  # blocks of the trained head, after the target's
        memory: MemoryFile | None = None,  # host memory shared with later engines; None: private
    ) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._memory = memory or HugePages()
        slots = (num_blocks + 1) * block_size
        stored = torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype)
        self._layers: list[LayerCache] = []
        for shape in layers:
            if isinstance(shape, HybridShape):
                kv, state = shape
                hybrid = HybridLayer(
                    None if kv is None else self._make_layer(slots, kv, stored),
                    None if state is None else self._make_state_layer(state, states, state_dtype),
                )
                self._layers.append(hybrid)
            elif isinstance(shape, StateShape):
                self._layers.append(self._make_state_layer(shape, states, state_dtype))
            elif shape.source is not None:
                assert layers[shape.source] == shape._replace(source=None)
                self._layers.append(self._layers[shape.source])
            else:
                self._layers.append(self._make_layer(slots, shape, stored))
        self.head: HeadCache | None = None
        if head is not None:
            slots += num_draft_blocks * block_size
            hidden = self._zeros((slots + 1, head.hidden_size), state_dtype)
            kv_layers = tuple(self._make_layer(slots, shape, stored) for shape in head.layers)
            self.head = HeadCache(kv_layers, hidden)

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        parts = self._parts()
        hidden = 0 if self.head is None else self.head.hidden.nbytes
        return hidden + sum(tensor.nbytes for tensor in _own_tensors(parts, (KVLayer, StateLayer)))

    def block_images(self) -> CacheImages:
        """The bytes of each block: K, V and their scales in all layers, and those of a trained head."""
        hidden = [] if self.head is None else [self.head.hidden]
        return CacheImages([*_own_tensors(self._parts(), (KVLayer,)), *hidden], self.block_size)

    def anchor_images(self) -> CacheImages:
        """The bytes of each anchor in all layers with state."""
        states = [part for part in self._parts() if isinstance(part, StateLayer)]
        return CacheImages([tensor for part in states for tensor in (part.tails, part.matrices)], 1)

    def _parts(self) -> list[KVLayer | StateLayer]:
        """Memory of each layer that has its own, and of a trained head's layers."""
        own: list[LayerCache] = list({id(layer): layer for layer in self._layers}.values())
        own += [] if self.head is None else self.head.layers
        parts = [part for layer in own for part in (layer if isinstance(layer, HybridLayer) else (layer,))]
        return [part for part in parts if part is not None]

    def _make_layer(self, slots: int, shape: KVShape, dtype: torch.dtype) -> KVLayer:
        size = slots, shape.heads, shape.head_dim
        k = self._zeros(size, dtype)
        v = self._zeros(size, dtype) if shape.latent_dim is None else k[..., : shape.latent_dim]
        if dtype not in SCALED_DTYPES:
            return KVLayer(k, v)
        return KVLayer(k, v, self._zeros(size[:2], torch.float32), self._zeros(size[:2], torch.float32))

    def _make_state_layer(self, shape: StateShape, sizes: StateSizes, dtype: torch.dtype) -> StateLayer:
        rows, anchors = (sizes.num_slots, shape.ring_size(sizes.max_rows)), sizes.num_anchors
        heads, value_dim = shape.value_heads, shape.value_dim
        return StateLayer(
            shape,
            self._zeros((*rows, shape.channels), dtype),
            self._zeros((anchors, shape.kernel_size - 1, shape.channels), dtype),
            self._zeros((*rows, shape.key_heads, shape.key_dim), dtype),
            self._zeros((*rows, heads, value_dim), dtype),
            self._zeros((*rows, heads), torch.float32),
            self._zeros((anchors, heads, shape.key_dim, value_dim), torch.float32),
        )

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device != "cpu" or not math.prod(shape):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self._memory.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class CacheImages:
    """Entries of the cache as images: the bytes of one block or anchor in all layers, in one piece.

    Copies are done when a call returns. Those of read(), from any thread, run beside a GPU's steps: its entry
    must be complete by then. An image that is read while its entry is written is torn.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Entry i has rows [i * rows, (i + 1) * rows) of each tensor."""
        tensors = [tensor for tensor in tensors if tensor.numel()]
        sizes = [tensor.nbytes // tensor.shape[0] * rows for tensor in tensors]
        self._parts = [(t.view(torch.uint8).flatten(), size) for t, size in zip(tensors, sizes, strict=True)]
        self._stream = torch.cuda.Stream() if any(tensor.is_cuda for tensor in tensors) else None  # type: ignore[no-untyped-call]
        self.nbytes = sum(sizes)  # size of an image
        self.layout = tuple((str(tensor.dtype), *tensor.shape[1:]) for tensor in tensors)

    @property
    def is_on_gpu(self) -> bool:
        return self._stream is not None

    def new_image(self) -> Tensor:
        """uint8 [nbytes] of the host, pinned for a GPU."""
        return torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.is_on_gpu)

    def read(self, index: int, image: Tensor) -> None:
        """Copy an entry to an image."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for piece, part in self._pieces(index, image):
                piece.copy_(part, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def write(self, index: int, image: Tensor) -> None:
        """Copy an image to an entry, after all work that is launched."""
        for piece, part in self._pieces(index, image):
            part.copy_(piece, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()

    def _pieces(self, index: int, image: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece of an image, with the bytes of a tensor that it is a copy of."""
        assert len(image) == self.nbytes
        start = 0
        for part, size in self._parts:
            yield image[start : start + size], part[index * size : (index + 1) * size]
            start += size


def _own_tensors(
    parts: Sequence[KVLayer | StateLayer], kinds: tuple[type[KVLayer | StateLayer], ...]
) -> list[Tensor]:
    """The tensors of these kinds of memory; V of latent attention is a view of K."""
    own: dict[tuple[int, int], Tensor] = {}  # by storage and offset in bytes
    for part in parts:
        values = [getattr(part, name) for name in part.__slots__] if isinstance(part, kinds) else []
        for tensor in (value for value in values if isinstance(value, Tensor)):
            place = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.itemsize
            if (known := own.get(place)) is None or tensor.nbytes > known.nbytes:
                own[place] = tensor
    return list(own.values())
