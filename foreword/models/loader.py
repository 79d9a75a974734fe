"""From a checkpoint, a directory or a GGUF file, to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from foreword.errors import CheckpointError
from foreword.kernels.ops import Ops
from foreword.models.base import Model, Precision
from foreword.models.config import ConfigReader, read_json
from foreword.models.decoder import Decoder, DecoderConfig
from foreword.models.gemma2 import Gemma2
from foreword.models.gemma3_text import Gemma3Text
from foreword.models.gguf.config import read_options
from foreword.models.gguf.reader import GGUF, is_gguf, open_gguf, part_files
from foreword.models.gguf.weights import GGUFWeights, check_kinds, read_factors, with_kept
from foreword.models.llama import Llama
from foreword.models.mistral import Mistral
from foreword.models.phi3 import Phi3
from foreword.models.qwen2 import Qwen2
from foreword.models.qwen3 import Qwen3
from foreword.models.weights import BodyWeights, CountedWeights, FileWeights, ShapesOnly
from foreword.resolve import ModelFacts

__all__ = ["ARCHITECTURES", "load_model", "read_facts", "weight_files"]

ARCHITECTURES: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "gemma2": Gemma2,
        "gemma3_text": Gemma3Text,
        "llama": Llama,
        "mistral": Mistral,
        "phi3": Phi3,
        "qwen2": Qwen2,
        "qwen3": Qwen3,
    }
)
BODY = "model.embed_tokens.weight"  # where it is missing, all names are those within the body: so embedders are saved
NEEDED_FOR_FACTS = 1  # positions: tables by position are not what read_facts is after


def read_facts(path: Path, gguf_dequantize: bool = False) -> ModelFacts:
    """What config.json or a GGUF file's metadata tell, without reading weights. Raises CheckpointError."""
    gguf = open_gguf(path) if is_gguf(path) else None
    architecture, config = _read_config(path) if gguf is None else _read_metadata(gguf)
    facts = architecture(config, ShapesOnly(), Precision.of("float32"), CountedWeights(), "cpu", NEEDED_FOR_FACTS).facts
    if gguf is None:
        return facts
    check_kinds(gguf, gguf_dequantize)
    return with_kept(facts, gguf)


def weight_files(path: Path) -> list[Path]:
    """The files whose bytes decide what a model computes."""
    return part_files(path) if path.is_file() else [path / "config.json", *sorted(path.glob("*.safetensors"))]


def load_model(
    path: Path,
    ops: Ops,
    precision: Precision,
    device: str,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
    gguf_dequantize: bool = False,
) -> Model:
    """The model in `path`.

    max_model_len    longest context it will be used for
    progress         gets bytes done and bytes in all
    gguf_dequantize  take types of a GGUF file that have no kernels, as floats
    Raises CheckpointError, which names the option, the tensor or the file.
    """
    if is_gguf(path):
        gguf = open_gguf(path)
        architecture, config = _read_metadata(gguf)
        heads = (config.heads, config.kv_heads)
        weights = GGUFWeights(gguf, device, heads, gguf_dequantize, progress)
        model = architecture(config, ops, precision, weights, device, max_model_len)
        weights.finish()
        return model
    architecture, config = _read_config(path)
    files = FileWeights(path, device, progress)
    named = files if BODY in files.names else BodyWeights(files)
    model = architecture(config, ops, precision, named, device, max_model_len)
    files.finish(ignore={"lm_head.weight": "a copy of the embedding"} if config.tied else None)
    return model


def _read_config(path: Path) -> tuple[type[Decoder], DecoderConfig]:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    return _strictly(ConfigReader(read_json(file), str(file)))


def _read_metadata(gguf: GGUF) -> tuple[type[Decoder], DecoderConfig]:
    """Norms stand in these files with what their architecture adds to them."""
    options = read_options(gguf, lambda name: read_factors(gguf, name))
    architecture, config = _strictly(ConfigReader(options, str(gguf.path)))
    return architecture, replace(config, norm_offset=0.0)


def _strictly(reader: ConfigReader) -> tuple[type[Decoder], DecoderConfig]:
    model_type = reader.raw("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        foreign = "; the code that `auto_map` names is not run: no code out of a checkpoint is" if "auto_map" in reader else ""
        raise CheckpointError(f"{reader.source}: model_type {model_type!r:.80} is not supported{foreign}; known: {known}")
    architecture = ARCHITECTURES[model_type]
    config = architecture.read(reader)
    reader.finish()
    return architecture, config
