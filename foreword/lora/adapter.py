"""Adapters, from PEFT's directories or GGUF files of llama.cpp's convert_lora_to_gguf, and their slots."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foreword.config.lora import AdapterInfo
from foreword.core.request import NO_LORA
from foreword.errors import AdapterConflict, CheckpointError, ConfigError, ModelNotFound
from foreword.kernels.ops import QuantizedBlocks
from foreword.kernels.quantization import QUANT_BLOCKS, dequantize
from foreword.layers.lora import LoraLayers, LoraWeights
from foreword.lora.config import CONFIG_FILE, read_adapter_config
from foreword.weights.gguf.gguf_weights import (
    FLOAT_DTYPES,
    PERMUTED_QK_ARCHITECTURES,
    SCALED_ARCHITECTURES,
    TILED_VALUE_ARCHITECTURES,
)
from foreword.weights.gguf.header import TensorInfo, is_gguf, open_gguf
from foreword.weights.gguf.tensor_names import gguf_name
from foreword.weights.mapped_file import MappedFile
from foreword.weights.safetensors_weights import SafetensorsFile

WEIGHTS_FILE, PICKLE_FILE = "adapter_model.safetensors", "adapter_model.bin"
TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
# Of a layer's path, also in models with a vision encoder; their other parts have no adapters.
LAYER_PATH = re.compile(
    r"(?:(?:model\.|backbone\.|language_model\.model\.|model\.language_model\.)?layers|transformer\.h)"
    r"(\.\d+\..+)"
)
GGUF_TENSOR_NAME = re.compile(r"(.+\.weight)\.lora_(a|b)")
DIGEST_BYTES = 16
READ_BYTES = 1 << 20
# Why a module that models have is no target here.
REASONS = (
    ("lm_head", "the head is shared by all rows"),
    ("embed_tokens", "the embedding is shared by all rows"),
    ("kv_b_proj", "latent attention multiplies queries and outputs by it, where it has no adapters yet"),
    ("experts", "experts' weights have no adapters yet"),
    ("visual", "the vision encoder has no adapters"),
    ("vision", "the vision encoder has no adapters"),
)
Shapes = Mapping[str, tuple[int, int]]  # (N, K) of each projection of the base


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, checked against its base."""

    info: AdapterInfo
    weights: Mapping[str, LoraWeights]  # by projection


@dataclass(frozen=True, slots=True)
class _Pair:
    """A and B of one projection, not yet read."""

    path: str  # as in the files
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    rank: int  # as the config says
    scale: float
    read: Callable[[], tuple[Tensor, Tensor]]
    interleaves_qk: bool = False


def read_adapter(path: Path, shapes: Shapes, max_rank: int, dtype: torch.dtype) -> Adapter:
    """Read the adapter in `path` for a base with these projections; matrices get `dtype`.

    Raises CheckpointError, which names the option, the tensor or the file. Shapes are checked before data
    is read.
    """
    if is_gguf(path):
        pairs, files = _open_gguf_adapter(path, shapes), [path]
    elif path.is_dir():
        pairs, files = _open_peft_adapter(path, shapes), [path / CONFIG_FILE, path / WEIGHTS_FILE]
    else:
        raise _error(path, f"neither a directory with {CONFIG_FILE} nor a GGUF file")
    for name, pair in pairs.items():
        _check_shapes(path, pair, shapes[name], max_rank)
    weights = {name: _read_pair(path, pair, dtype) for name, pair in pairs.items()}
    info = AdapterInfo(
        path=str(path),
        digest=_digest(files),
        rank=max(len(each.a) for each in weights.values()),
        num_projections=len(weights),
        num_bytes=sum(each.a.nbytes + each.b.nbytes for each in weights.values()),
    )
    return Adapter(info, weights)


def _error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"the adapter {path}: {problem}", "lora_modules")


def _check_shapes(source: Path, pair: _Pair, shape: tuple[int, int], max_rank: int) -> None:
    out_features, in_features = shape
    if pair.rank > max_rank:
        raise _error(source, f"`{pair.path}` has rank {pair.rank}; --max-lora-rank is {max_rank}")
    for letter, actual, expected in (
        ("A", pair.a_shape, (pair.rank, in_features)),
        ("B", pair.b_shape, (out_features, pair.rank)),
    ):
        if actual != expected:
            sizes = f"is {list(actual)}, the model and the config say {list(expected)}"
            raise _error(source, f"lora_{letter} of `{pair.path}` {sizes}")


