"""Loads a trained head for a target, from a checkpoint directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.decoder import Decoder
from foreword.models.heads import dflash, gemma4_assistant
from foreword.models.heads.dflash import DFlash, DFlashConfig
from foreword.models.heads.eagle3 import Eagle3, Eagle3Config
from foreword.models.heads.gemma4_assistant import AssistantConfig, Gemma4Assistant
from foreword.models.heads.mtp import MTP
from foreword.models.interfaces import Head, Precision
from foreword.models.model_loader import (
    INFO_MAX_MODEL_LEN,
    open_device_loader,
    open_mtp_weights,
    read_shape,
)
from foreword.planning.memory import ModelInfo
from foreword.weights.config_reader import ConfigReader, read_json
from foreword.weights.dummy_weights import DummyWeights, HeaderWeights, MetaOps, MetaWeights
from foreword.weights.file_to_device import DeviceLoader
from foreword.weights.gguf.eagle3_file import open_eagle3
from foreword.weights.gguf.gguf_weights import GGUFWeights, with_memory_info
from foreword.weights.gguf.header import is_gguf
from foreword.weights.safetensors_weights import SafetensorsWeights
from foreword.weights.trained_heads import MTPNames, head_method

# Tensors of training: members of the draft vocabulary, and the target's own output layer
UNUSED_TENSORS = (
    *("t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
    *dflash.UNUSED_TENSORS,
    *gemma4_assistant.UNUSED_TENSORS,
)
HeadConfig = Eagle3Config | DFlashConfig | AssistantConfig


@dataclass(frozen=True, slots=True)
class _HeadFiles:
    """A head's config and tensors."""

    config: HeadConfig
    weights: Weights
    headers: Weights  # the same without memory
    vocab_ids: Tensor | None  # int64 [draft vocabulary]: the target's id of each logit; None: the same ids
    check_all_read: Callable[[], None]
    describe: Callable[[ModelInfo], ModelInfo] = lambda info: info  # adds the memory of quantized tensors


def read_head_info(
    path: Path, target_path: Path, dummy: bool = False, gguf_dequantize: bool = False
) -> ModelInfo:
    """Read configs and file headers, and check that the head fits the target. Raises CheckpointError."""
    target = read_shape(target_path)
    if path == target_path:
        options = (target, MetaOps(), Precision.from_dtypes("float32"))
        return _read_mtp_info(path, options, dummy, gguf_dequantize)
    files = _dummy_files(path, "cpu") if dummy else _open_files(path, gguf_dequantize)
    precision = Precision.from_dtypes("float32")
    head = _make_head(files, target, MetaOps(), precision, files.headers, "cpu", INFO_MAX_MODEL_LEN)
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


def _make_head(
    files: _HeadFiles,
    target: Decoder,
    ops: Ops,
    precision: Precision,
    weights: Weights,
    device: str,
    max_model_len: int,
) -> Head:
    options = (target, ops, precision, weights, device, max_model_len)
    if isinstance(files.config, AssistantConfig):
        return Gemma4Assistant(files.config, *options)
    vocab_ids = None if files.vocab_ids is None else files.vocab_ids.to(device)
    if isinstance(files.config, DFlashConfig):
        return DFlash(files.config, *options, vocab_ids)
    return Eagle3(files.config, *options, vocab_ids)


def _read_mtp_info(
    path: Path, options: tuple[Decoder, Ops, Precision], dummy: bool, gguf_dequantize: bool
) -> ModelInfo:
    if dummy:
        return MTP(_dummy_names(options[0]), *options, MetaWeights(), "cpu").info
    files = open_mtp_weights(path, gguf_dequantize, headers=True)
    head = MTP(files.names, *options, files.weights, "cpu")
    files.check_all_read()
    return files.with_memory_info(head.info)


def load_mtp_head(
    path: Path,
    target: Decoder,
    ops: Ops,
    precision: Precision,
    device: str,
    dummy: bool = False,
    gguf_dequantize: bool = False,
    draft_vocab_size: int = 0,
) -> MTP:
    """Load the MTP head in the target's own checkpoint. Raises CheckpointError.

    dummy: random weights; draft_vocab_size: ids that are drafted, 0: all
    """
    if dummy:
        weights = DummyWeights(device, getattr(torch, target.config.dtype))
        return MTP(_dummy_names(target), target, ops, precision, weights, device, draft_vocab_size)
    with open_device_loader(device) as device_loader:
        files = open_mtp_weights(path, gguf_dequantize, device_loader)
        head = MTP(files.names, target, ops, precision, files.weights, device, draft_vocab_size)
        files.check_all_read()
        return head


def _dummy_names(target: Decoder) -> MTPNames:
    names = MTPNames.of_family(target.config.architecture, len(target.config.layer_types))
    assert names is not None
    return names


def _open_files(
    path: Path,
    gguf_dequantize: bool,
    progress: Callable[[int, int], None] | None = None,
    device_loader: DeviceLoader | None = None,
) -> _HeadFiles:
    if not is_gguf(path):
        config = _read_config(path)
        files = SafetensorsWeights(path, progress, device_loader)
        headers = HeaderWeights(files.check_shape, files.has)
        check_all_read = partial(files.check_all_read, UNUSED_TENSORS)
        return _HeadFiles(config, files, headers, _read_vocab_ids(config, files), check_all_read)
    if head_method(path) != "eagle3":
        raise CheckpointError(f"{path}: a DFlash head in GGUF: only safetensors are read", "draft_model")
    file = open_eagle3(path)
    config = Eagle3Config.read(ConfigReader(file.options, str(path)))
    heads = config.layer.num_heads, config.layer.kv_shapes[0].heads
    weights = GGUFWeights(file.gguf, heads, gguf_dequantize, progress, device_loader)
    headers = HeaderWeights(weights.lookup, weights.has)
    describe = partial(with_memory_info, gguf=file.gguf)
    return _HeadFiles(config, weights, headers, file.vocab_ids, weights.check_all_read, describe)


def _dummy_files(path: Path, device: str) -> _HeadFiles:
    """Random weights for a config.json."""
    config = _read_config(path)
    weights = DummyWeights(device, getattr(torch, config.layer.dtype))
    vocab_size = size = config.layer.vocab_size
    if not isinstance(config, AssistantConfig):
        size = config.draft_vocab_size
    vocab_ids = None if size == vocab_size else torch.arange(size) * (vocab_size // size)
    return _HeadFiles(config, weights, MetaWeights(), vocab_ids, lambda: None)


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
