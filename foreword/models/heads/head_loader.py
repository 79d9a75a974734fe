"""Loads a trained head for a target, from a checkpoint directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.decoder import Decoder
from foreword.models.heads import dflash, gemma4_assistant
from foreword.models.heads.dflash import DFlash, DFlashConfig
from foreword.models.heads.eagle3 import AUX_LAYERS_KEY, Eagle3, Eagle3Config
from foreword.models.heads.gemma4_assistant import AssistantConfig, Gemma4Assistant
from foreword.models.heads.mtp import MTP
from foreword.models.interfaces import Head, Precision
from foreword.models.model_loader import (
    INFO_MAX_MODEL_LEN,
    open_checkpoint,
    open_device_loader,
)
from foreword.planning.memory import ModelInfo
from foreword.weights.config_reader import ConfigReader, read_json
from foreword.weights.dummy_weights import DummyWeights, HeaderWeights, MetaOps, MetaWeights
from foreword.weights.file_to_device import DeviceLoader
from foreword.weights.gguf.gguf_weights import GGUFWeights, read_rope_factors, with_memory_info
from foreword.weights.gguf.header import EMBEDDING_TENSOR, GGUFFile, TensorInfo, is_gguf, open_gguf
from foreword.weights.gguf.hf_config import read_hf_config
from foreword.weights.mapped_file import MappedFile
from foreword.weights.safetensors_weights import SafetensorsWeights
from foreword.weights.trained_heads import MTPNames, head_method

# Tensors of training: members of the draft vocabulary, and the target's own output layer
UNUSED_TENSORS = (
    *("t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
    *dflash.UNUSED_TENSORS,
    *gemma4_assistant.UNUSED_TENSORS,
)
EAGLE3_ARCHITECTURE, LAYER_ARCHITECTURE = (
    "eagle3",
    "llama",
)  # EAGLE-3 heads in GGUF files, as llama.cpp's converter writes them: a Llama layer with more tensors
LAYERS_KEY, OLDER_LAYERS_KEY = "target_layers", "extract_layers"
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc")
EAGLE3_KEYS = (LAYERS_KEY, OLDER_LAYERS_KEY, "target_hidden_size", "vocab_size", *EAGLE3_FLAGS)
EAGLE3_TENSOR_NAMES = {
    "blk.0.attn_norm_2.weight": "blk.0.hidden_norm.weight",
    "enc.output_norm.weight": "input_norm.weight",
}
IDS_TENSOR = "d2t"  # ids of the target, not differences as in other formats
HeadConfig = Eagle3Config | DFlashConfig | AssistantConfig


@dataclass(frozen=True, slots=True)
class _HeadFiles:
    """A head's config and tensors."""

    config: HeadConfig | MTPNames
    weights: Weights
    headers: Weights  # the same without memory
    check_all_read: Callable[[], None]
    vocab_ids: Tensor | None = None  # int64 [draft vocabulary]: the target's id of each logit; None: the same
    describe: Callable[[ModelInfo], ModelInfo] = lambda info: info  # adds the memory of quantized tensors


def read_head_info(
    path: Path, target_path: Path, dummy: bool = False, gguf_dequantize: bool = False
) -> ModelInfo:
    """Read configs and file headers, and check that the head fits the target. Raises CheckpointError."""
    target = open_checkpoint(target_path).build_shape()
    if path == target_path:
        files = _dummy_mtp_files(target, "cpu") if dummy else _open_mtp_files(path, gguf_dequantize)
    else:
        files = _dummy_files(path, "cpu") if dummy else _open_files(path, gguf_dequantize)
    options = (MetaOps(), Precision.from_dtypes("float32"), files.headers, "cpu", INFO_MAX_MODEL_LEN)
    head = _make_head(files, target, *options)
    files.check_all_read()
    return files.describe(head.info)


