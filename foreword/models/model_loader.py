"""Loads a model from a checkpoint directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.lora import LoraLimits
from foreword.layers.weights import Weights
from foreword.models.architectures import ALIASES, ARCHITECTURES, read_decoder
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import Precision
from foreword.models.vision.llava import Llava
from foreword.models.vision.llava_next import LlavaNext
from foreword.models.vision.qwen2_5_vl import Qwen25VL
from foreword.models.vision.qwen2_vl import Qwen2VL
from foreword.models.vision.qwen3_vl import Qwen3VL
from foreword.models.vision.vision_model import PREPROCESSOR_FILE, PROCESSOR_FILE, VisionModel
from foreword.planning.memory import ModelInfo
from foreword.weights.config_reader import ConfigReader, read_json
from foreword.weights.dummy_weights import DummyWeights, HeaderWeights, MetaOps, MetaWeights
from foreword.weights.file_to_device import DeviceLoader
from foreword.weights.gguf.gguf_weights import (
    SCALED_ARCHITECTURES,
    GGUFWeights,
    check_tensor_types,
    read_rope_factors,
    with_memory_info,
)
from foreword.weights.gguf.header import GGUFFile, is_gguf, open_gguf, split_files
from foreword.weights.gguf.hf_config import read_hf_config
from foreword.weights.gguf.state_config import split_mtp_head
from foreword.weights.gguf.tensor_names import gguf_name
from foreword.weights.quantized.quantization_config import CONFIG_FILES, Quantization, read_quantization
from foreword.weights.quantized.quantized_weights import QuantizedWeights
from foreword.weights.renamed_weights import HeadlessWeights, MultipartWeights
from foreword.weights.safetensors_weights import SafetensorsWeights
from foreword.weights.trained_heads import MTPNames, brings_mtp_head
from foreword.weights.unsupported_families import describe_checkpoint

VISION_MODELS: Mapping[str, type[VisionModel]] = MappingProxyType(
    {
        "llava": Llava,
        "llava_next": LlavaNext,
        "qwen2_vl": Qwen2VL,
        "qwen2_5_vl": Qwen25VL,
        "qwen3_vl": Qwen3VL,
    }
)
# Multimodal checkpoints whose text alone runs here, and the prefixes of their tensors in files
TEXT_MODELS: Mapping[str, str] = MappingProxyType(
    {name: f"{name}_text" for name in ("gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")}
)
TEXT_PREFIXES = MappingProxyType({"model.": ("model.language_model.", "language_model.model.", "model.")})
TEXT_KEYS = (
    *("audio_config", "vision_config", "vision_soft_tokens_per_image"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id"),
)
# Families whose checkpoints may hold more than their text, by the prefixes of what is not loaded
MULTIPART_FAMILIES = (
    *("ernie4_5_moe", "exaone_moe", "mellum", "nemotron_h", "qwen3_next"),
    *(*TEXT_MODELS, *TEXT_MODELS.values()),
)
MTP_HEAD = "the MTP head, which drafts,"
UNUSED_PARTS = MappingProxyType(
    {
        "mtp.": MTP_HEAD,
        "model.mtp_": MTP_HEAD,
        "model.visual.": "the vision encoder",
        "visual.": "the vision encoder",
        "model.vision_tower.": "the vision encoder",
        "model.embed_vision.": "the vision encoder",
        "model.vision_embedder.": "the vision encoder",
        "model.audio_tower.": "the audio encoder",
        "model.embed_audio.": "the audio encoder",
    }
)
EMBEDDING_TENSORS = {
    "model.embed_tokens.weight",
    "model.word_embeddings.weight",
}  # missing in checkpoints that were saved without a head
INFO_MAX_MODEL_LEN = 1  # positions: read_model_info() needs no RoPE tables


def read_model_info(path: Path, gguf_dequantize: bool = False) -> ModelInfo:
    """Read model information from config.json or GGUF metadata, and of quantized weights from the headers.

    Raises CheckpointError.
    """
    precision, weights = Precision.from_dtypes("float32"), MetaWeights()
    if not is_gguf(path):
        spec = _read_config(path)
        if spec.quantization is None:
            info = _build_model(spec, MetaOps(), precision, weights, "cpu", INFO_MAX_MODEL_LEN).info
            return replace(info, unused_parts=_describe_unused(path, spec))
        files = QuantizedWeights(path, spec.quantization)
        renamed = _rename_weights(spec, HeaderWeights(files.check_shape, files.has), files.names)
        model = _build_model(spec, MetaOps(), precision, renamed, "cpu", INFO_MAX_MODEL_LEN)
        info = files.with_memory_info(model.info)
        return replace(info, unused_parts=_describe_unused(path, spec))
    file = _open_gguf(path)
    check_tensor_types(file.gguf, gguf_dequantize)
    model = file.architecture(file.config, MetaOps(), precision, weights, "cpu", INFO_MAX_MODEL_LEN)
    info = with_memory_info(model.info, file.gguf)
    if brings_mtp_head(path):
        return info
    num_values = sum(tensor.num_values for tensor in file.mtp_head.tensors.values())
    return replace(info, unused_parts=_describe_parts({MTP_HEAD: num_values}))


def read_shape(path: Path) -> Decoder:
    """The decoder of a checkpoint, without its tensors. Raises CheckpointError."""
    options = (MetaOps(), Precision.from_dtypes("float32"), MetaWeights(), "cpu", INFO_MAX_MODEL_LEN)
    if is_gguf(path):
        file = _open_gguf(path)
        return file.architecture(file.config, *options)
    return _build_model(_read_config(path), *options)


@dataclass(frozen=True, slots=True)
class MTPWeights:
    """Tensors of the MTP head in a checkpoint."""

    names: MTPNames
    weights: Weights
    check_all_read: Callable[[], None]  # raises CheckpointError for tensors of the head that were not read
    with_memory_info: Callable[[ModelInfo], ModelInfo]


def open_mtp_weights(
    path: Path,
    gguf_dequantize: bool = False,
    device_loader: DeviceLoader | None = None,
    headers: bool = False,
) -> MTPWeights:
    """headers: names and shapes alone. Raises CheckpointError if no head is there that runs here."""
    if is_gguf(path):
        file = _open_gguf(path)
        names = _mtp_names(file.config, path, gguf=True)
        tensors = file.weights(gguf_dequantize, None, device_loader, mtp_head=True)
        architecture = file.gguf.metadata["general.architecture"]
        copies = {gguf_name(f"{prefix}weight", architecture) for prefix in names.copies}
        return MTPWeights(
            names,
            HeaderWeights(tensors.lookup, tensors.has) if headers else tensors,
            partial(tensors.check_all_read, copies),
            partial(with_memory_info, gguf=file.mtp_head),
        )
    spec = _read_config(path)
    names = _mtp_names(spec.config, path)
    files = _open_files(path, spec, None, device_loader)
    others = {name for name in files.names if not name.startswith(names.prefix)}
    others |= {name for name in files.names if name.startswith(names.copies)}
    return MTPWeights(
        names,
        HeaderWeights(files.check_shape, files.has) if headers else files,
        partial(files.check_all_read, others),
        files.with_memory_info if isinstance(files, QuantizedWeights) else _unchanged,
    )


def _unchanged(info: ModelInfo) -> ModelInfo:
    return info


def _mtp_names(config: DecoderConfig, path: Path, gguf: bool = False) -> MTPNames:
    names = MTPNames.of_family(config.architecture, len(config.layer_types), gguf)
    if names is None:
        problem = f"has no MTP head that runs here: {config.architecture}"
        raise CheckpointError(f"{path} {problem}", "speculate")
    return names


def check_weights(path: Path, gguf_dequantize: bool = False) -> int:
    """Compare names and shapes in the headers of a checkpoint's files with what the model loads.

    Returns the bytes of all tensors. Raises CheckpointError.
    """
    precision = Precision.from_dtypes("float32")
    if is_gguf(path):
        file = _open_gguf(path)
        tensors = file.weights(gguf_dequantize)
        headers = HeaderWeights(tensors.lookup, tensors.has)
        file.architecture(file.config, MetaOps(), precision, headers, "cpu", INFO_MAX_MODEL_LEN)
        tensors.check_all_read()
        return tensors.num_bytes
    spec = _read_config(path)
    files = _open_files(path, spec)
    renamed = _rename_weights(spec, HeaderWeights(files.check_shape, files.has), files.names)
    _build_model(spec, MetaOps(), precision, renamed, "cpu", INFO_MAX_MODEL_LEN)
    files.check_all_read(_ignored_weights(spec, renamed, files.names))
    return files.num_bytes


def weight_files(path: Path) -> list[Path]:
    """Files that determine the model's results: weights and configs."""
    if path.is_file():
        return split_files(path)
    names = ("config.json", *CONFIG_FILES, PREPROCESSOR_FILE, PROCESSOR_FILE)
    configs = [path / name for name in names]
    return [*(file for file in configs if file.is_file()), *sorted(path.glob("*.safetensors"))]


