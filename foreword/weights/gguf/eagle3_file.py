"""EAGLE-3 heads in GGUF files, as llama.cpp's converter writes them: a Llama layer with more tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.weights.config_reader import ConfigReader
from foreword.weights.gguf.gguf_weights import read_rope_factors
from foreword.weights.gguf.header import EMBEDDING_TENSOR, GGUFFile, TensorInfo, open_gguf
from foreword.weights.gguf.hf_config import read_hf_config
from foreword.weights.mapped_file import MappedFile

ARCHITECTURE, LAYER_ARCHITECTURE = "eagle3", "llama"
LAYERS_KEY, OLDER_LAYERS_KEY = "target_layers", "extract_layers"
FLAGS = ("norm_before_residual", "norm_before_fc")
OWN_KEYS = (LAYERS_KEY, OLDER_LAYERS_KEY, "target_hidden_size", "vocab_size", *FLAGS)
TENSOR_NAMES = {
    "blk.0.attn_norm_2.weight": "blk.0.hidden_norm.weight",
    "enc.output_norm.weight": "input_norm.weight",
}
IDS_TENSOR = "d2t"  # ids of the target, not differences as in other formats


@dataclass(frozen=True, slots=True)
class Eagle3File:
    """A head's options in the original's format, its tensors as those of a Llama, and its vocabulary."""

    options: dict[str, Any]
    gguf: GGUFFile
    vocab_ids: Tensor | None  # int64 [draft vocabulary]


def open_eagle3(path: Path) -> Eagle3File:
    """Raises CheckpointError."""
    gguf = open_gguf(path)
    values = {name: gguf.metadata.get(f"{ARCHITECTURE}.{name}") for name in OWN_KEYS}
    keys = ConfigReader(values, f"{path}: {ARCHITECTURE}")
    layer = _as_llama(gguf)
    ids = gguf.tensors.get(IDS_TENSOR)
    options = read_hf_config(
        _with_embedding(layer, keys), lambda name: read_rope_factors(gguf, name), ARCHITECTURE
    )
    layers_key = OLDER_LAYERS_KEY if OLDER_LAYERS_KEY in keys else LAYERS_KEY
    options |= {
        "eagle_aux_hidden_state_layer_ids": keys.get(layers_key),  # by their input
        "target_hidden_size": keys.get_int("target_hidden_size"),
        **{name: keys.get_bool(name, False) for name in FLAGS},
        "draft_vocab_size": options["vocab_size"] if ids is None else ids.num_values,
    }
    return Eagle3File(options, layer, None if ids is None else _read_ids(ids))


def _as_llama(gguf: GGUFFile) -> GGUFFile:
    own = {f"{ARCHITECTURE}.{name}" for name in OWN_KEYS}
    metadata = {key: value for key, value in gguf.metadata.items() if key not in own}
    tensors = {
        TENSOR_NAMES.get(name, name): replace(info, name=TENSOR_NAMES.get(name, name))
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