def load_head(
    path: Path,
    target: Decoder,
    ops: Ops,
    precision: Precision,
    device: str,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
    dummy: bool = False,
    gguf_dequantize: bool = False,
) -> Head:
    """Load the head in `path`; the other options as those of load_model(). Raises CheckpointError."""
    with open_device_loader(device) as device_loader:
        options = (gguf_dequantize, progress, device_loader)
        files = _dummy_files(path, device) if dummy else _open_files(path, *options)
        head = _make_head(files, target, ops, precision, files.weights, device, max_model_len)
        files.check_all_read()
        return head


def load_mtp_head(
    path: Path,
    target: Decoder,
    ops: Ops,
    precision: Precision,
    device: str,
    dummy: bool = False,
    gguf_dequantize: bool = False,
    draft_vocab_size: int = 0,
) -> Head:
    """Load the MTP head in the target's own checkpoint. Raises CheckpointError.

    dummy: random weights; draft_vocab_size: ids that are drafted, 0: all
    """
    with open_device_loader(device) as device_loader:
        options = (gguf_dequantize, device_loader)
        files = _dummy_mtp_files(target, device) if dummy else _open_mtp_files(path, *options)
        head = _make_head(files, target, ops, precision, files.weights, device, 0, draft_vocab_size)
        files.check_all_read()
        return head


def _make_head(
    files: _HeadFiles,
    target: Decoder,
    ops: Ops,
    precision: Precision,
    weights: Weights,
    device: str,
    max_model_len: int,
    draft_vocab_size: int = 0,
) -> Head:
    if isinstance(files.config, MTPNames):
        return MTP(files.config, target, ops, precision, weights, device, draft_vocab_size)
    options = (target, ops, precision, weights, device, max_model_len)
    if isinstance(files.config, AssistantConfig):
        return Gemma4Assistant(files.config, *options)
    vocab_ids = None if files.vocab_ids is None else files.vocab_ids.to(device)
    if isinstance(files.config, DFlashConfig):
        return DFlash(files.config, *options, vocab_ids)
    return Eagle3(files.config, *options, vocab_ids)


def _open_mtp_files(
    path: Path, gguf_dequantize: bool, device_loader: DeviceLoader | None = None
) -> _HeadFiles:
    head = open_checkpoint(path).open_mtp_head(gguf_dequantize, device_loader)
    files, check_all_read = head.files, partial(head.files.check_all_read, head.others)
    return _HeadFiles(head.names, files, HeaderWeights(files), check_all_read, describe=head.with_memory_info)


def _dummy_mtp_files(target: Decoder, device: str) -> _HeadFiles:
    names = MTPNames.of_family(target.config.architecture, len(target.config.layer_types))
    assert names is not None
    weights = DummyWeights(device, getattr(torch, target.config.dtype))
    return _HeadFiles(names, weights, MetaWeights(), lambda: None)


def _open_files(
    path: Path,
    gguf_dequantize: bool,
    progress: Callable[[int, int], None] | None = None,
    device_loader: DeviceLoader | None = None,
) -> _HeadFiles:
    if not is_gguf(path):
        config = _read_config(path)
        files = SafetensorsWeights(path, progress, device_loader)
        check_all_read = partial(files.check_all_read, UNUSED_TENSORS)
        return _HeadFiles(config, files, HeaderWeights(files), check_all_read, _read_vocab_ids(config, files))
    if head_method(path) != "eagle3":
        raise CheckpointError(f"{path}: a DFlash head in GGUF: only safetensors are read", "draft_model")
    gguf = open_gguf(path)
    layer = _as_llama(gguf)
    ids = gguf.tensors.get(IDS_TENSOR)
    config = Eagle3Config.read(ConfigReader(_read_eagle3_options(gguf, layer, ids), str(path)))
    heads = config.layer.num_heads, config.layer.kv_shapes[0].heads
    weights = GGUFWeights(layer, heads, gguf_dequantize, progress, device_loader)
    vocab_ids, describe = None if ids is None else _read_ids(ids), partial(with_memory_info, gguf=layer)
    return _HeadFiles(config, weights, HeaderWeights(weights), weights.check_all_read, vocab_ids, describe)


