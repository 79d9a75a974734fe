"""Resolves checkpoints and reads tokenizers and image processors for an engine. Imports no torch."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.chat_formats.families import FORMATS
from foreword.config.drafters import with_head
from foreword.config.options import Config
from foreword.config.speculative_config import apply_speculative_config, check_draft_model_options
from foreword.demo import BUNDLED, DEFAULT_MODEL
from foreword.errors import CheckpointError, ConfigError, InvalidRequest, did_you_mean
from foreword.multimodal.image_processor import ImageProcessor
from foreword.multimodal.processor_registry import read_placeholder_ids, read_processor
from foreword.planning.resolve import check_max_model_len
from foreword.tokenizer.chat_template import PROBE_TOOL, ChatTemplate
from foreword.tokenizer.files import read_tokenizer_files
from foreword.tokenizer.generation_config import GenerationConfig
from foreword.tokenizer.gguf import CHAT_TEMPLATE_KEY, build_gguf_tokenizer
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.weights.config_reader import ConfigReader, read_json, read_text_config, read_vocab_size
from foreword.weights.gguf.header import is_gguf, open_gguf
from foreword.weights.hub import resolve_path
from foreword.weights.trained_heads import brings_mtp_head, head_method
from foreword.weights.unsupported_families import (
    TYPES_WITH_STATES,
    describe_checkpoint,
    draft_model_with_states,
    missing_feature,
)

logger = logging.getLogger(__name__)

EXTENDING_ROPE_TYPES = ("dynamic", "yarn")
PROBE_MESSAGES = (  # must render with a chat template given by option
    {"role": "user", "content": "Foreword asks"},
    {"role": "assistant", "content": "Foreword answers"},
    {"role": "user", "content": "Foreword asks again"},
)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint before its weights are loaded."""

    config: Config  # with local paths in `model` and `draft_model`
    path: Path
    tokenizer: Tokenizer
    never_sampled_ids: tuple[int, ...]  # ids without a token, image placeholders, `suppress_tokens`
    vocab_size: int  # rows of the output layer
    processor: ImageProcessor | None = None  # None: text only


def resolve_paths(config: Config) -> Config:
    """Set `model` and `draft_model` to local paths, and apply `speculative_config`.

    The default model is the bundled demo. A bundled model's name as `draft_model` means its draft model.
    Raises ConfigError for several models, CheckpointError for one that is not there.
    """
    return _resolve_paths(config)[0]


def _resolve_paths(config: Config) -> tuple[Config, str | None]:
    """resolve_paths(), and the method of the trained head; None: there is none."""
    if config.models is not None:
        raise ConfigError("models: several models need a server: foreword serve --models", "models")
    config = apply_speculative_config(config)
    name = str(config.model or DEFAULT_MODEL)
    path = BUNDLED[name][0] if name in BUNDLED else resolve_path(name)
    items = {*map(str.strip, config.speculate.split(","))}
    config = replace(config, model=str(path))
    if config.draft_model is None and items & {"auto", "mtp"}:
        if brings_mtp_head(path):
            is_optional, speculate = "mtp" not in items, with_head(config.speculate, "mtp", name)
            config = replace(config, draft_model=str(path), is_head_optional=is_optional)
            return replace(config, speculate=speculate), "mtp"
        if "mtp" in items:
            raise ConfigError(f"speculate: `mtp`: {name} has no MTP head that runs here", "speculate")
    if not config.runs_draft_model:
        return config, None
    name = str(config.draft_model)
    drafter = BUNDLED[name][1] if name in BUNDLED else resolve_path(name)
    method = head_method(drafter, path)
    speculate = with_head(config.speculate, method, name)
    if method is None:
        check_draft_model_options(config)
    return replace(config, draft_model=str(drafter), speculate=speculate), method


def prepare_checkpoint(config: Config) -> CheckpointInfo:
    """Resolve the checkpoints and read the tokenizer.

    Raises CheckpointError, or ConfigError for a draft model whose tokenizer differs from the model's, or a
    trace that cannot be written.
    """
    folder = config.draft_trace_path.parent
    if config.trace is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"trace {config.trace}: {folder} is no directory that can be written", "trace")
    config, method = _resolve_paths(config)
    path = Path(str(config.model))
    check_family(path, "model")
    check_context(config, path)
    tokenizer, rows = read_tokenizer(path)
    processor = read_processor(path)
    apply_options(config, tokenizer, processor)
    for warning in tokenizer.generation_config.warnings:
        logger.warning("%s", warning)
    if config.runs_draft_model and method is None:
        check_draft_model(tokenizer, processor, Path(str(config.draft_model)))
    placeholders = () if processor is None else read_placeholder_ids(path, rows)
    suppressed = (token_id for token_id in tokenizer.suppress_tokens if token_id < rows)
    never_sampled_ids = tuple(sorted({*tokenizer.unassigned_ids(rows), *placeholders, *suppressed}))
    return CheckpointInfo(config, path, tokenizer, never_sampled_ids, rows, processor)


def model_names(config: Config, path: Path) -> tuple[str, ...]:
    """The model's names in the API: --served-model-name, or the last part of its path or hub id."""
    if names := config.served_names():
        return names
    bundled = next((name for name, (model, _) in BUNDLED.items() if model == path), None)
    return (bundled or (config.model or path.name).rstrip("/").rsplit("/", 1)[-1],)


