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

from foreword.errors import CheckpointError
from foreword.kernels.ops import Blocks, Matrix
from foreword.layers.weights import Weights
from foreword.models.gguf.dequantize import DEQUANTIZERS, dequantize
from foreword.models.gguf.reader import GGUF, TensorInfo
from foreword.models.gguf.rope import TENSORS as ROPE_TENSORS
from foreword.models.mapped import MappedFile
from foreword.models.staging import Span, Staging
from foreword.models.weights import ScopedWeights
from foreword.resolve import ModelFacts

__all__ = ["GGUFWeights", "check_kinds", "file_name", "read_factors", "with_kept"]

FLOATS: Mapping[str, torch.dtype] = MappingProxyType({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16})
# Kinds that are computed with as they are, and their bits; how the kernels lay them out: csrc/quantized_layout.h.
PACKED: Mapping[str, int] = MappingProxyType({"q8_0": 8, "q5_0": 5, "q4_0": 4, "q4_k": 4, "q5_k": 5, "q6_k": 6})
ON_GPU: Mapping[str, float] = MappingProxyType({"q8_0": 34 / 32, "q4_0": 18 / 32})  # kinds kept there, and bytes of a value
TILE = 16  # rows that lie together; the last ones are filled up
TILE_SCALES = 320  # bytes beside the values: of a tile's block of 256 columns
TILE_PAIR = 64  # the same of two blocks of 32
INTERLEAVED = ("llama",)  # architectures whose rows of q and k stand in another order than in the checkpoint
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
OUTER: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens.weight": EMBEDDING,
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": HEAD,
    }
)
INNER: Mapping[str, str] = MappingProxyType(
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
GEMMA_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)


def file_name(name: str, architecture: str) -> str:
    """What a GGUF file calls the tensor that a Hugging Face checkpoint calls `name`."""
    match = LAYER.fullmatch(name)
    if match is None:
        return OUTER[name]
    inner = dict(INNER) | (dict(GEMMA_NORMS) if architecture.startswith("gemma") else {})
    return f"blk.{match[1]}.{inner[match[2]]}.{match[3]}"


def with_kept(facts: ModelFacts, gguf: GGUF) -> ModelFacts:
    """What a model of this file takes in memory: its blocks stay as they are, the rest gets a data type."""
    kept = [info for info in gguf.tensors.values() if info.kind.name in PACKED]
    if not kept:
        return facts
    return replace(
        facts,
        weight_bytes=sum(map(_packed_bytes, kept)),
        kept_parameters=sum(info.values for info in kept),
        kept_embedding_parameters=sum(info.values for info in kept if info.name in (EMBEDDING, HEAD)),
        gpu_bytes=sum(int(info.values * ON_GPU.get(info.kind.name, 0)) for info in kept),
        gpu_kept_parameters=sum(info.values for info in kept if info.kind.name in ON_GPU),
    )


