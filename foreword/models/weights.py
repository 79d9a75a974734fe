"""Tensors of a checkpoint: from safetensors files, or only their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Matrix
from foreword.kernels.reference import Packed, Reference
from foreword.layers.weights import Weights
from foreword.models.config import read_json
from foreword.models.safetensors import SafetensorsFile
from foreword.models.staging import Staging

__all__ = ["BodyWeights", "CountedWeights", "FileWeights", "PartWeights", "ScopedWeights", "ShapesOnly"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
DERIVED = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # buffers that old checkpoints hold


class ShapesOnly(Reference):
    """Builds models whose weights are CountedWeights, which nobody wants packed."""

    def pack_linear(self, parts: Sequence[Matrix], kind: str, bias: Tensor | None = None) -> Packed:
        return Packed(torch.empty(0), None)


class CountedWeights:
    """Tensors without memory: they tell how many parameters a model has."""

    def __init__(self) -> None:
        self.parameters = 0

    def take(self, name: str, *shape: int) -> Tensor:
        """A zero that looks as if it had this shape."""
        tensor = torch.zeros(()).expand(shape)
        self.parameters += tensor.numel()
        return tensor

    @contextmanager
    def matrices(self, rows: Mapping[str, int], columns: int) -> Iterator[Sequence[Matrix]]:
        """See `take`."""
        yield [self.take(name, size, columns) for name, size in rows.items()]

    def within(self, prefix: str) -> Weights:
        """Names do not matter here."""
        return self


class FileWeights:
    """Tensors of a directory's safetensors files: on a CPU mapped into memory, else what `staging` brings to its device.

    progress  gets bytes done and bytes in all
    Raises CheckpointError, here for missing or damaged files, in `take` for tensors, in `finish` for tensors left over.
    """

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None = None, staging: Staging | None = None) -> None:
        self._path = path
        self._progress = progress
        self._staging = staging
        files = [SafetensorsFile(path / name) for name in _file_names(path)]
        self._file_of = {name: file for file in files for name in file.entries}
        self._bytes_total = sum(file.size for file in files)
        self._bytes_done = 0
        self._taken: set[str] = set()
        self.parameters = 0

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors in the files."""
        return frozenset(self._file_of)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape, as float32."""
        tensor = self._tensor(name, shape).to(torch.float32, copy=True)
        self._done(name)
        return tensor

    @contextmanager
    def matrices(self, rows: Mapping[str, int], columns: int) -> Iterator[Sequence[Matrix]]:
        """The tensors as they stand in the file; their memory is given back at the end."""
        yield [self._tensor(name, (size, columns)) for name, size in rows.items()]
        for name in rows:
            self._done(name)

    def within(self, prefix: str) -> Weights:
        """Names below `prefix`."""
        return ScopedWeights(self, prefix)

    def finish(self, ignore: Mapping[str, str] | None = None) -> None:
        """Every tensor must have been taken, but for those that `ignore` names (with the reason)."""
        left = sorted(name for name in self._file_of if name not in self._taken and not name.endswith(DERIVED))
        left = [name for name in left if name not in (ignore or {})]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"{self._path}: unexpected tensors: {', '.join(left[:3])}{more}")
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the engine's device."""
        tensor = self._checked(name, shape)
        return tensor if self._staging is None else self._staging.tensor(self._file_of[name].span(name), tensor.dtype, shape)

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor where it stands in its file; nothing of it is read."""
        if name not in self._file_of:
            raise CheckpointError(f"{self._path}: tensor `{name}` {list(shape)} is missing")
        tensor = self._file_of[name].tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self._path}: tensor `{name}` is {list(tensor.shape)}, the config says {list(shape)}")
        self._taken.add(name)
        self.parameters += tensor.numel()
        return tensor

    def _done(self, name: str) -> None:
        file = self._file_of[name]
        file.release(name)
        self._bytes_done += file.entries[name].size
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)


class ScopedWeights:
    """A view of other weights through a prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    @property
    def parameters(self) -> int:
        return self._weights.parameters

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(self._prefix + name, *shape)

    def matrices(self, rows: Mapping[str, int], columns: int) -> AbstractContextManager[Sequence[Matrix]]:
        return self._weights.matrices({self._prefix + name: size for name, size in rows.items()}, columns)

    def within(self, prefix: str) -> Weights:
        return ScopedWeights(self._weights, self._prefix + prefix)


class BodyWeights(ScopedWeights):
    """Weights of a body that was saved without its head: what is `model.norm` elsewhere is `norm` there."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, "")

    def within(self, prefix: str) -> Weights:
        return ScopedWeights(self._weights, prefix.removeprefix("model."))


class PartWeights(ScopedWeights):
    """Weights of several parts, whose names begin differently in different files.

    prefixes  beginning of a name as it is asked for -> what it may be in the files; the first that is there holds
    """

    def __init__(self, weights: Weights, names: frozenset[str], prefixes: Mapping[str, Sequence[str]]) -> None:
        super().__init__(weights, "")
        self._actual = {
            asked: next((one for one in given if any(name.startswith(one) for name in names)), given[0])
            for asked, given in prefixes.items()
        }

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(self.actual(name), *shape)

    def matrices(self, rows: Mapping[str, int], columns: int) -> AbstractContextManager[Sequence[Matrix]]:
        return self._weights.matrices({self.actual(name): size for name, size in rows.items()}, columns)

    def within(self, prefix: str) -> Weights:
        return ScopedWeights(self._weights, self.actual(prefix))

    def actual(self, name: str) -> str:
        """A name, or the beginning of one, as the files have it."""
        for asked, actual in self._actual.items():
            if name.startswith(asked):
                return actual + name.removeprefix(asked)
        return name


def _file_names(path: Path) -> list[str]:
    """The safetensors files that make up the checkpoint."""
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        return sorted({str(name) for name in weight_map.values()})
    if (path / SINGLE).is_file():
        return [SINGLE]
    pickles = sorted(item.name for pattern in PICKLES for item in path.glob(pattern))
    if pickles:
        raise CheckpointError(f"{path} holds pickled weights ({pickles[0]}), which can run code; convert them to safetensors")
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")
