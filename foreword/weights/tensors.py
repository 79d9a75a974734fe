"""Tensors of a checkpoint: from safetensors files, random ones, or only their shapes."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Float8Blocks, GroupedInts, Matrix, QuantizedBlocks
from foreword.kernels.reference.backend import ReferenceOps, ReferenceWeight
from foreword.layers.lora import deinterleave_heads
from foreword.layers.weights import Weights
from foreword.weights.config import read_json
from foreword.weights.device_loader import DeviceLoader
from foreword.weights.safetensors import DTYPES, SafetensorsFile

DUMMY_VECTOR_STD = 0.02  # around 1 for norm weights, around 0 for biases
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_PATTERN = re.compile(r".+-\d+-of-(\d+)\.safetensors")
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
MXFP4_DTYPES = {"U8": torch.uint8}
MXFP4_PARTS = ("blocks", "scales")  # suffixes of the two tensors of a matrix in MXFP4
MXFP4_BLOCK = 32  # values with one scale
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # buffers in old checkpoints


class MetaOps(ReferenceOps):
    """Builds models of MetaWeights: packing would copy tensors without data."""

    def pack_linear(
        self, parts: Sequence[Matrix], weight_format: str, bias: Tensor | None = None
    ) -> ReferenceWeight:
        return ReferenceWeight(torch.empty(0), None)


class MetaWeights:
    """Tensors without memory, to count a model's parameters."""

    def __init__(self) -> None:
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Zeros, expanded from one value."""
        tensor = torch.zeros(()).expand(shape)
        self.num_parameters += tensor.numel()
        return tensor

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        yield [self.tensor(name, size, in_features) for name, size in out_features.items()]

    def has(self, name: str) -> bool:
        return False

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        yield self.tensor(name, *shape[1:])

    def prefixed(self, prefix: str) -> Weights:
        return self


class HeaderWeights(MetaWeights):
    """Tensors without memory, whose names and shapes are checked against other weights' file headers."""

    def __init__(
        self, check_shape: Callable[[str, Sequence[int]], object], has: Callable[[str], bool]
    ) -> None:
        """check_shape raises CheckpointError; has() is that of the other weights."""
        super().__init__()
        self._check_shape = check_shape
        self._has = has

    def tensor(self, name: str, *shape: int) -> Tensor:
        self._check_shape(name, shape)
        return super().tensor(name, *shape)

    def has(self, name: str) -> bool:
        return self._has(name)

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        self._check_shape(name, shape)
        yield super().tensor(name, *shape[1:])

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)


