"""Tensors of a GGUF file by the names that they have in Hugging Face's format, where they stand in the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.config.resolve import ModelInfo
from foreword.errors import CheckpointError
from foreword.kernels.ops import Matrix, QuantizedBlocks
from foreword.layers.weights import Weights
from foreword.models.device_loader import DeviceLoader, FileSpan
from foreword.models.gguf.dequantize import DEQUANTIZERS, dequantize
from foreword.models.gguf.reader import GGUFFile, TensorInfo
from foreword.models.gguf.rope import ROPE_TENSORS as ROPE_TENSORS
from foreword.models.mmap_file import MappedFile
from foreword.models.weights import PrefixedWeights

__all__ = ["GGUFWeights", "check_tensor_types", "gguf_name", "read_rope_factors", "with_memory_info"]

FLOAT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
)
# Kinds that are computed with as they are, and their bits; how the kernels lay them out: csrc/quantized_layout.h.
QUANT_BITS: Mapping[str, int] = MappingProxyType(
    {"q8_0": 8, "q5_0": 5, "q4_0": 4, "q4_k": 4, "q5_k": 5, "q6_k": 6}
)
GPU_BYTES_PER_VALUE: Mapping[str, float] = MappingProxyType(
    {"q8_0": 34 / 32, "q4_0": 18 / 32}
)  # kinds kept there, and bytes of a value
TILE_ROWS = 16  # rows that lie together; the last ones are filled up
TILE_SCALE_BYTES = 320  # bytes beside the values: of a tile's block of 256 columns
TILE_PAIR_SCALE_BYTES = 64  # the same of two blocks of 32
PERMUTED_QK_ARCHITECTURES = (
    "llama",
)  # architectures whose rows of q and k stand in another order than in the checkpoint
LAYER_TENSOR_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EMBEDDING_TENSOR, HEAD_TENSOR = "token_embd.weight", "output.weight"
MODEL_TENSOR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens.weight": EMBEDDING_TENSOR,
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": HEAD_TENSOR,
    }
)
LAYER_TENSOR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
GEMMA_NORM_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)


def gguf_name(name: str, architecture: str) -> str:
    """What a GGUF file calls the tensor that a Hugging Face checkpoint calls `name`."""
    match = LAYER_TENSOR_PATTERN.fullmatch(name)
    if match is None:
        return MODEL_TENSOR_NAMES[name]
    inner = dict(LAYER_TENSOR_NAMES) | (dict(GEMMA_NORM_NAMES) if architecture.startswith("gemma") else {})
    return f"blk.{match[1]}.{inner[match[2]]}.{match[3]}"


def with_memory_info(model_info: ModelInfo, gguf: GGUFFile) -> ModelInfo:
    """What a model of this file takes in memory: its blocks stay as they are, the rest gets a data type."""
    kept = [info for info in gguf.tensors.values() if info.tensor_type.name in QUANT_BITS]
    if not kept:
        return model_info
    return replace(
        model_info,
        packed_bytes=sum(map(_packed_bytes, kept)),
        packed_parameters=sum(info.num_values for info in kept),
        packed_embedding_parameters=sum(
            info.num_values for info in kept if info.name in (EMBEDDING_TENSOR, HEAD_TENSOR)
        ),
        gpu_packed_bytes=sum(
            int(info.num_values * GPU_BYTES_PER_VALUE.get(info.tensor_type.name, 0)) for info in kept
        ),
        gpu_packed_parameters=sum(
            info.num_values for info in kept if info.tensor_type.name in GPU_BYTES_PER_VALUE
        ),
    )


def _packed_bytes(info: TensorInfo) -> int:
    """A little more than in the file."""
    columns = info.shape[-1]
    blocks = columns // info.tensor_type.block_values
    scales = (
        blocks * TILE_SCALE_BYTES
        if info.tensor_type.block_values > 32
        else (blocks + 1) // 2 * TILE_PAIR_SCALE_BYTES
    )
    tiles = -(-info.num_values // columns // TILE_ROWS)
    return tiles * (scales + columns * TILE_ROWS * QUANT_BITS[info.tensor_type.name] // 8)


def check_tensor_types(gguf: GGUFFile, allow_dequantize: bool) -> None:
    """Raises CheckpointError, which names it, for a type of tensors that cannot be computed with."""
    for info in gguf.tensors.values():
        kind = info.tensor_type.name
        if kind in FLOAT_DTYPES or kind in QUANT_BITS or (kind in DEQUANTIZERS and allow_dequantize):
            continue
        known = ", ".join((*FLOAT_DTYPES, *QUANT_BITS))
        hint = "with --gguf-dequantize it becomes floats" if kind in DEQUANTIZERS else f"known: {known}"
        raise CheckpointError(
            f"{info.file}: tensor `{info.name}` is of type {kind}, which is not computed with here; {hint}",
            "model",
        )


def read_rope_factors(gguf: GGUFFile, name: str) -> list[float]:
    """The values of one of the small tensors that belong to RoPE, by its name in the file."""
    info = gguf.tensors[name]
    if info.tensor_type.name != "f32" or len(info.shape) != 1:
        raise CheckpointError(
            f"{info.file}: tensor `{name}` {list(info.shape)} must be one row of type f32", "model"
        )
    return MappedFile(info.file).tensor(torch.float32, info.offset, info.num_values).tolist()


class GGUFWeights:
    """See `layers.weights.Weights`.

    heads     query heads and key heads
    widen     take types without kernels, as floats
    progress  gets bytes done and bytes in all
    staging   brings tensors to the engine's device; None: that is the CPU, which has them mapped into memory
    Raises CheckpointError, here for types, in `take` and `matrices` for tensors, in `finish` for tensors left over.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        num_heads: tuple[int, int],
        allow_dequantize: bool = False,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
    ) -> None:
        check_tensor_types(gguf, allow_dequantize)
        self._gguf = gguf
        self._architecture: str = gguf.metadata["general.architecture"]
        self._device_loader = device_loader
        self._num_heads = num_heads if self._architecture in PERMUTED_QK_ARCHITECTURES else None
        self._progress = progress
        self._files: dict[Path, MappedFile] = {file: MappedFile(file) for file in gguf.files}
        self._bytes_total = sum(info.num_bytes for info in gguf.tensors.values())
        self._bytes_done = 0
        self._read_names: set[str] = set()
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape, as float32."""
        info = self._lookup(name, shape)
        if info.tensor_type.name not in FLOAT_DTYPES:
            raise self._tensor_error(info, f"must be of type {', '.join(FLOAT_DTYPES)}")
        tensor = self._unpermute(name, self._read_floats(info)).to(torch.float32, copy=True)
        self._release(info)
        return tensor

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """The tensors as they stand in the file; their memory is given back at the end."""
        infos = {name: self._lookup(name, (size, in_features)) for name, size in out_features.items()}
        yield [self._matrix(name, info) for name, info in infos.items()]
        for info in infos.values():
            self._release(info)

    def prefixed(self, prefix: str) -> Weights:
        """Names below `prefix`."""
        return PrefixedWeights(self, prefix)

    def check_all_read(self) -> None:
        """Every tensor must have been taken."""
        left = sorted(self._gguf.tensors.keys() - self._read_names - set(ROPE_TENSORS))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{self._gguf.path}: unexpected tensors: {', '.join(left[:3])}{more}", "model"
            )
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _lookup(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        called = gguf_name(name, self._architecture)
        info = self._gguf.tensors.get(called)
        if info is None:
            raise CheckpointError(f"{self._gguf.path}: tensor `{called}` {list(shape)} is missing", "model")
        if info.shape != shape:
            raise self._tensor_error(info, f"is {list(info.shape)}, the metadata says {list(shape)}")
        self._read_names.add(called)
        self.num_parameters += info.num_values
        return info

    def _matrix(self, name: str, info: TensorInfo) -> Matrix:
        kind = info.tensor_type.name
        if kind in FLOAT_DTYPES:
            return self._unpermute(name, self._read_floats(info))
        if kind in QUANT_BITS:
            return QuantizedBlocks(kind, self._unpermute(name, self._read_blocks(info)), info.shape[-1])
        found = self._read_blocks(info)
        return self._unpermute(name, torch.from_numpy(dequantize(kind, found.cpu().numpy())).to(found.device))

    def _read_floats(self, info: TensorInfo) -> Tensor:
        return self._read_tensor(info, FLOAT_DTYPES[info.tensor_type.name], info.shape)

    def _read_blocks(self, info: TensorInfo) -> Tensor:
        """uint8 [N, bytes of a row]"""
        return self._read_tensor(info, torch.uint8, (info.num_bytes // info.row_bytes, info.row_bytes))

    def _read_tensor(self, info: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor's bytes on the engine's device, as values of this type."""
        if self._device_loader is not None:
            return self._device_loader.tensor(FileSpan(info.file, info.offset, info.num_bytes), dtype, shape)
        count = info.num_bytes // dtype.itemsize
        return self._files[info.file].tensor(dtype, info.offset, count).view(shape)

    def _unpermute(self, name: str, rows: Tensor) -> Tensor:
        """Rows as the checkpoint had them: first half and second half of each head, not interleaved."""
        turned = ".self_attn.q_proj." in name or ".self_attn.k_proj." in name
        if self._num_heads is None or not turned:
            return rows
        heads = self._num_heads[".k_proj." in name]
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _release(self, info: TensorInfo) -> None:
        self._files[info.file].release(info.offset, info.num_bytes)
        self._bytes_done += info.num_bytes
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)

    def _tensor_error(self, info: TensorInfo, reason: str) -> CheckpointError:
        return CheckpointError(f"{info.file}: tensor `{info.name}` {reason}", "model")