def load_model(
    path: Path,
    ops: Ops,
    precision: Precision,
    device: str,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
    gguf_dequantize: bool = False,
    dummy: bool = False,
    lora: LoraLimits | None = None,
) -> Decoder:
    """Load the model in `path`.

    progress         called with bytes done and bytes in total
    gguf_dequantize  convert GGUF types without kernels to floats
    dummy            random weights; only config.json is read
    lora             room for adapters; None: LoRA is off
    Raises CheckpointError, which names the option, the tensor or the file.
    """
    if dummy:
        return _load_dummy_model(path, ops, precision, device, max_model_len, lora)
    with open_device_loader(device) as device_loader:
        if is_gguf(path):
            file = _open_gguf(path)
            weights = file.weights(gguf_dequantize, progress, device_loader)
            model = file.architecture(file.config, ops, precision, weights, device, max_model_len, lora)
            weights.check_all_read()
            return model
        spec = _read_config(path)
        files = _open_files(path, spec, progress, device_loader)
        renamed = _rename_weights(spec, files, files.names)
        model = _build_model(spec, ops, precision, renamed, device, max_model_len, lora)
        files.check_all_read(_ignored_weights(spec, renamed, files.names))
        return model


def _open_files(
    path: Path,
    spec: _ModelSpec,
    progress: Callable[[int, int], None] | None = None,
    device_loader: DeviceLoader | None = None,
) -> SafetensorsWeights:
    if spec.quantization is None:
        return SafetensorsWeights(path, progress, device_loader)
    return QuantizedWeights(path, spec.quantization, progress, device_loader)


