"""From a checkpoint, a directory or a GGUF file, to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foreword.config.resolve import ModelInfo
from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.architectures import ARCHITECTURES, read_decoder
from foreword.models.base import Model, Precision
from foreword.models.config import ConfigReader, read_json
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.device_loader import DeviceLoader
from foreword.models.dummy_weights import DummyWeights
from foreword.models.gguf.config import read_hf_config
from foreword.models.gguf.reader import GGUFFile, is_gguf, open_gguf, split_files
from foreword.models.gguf.weights import GGUFWeights, check_tensor_types, read_rope_factors, with_memory_info
from foreword.models.vision.base import PREPROCESSOR_FILE, PROCESSOR_FILE, VisionModel
from foreword.models.vision.registry import VISION_MODELS
from foreword.models.weights import FileWeights, HeadlessWeights, MetaOps, MetaWeights, MultipartWeights

__all__ = ["load_model", "read_model_info", "weight_files"]

EMBEDDING_TENSOR = "model.embed_tokens.weight"  # where it is missing, all names are those within the body: so embedders are saved
INFO_MAX_MODEL_LEN = 1  # positions: tables by position are not what read_facts is after


def read_model_info(path: Path, gguf_dequantize: bool = False) -> ModelInfo:
    """What config.json or a GGUF file's metadata tell, without reading weights. Raises CheckpointError."""
    precision, counted = Precision.from_dtypes("float32"), MetaWeights()
    if not is_gguf(path):
        return _build_model(_read_config(path), MetaOps(), precision, counted, "cpu", INFO_MAX_MODEL_LEN).info
    gguf = open_gguf(path)
    architecture, config = _read_gguf_config(gguf)
    check_tensor_types(gguf, gguf_dequantize)
    return with_memory_info(
        architecture(config, MetaOps(), precision, counted, "cpu", INFO_MAX_MODEL_LEN).info, gguf
    )


def weight_files(path: Path) -> list[Path]:
    """The files whose bytes decide what a model computes."""
    if path.is_file():
        return split_files(path)
    options = [path / "config.json", path / PREPROCESSOR_FILE, path / PROCESSOR_FILE]
    return [*(file for file in options if file.is_file()), *sorted(path.glob("*.safetensors"))]


def load_model(
    path: Path,
    ops: Ops,
    precision: Precision,
    device: str,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
    gguf_dequantize: bool = False,
    dummy: bool = False,
) -> Model:
    """The model in `path`.

    max_model_len    longest context it will be used for
    progress         gets bytes done and bytes in all
    gguf_dequantize  take types of a GGUF file that have no kernels, as floats
    dummy            make random weights; of the directory, config.json is read
    Raises CheckpointError, which names the option, the tensor or the file.
    """
    if dummy:
        return _load_dummy_model(path, ops, precision, device, max_model_len)
    with _open_device_loader(device) as staging:
        if is_gguf(path):
            gguf = open_gguf(path)
            architecture, config = _read_gguf_config(gguf)
            weights = GGUFWeights(
                gguf, (config.num_heads, config.num_kv_heads), gguf_dequantize, progress, staging
            )
            model = architecture(config, ops, precision, weights, device, max_model_len)
            weights.check_all_read()
            return model
        described = _read_config(path)
        files = FileWeights(path, progress, staging)
        named = _rename_weights(described, files)
        model = _build_model(described, ops, precision, named, device, max_model_len)
        files.check_all_read(ignored=_ignored_weights(described, named, files.names))
        return model


@contextmanager
def _open_device_loader(device: str) -> Iterator[DeviceLoader | None]:
    """A CPU reads files where they are mapped."""
    if device == "cpu":
        yield None
        return
    with DeviceLoader(device) as staging:
        yield staging


def _load_dummy_model(path: Path, ops: Ops, precision: Precision, device: str, max_model_len: int) -> Model:
    """The model of a config.json, with random weights."""
    if is_gguf(path):
        raise CheckpointError(
            f"{path}: load_format dummy needs a directory with a config.json", "load_format"
        )
    described = _read_config(path)
    weights = DummyWeights(device, getattr(torch, described.config.dtype))
    return _build_model(described, ops, precision, weights, device, max_model_len)


@dataclass(frozen=True, slots=True)
class _ModelSpec:
    """What config.json says; `vision` where the model sees pictures."""

    architecture: type[Decoder]
    config: DecoderConfig
    vision: VisionModel | None = None
    name: str = ""


def _build_model(
    spec: _ModelSpec, ops: Ops, precision: Precision, weights: Weights, device: str, max_model_len: int
) -> Decoder:
    model = spec.architecture(spec.config, ops, precision, weights, device, max_model_len)
    vision = spec.vision
    if vision is None:
        return model
    before = weights.num_parameters
    model.vision_encoder = vision.build_tower(ops, precision, weights, device)
    model.info = replace(
        model.info,
        architecture=spec.name,
        parameters=weights.num_parameters,
        vision_parameters=weights.num_parameters - before,
        image_token_id=vision.image_token_id,
    )
    return model


def _rename_weights(spec: _ModelSpec, files: FileWeights) -> Weights:
    """Tensors by the names that models here ask for."""
    if spec.vision is not None:
        return MultipartWeights(files, files.names, spec.vision.WEIGHT_PREFIXES)
    return files if EMBEDDING_TENSOR in files.names else HeadlessWeights(files)


def _ignored_weights(spec: _ModelSpec, weights: Weights, names: frozenset[str]) -> dict[str, str]:
    """Tensors that nobody takes, and why."""
    actual = weights.name_in_file if isinstance(weights, MultipartWeights) else str
    ignored = {actual("lm_head.weight"): "a copy of the embedding"} if spec.config.tie_word_embeddings else {}
    if spec.vision is not None:
        unused = tuple(map(actual, spec.vision.ignored_prefixes))
        ignored |= dict.fromkeys((name for name in names if name.startswith(unused)), "not read of a tower")
    return ignored


def _read_config(path: Path) -> _ModelSpec:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    reader = ConfigReader(read_json(file), str(file))
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in VISION_MODELS:
        return _ModelSpec(*_read_known_decoder(reader))
    vision = VISION_MODELS[model_type].from_config(reader, path)
    reader.check_all_read()
    return _ModelSpec(vision.decoder_type, vision.decoder_config, vision, model_type)


def _read_gguf_config(gguf: GGUFFile) -> tuple[type[Decoder], DecoderConfig]:
    """Norms stand in these files with what their architecture adds to them."""
    options = read_hf_config(gguf, lambda name: read_rope_factors(gguf, name))
    architecture, config = _read_known_decoder(ConfigReader(options, str(gguf.path)))
    return architecture, replace(config, norm_offset=0.0)


def _read_known_decoder(reader: ConfigReader) -> tuple[type[Decoder], DecoderConfig]:
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted((*ARCHITECTURES, *VISION_MODELS)))
        foreign = (
            "; the code that `auto_map` names is not run: no code out of a checkpoint is"
            if "auto_map" in reader
            else ""
        )
        raise CheckpointError(
            f"{reader.source}: model_type {model_type!r:.80} is not supported{foreign}; known: {known}"
        )
    return read_decoder(reader)
