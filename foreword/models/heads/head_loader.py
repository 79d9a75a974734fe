"""Loads a trained head for a target from a checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.models.decoder import Decoder
from foreword.models.heads.eagle3 import Eagle3, Eagle3Config
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
from foreword.weights.safetensors_weights import SafetensorsWeights
from foreword.weights.trained_heads import MTPNames

# Tensors of training: members of the draft vocabulary, and the target's own output layer
UNUSED_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def read_head_info(
    path: Path, target_path: Path, dummy: bool = False, gguf_dequantize: bool = False
) -> ModelInfo:
    """Read configs and file headers, and check that the head fits the target. Raises CheckpointError."""
    target = read_shape(target_path)
    options = (target, MetaOps(), Precision.from_dtypes("float32"))
    if path == target_path:
        return _read_mtp_info(path, options, dummy, gguf_dequantize)
    config = _read_config(path)
    if dummy:
        vocab_ids = _dummy_ids(config, target)
        return Eagle3(config, *options, MetaWeights(), "cpu", INFO_MAX_MODEL_LEN, vocab_ids).info
    files = SafetensorsWeights(path)
    vocab_ids = _read_vocab_ids(config, files)
    headers = HeaderWeights(files.check_shape, files.has)
    head = Eagle3(config, *options, headers, "cpu", INFO_MAX_MODEL_LEN, vocab_ids)
    files.check_all_read(UNUSED_TENSORS)
    return head.info


def load_head(
    path: Path,
    target: Decoder,
    ops: Ops,
    precision: Precision,
    device: str,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
    dummy: bool = False,
) -> Head:
    """Load the head in `path`; `dummy`: random weights. Raises CheckpointError."""
    config = _read_config(path)
    if dummy:
        weights = DummyWeights(device, getattr(torch, config.layer.dtype))
        options = (weights, device, max_model_len, _dummy_ids(config, target))
        return Eagle3(config, target, ops, precision, *options)
    with open_device_loader(device) as device_loader:
        files = SafetensorsWeights(path, progress, device_loader)
        vocab_ids = _read_vocab_ids(config, files)
        head = Eagle3(config, target, ops, precision, files, device, max_model_len, vocab_ids)
        files.check_all_read(UNUSED_TENSORS)
        return head


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
) -> MTP:
    """Load the MTP head in the target's own checkpoint; `dummy`: random weights. Raises CheckpointError."""
    if dummy:
        weights = DummyWeights(device, getattr(torch, target.config.dtype))
        return MTP(_dummy_names(target), target, ops, precision, weights, device)
    with open_device_loader(device) as device_loader:
        files = open_mtp_weights(path, gguf_dequantize, device_loader)
        head = MTP(files.names, target, ops, precision, files.weights, device)
        files.check_all_read()
        return head


def _dummy_names(target: Decoder) -> MTPNames:
    names = MTPNames.of_family(target.config.architecture, len(target.config.layer_types))
    assert names is not None
    return names


def _read_config(path: Path) -> Eagle3Config:
    file = path / "config.json"
    return Eagle3Config.read(ConfigReader(read_json(file), str(file)))


def _read_vocab_ids(config: Eagle3Config, files: SafetensorsWeights) -> Tensor | None:
    """int64 [draft vocabulary]: the target's id of each logit; None: the same ids. d2t holds differences."""
    size = config.draft_vocab_size
    if not files.has("d2t"):
        if size == config.layer.vocab_size:
            return None
        problem = f"its vocabulary has {size} of the model's {config.layer.vocab_size} tokens"
        raise CheckpointError(f"the EAGLE-3 head lacks the tensor `d2t`: {problem}", "draft_model")
    own = torch.arange(size)
    ids = files.ints("d2t", size) + own
    return None if torch.equal(ids, own) and size == config.layer.vocab_size else ids


def _dummy_ids(config: Eagle3Config, target: Decoder) -> Tensor | None:
    size = config.draft_vocab_size
    return None if size == target.vocab_size else torch.arange(size) * (target.vocab_size // size)