def open_device_loader(device: str) -> AbstractContextManager[DeviceLoader | None]:
    """None for a CPU, which uses mapped files."""
    return nullcontext() if device == "cpu" else DeviceLoader(device)


def _load_dummy_model(
    path: Path, ops: Ops, precision: Precision, device: str, max_model_len: int, lora: LoraLimits | None
) -> Decoder:
    """The model of a config.json with random weights."""
    if is_gguf(path):
        problem = "load_format dummy needs a directory with a config.json"
        raise CheckpointError(f"{path}: {problem}", "load_format")
    spec = _read_config(path)
    if spec.quantization is not None:
        problem = (
            f"load_format dummy needs a plain checkpoint; this one is quantized ({spec.quantization.method})"
        )
        raise CheckpointError(f"{path}: {problem}", "load_format")
    weights = DummyWeights(device, getattr(torch, spec.config.dtype))
    return _build_model(spec, ops, precision, weights, device, max_model_len, lora)


@dataclass(frozen=True, slots=True)
class _ModelSpec:
    """Contents of a config.json."""

    architecture: type[Decoder]
    config: DecoderConfig
    vision: VisionModel | None = None  # None: text only
    name: str = ""  # model_type in the config.json
    quantization: Quantization | None = None


def _build_model(
    spec: _ModelSpec,
    ops: Ops,
    precision: Precision,
    weights: Weights,
    device: str,
    max_model_len: int,
    lora: LoraLimits | None = None,
) -> Decoder:
    model = spec.architecture(spec.config, ops, precision, weights, device, max_model_len, lora)
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


def _rename_weights(spec: _ModelSpec, weights: Weights, names: frozenset[str]) -> Weights:
    """Weights by the names that our models use; `names` are those in the files."""
    if spec.vision is not None:
        return MultipartWeights(weights, names, spec.vision.WEIGHT_PREFIXES)
    prefixes = TEXT_PREFIXES if spec.name in TEXT_MODELS else spec.architecture.WEIGHT_PREFIXES
    if prefixes:
        return MultipartWeights(weights, names, prefixes)
    return HeadlessWeights(weights) if EMBEDDING_TENSORS.isdisjoint(names) else weights


def _ignored_weights(spec: _ModelSpec, weights: Weights, names: frozenset[str]) -> set[str]:
    """Tensors that are not loaded: a tied head, and unused parts of the vision encoder."""
    name_in_file = weights.name_in_file if isinstance(weights, MultipartWeights) else str
    ignored = {name_in_file("lm_head.weight")} if spec.config.tie_word_embeddings else set()
    unread = tuple(map(name_in_file, spec.config.unread_prefixes))
    ignored |= {name for name in names if name.startswith(unread)}
    if spec.vision is not None:
        prefixes = tuple(map(name_in_file, spec.vision.ignored_prefixes))
        ignored |= {name for name in names if name.startswith(prefixes)}
    return ignored | {name for name in names if name.startswith(tuple(_unused_parts(spec)))}


def _unused_parts(spec: _ModelSpec) -> dict[str, str]:
    """What the files may hold beside the text, in words, by the prefixes of its tensors."""
    parts = dict(UNUSED_PARTS) if spec.name in MULTIPART_FAMILIES else {}
    num_layers = len(spec.config.layer_types)
    for layer in range(num_layers, num_layers + spec.config.num_mtp_layers):
        parts[f"model.layers.{layer}."] = MTP_HEAD
    return parts