def _read_eagle3_options(gguf: GGUFFile, layer: GGUFFile, ids: TensorInfo | None) -> dict[str, Any]:
    """In the original's format."""
    values = {name: gguf.metadata.get(f"{EAGLE3_ARCHITECTURE}.{name}") for name in EAGLE3_KEYS}
    keys = ConfigReader(values, f"{gguf.path}: {EAGLE3_ARCHITECTURE}")
    options = read_hf_config(
        _with_embedding(layer, keys), lambda name: read_rope_factors(gguf, name), EAGLE3_ARCHITECTURE
    )
    return options | {
        AUX_LAYERS_KEY: keys.get(OLDER_LAYERS_KEY if OLDER_LAYERS_KEY in keys else LAYERS_KEY),  # by input
        "target_hidden_size": keys.get_int("target_hidden_size"),
        **{name: keys.get_bool(name, False) for name in EAGLE3_FLAGS},
        "draft_vocab_size": options["vocab_size"] if ids is None else ids.num_values,
    }


def _as_llama(gguf: GGUFFile) -> GGUFFile:
    own = {f"{EAGLE3_ARCHITECTURE}.{name}" for name in EAGLE3_KEYS}
    metadata = {key: value for key, value in gguf.metadata.items() if key not in own}
    tensors = {
        EAGLE3_TENSOR_NAMES.get(name, name): replace(info, name=EAGLE3_TENSOR_NAMES.get(name, name))
        for name, info in gguf.tensors.items()
        if name != IDS_TENSOR
    }
    return replace(gguf, metadata={**metadata, "general.architecture": LAYER_ARCHITECTURE}, tensors=tensors)


def _with_embedding(layer: GGUFFile, keys: ConfigReader) -> GGUFFile:
    """For the size of the vocabulary: the head may lack an embedding, and read the target's."""
    if EMBEDDING_TENSOR in layer.tensors:
        return layer
    norm = layer.tensors.get("output_norm.weight")
    if norm is None:
        raise CheckpointError(f"{layer.path}: tensor `output_norm.weight` is missing", "draft_model")
    shape = keys.get_int("vocab_size"), norm.num_values
    return replace(layer, tensors={**layer.tensors, EMBEDDING_TENSOR: replace(norm, shape=shape)})


def _read_ids(info: TensorInfo) -> Tensor:
    if info.tensor_type.name != "i64" or len(info.shape) != 1:
        problem = f"is {list(info.shape)} of type {info.tensor_type.name}, not a vector of i64"
        raise CheckpointError(f"{info.file}: tensor `{info.name}` {problem}", "draft_model")
    return MappedFile(info.file).tensor(torch.int64, info.offset, info.num_values).clone()


def _dummy_files(path: Path, device: str) -> _HeadFiles:
    """Random weights for a config.json."""
    config = _read_config(path)
    weights = DummyWeights(device, getattr(torch, config.layer.dtype))
    vocab_size = size = config.layer.vocab_size
    if not isinstance(config, AssistantConfig):
        size = config.draft_vocab_size
    vocab_ids = None if size == vocab_size else torch.arange(size) * (vocab_size // size)
    return _HeadFiles(config, weights, MetaWeights(), lambda: None, vocab_ids)


def _read_config(path: Path) -> HeadConfig:
    file = path / "config.json"
    config = ConfigReader(read_json(file), str(file))
    if config.get("model_type", None) in gemma4_assistant.MODEL_TYPES:
        return AssistantConfig.read(config)
    return DFlashConfig.read(config) if head_method(path) == "dflash" else Eagle3Config.read(config)


def _read_vocab_ids(config: HeadConfig, files: SafetensorsWeights) -> Tensor | None:
    """The tensor d2t holds differences to the ids of the draft vocabulary."""
    if isinstance(config, AssistantConfig):
        return None
    size = config.draft_vocab_size
    if not files.has("d2t"):
        if size == config.layer.vocab_size:
            return None
        problem = f"its vocabulary has {size} of the model's {config.layer.vocab_size} tokens"
        raise CheckpointError(f"the head lacks the tensor `d2t`: {problem}", "draft_model")
    own = torch.arange(size)
    ids = files.ints("d2t", size) + own
    return None if torch.equal(ids, own) and size == config.layer.vocab_size else ids
