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
from foreword.models.vision.llava import read_llava
from foreword.models.vision.llava_next import read_llava_next
from foreword.models.vision.qwen2_5_vl import read_qwen2_5_vl
from foreword.models.vision.qwen2_vl import read_qwen2_vl
from foreword.models.vision.qwen3_vl import read_qwen3_vl
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

VISION_MODELS: Mapping[str, Callable[[ConfigReader, Path], VisionModel]] = MappingProxyType(
    {
        "llava": read_llava,
        "llava_next": read_llava_next,
        "qwen2_vl": read_qwen2_vl,
        "qwen2_5_vl": read_qwen2_5_vl,
        "qwen3_vl": read_qwen3_vl,
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
CheckpointFiles = GGUFWeights | SafetensorsWeights


@dataclass(frozen=True, slots=True)
class MTPFiles:
    """Tensors of the MTP head in a checkpoint."""

    names: MTPNames
    files: CheckpointFiles
    others: set[str]  # in the files, that the head does not read
    with_memory_info: Callable[[ModelInfo], ModelInfo]


def read_model_info(path: Path, gguf_dequantize: bool = False) -> ModelInfo:
    """Read model information from config.json or GGUF metadata, and of quantized weights from the headers.

    Raises CheckpointError.
    """
    return open_checkpoint(path).read_info(gguf_dequantize)


def check_weights(path: Path, gguf_dequantize: bool = False) -> int:
    """Compare names and shapes in the headers of a checkpoint's files with what the model loads.

    Returns the bytes of all tensors. Raises CheckpointError.
    """
    checkpoint = open_checkpoint(path)
    files = checkpoint.open_files(gguf_dequantize)
    weights = checkpoint.rename(HeaderWeights(files), files.names)
    checkpoint.build_shape(weights)
    files.check_all_read(checkpoint.ignored_names(weights, files.names))
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
    checkpoint = open_checkpoint(path)
    if dummy:
        checkpoint.check_dummy()
        random = DummyWeights(device, getattr(torch, checkpoint.config.dtype))
        return checkpoint.build(ops, precision, random, device, max_model_len, lora)
    with open_device_loader(device) as device_loader:
        files = checkpoint.open_files(gguf_dequantize, progress, device_loader)
        weights = checkpoint.rename(files, files.names)
        model = checkpoint.build(ops, precision, weights, device, max_model_len, lora)
        files.check_all_read(checkpoint.ignored_names(weights, files.names))
        return model


def open_device_loader(device: str) -> AbstractContextManager[DeviceLoader | None]:
    """None for a CPU, which uses mapped files."""
    return nullcontext() if device == "cpu" else DeviceLoader(device)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A config.json or the header of a GGUF file."""

    path: Path
    architecture: type[Decoder]
    config: DecoderConfig
    vision: VisionModel | None  # None: text only
    name: str  # model_type in the config.json

    def build(
        self,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
        max_model_len: int,
        lora: LoraLimits | None = None,
    ) -> Decoder:
        model = self.architecture(self.config, ops, precision, weights, device, max_model_len, lora)
        if self.vision is None:
            return model
        before = weights.num_parameters
        model.vision_encoder = self.vision.build_tower(ops, precision, weights, device)
        model.info = replace(
            model.info,
            architecture=self.name,
            parameters=weights.num_parameters,
            vision_parameters=weights.num_parameters - before,
            image_token_id=self.vision.image_token_id,
        )
        return model

    def build_shape(self, weights: Weights | None = None) -> Decoder:
        """The model without its tensors; weights: also without, by default of any names."""
        precision = Precision.from_dtypes("float32")
        return self.build(MetaOps(), precision, weights or MetaWeights(), "cpu", INFO_MAX_MODEL_LEN)

    def mtp_names(self, gguf: bool) -> MTPNames:
        """Raises CheckpointError for a family without an MTP head that runs here."""
        names = MTPNames.of_family(self.config.architecture, len(self.config.layer_types), gguf)
        if names is None:
            problem = f"has no MTP head that runs here: {self.config.architecture}"
            raise CheckpointError(f"{self.path} {problem}", "speculate")
        return names


@dataclass(frozen=True, slots=True)
class _Folder(_Checkpoint):
    """Contents of a config.json."""

    quantization: Quantization | None

    def read_info(self, gguf_dequantize: bool) -> ModelInfo:
        if self.quantization is None:
            info = self.build_shape().info
        else:
            files = QuantizedWeights(self.path, self.quantization)
            weights = self.rename(HeaderWeights(files), files.names)
            info = files.with_memory_info(self.build_shape(weights).info)
        return replace(info, unused_parts=self._describe_unused())

    def open_files(
        self,
        gguf_dequantize: bool,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
    ) -> SafetensorsWeights:
        if self.quantization is None:
            return SafetensorsWeights(self.path, progress, device_loader)
        return QuantizedWeights(self.path, self.quantization, progress, device_loader)

    def open_mtp_head(self, gguf_dequantize: bool, device_loader: DeviceLoader | None) -> MTPFiles:
        names = self.mtp_names(gguf=False)
        files = self.open_files(gguf_dequantize, None, device_loader)
        others = {name for name in files.names if not name.startswith(names.prefix)}
        others |= {name for name in files.names if name.startswith(names.copies)}
        describe = files.with_memory_info if isinstance(files, QuantizedWeights) else lambda info: info
        return MTPFiles(names, files, others, describe)

    def check_dummy(self) -> None:
        """Raises CheckpointError if there can be no random weights for it."""
        if self.quantization is not None:
            method = self.quantization.method
            problem = f"load_format dummy needs a plain checkpoint; this one is quantized ({method})"
            raise CheckpointError(f"{self.path}: {problem}", "load_format")

    def rename(self, weights: Weights, names: frozenset[str]) -> Weights:
        """Weights by the names that our models use; `names` are those in the files."""
        if self.vision is not None:
            return MultipartWeights(weights, names, self.vision.weight_prefixes)
        prefixes = TEXT_PREFIXES if self.name in TEXT_MODELS else self.architecture.WEIGHT_PREFIXES
        if prefixes:
            return MultipartWeights(weights, names, prefixes)
        return HeadlessWeights(weights) if EMBEDDING_TENSORS.isdisjoint(names) else weights

    def ignored_names(self, weights: Weights, names: frozenset[str]) -> set[str]:
        """Tensors that are not loaded: a tied head, and unused parts; weights: of rename()."""
        name_in_file = weights.name_in_file if isinstance(weights, MultipartWeights) else str
        ignored = {name_in_file("lm_head.weight")} if self.config.tie_word_embeddings else set()
        vision_prefixes = () if self.vision is None else self.vision.ignored_prefixes
        prefixes = tuple(map(name_in_file, (*self.config.unread_prefixes, *vision_prefixes)))
        return ignored | {name for name in names if name.startswith((*prefixes, *self._unused_parts()))}

    def _unused_parts(self) -> dict[str, str]:
        """Parts that the files may hold beside the text, in words, by the prefixes of its tensors."""
        parts = dict(UNUSED_PARTS) if self.name in MULTIPART_FAMILIES else {}
        num_layers = len(self.config.layer_types)
        for layer in range(num_layers, num_layers + self.config.num_mtp_layers):
            parts[f"model.layers.{layer}."] = MTP_HEAD
        return parts

    def _describe_unused(self) -> tuple[str, ...]:
        """Parts of the files beside the text, in words; () if there are no files."""
        prefixes = self._unused_parts()
        if not prefixes:
            return ()
        try:
            files = SafetensorsWeights(self.path)
        except CheckpointError:  # loading says so, unless it is of random weights
            return ()
        parts: dict[str, int] = {}
        for prefix, part in prefixes.items():
            if part != MTP_HEAD or not brings_mtp_head(self.path):
                parts[part] = parts.get(part, 0) + files.count_values(prefix)
        return _describe_parts(parts)


@dataclass(frozen=True, slots=True)
class _GGUFModel(_Checkpoint):
    """Header of a GGUF file."""

    gguf: GGUFFile  # without the tensors of an MTP head
    mtp_head: GGUFFile  # these alone

    def read_info(self, gguf_dequantize: bool) -> ModelInfo:
        check_tensor_types(self.gguf, gguf_dequantize)
        info = with_memory_info(self.build_shape().info, self.gguf)
        if brings_mtp_head(self.path):
            return info
        num_values = sum(tensor.num_values for tensor in self.mtp_head.tensors.values())
        return replace(info, unused_parts=_describe_parts({MTP_HEAD: num_values}))

    def open_files(
        self,
        gguf_dequantize: bool,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
    ) -> GGUFWeights:
        return self._open(self.gguf, gguf_dequantize, progress, device_loader)

    def check_dummy(self) -> None:
        problem = "load_format dummy needs a directory with a config.json"
        raise CheckpointError(f"{self.path}: {problem}", "load_format")

    def rename(self, weights: Weights, names: frozenset[str]) -> Weights:
        return weights

    def ignored_names(self, weights: Weights, names: frozenset[str]) -> set[str]:
        return set()

    def open_mtp_head(self, gguf_dequantize: bool, device_loader: DeviceLoader | None) -> MTPFiles:
        names = self.mtp_names(gguf=True)
        files = self._open(self.mtp_head, gguf_dequantize, None, device_loader)
        architecture = self.gguf.metadata["general.architecture"]
        copies = {gguf_name(f"{prefix}weight", architecture) for prefix in names.copies}
        return MTPFiles(names, files, copies, partial(with_memory_info, gguf=self.mtp_head))

    def _open(
        self,
        gguf: GGUFFile,
        allow_dequantize: bool,
        progress: Callable[[int, int], None] | None,
        device_loader: DeviceLoader | None,
    ) -> GGUFWeights:
        heads = self.config.num_heads, self.config.kv_shapes[0].heads
        state = next(iter(self.config.state_shapes), None)
        return GGUFWeights(gguf, heads, allow_dequantize, progress, device_loader, state)


def _describe_parts(num_values: Mapping[str, int]) -> tuple[str, ...]:
    """Parts that have values, in words."""
    counts = {part: count for part, count in num_values.items() if count}
    return tuple(f"{part} is not used yet ({count / 1e6:.1f} M values)" for part, count in counts.items())


def open_checkpoint(path: Path) -> _Folder | _GGUFModel:
    """Read the config of a directory or a GGUF file. Raises CheckpointError."""
    return _open_gguf(path) if is_gguf(path) else _open_folder(path)


def _open_folder(path: Path) -> _Folder:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    reader = ConfigReader(read_json(file), str(file))
    quantization = read_quantization(reader, path)
    model_type = reader.get("model_type")
    vision: VisionModel | None = None
    if isinstance(model_type, str) and model_type in TEXT_MODELS:
        decoder = _read_text_model(reader)
    elif not isinstance(model_type, str) or model_type not in VISION_MODELS:
        decoder = _read_known_decoder(reader)
    else:
        vision = VISION_MODELS[model_type](reader, path)
        decoder = vision.decoder_type, vision.decoder_config
        reader.check_all_read()
    return _Folder(path, *decoder, vision, str(model_type), quantization)


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


def _open_gguf(path: Path) -> _GGUFModel:
    """Norm weights in GGUF files include the architecture's offset."""
    gguf = open_gguf(path)
    options = read_hf_config(gguf, lambda name: read_rope_factors(gguf, name))
    architecture, config = _read_known_decoder(ConfigReader(options, str(gguf.path)))
    name = gguf.metadata["general.architecture"]
    unread = {gguf_name(f"{prefix}weight", name) for prefix in config.unread_prefixes}
    gguf = replace(gguf, tensors={key: info for key, info in gguf.tensors.items() if key not in unread})
    config = replace(config, norm_offset=0.0, takes_lora=name not in SCALED_ARCHITECTURES)
    return _GGUFModel(path, architecture, config, None, "", *split_mtp_head(gguf))


def _read_known_decoder(reader: ConfigReader) -> tuple[type[Decoder], DecoderConfig]:
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in {**ARCHITECTURES, **ALIASES}:
        known = ", ".join(sorted((*ARCHITECTURES, *ALIASES, *VISION_MODELS)))
        remote = "; the code in `auto_map` is not run: no code of a checkpoint is"
        reason = describe_checkpoint(str(model_type)) or (remote if "auto_map" in reader else "")
        problem = f"is not supported{reason}"
        raise CheckpointError(f"{reader.source}: model_type {model_type!r:.80} {problem}; known: {known}")
    return read_decoder(reader)