def _describe_unused(path: Path, spec: _ModelSpec) -> tuple[str, ...]:
    """What the files hold beside the text, in words; () if there are no files."""
    prefixes = _unused_parts(spec)
    if not prefixes:
        return ()
    try:
        files = SafetensorsWeights(path)
    except CheckpointError:  # loading says so, unless it is of random weights
        return ()
    parts: dict[str, int] = {}
    for prefix, part in prefixes.items():
        if part != MTP_HEAD or not brings_mtp_head(path):
            parts[part] = parts.get(part, 0) + files.count_values(prefix)
    return _describe_parts(parts)


def _describe_parts(num_values: Mapping[str, int]) -> tuple[str, ...]:
    """Parts that have values, in words."""
    counts = {part: count for part, count in num_values.items() if count}
    return tuple(f"{part} is not used yet ({count / 1e6:.1f} M values)" for part, count in counts.items())


def _read_config(path: Path) -> _ModelSpec:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    reader = ConfigReader(read_json(file), str(file))
    quantization = read_quantization(reader, path)
    model_type = reader.get("model_type")
    if isinstance(model_type, str) and model_type in TEXT_MODELS:
        return _ModelSpec(*_read_text_model(reader), name=model_type, quantization=quantization)
    if not isinstance(model_type, str) or model_type not in VISION_MODELS:
        return _ModelSpec(*_read_known_decoder(reader), name=str(model_type), quantization=quantization)
    vision = VISION_MODELS[model_type].from_config(reader, path)
    reader.check_all_read()
    return _ModelSpec(vision.decoder_type, vision.decoder_config, vision, model_type, quantization)


def _read_text_model(reader: ConfigReader) -> tuple[type[Decoder], DecoderConfig]:
    """The `text_config` of a multimodal checkpoint; data type and tying of the outer config override it."""
    section = reader.get_section("text_config")
    if section is None:
        raise reader.error("text_config", "is missing")
    model_type = TEXT_MODELS[reader.get("model_type")]
    text = section.with_defaults({"model_type": model_type, "dtype": reader.get_dtype()})
    text.require_value("model_type", model_type)
    architecture, config = read_decoder(text)
    for key in TEXT_KEYS:
        reader.get(key, None)
    tied = reader.get_bool("tie_word_embeddings", config.tie_word_embeddings)
    reader.ignore_repeats_of(text)
    reader.check_all_read()
    return architecture, replace(config, tie_word_embeddings=tied)


@dataclass(frozen=True, slots=True)
class _GGUFModel:
    """Header of a GGUF file."""

    architecture: type[Decoder]
    config: DecoderConfig
    gguf: GGUFFile  # without the tensors of an MTP head
    mtp_head: GGUFFile  # these alone

    def weights(
        self,
        allow_dequantize: bool,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
        mtp_head: bool = False,
    ) -> GGUFWeights:
        kv_heads = self.config.kv_shapes[0].heads
        heads, state = (self.config.num_heads, kv_heads), next(iter(self.config.state_shapes), None)
        gguf = self.mtp_head if mtp_head else self.gguf
        return GGUFWeights(gguf, heads, allow_dequantize, progress, device_loader, state)


def _open_gguf(path: Path) -> _GGUFModel:
    """Norm weights in GGUF files include the architecture's offset."""
    gguf = open_gguf(path)
    options = read_hf_config(gguf, lambda name: read_rope_factors(gguf, name))
    architecture, config = _read_known_decoder(ConfigReader(options, str(gguf.path)))
    name = gguf.metadata["general.architecture"]
    unread = {gguf_name(f"{prefix}weight", name) for prefix in config.unread_prefixes}
    gguf = replace(gguf, tensors={key: info for key, info in gguf.tensors.items() if key not in unread})
    takes_lora = name not in SCALED_ARCHITECTURES
    config = replace(config, norm_offset=0.0, takes_lora=takes_lora)
    return _GGUFModel(architecture, config, *split_mtp_head(gguf))


def _read_known_decoder(reader: ConfigReader) -> tuple[type[Decoder], DecoderConfig]:
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in {**ARCHITECTURES, **ALIASES}:
        known = ", ".join(sorted((*ARCHITECTURES, *ALIASES, *VISION_MODELS)))
        remote = "; the code in `auto_map` is not run: no code of a checkpoint is"
        reason = describe_checkpoint(str(model_type)) or (remote if "auto_map" in reader else "")
        problem = f"is not supported{reason}"
        raise CheckpointError(f"{reader.source}: model_type {model_type!r:.80} {problem}; known: {known}")
    return read_decoder(reader)
