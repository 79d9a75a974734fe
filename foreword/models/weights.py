"""Tensors of a checkpoint: from safetensors files, or only their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Matrix
from foreword.kernels.reference.backend import ReferenceOps, ReferenceWeight
from foreword.layers.weights import Weights
from foreword.models.config import read_json
from foreword.models.device_loader import DeviceLoader
from foreword.models.safetensors import SafetensorsFile

__all__ = ["FileWeights", "HeadlessWeights", "MetaOps", "MetaWeights", "MultipartWeights", "PrefixedWeights"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # buffers that old checkpoints hold


class MetaOps(ReferenceOps):
    """Builds models whose weights are CountedWeights, which nobody wants packed."""

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> ReferenceWeight:
        return ReferenceWeight(torch.empty(0), None)


class MetaWeights:
    """Tensors without memory: they tell how many parameters a model has."""

    def __init__(self) -> None:
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A zero that looks as if it had this shape."""
        tensor = torch.zeros(()).expand(shape)
        self.num_parameters += tensor.numel()
        return tensor

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """See `take`."""
        yield [self.tensor(name, size, in_features) for name, size in out_features.items()]

    def prefixed(self, prefix: str) -> Weights:
        """Names do not matter here."""
        return self


class FileWeights:
    """Tensors of a directory's safetensors files: on a CPU mapped into memory, else what `staging` brings to its device.

    progress  gets bytes done and bytes in all
    Raises CheckpointError, here for missing or damaged files, in `take` for tensors, in `finish` for tensors left over.
    """

    def __init__(
        self,
        path: Path,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
    ) -> None:
        self._path = path
        self._progress = progress
        self._device_loader = device_loader
        files = [SafetensorsFile(path / name) for name in _list_files(path)]
        self._file_by_name = {name: file for file in files for name in file.entries}
        self._bytes_total = sum(file.num_bytes for file in files)
        self._bytes_done = 0
        self._read_names: set[str] = set()
        self.num_parameters = 0

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors in the files."""
        return frozenset(self._file_by_name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape, as float32."""
        tensor = self._read_tensor(name, shape).to(torch.float32, copy=True)
        self._release(name)
        return tensor

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """The tensors as they stand in the file; their memory is given back at the end."""
        yield [self._read_tensor(name, (size, in_features)) for name, size in out_features.items()]
        for name in out_features:
            self._release(name)

    def prefixed(self, prefix: str) -> Weights:
        """Names below `prefix`."""
        return PrefixedWeights(self, prefix)

    def check_all_read(self, ignored: Mapping[str, str] | None = None) -> None:
        """Every tensor must have been taken, but for those that `ignore` names (with the reason)."""
        left = sorted(
            name
            for name in self._file_by_name
            if name not in self._read_names and not name.endswith(DERIVED_SUFFIXES)
        )
        left = [name for name in left if name not in (ignored or {})]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"{self._path}: unexpected tensors: {', '.join(left[:3])}{more}")
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _read_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the engine's device."""
        tensor = self._lookup(name, shape)
        return (
            tensor
            if self._device_loader is None
            else self._device_loader.tensor(self._file_by_name[name].span(name), tensor.dtype, shape)
        )

    def _lookup(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor where it stands in its file; nothing of it is read."""
        if name not in self._file_by_name:
            raise CheckpointError(f"{self._path}: tensor `{name}` {list(shape)} is missing")
        tensor = self._file_by_name[name].tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._path}: tensor `{name}` is {list(tensor.shape)}, the config says {list(shape)}"
            )
        self._read_names.add(name)
        self.num_parameters += tensor.numel()
        return tensor

    def _release(self, name: str) -> None:
        file = self._file_by_name[name]
        file.release(name)
        self._bytes_done += file.entries[name].num_bytes
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)


class PrefixedWeights:
    """A view of other weights through a prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    @property
    def num_parameters(self) -> int:
        return self._weights.num_parameters

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.tensor(self._prefix + name, *shape)

    def weights(
        self, out_features: Mapping[str, int], in_features: int
    ) -> AbstractContextManager[Sequence[Matrix]]:
        return self._weights.weights(
            {self._prefix + name: size for name, size in out_features.items()}, in_features
        )

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, self._prefix + prefix)


class HeadlessWeights(PrefixedWeights):
    """Weights of a body that was saved without its head: what is `model.norm` elsewhere is `norm` there."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, "")

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, prefix.removeprefix("model."))


class MultipartWeights(PrefixedWeights):
    """Weights of several parts, whose names begin differently in different files.

    prefixes  beginning of a name as it is asked for -> what it may be in the files; the first that is there holds
    """

    def __init__(
        self, weights: Weights, names: frozenset[str], prefixes: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__(weights, "")
        self._file_prefixes = {
            asked: next((one for one in given if any(name.startswith(one) for name in names)), given[0])
            for asked, given in prefixes.items()
        }

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.tensor(self.name_in_file(name), *shape)

    def weights(
        self, out_features: Mapping[str, int], in_features: int
    ) -> AbstractContextManager[Sequence[Matrix]]:
        return self._weights.weights(
            {self.name_in_file(name): size for name, size in out_features.items()}, in_features
        )

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, self.name_in_file(prefix))

    def name_in_file(self, name: str) -> str:
        """A name, or the beginning of one, as the files have it."""
        for asked, actual in self._file_prefixes.items():
            if name.startswith(asked):
                return actual + name.removeprefix(asked)
        return name


def _list_files(path: Path) -> list[str]:
    """The safetensors files that make up the checkpoint."""
    if (path / INDEX_FILE).is_file():
        weight_map = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX_FILE} has no weight_map")
        return sorted({str(name) for name in weight_map.values()})
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    pickles = sorted(item.name for pattern in PICKLE_PATTERNS for item in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickled weights ({pickles[0]}), which can run code; convert them to safetensors"
        )
    raise CheckpointError(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