def _packed_bytes(info: TensorInfo) -> int:
    """A little more than in the file."""
    columns = info.shape[-1]
    blocks = columns // info.kind.block_values
    scales = blocks * TILE_SCALES if info.kind.block_values > 32 else (blocks + 1) // 2 * TILE_PAIR
    tiles = -(-info.values // columns // TILE)
    return tiles * (scales + columns * TILE * PACKED[info.kind.name] // 8)


def check_kinds(gguf: GGUF, widen: bool) -> None:
    """Raises CheckpointError, which names it, for a type of tensors that cannot be computed with."""
    for info in gguf.tensors.values():
        kind = info.kind.name
        if kind in FLOATS or kind in PACKED or (kind in DEQUANTIZERS and widen):
            continue
        known = ", ".join((*FLOATS, *PACKED))
        hint = "with --gguf-dequantize it becomes floats" if kind in DEQUANTIZERS else f"known: {known}"
        raise CheckpointError(
            f"{info.file}: tensor `{info.name}` is of type {kind}, which is not computed with here; {hint}", "model"
        )


def read_factors(gguf: GGUF, name: str) -> list[float]:
    """The values of one of the small tensors that belong to RoPE, by its name in the file."""
    info = gguf.tensors[name]
    if info.kind.name != "f32" or len(info.shape) != 1:
        raise CheckpointError(f"{info.file}: tensor `{name}` {list(info.shape)} must be one row of type f32", "model")
    return MappedFile(info.file).tensor(torch.float32, info.offset, info.values).tolist()


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
        gguf: GGUF,
        heads: tuple[int, int],
        widen: bool = False,
        progress: Callable[[int, int], None] | None = None,
        staging: Staging | None = None,
    ) -> None:
        check_kinds(gguf, widen)
        self._gguf = gguf
        self._architecture: str = gguf.metadata["general.architecture"]
        self._staging = staging
        self._heads = heads if self._architecture in INTERLEAVED else None
        self._progress = progress
        self._files: dict[Path, MappedFile] = {file: MappedFile(file) for file in gguf.files}
        self._bytes_total = sum(info.num_bytes for info in gguf.tensors.values())
        self._bytes_done = 0
        self._taken: set[str] = set()
        self.parameters = 0

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name, which must have this shape, as float32."""
        info = self._checked(name, shape)
        if info.kind.name not in FLOATS:
            raise self._refused(info, f"must be of type {', '.join(FLOATS)}")
        tensor = self._ordered(name, self._floats(info)).to(torch.float32, copy=True)
        self._done(info)
        return tensor

    @contextmanager
    def matrices(self, rows: Mapping[str, int], columns: int) -> Iterator[Sequence[Matrix]]:
        """The tensors as they stand in the file; their memory is given back at the end."""
        infos = {name: self._checked(name, (size, columns)) for name, size in rows.items()}
        yield [self._matrix(name, info) for name, info in infos.items()]
        for info in infos.values():
            self._done(info)

    def within(self, prefix: str) -> Weights:
        """Names below `prefix`."""
        return ScopedWeights(self, prefix)

    def finish(self) -> None:
        """Every tensor must have been taken."""
        left = sorted(self._gguf.tensors.keys() - self._taken - set(ROPE_TENSORS))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"{self._gguf.path}: unexpected tensors: {', '.join(left[:3])}{more}", "model")
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        called = file_name(name, self._architecture)
        info = self._gguf.tensors.get(called)
        if info is None:
            raise CheckpointError(f"{self._gguf.path}: tensor `{called}` {list(shape)} is missing", "model")
        if info.shape != shape:
            raise self._refused(info, f"is {list(info.shape)}, the metadata says {list(shape)}")
        self._taken.add(called)
        self.parameters += info.values
        return info

    def _matrix(self, name: str, info: TensorInfo) -> Matrix:
        kind = info.kind.name
        if kind in FLOATS:
            return self._ordered(name, self._floats(info))
        if kind in PACKED:
            return Blocks(kind, self._ordered(name, self._bytes(info)), info.shape[-1])
        found = self._bytes(info)
        return self._ordered(name, torch.from_numpy(dequantize(kind, found.cpu().numpy())).to(found.device))

    def _floats(self, info: TensorInfo) -> Tensor:
        return self._tensor(info, FLOATS[info.kind.name], info.shape)

    def _bytes(self, info: TensorInfo) -> Tensor:
        """uint8 [N, bytes of a row]"""
        return self._tensor(info, torch.uint8, (info.num_bytes // info.row_bytes, info.row_bytes))

    def _tensor(self, info: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor's bytes on the engine's device, as values of this type."""
        if self._staging is not None:
            return self._staging.tensor(Span(info.file, info.offset, info.num_bytes), dtype, shape)
        count = info.num_bytes // dtype.itemsize
        return self._files[info.file].tensor(dtype, info.offset, count).view(shape)

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Rows as the checkpoint had them: first half and second half of each head, not interleaved."""
        turned = ".self_attn.q_proj." in name or ".self_attn.k_proj." in name
        if self._heads is None or not turned:
            return rows
        heads = self._heads[".k_proj." in name]
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _done(self, info: TensorInfo) -> None:
        self._files[info.file].release(info.offset, info.num_bytes)
        self._bytes_done += info.num_bytes
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)

    def _refused(self, info: TensorInfo, why: str) -> CheckpointError:
        return CheckpointError(f"{info.file}: tensor `{info.name}` {why}", "model")
