"""From a checkpoint, a directory or a GGUF file, to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.architectures import ARCHITECTURES, read_decoder
from foreword.models.base import Model, Precision
from foreword.models.config import ConfigReader, read_json
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.dummy import DummyWeights
from foreword.models.gguf.config import read_options
from foreword.models.gguf.reader import GGUF, is_gguf, open_gguf, part_files
from foreword.models.gguf.weights import GGUFWeights, check_kinds, read_factors, with_kept
from foreword.models.staging import Staging
from foreword.models.vision.base import PREPROCESSOR, PROCESSOR, VisionModel
from foreword.models.vision.registry import VISION
from foreword.models.weights import BodyWeights, CountedWeights, FileWeights, PartWeights, ShapesOnly
from foreword.resolve import ModelFacts

__all__ = ["load_model", "read_facts", "weight_files"]

BODY = "model.embed_tokens.weight"  # where it is missing, all names are those within the body: so embedders are saved
NEEDED_FOR_FACTS = 1  # positions: tables by position are not what read_facts is after


def read_facts(path: Path, gguf_dequantize: bool = False) -> ModelFacts:
    """What config.json or a GGUF file's metadata tell, without reading weights. Raises CheckpointError."""
    precision, counted = Precision.of("float32"), CountedWeights()
    if not is_gguf(path):
        return _build(_read_config(path), ShapesOnly(), precision, counted, "cpu", NEEDED_FOR_FACTS).facts
    gguf = open_gguf(path)
    architecture, config = _read_metadata(gguf)
    check_kinds(gguf, gguf_dequantize)
    return with_kept(architecture(config, ShapesOnly(), precision, counted, "cpu", NEEDED_FOR_FACTS).facts, gguf)


def weight_files(path: Path) -> list[Path]:
    """The files whose bytes decide what a model computes."""
    if path.is_file():
        return part_files(path)
    options = [path / "config.json", path / PREPROCESSOR, path / PROCESSOR]
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
        return _made_up(path, ops, precision, device, max_model_len)
    with _staging(device) as staging:
        if is_gguf(path):
            gguf = open_gguf(path)
            architecture, config = _read_metadata(gguf)
            weights = GGUFWeights(gguf, (config.heads, config.kv_heads), gguf_dequantize, progress, staging)
            model = architecture(config, ops, precision, weights, device, max_model_len)
            weights.finish()
            return model
        described = _read_config(path)
        files = FileWeights(path, progress, staging)
        named = _named(described, files)
        model = _build(described, ops, precision, named, device, max_model_len)
        files.finish(ignore=_ignored(described, named, files.names))
        return model


@contextmanager
def _staging(device: str) -> Iterator[Staging | None]:
    """A CPU reads files where they are mapped."""
    if device == "cpu":
        yield None
        return
    with Staging(device) as staging:
        yield staging


def _made_up(path: Path, ops: Ops, precision: Precision, device: str, max_model_len: int) -> Model:
    """The model of a config.json, with random weights."""
    if is_gguf(path):
        raise CheckpointError(f"{path}: load_format dummy needs a directory with a config.json", "load_format")
    described = _read_config(path)
    weights = DummyWeights(device, getattr(torch, described.config.dtype))
    return _build(described, ops, precision, weights, device, max_model_len)


@dataclass(frozen=True, slots=True)
class _Described:
    """What config.json says; `vision` where the model sees pictures."""

    architecture: type[Decoder]
    config: DecoderConfig
    vision: VisionModel | None = None
    name: str = ""


def _build(described: _Described, ops: Ops, precision: Precision, weights: Weights, device: str, max_model_len: int) -> Decoder:
    model = described.architecture(described.config, ops, precision, weights, device, max_model_len)
    vision = described.vision
    if vision is None:
        return model
    before = weights.parameters
    model.tower = vision.tower(ops, precision, weights, device)
    model.facts = replace(
        model.facts,
        architecture=described.name,
        parameters=weights.parameters,
        tower_parameters=weights.parameters - before,
        image_token_id=vision.image_token_id,
    )
    return model


def _named(described: _Described, files: FileWeights) -> Weights:
    """Tensors by the names that models here ask for."""
    if described.vision is not None:
        return PartWeights(files, files.names, described.vision.PREFIXES)
    return files if BODY in files.names else BodyWeights(files)


def _ignored(described: _Described, named: Weights, names: frozenset[str]) -> dict[str, str]:
    """Tensors that nobody takes, and why."""
    actual = named.actual if isinstance(named, PartWeights) else str
    ignored = {actual("lm_head.weight"): "a copy of the embedding"} if described.config.tied else {}
    if described.vision is not None:
        unused = tuple(map(actual, described.vision.unused))
        ignored |= dict.fromkeys((name for name in names if name.startswith(unused)), "not read of a tower")
    return ignored


def _read_config(path: Path) -> _Described:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    reader = ConfigReader(read_json(file), str(file))
    model_type = reader.raw("model_type")
    if not isinstance(model_type, str) or model_type not in VISION:
        return _Described(*_strictly(reader))
    vision = VISION[model_type].read(reader, path)
    reader.finish()
    return _Described(vision.decoder_type, vision.decoder, vision, model_type)


def _read_metadata(gguf: GGUF) -> tuple[type[Decoder], DecoderConfig]:
    """Norms stand in these files with what their architecture adds to them."""
    options = read_options(gguf, lambda name: read_factors(gguf, name))
    architecture, config = _strictly(ConfigReader(options, str(gguf.path)))
    return architecture, replace(config, norm_offset=0.0)


def _strictly(reader: ConfigReader) -> tuple[type[Decoder], DecoderConfig]:
    model_type = reader.raw("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted((*ARCHITECTURES, *VISION)))
        foreign = "; the code that `auto_map` names is not run: no code out of a checkpoint is" if "auto_map" in reader else ""
        raise CheckpointError(f"{reader.source}: model_type {model_type!r:.80} is not supported{foreign}; known: {known}")
    return read_decoder(reader)
