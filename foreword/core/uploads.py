"""What the host knows of a step goes to the device by one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Array", "Arrays", "upload"]

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]

ALIGNMENT = 16  # bytes: kernels compiled for such addresses are the ones that load widely


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device; on a CPU they share the arrays' memory.

    Elsewhere they are parts of one tensor. Its pinned twin is kept by torch until the copy has read it.
    """
    here = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return here
    starts = list(accumulate((-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for part, start in zip(here, starts, strict=False):
        _view_at(pinned, start, part).copy_(part)
    there = pinned.to(device, non_blocking=True)
    return [_view_at(there, start, part) for part, start in zip(here, starts, strict=False)]


def _view_at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from `start` on, as a tensor of this type and shape."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