def check_family(path: Path, param: str) -> str:
    """Refuse a model of a known unsupported family before its tokenizer is read.

    Returns the family, which may be unknown. Raises CheckpointError.
    """
    if is_gguf(path):
        family = str(open_gguf(path).metadata.get("general.architecture"))
        reason, source = missing_feature(family), f"{path}: `general.architecture`"
    else:
        file = path / "config.json"
        family = str(read_json(file, "model").get("model_type"))
        reason, source = describe_checkpoint(family), f"{file}: model_type"
    if reason:
        raise CheckpointError(f"{source} {family!r:.80} is not supported{reason}", param)
    return family


def check_context(config: Config, path: Path) -> None:
    """Check `max_model_len` before the engine starts, unless RoPE options extend the checkpoint's positions.

    Raises ConfigError, CheckpointError.
    """
    if config.max_model_len is None:
        return
    if is_gguf(path):
        metadata = open_gguf(path).metadata
        prefix = metadata.get("general.architecture")
        positions = metadata.get(f"{prefix}.context_length")
        rope = metadata.get(f"{prefix}.rope.scaling.type")
    else:
        values = read_json(path / "config.json", "model")
        values |= values["text_config"] if isinstance(values.get("text_config"), dict) else {}
        positions = values.get("max_position_embeddings")
        rope = values.get("rope_parameters") or values.get("rope_scaling")
    if isinstance(positions, int) and not any(name in str(rope) for name in EXTENDING_ROPE_TYPES):
        check_max_model_len(config, positions)


def has_chat_template(path: Path) -> bool:
    """Whether a checkpoint has a chat template. Raises CheckpointError."""
    if is_gguf(path):
        return bool(open_gguf(path).metadata.get(CHAT_TEMPLATE_KEY))
    return bool(read_tokenizer_files(path).chat_template)


def read_tokenizer(path: Path) -> tuple[Tokenizer, int]:
    """Tokenizer and model vocabulary size of a checkpoint. Raises CheckpointError."""
    if is_gguf(path):
        gguf = open_gguf(path)
        vocab_size = gguf.vocab_size  # a file with only a vocabulary is refused for its tensor
        return build_gguf_tokenizer(gguf.metadata, str(path)), vocab_size
    file = path / "config.json"
    text_config = read_text_config(ConfigReader(read_json(file), str(file)))
    return Tokenizer.from_directory(path), read_vocab_size(text_config)


def apply_options(config: Config, tokenizer: Tokenizer, processor: ImageProcessor | None) -> None:
    """Apply `generation_config` and `chat_template`.

    Raises ConfigError for a template that does not work, and for a `tool_format` that there is not.
    """
    if config.tool_format not in (formats := ("auto", "none", *FORMATS)):
        hint = did_you_mean(config.tool_format, formats) or f": it is one of {', '.join(formats)}"
        raise ConfigError(f"tool_format {config.tool_format!r:.80} is not known{hint}", "tool_format")
    if config.generation_config != "auto":
        tokenizer.generation_config = GenerationConfig()
    if config.chat_template is None:
        return
    tokenizer.chat_template, source = read_chat_template(config.chat_template)
    placeholder = None if processor is None else processor.placeholder_text
    try:
        template = ChatTemplate.from_tokenizer(tokenizer, placeholder)
        try:
            text = template.render(PROBE_MESSAGES)
        except InvalidRequest:  # it may need tools; a chat without is refused then
            text = template.render(PROBE_MESSAGES, tools=[PROBE_TOOL])
    except (CheckpointError, InvalidRequest) as error:
        raise ConfigError(f"chat_template {source}: {error.message}", "chat_template") from None
    if PROBE_MESSAGES[-1]["content"] not in text:
        problem = "the prompt that it renders lacks the text of the last message"
        raise ConfigError(f"chat_template {source}: {problem}", "chat_template")


def read_chat_template(value: str) -> tuple[str, str]:
    """A template and its name in errors, from a file's path or the text itself. Raises ConfigError."""
    if any(mark in value for mark in ("{{", "{%")):
        return value, "text"
    try:
        return Path(value).expanduser().read_text(encoding="utf-8"), value
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        problem = f"is no readable file ({reason}), nor the text of a template, which has {{{{ or {{%"
        raise ConfigError(f"chat_template {value:.200} {problem}", "chat_template") from None


def check_draft_model(tokenizer: Tokenizer, processor: ImageProcessor | None, path: Path) -> int:
    """Check that the model in `path` can draft for a model with this tokenizer and image processor.

    The draft model may lack added tokens, such as those of images. A vision-language draft model must
    preprocess images like the model. Returns the number of added tokens that it lacks. Raises ConfigError.
    """
    family = check_family(path, "draft_model")
    if family in TYPES_WITH_STATES:
        raise draft_model_with_states(family)
    drafter, rows = read_tokenizer(path)
    difference = tokenizer.diff(drafter)
    if difference is not None:
        problem = f"tokenizer differs from the model's: {difference}"
        raise ConfigError(f"the draft model's {problem}", "draft_model")
    if rows < drafter.vocab_size:
        problem = f"vocabulary has {rows} ids; its tokenizer's go up to id {drafter.vocab_size - 1}"
        raise ConfigError(f"the draft model's {problem}", "draft_model")
    draft_processor = read_processor(path)
    if processor is None and draft_processor is not None:
        raise ConfigError("the draft model takes images, but the model is text only", "draft_model")
    if draft_processor not in (None, processor):
        problem = f"image processor differs from the model's: {draft_processor} instead of {processor}"
        raise ConfigError(f"the draft model's {problem}", "draft_model")
    return len(tokenizer.added_tokens_missing_in(drafter))