def _read_pair(source: Path, pair: _Pair, dtype: torch.dtype) -> LoraWeights:
    a, b = pair.read()
    for letter, matrix in (("A", a), ("B", b)):
        if not bool(matrix.to(dtype).isfinite().all()):
            raise _error(source, f"lora_{letter} of `{pair.path}` has values that are not finite")
    return LoraWeights(a.to(dtype), b.to(dtype), pair.scale, pair.interleaves_qk)


def _digest(files: Iterable[Path]) -> str:
    """Digest of all bytes: equal digests mean equal answers."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _find_projection(source: Path, path: str, shapes: Shapes) -> str:
    """The projection of a module's path. Raises CheckpointError if the base has none."""
    match = LAYER_PATH.fullmatch(path)
    if match is not None and f"layers{match[1]}" in shapes:
        return f"layers{match[1]}"
    reason = next((why for part, why in REASONS if part in path), "the model has no such projection")
    raise _error(source, f"`{path}` cannot be adapted: {reason}")


def _pair_up(source: Path, names: Iterable[str], pattern: re.Pattern[str]) -> dict[str, dict[str, str]]:
    """Names of tensors by path and letter, "a" or "b"; each path has both."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            raise _error(source, f"unexpected tensor `{name:.200}`")
        letters = found.setdefault(match[1], {})
        if match[2].lower() in letters:
            raise _error(source, f"`{match[1]}` has two tensors lora_{match[2]}")
        letters[match[2].lower()] = name
    for path, letters in found.items():
        for letter in "ab":
            if letter not in letters:
                raise _error(source, f"`{path}` has no lora_{letter.upper()}: the file is incomplete")
    if not found:
        raise _error(source, "it has no tensors")
    return found


def _open_peft_adapter(path: Path, shapes: Shapes) -> dict[str, _Pair]:
    config = read_adapter_config(path / CONFIG_FILE)
    if not (path / WEIGHTS_FILE).is_file() and (path / PICKLE_FILE).is_file():
        raise _error(path, f"{PICKLE_FILE} is pickled, which can run code; convert it to safetensors")
    file = SafetensorsFile(path / WEIGHTS_FILE)
    pairs: dict[str, _Pair] = {}
    modules = _pair_up(path, file.entries, TENSOR_NAME)
    names = {module: _find_projection(path, module, shapes) for module in modules}
    targets = config.targets(tuple(modules))
    for module, letters in modules.items():
        name, target = names[module], targets.get(module)
        if target is None:
            raise _error(path, f"`{module}` has tensors, but it is not among the targets of {CONFIG_FILE}")
        if name in pairs:
            raise _error(path, f"`{name}` is there twice, as `{pairs[name].path}` and `{module}`")

        def read(a: str = letters["a"], b: str = letters["b"]) -> tuple[Tensor, Tensor]:
            return file.tensor(a), file.tensor(b)

        a_shape, b_shape = file.entries[letters["a"]].shape, file.entries[letters["b"]].shape
        pairs[name] = _Pair(module, a_shape, b_shape, target.rank, target.scale, read)
    return pairs


def _open_gguf_adapter(path: Path, shapes: Shapes) -> dict[str, _Pair]:
    gguf = open_gguf(path)
    if len(gguf.files) > 1:
        raise _error(path, "it is split into several files; llama-gguf-split --merge joins them")
    metadata = gguf.metadata
    kind = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        problem = f"general.type and adapter.type are {kind[0]!r:.40} and {kind[1]!r:.40}"
        raise _error(path, f"{problem}; an adapter has adapter and lora")
    if metadata.get("adapter.alora.invocation_tokens"):
        raise _error(path, "aLoRA is not supported (adapter.alora.invocation_tokens)")
    alpha, architecture = metadata.get("adapter.lora.alpha"), metadata.get("general.architecture")
    if not isinstance(alpha, float | int) or not 0 <= alpha < float("inf"):
        raise _error(path, f"adapter.lora.alpha must be a number from 0, got {alpha!r:.80}")
    if not isinstance(architecture, str):
        raise _error(path, "general.architecture is missing")
    if architecture in SCALED_ARCHITECTURES:
        raise _error(path, f"adapters of {architecture} are loaded from their PEFT directory alone")
    names = {gguf_name(f"model.{name}.weight", architecture): name for name in shapes}
    pairs: dict[str, _Pair] = {}
    mapped = MappedFile(path)
    for module, letters in _pair_up(path, gguf.tensors, GGUF_TENSOR_NAME).items():
        if module not in names:
            raise _error(path, f"`{module}` cannot be adapted: the model has no such projection")
        if architecture in TILED_VALUE_ARCHITECTURES and ".linear_attn." in names[module]:
            problem = "GGUF files order its value heads anew; load the adapter from its PEFT directory"
            raise _error(path, f"`{module}` cannot be adapted from a GGUF file: {problem}")
        infos = gguf.tensors[letters["a"]], gguf.tensors[letters["b"]]
        for info in infos:
            if info.tensor_type.name not in FLOAT_DTYPES and info.tensor_type.name not in QUANT_BLOCKS:
                raise _error(path, f"tensor `{info.name}` is of type {info.tensor_type.name}")

        def read(infos: tuple[TensorInfo, TensorInfo] = infos) -> tuple[Tensor, Tensor]:
            return _read_gguf_tensor(mapped, infos[0]), _read_gguf_tensor(mapped, infos[1])

        a_shape, b_shape = infos[0].shape, infos[1].shape
        rank = a_shape[0]
        is_permuted = architecture in PERMUTED_QK_ARCHITECTURES
        # llama.cpp takes alpha 0 as a scale of 1
        pairs[names[module]] = _Pair(
            module, a_shape, b_shape, rank, alpha / rank if alpha else 1.0, read, is_permuted
        )
    return pairs


def _read_gguf_tensor(mapped: MappedFile, info: TensorInfo) -> Tensor:
    name = info.tensor_type.name
    if name in FLOAT_DTYPES:
        return mapped.tensor(FLOAT_DTYPES[name], info.offset, info.num_values).view(info.shape)
    blocks = mapped.tensor(torch.uint8, info.offset, info.num_bytes).view(-1, info.row_bytes)
    return dequantize(QuantizedBlocks(name, blocks, info.shape[-1]))


class AdapterSlots:
    """Loads and unloads adapters, which requests name by their digests."""

    def __init__(self, layers: LoraLayers) -> None:
        self._layers = layers
        self._slots: list[AdapterInfo | None] = [None] * (layers.limits.max_loras if layers.limits else 0)

    @property
    def loaded(self) -> tuple[AdapterInfo, ...]:
        return tuple(info for info in self._slots if info is not None)

    def slot_of(self, digest: str) -> int:
        """The slot of a loaded adapter; NO_LORA for none. Raises ModelNotFound."""
        if not digest:
            return NO_LORA
        for slot, info in enumerate(self._slots):
            if info is not None and info.digest == digest:
                return slot
        raise ModelNotFound("the adapter of this request is not loaded", "model")

    def load(self, path: str, digest: str | None = None) -> AdapterInfo:
        """Load an adapter; one with the same content is loaded once.

        digest  of the adapter that a restarted engine gets back: another content is refused
        Raises CheckpointError, ConfigError, AdapterConflict.
        """
        limits = self._layers.limits
        if limits is None:
            raise ConfigError("LoRA is off: --enable-lora or --lora-modules turns it on", "enable_lora")
        adapter = read_adapter(Path(path), self._layers.shapes, limits.max_rank, self._layers.dtype)
        info = adapter.info
        if digest not in (None, info.digest):
            raise ConfigError(f"the adapter {path} has changed since it was loaded", "lora_modules")
        for loaded in self._slots:
            if loaded is not None and loaded.digest == info.digest:
                return loaded
        if None not in self._slots:
            raise AdapterConflict(
                f"all {len(self._slots)} slots of --max-loras have adapters: unload one first", "lora_name"
            )
        slot = self._slots.index(None)
        self._layers.fill(slot, adapter.weights)
        self._slots[slot] = info
        return info

    def unload(self, digest: str) -> None:
        """Free the slot of an adapter that no request uses; does nothing if it is not loaded."""
        for slot, info in enumerate(self._slots):
            if info is not None and info.digest == digest:
                self._layers.clear(slot)
                self._slots[slot] = None
