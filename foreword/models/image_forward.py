"""A compiled forward takes only tokens: batches with images run uncompiled."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foreword.core.batch import Batch
from foreword.kernels.ops import DraftLoop


def with_images(
    compiled: Callable[[Batch], Tensor], forward: Callable[[Batch], Tensor]
) -> Callable[[Batch], Tensor]:
    """The compiled forward, or `forward` itself for a batch with images; a DraftLoop stays one."""
    if isinstance(compiled, DraftLoop):
        return _ImageAwareDraftLoop(compiled, forward)
    return _ImageAwareForward(compiled, forward)


class _ImageAwareForward:
    """Runs a batch with images, which is a prompt, uncompiled: the compiled forward takes only tokens."""

    def __init__(self, compiled: Callable[[Batch], Tensor], forward: Callable[[Batch], Tensor]) -> None:
        self._compiled = compiled
        self._forward = forward

    def __call__(self, batch: Batch) -> Tensor:
        return self._compiled(batch) if batch.image_features is None else self._forward(batch)


class _ImageAwareDraftLoop(_ImageAwareForward):
    """Keeps `draft` of the compiled forward: drafting needs no image features."""

    def __init__(self, compiled: DraftLoop, forward: Callable[[Batch], Tensor]) -> None:
        super().__init__(compiled, forward)
        self.draft = compiled.draft