class DummyWeights:
    """Random tensors, see `layers.weights.Weights`; deterministic by name, shape, type and device.

    A matrix [N, K] has standard deviation K^-1/2, so that activations stay finite through all layers.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device)
        self._device = device
        self._dtype = dtype
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """float32: about 1 for norm weights, about 0 for biases, else normal as a matrix."""
        is_vector = len(shape) == 1
        std = DUMMY_VECTOR_STD if is_vector else shape[-1] ** -0.5
        values = self._normal(name, shape, torch.float32, std)
        return values.add_(1.0) if is_vector and name.endswith("weight") else values

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        yield [
            self._normal(name, (size, in_features), self._dtype, in_features**-0.5)
            for name, size in out_features.items()
        ]

    def has(self, name: str) -> bool:
        return False

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        yield self._normal(f"{name}.{index}", shape[1:], self._dtype, shape[-1] ** -0.5)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)

    def _normal(self, name: str, shape: Sequence[int], dtype: torch.dtype, std: float) -> Tensor:
        seed = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(seed, "little"))
        values = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self.num_parameters += values.numel()
        return values.normal_(0.0, std, generator=self._generator)


class FileWeights:
    """Tensors of safetensors files, mapped if there is no device loader.

    `progress` gets bytes done and in total.

    Raises CheckpointError for damaged files, missing tensors, wrong shapes, and tensors that are not read.
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
        self._mxfp4_shapes: dict[str, tuple[int, ...]] = {}  # [E, N, K] by name, of those that were checked
        self.num_parameters = 0

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_by_name)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return self._bytes_total

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raises CheckpointError if a file's header has no such tensor, or another shape or type."""
        for part, part_shape in self._parts(name, shape).items():
            if part not in self._file_by_name:
                raise CheckpointError(f"{self._path}: tensor `{part}` {list(part_shape)} is missing")
            actual = self._file_by_name[part].entries[part].shape
            if actual != part_shape:
                sizes = f"is {list(actual)}, the config says {list(part_shape)}"
                raise CheckpointError(f"{self._path}: tensor `{part}` {sizes}")
            self._file_by_name[part].check_type(part, DTYPES if part == name else MXFP4_DTYPES)
            self._read_names.add(part)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """float32 tensor of this shape, a copy."""
        tensor = self._read_tensor(name, shape).to(torch.float32, copy=True)
        self._release(name)
        return tensor

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """Matrices as they are in the file; their pages are released at the end."""
        yield [self._read_tensor(name, (size, in_features)) for name, size in out_features.items()]
        for name in out_features:
            self._release(name)

    def has(self, name: str) -> bool:
        return name in self._file_by_name

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        """One matrix as it is in the file; its pages are released at the end."""
        self.check_shape(name, shape)
        parts = self._parts(name, shape)
        tensors = [self._load(part, index, DTYPES if part == name else MXFP4_DTYPES) for part in parts]
        self.num_parameters += math.prod(shape[1:])
        yield tensors[0] if len(tensors) == 1 else join_mxfp4(*tensors)
        for part in parts:
            self._release(part, index)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)

    def check_all_read(self, ignored: Collection[str] = ()) -> None:
        """Raises CheckpointError for tensors that were neither read nor ignored."""
        left = self._file_by_name.keys() - self._read_names - set(ignored)
        left = {name for name in left if not name.endswith(DERIVED_SUFFIXES)}
        if left:
            raise unexpected_tensors_error(self._path, sorted(left))
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _read_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the engine's device."""
        self.check_shape(name, shape)
        self.num_parameters += math.prod(shape)
        return self._load(name)

    def _load(
        self, name: str, index: int | None = None, dtypes: Mapping[str, torch.dtype] = DTYPES
    ) -> Tensor:
        """The tensor, or entry `index` of its first dimension, on the engine's device."""
        file = self._file_by_name[name]
        tensor = file.tensor(name, index, dtypes)  # mapped, not yet read
        if self._device_loader is None:
            return tensor
        return self._device_loader.tensor(file.span(name, index), tensor.dtype, tensor.shape)

    def _parts(self, name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The tensors that hold this one in the files, and their shapes: itself, or MXFP4's two."""
        blocks, scales = (f"{name}_{part}" for part in MXFP4_PARTS)
        if blocks not in self._file_by_name:
            return {name: tuple(shape)}
        if shape[-1] % MXFP4_BLOCK:
            rule = f"rows of MXFP4 are whole blocks of {MXFP4_BLOCK} values, not {shape[-1]}"
            raise CheckpointError(f"{self._path}: tensor `{blocks}`: {rule}")
        self._mxfp4_shapes[name] = tuple(shape)
        groups = (*shape[:-1], shape[-1] // MXFP4_BLOCK)
        return {blocks: (*groups, MXFP4_BLOCK // 2), scales: groups}

    def _release(self, name: str, index: int | None = None) -> None:
        self._bytes_done += self._file_by_name[name].release(name, index)
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)


class PrefixedWeights:
    """Other weights, with a prefix before each name."""

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

    def has(self, name: str) -> bool:
        return self._weights.has(self._prefix + name)

    def stacked(self, name: str, index: int, *shape: int) -> AbstractContextManager[Matrix]:
        return self._weights.stacked(self._prefix + name, index, *shape)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, self._prefix + prefix)


class DeinterleavedWeights(PrefixedWeights):
    """Weights of a layer whose RoPE turns neighbours: rows of q and k in the order of RoPE in halves.

    Scores stay the same, since rows of q and k move alike. `num_heads` maps projections to their heads.
    """

    def __init__(self, weights: Weights, num_heads: Mapping[str, int]) -> None:
        super().__init__(weights, "")
        self._num_heads = num_heads

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._reorder(name, super().tensor(name, *shape))

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        with super().weights(out_features, in_features) as matrices:
            yield [
                self._reorder_matrix(name, matrix)
                for name, matrix in zip(out_features, matrices, strict=True)
            ]

    def _reorder_matrix(self, name: str, matrix: Matrix) -> Matrix:
        if isinstance(matrix, QuantizedBlocks):
            return replace(matrix, data=self._reorder(name, matrix.data))
        if isinstance(matrix, GroupedInts):
            values, scales, zeros = (
                self._reorder(name, rows) for rows in (matrix.values, matrix.scales, matrix.zeros)
            )
            return replace(matrix, values=values, scales=scales, zeros=zeros)
        if isinstance(matrix, Float8Blocks):  # a scale for each row: rows leave their blocks
            block_rows, block_columns = matrix.block_shape
            scales = matrix.scales.repeat_interleave(block_rows, 0)[: len(matrix.values)]
            values, scales = self._reorder(name, matrix.values), self._reorder(name, scales)
            return Float8Blocks(values, scales, (1, block_columns))
        return self._reorder(name, matrix)

    def _reorder(self, name: str, rows: Tensor) -> Tensor:
        heads = self._num_heads.get(name.partition(".")[0])
        return rows if heads is None else deinterleave_heads(rows, heads)


class HeadlessWeights(PrefixedWeights):
    """Weights of a checkpoint saved without its head: names lack `model.`."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, "")

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, prefix.removeprefix("model."))


class MultipartWeights(PrefixedWeights):
    """Weights whose prefixes differ between files; `prefixes` maps ours to those in files, by priority."""

    def __init__(
        self, weights: Weights, names: frozenset[str], prefixes: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__(weights, "")
        self._file_prefixes = {
            ours: next((prefix for prefix in known if _has_prefix(names, prefix)), known[0])
            for ours, known in prefixes.items()
        }

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.tensor(self.name_in_file(name), *shape)

    def weights(
        self, out_features: Mapping[str, int], in_features: int
    ) -> AbstractContextManager[Sequence[Matrix]]:
        return self._weights.weights(
            {self.name_in_file(name): size for name, size in out_features.items()}, in_features
        )

    def has(self, name: str) -> bool:
        return self._weights.has(self.name_in_file(name))

    def stacked(self, name: str, index: int, *shape: int) -> AbstractContextManager[Matrix]:
        return self._weights.stacked(self.name_in_file(name), index, *shape)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self._weights, self.name_in_file(prefix))

    def name_in_file(self, name: str) -> str:
        """A name or prefix as it is in the files."""
        for ours, actual in self._file_prefixes.items():
            if name.startswith(ours):
                return actual + name.removeprefix(ours)
        return name


def join_mxfp4(blocks: Tensor, scales: Tensor) -> QuantizedBlocks:
    """A matrix from gpt-oss's tensors: blocks uint8 [N, K / 32, 16], scales uint8 [N, K / 32].

    There the low nibbles are the even values of a block; in GGUF's layout they are its first half.
    """
    values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    first, second = values[..., : MXFP4_BLOCK // 2], values[..., MXFP4_BLOCK // 2 :]
    data = torch.cat((scales[..., None], first | second << 4), -1)
    return QuantizedBlocks("mxfp4", data.flatten(1), blocks.shape[1] * MXFP4_BLOCK)


def unexpected_tensors_error(path: Path, names: Sequence[str]) -> CheckpointError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return CheckpointError(f"{path}: unexpected tensors: {', '.join(names[:3])}{more}", "model")


def _has_prefix(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _list_files(path: Path) -> list[str]:
    """Names of the checkpoint's safetensors files."""
    if (path / INDEX_FILE).is_file():
        weight_map = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX_FILE} has no weight_map")
        return sorted({str(name) for name in weight_map.values()})
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    names = sorted(item.name for item in path.glob("*.safetensors"))
    shards = [SHARD_PATTERN.fullmatch(name) for name in names]
    if len(names) == 1 or (shards and all(shard and int(shard[1]) == len(names) for shard in shards)):
        return names  # one file of another name, or all parts without their index
    pickles = sorted(item.name for pattern in PICKLE_PATTERNS for item in path.glob(pattern))
    if pickles:
        problem = f"holds pickled weights ({pickles[0]}), which can run code"
        raise CheckpointError(f"{path} {problem}; convert them to safetensors")
    found = f"; it holds {', '.join(names[:3])}" if names else ""
    raise CheckpointError(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}{found}")
