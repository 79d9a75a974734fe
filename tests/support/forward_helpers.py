"""Runs a model without an engine."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foreword.core.batch import Chunk, build_batch
from foreword.core.images import MRopePositions, PromptImage
from foreword.core.states import NO_ANCHOR, SEGMENT, StateSizes
from foreword.cuda_graphs.graph_runner import with_graphs
from foreword.kernels.ops import Ops
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kv_cache.storage import KVStorage
from foreword.models.interfaces import Head, Precision
from foreword.models.model_loader import load_model


class ForwardHelper:
    """Runs one request at a time, in shuffled KV blocks."""

    def __init__(
        self,
        path: Path,
        max_len: int = 512,
        dtype: str = "float32",
        ops: Ops | None = None,
        block_size: int = 16,
        weight_dtype: str | None = None,
        quantization: str | None = None,
        kv_dtype: str | None = None,
        head: Head | None = None,
    ):
        self.model = load_model(
            path,
            ops or ReferenceOps(),
            Precision.from_dtypes(dtype, weight_dtype, quantization),
            "cpu",
            max_len,
        )
        self.block_size = block_size
        num_blocks = -(-max_len // block_size)
        self.states = StateSizes(2, max_len // SEGMENT + 2, max_rows=max_len)  # an anchor for each segment
        options = (kv_dtype or dtype, "cpu", self.states, getattr(torch, dtype))
        self.model.head = head
        shape = None if head is None else head.cache_shape
        self.kv = KVStorage(num_blocks, block_size, self.model.cache_shapes, *options, shape)
        self.compiled = with_graphs(self.model.ops, self.model.compile_logits(self.kv))
        self.features: dict[bytes, Tensor] = {}
        self.blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).add(1).tolist()

    def logits(self, token_ids: Sequence[int], start: int = 0, images: Sequence[PromptImage] = ()) -> Tensor:
        """float32 [len(token_ids), V]; positions before `start` are cached; `images` of the request."""
        end = start + len(token_ids)
        features = self._features(images, start, end)
        positions = MRopePositions(images)
        anchors = [segment or NO_ANCHOR for segment in range(start // SEGMENT, end // SEGMENT + 1)]
        chunk = Chunk(
            token_ids, start, self.blocks, len(token_ids), positions, features, state_slot=1, anchors=anchors
        )
        tile, mrope, states = self.model.ops.row_tile, self.model.uses_mrope, self.model.has_states
        batch = build_batch(
            [chunk], self.block_size, tile, "cpu", mrope, with_states=states, with_prev_slots=True
        )
        with torch.inference_mode():
            return self.compiled(batch).clone()

    def greedy(self, prompt: Sequence[int], count: int, images: Sequence[PromptImage] = ()) -> list[int]:
        """The next `count` tokens."""
        output = [int(self.logits(prompt, 0, images)[-1].argmax())]
        while len(output) < count:
            output.append(int(self.logits(output[-1:], len(prompt) + len(output) - 1, images)[0].argmax()))
        return output

    def encode(self, image: PromptImage) -> Tensor:
        """Features [num_tokens, feature_size]."""
        assert self.model.vision_encoder is not None
        work = self.model.vision_encoder.encode(image)
        with torch.inference_mode():
            while True:
                try:
                    assert next(work) > 0, "a piece without cost"
                except StopIteration as done:
                    return done.value

    def _features(self, images: Sequence[PromptImage], start: int, end: int) -> list[tuple[int, Tensor]]:
        """(row in the chunk, features) of images with tokens in [start, end)."""
        result = []
        for image in images:
            if image.start >= end or image.end <= start:
                continue
            if image.digest not in self.features:
                self.features[image.digest] = self.encode(image)
            features = self.features[image.digest][max(start - image.start, 0) : end - image.start]
            result.append((max(image.start - start, 0), features))
        return result
