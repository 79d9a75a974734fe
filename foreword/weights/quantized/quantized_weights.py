"""Tensors of a quantized checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Float8Blocks, GroupedInts, Matrix
from foreword.planning.memory import TILE_ROWS, ModelInfo, PackedFormat, float8_bytes, grouped_bytes
from foreword.weights.file_to_device import DeviceLoader
from foreword.weights.quantized.quantization_config import Quantization
from foreword.weights.quantized.scheme import GroupedScheme, Scheme, SchemeError
from foreword.weights.safetensors_weights import DTYPES, MXFP4_BLOCK, QUANTIZED_DTYPES, SafetensorsWeights

WEIGHT = ".weight"
VALUES = ("qweight", "weight_packed", "weight")  # suffixes of the tensors of values
SCALE_NAMES = {"weight_scale": "weight_scale_inv", "weight_scale_inv": "weight_scale"}  # either is used
# Scales of activations and of the KV cache: both are Foreword's own.
UNUSED_SUFFIXES = (
    *(".input_scale", ".input_zero_point", ".k_scale", ".k_zero_point", ".q_scale"),
    *(".v_scale", ".v_zero_point"),
)
MUST_BE_PLAIN = "is quantized, but must be plain here"
EXPERTS_MARK = ".experts."  # in names of matrices


class QuantizedWeights(SafetensorsWeights):
    """SafetensorsWeights whose matrices may be quantized, see `layers.weights.Weights`.

    The files decide whether a matrix is quantized, and the config how: a matrix that the files hold as floats
    stays one.
    """

    def __init__(
        self,
        path: Path,
        quantization: Quantization,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
    ) -> None:
        super().__init__(path, progress, device_loader)
        self._quantization = quantization
        self._quantized: dict[str, tuple[Scheme, int, int]] = {}  # scheme, rows and columns, by name
        modules = {name.rpartition(".")[0] for name in self.names if name.endswith(VALUES)}
        suffixes = {module: self._stored_values(module + WEIGHT) for module in sorted(modules)}
        quantized = [module for module, suffix in suffixes.items() if suffix is not None]
        for module in quantized:
            if module.endswith(("embed_tokens", "embeddings")):
                problem = "is of a quantized embedding, which is not supported"
                raise self._error(f"{module}.{suffixes[module]}", problem)
        self._schemes = quantization.schemes(quantized)  # by module

    def has(self, name: str) -> bool:
        """Whether the files hold this tensor, quantized or not."""
        return self._stored_values(name) is not None or name in self.names

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raises CheckpointError if a file's header lacks a tensor, or it has another shape or type."""
        scheme = self._scheme(name)
        if scheme is None:
            super().check_shape(name, shape)
        elif len(shape) > 2:
            raise self._error(name, "of all experts is quantized; experts with a tensor each work")
        elif len(shape) == 2:
            self._check_matrix(name, scheme, *shape)
        else:
            raise self._error(name, MUST_BE_PLAIN)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """float32 tensor of this shape, a copy."""
        if self._scheme(name) is not None:
            raise self._error(name, MUST_BE_PLAIN)
        return super().tensor(name, *shape)

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """Matrices with the file's bits; the file's pages are released at the end."""
        matrices: list[Matrix] = []
        names: list[str] = []
        for name, rows in out_features.items():
            scheme = self._scheme(name)
            if scheme is None:
                matrices.append(self._read_tensor(name, (rows, in_features)))
                names.append(name)
            else:
                stored = self._check_matrix(name, scheme, rows, in_features)
                matrices.append(self._read_matrix(scheme, stored, rows, in_features))
                names += stored.values()
        yield matrices
        for name in names:
            self._release(name)

    def check_all_read(self, ignored: Collection[str] = ()) -> None:
        """Raises CheckpointError for tensors that were neither read nor ignored.

        GPTQ has a bias for each matrix: zeros if the model has none.
        """
        left = self.names - self._read_names
        unused = {name for name in left if name.endswith(UNUSED_SUFFIXES)}
        for name in self._quantized:
            bias = name.removesuffix(WEIGHT) + ".bias"
            if bias in left:
                if bool(self._file_by_name[bias].tensor(bias).any()):
                    raise self._error(bias, "is not zero, but the architecture has no bias there")
                unused.add(bias)
        super().check_all_read({*ignored, *unused})

    def with_memory_info(self, model_info: ModelInfo) -> ModelInfo:
        """Add the memory of quantized matrices that were checked; they stay packed."""
        sizes = {name: (rows * columns, scheme) for name, (scheme, rows, columns) in self._quantized.items()}
        packed_bytes = sum(_packed_bytes(*matrix) for matrix in self._quantized.values())
        head = sum(size for name, (size, _) in sizes.items() if name.endswith("lm_head" + WEIGHT))
        parameters = sum(size for size, _ in sizes.values())
        return replace(
            model_info,
            packed_bytes=packed_bytes + sum(map(_mxfp4_bytes, self._mxfp4_shapes.values())),
            packed_parameters=parameters + sum(map(math.prod, self._mxfp4_shapes.values())),
            packed_embedding_parameters=head,
            gpu_packed_bytes=packed_bytes,
            gpu_packed_parameters=parameters,
            packed_formats=tuple(self._packed_formats()),
        )

    def _packed_formats(self) -> Iterator[PackedFormat]:
        """Memory by format."""
        by_format: dict[str, dict[str, int]] = {}  # bytes by name of the matrix
        for name, matrix in self._quantized.items():
            scheme = matrix[0]
            format_name = f"int{scheme.bits}" if isinstance(scheme, GroupedScheme) else "float8"
            by_format.setdefault(format_name, {})[name] = _packed_bytes(*matrix)
        for format_name, sizes in by_format.items():
            experts = sum(size for name, size in sizes.items() if EXPERTS_MARK in name)
            yield PackedFormat(format_name, sum(sizes.values()), experts)
        if self._mxfp4_shapes:
            size = sum(map(_mxfp4_bytes, self._mxfp4_shapes.values()))
            yield PackedFormat("mxfp4", size, size)

    def _stored_values(self, name: str) -> str | None:
        """Suffix of the tensor of quantized values; None for a plain tensor or a missing one."""
        if not name.endswith(WEIGHT):
            return None
        for suffix in VALUES:
            stored = name.removesuffix("weight") + suffix
            file = self._file_by_name.get(stored)
            if file is not None and file.entries[stored].dtype_name not in DTYPES:
                return suffix
        return None

    def _scheme(self, name: str) -> Scheme | None:
        """How the matrix is stored; None for a plain one."""
        suffix = self._stored_values(name)
        if suffix is None:
            return None
        scheme = self._schemes[name.removesuffix(WEIGHT)]
        stored = name.removesuffix("weight") + suffix
        if scheme is None:
            problem = f"is quantized, but {self._quantization.source} excludes it"
            raise self._error(stored, problem)
        if scheme.values != suffix:
            problem = f"does not fit {self._quantization.source}, which says `{scheme.values}`"
            raise self._error(stored, problem)
        return scheme

    def _check_matrix(self, name: str, scheme: Scheme, rows: int, columns: int) -> dict[str, str]:
        """Check the matrix's tensors in the files' headers; their names by suffix. Raises CheckpointError."""
        prefix = name.removesuffix("weight")
        try:
            demanded = scheme.tensors(rows, columns)
        except SchemeError as error:
            raise self._error(prefix + error.suffix, str(error)) from None
        names = {}
        for suffix, tensor in demanded.items():
            stored = prefix + suffix
            if stored not in self.names and suffix in SCALE_NAMES:
                stored = prefix + SCALE_NAMES[suffix]
            if stored not in self.names:
                if tensor.optional:
                    continue
                raise self._error(stored, f"{list(tensor.shapes[0])} is missing")
            entry = self._file_by_name[stored].entries[stored]
            if entry.shape not in tensor.shapes:
                known = " or ".join(str(list(shape)) for shape in tensor.shapes)
                raise self._error(stored, f"is {list(entry.shape)}, the config says {known}")
            if entry.dtype_name not in tensor.dtypes:
                raise self._error(stored, f"is of type {entry.dtype_name}, not {' or '.join(tensor.dtypes)}")
            names[suffix] = stored
        self._read_names |= set(names.values())
        self._quantized[name] = scheme, rows, columns
        return names

    def _read_matrix(
        self, scheme: Scheme, stored: Mapping[str, str], rows: int, columns: int
    ) -> GroupedInts | Float8Blocks:
        """The matrix on the engine's device."""
        tensors = {suffix: self._load(part, dtypes=QUANTIZED_DTYPES) for suffix, part in stored.items()}
        self.num_parameters += rows * columns
        try:
            return scheme.matrix(tensors, rows, columns)
        except SchemeError as error:
            raise self._error(stored[error.suffix], str(error)) from None

    def _error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: tensor `{name}` {problem}")


def _mxfp4_bytes(shape: Sequence[int]) -> int:
    """Bytes of matrices [E, N, K] as the CPU kernels keep them: a byte for each scale, four together."""
    num_experts, rows, columns = shape
    row_bytes = columns // 2 + -(-columns // (4 * MXFP4_BLOCK)) * 4
    padded: int = -(-rows // TILE_ROWS) * TILE_ROWS
    return num_experts * padded * row_bytes


def _packed_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Bytes of a matrix in the layout of the CPU kernels; a GPU keeps about as many."""
    num_groups = scheme.num_groups(columns)
    if isinstance(scheme, GroupedScheme):
        return grouped_bytes(rows, columns, scheme.bits, num_groups)
    return float8_bytes(rows, columns, num_groups)
