"""Tensors of a checkpoint: from safetensors files, or only their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.layers.weights import Weights
from foreword.models.config import read_json

__all__ = ["CountedWeights", "FileWeights"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SOURCE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
DERIVED = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # buffers that old checkpoints hold


class CountedWeights:
    """Tensors without memory: they tell how many parameters a model has."""

    def __init__(self) -> None:
        self.parameters = 0

    def take(self, name: str, *shape: int) -> Tensor:
        """A zero that looks as if it had this shape."""
        tensor = torch.zeros(()).expand(shape)
        self.parameters += tensor.numel()
        return tensor

    def take_rows(self, rows: Mapping[str, int], *shape: int) -> Tensor:
        """See `take`."""
        return self.take("", sum(rows.values()), *shape)

    def within(self, prefix: str) -> Weights:
        """Names do not matter here."""
        return self


class FileWeights:
    """Tensors of a directory's safetensors files, converted as they are taken.

    progress  gets bytes done and bytes in all
    Raises CheckpointError, here for missing or damaged files, in `take` for tensors, in `finish` for tensors left over.
    """

    def __init__(self, path: Path, dtype: str, device: str, progress: Callable[[int, int], None] | None) -> None:
        self._path = path
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = device
        self._progress = progress
        self._files = {name: _open(path / name) for name in _file_names(path)}
        self._file_of = {name: file for file, handle in self._files.items() for name in handle.keys()}  # noqa: SIM118
        self._bytes_total = sum((path / name).stat().st_size for name in self._files)
        self._bytes_done = 0
        self._taken: set[str] = set()
        self.parameters = 0

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape."""
        return self.take_rows({name: shape[0]}, *shape[1:])

    def take_rows(self, rows: Mapping[str, int], *shape: int) -> Tensor:
        """The tensors one below the other, in memory of our own: the files may change or vanish later."""
        result = torch.empty(sum(rows.values()), *shape, dtype=self._dtype, device=self._device)
        for name, part in zip(rows, torch.split(result, list(rows.values())), strict=True):
            part.copy_(self._checked(name, tuple(part.shape)))
        return result

    def within(self, prefix: str) -> Weights:
        """Names below `prefix`."""
        return _Scope(self, prefix)

    def finish(self, ignore: Mapping[str, str] | None = None) -> None:
        """Every tensor must have been taken, but for those that `ignore` names (with the reason)."""
        left = sorted(name for name in self._file_of if name not in self._taken and not name.endswith(DERIVED))
        left = [name for name in left if name not in (ignore or {})]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"{self._path}: unexpected tensors: {', '.join(left[:3])}{more}")
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as it stands in its file."""
        if name not in self._file_of:
            raise CheckpointError(f"{self._path}: tensor `{name}` {list(shape)} is missing")
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self._path}: tensor `{name}` is {list(tensor.shape)}, the config says {list(shape)}")
        if tensor.dtype not in SOURCE_TYPES:
            raise CheckpointError(f"{self._path}: tensor `{name}` is of type {tensor.dtype}; weights must be f32, bf16 or f16")
        self._taken.add(name)
        self.parameters += tensor.numel()
        self._report(tensor.nbytes)
        return tensor

    def _read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path / self._file_of[name]}: tensor `{name}` cannot be read: {error}") from None
        return tensor

    def _report(self, num_bytes: int) -> None:
        self._bytes_done += num_bytes
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)


class _Scope:
    """A view of other weights through a prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    @property
    def parameters(self) -> int:
        return self._weights.parameters

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(self._prefix + name, *shape)

    def take_rows(self, rows: Mapping[str, int], *shape: int) -> Tensor:
        return self._weights.take_rows({self._prefix + name: size for name, size in rows.items()}, *shape)

    def within(self, prefix: str) -> Weights:
        return _Scope(self._weights, self._prefix + prefix)


def _file_names(path: Path) -> list[str]:
    """The safetensors files that make up the checkpoint."""
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        return sorted({str(name) for name in weight_map.values()})
    if (path / SINGLE).is_file():
        return [SINGLE]
    pickles = sorted(item.name for pattern in ("*.bin", "*.pt", "*.pth") for item in path.glob(pattern))
    if pickles:
        raise CheckpointError(f"{path} holds pickled weights ({pickles[0]}), which can run code; convert them to safetensors")
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: the file {path.name} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {error}") from None
