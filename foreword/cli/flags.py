"""Flags, environment variables and the config file, from the fields of `Config`, and flags of requests.

Precedence: flag, FOREWORD_* environment variable, config file, default. A ConfigError names the option.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import mimetypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from foreword.config.options import Config, option_fields
from foreword.core.params import SamplingParams, Speculation
from foreword.core.structured_output import StructuredOutput
from foreword.errors import ConfigError, InvalidRequest

__all__ = [
    "FLAGS",
    "GROUPS",
    "Message",
    "SamplingFlag",
    "add_config_options",
    "add_image_option",
    "add_sampling_options",
    "add_structured_options",
    "environment_name",
    "flag",
    "read_config",
    "read_params",
    "read_structured",
    "read_text",
    "user_message",
]

Message = Mapping[str, Any]  # `content` is a text or a list of parts

GROUPS = ("model", "scheduler", "speculation", "images", "server")
ENGINE_GROUPS = ("model", "scheduler", "speculation", "images")
PREFIX = "FOREWORD_"
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")


def flag(name: str) -> str:
    """ "max_model_len" -> "--max-model-len"."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """ "max_model_len" -> "FOREWORD_MAX_MODEL_LEN"."""
    return PREFIX + name.upper()


def add_config_options(
    parser: argparse.ArgumentParser, groups: Sequence[str] = GROUPS, more: Sequence[str] = ()
) -> None:
    """Add --config, and a flag for each field of Config in `groups` or named in `more`.

    A flag that is not given sets no attribute, so that the environment or the file applies.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these options, dashes or underscores"
    )
    sections = {name: parser.add_argument_group(name) for name in GROUPS if name in groups or more}
    for item in option_fields():
        if item.metadata["group"] in groups or item.name in more:
            _add_option(sections[item.metadata["group"]], item)


def read_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Config:
    """The Config of flags, environment and file. Raises ConfigError."""
    path = getattr(args, "config", None) or environ.get(PREFIX + "CONFIG")
    values = _from_file(Path(path)) if path else {}
    values.update(_from_environment(environ))
    values.update(
        {item.name: getattr(args, item.name) for item in option_fields() if hasattr(args, item.name)}
    )
    return Config(**values).with_speculative_config()


def help_text(item: Any) -> str:
    """Help of one field, with its default."""
    text = str(item.metadata["help"])
    if "(default" in text or item.default is None or isinstance(item.default, bool) or item.default == "":
        return text
    return f"{text} (default: {item.default})"


def type_name(item: Any) -> str:
    """Type of a field without None: "str", "int", "float" or "bool"."""
    return str(item.type).split("|")[0].strip()


def _add_option(section: Any, item: Any) -> None:
    help_ = help_text(item).replace("%", "%%")
    kind = type_name(item)
    common = {"dest": item.name, "default": argparse.SUPPRESS, "help": help_}
    if kind == "bool":
        section.add_argument(flag(item.name), action=argparse.BooleanOptionalAction, **common)
    elif item.metadata["choices"]:
        section.add_argument(flag(item.name), choices=item.metadata["choices"], **common)
    else:
        section.add_argument(flag(item.name), type=PARSERS[kind], metavar=METAVARS[kind], **common)


PARSERS: Mapping[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
METAVARS = {"str": "TEXT", "int": "N", "float": "X"}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of FOREWORD_* variables; an empty variable counts as not set."""
    names = {item: environment_name(item.name) for item in option_fields()}
    return {
        item.name: _parse(name, type_name(item), environ[name])
        for item, name in names.items()
        if environ.get(name)
    }


def _parse(source: str, type_name: str, text: str) -> Any:
    if type_name == "bool":
        if text.lower() not in TRUE + FALSE:
            raise ConfigError(f"{source} must be one of {', '.join(TRUE + FALSE)}, got {text!r}", source)
        return text.lower() in TRUE
    try:
        return PARSERS[type_name](text)
    except ValueError:
        raise ConfigError(f"{source} must be of type {type_name}, got {text!r}", source) from None


def _from_file(path: Path) -> dict[str, Any]:
    """Options of a YAML file, as text parsed like flags: YAML's own `off` would be a boolean."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}", "config") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"config file {path} is not YAML: {' '.join(str(error).split())}", "config"
        ) from None
    if not values:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must hold `option: value` lines", "config")
    items = [(str(key), value) for key, value in values.items() if value not in ("", "null", "~")]
    return dict(_file_option(path, key, value) for key, value in items)


def _file_option(path: Path, key: str, value: object) -> tuple[str, Any]:
    items = {item.name: item for item in option_fields()}
    name, source = key.replace("-", "_"), f"config file {path}: {key}"
    if name not in items:
        close = difflib.get_close_matches(name, items, n=1)
        hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
        raise ConfigError(f"config file {path}: unknown option {key!r}{hint}", "config")
    if not isinstance(value, str):
        raise ConfigError(f"{source} must be a single value", name)
    return name, _parse(source, type_name(items[name]), value)


def engine_fields(config: Config) -> dict[str, Any]:
    """The options that differ from their defaults, as keyword arguments of `LLM`."""
    values = {item: getattr(config, item.name) for item in option_fields()}
    return {item.name: value for item, value in values.items() if value != item.default}


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """A field of SamplingParams that is also a flag; `--seed` and `--on-runaway` are fields of Config."""

    name: str
    type: Any
    default: Any
    help: str


FLAGS = (
    SamplingFlag("max_tokens", int, 512, "longest answer in tokens (default 512)"),
    SamplingFlag("temperature", float, 0.0, "0, the default, takes the likeliest token"),
    SamplingFlag("top_p", float, 1.0, "keep the likeliest tokens up to this probability"),
    SamplingFlag("top_k", int, 0, "keep this many of the likeliest tokens; 0 keeps all"),
    SamplingFlag("min_p", float, 0.0, "drop tokens less likely than this share of the likeliest"),
    SamplingFlag("typical_p", float, 1.0, "keep tokens of typical surprise, up to this probability"),
    SamplingFlag(
        "top_n_sigma", float, 0.0, "keep logits within this many standard deviations of the best; 0 keeps all"
    ),
    SamplingFlag("xtc_probability", float, 0.0, "how often to exclude likely tokens"),
    SamplingFlag("xtc_threshold", float, 0.1, "least probability of a likely token; the last one stays"),
    SamplingFlag("presence_penalty", float, 0.0, "subtract from tokens that the answer has"),
    SamplingFlag("frequency_penalty", float, 0.0, "subtract per occurrence of a token in the answer"),
    SamplingFlag("repetition_penalty", float, 1.0, "divide tokens that prompt or answer have by this"),
    SamplingFlag("dry_multiplier", float, 0.0, "subtract from tokens that would continue a repeat"),
    SamplingFlag("dry_base", float, 1.75, "multiply by this for each token beyond the allowed repeat"),
    SamplingFlag("dry_allowed_length", int, 2, "longest repeat that only the multiplier penalizes"),
)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for item in FLAGS:
        group.add_argument(flag(item.name), type=item.type, default=item.default, metavar="N", help=item.help)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be repeated",
    )
    group.add_argument("--speculation", metavar="METHOD", help="auto, off, or the name of one drafter")


def read_params(args: argparse.Namespace) -> SamplingParams:
    """Sampling parameters of the flags. Raises InvalidRequest."""
    values = {item.name: getattr(args, item.name) for item in FLAGS}
    if args.speculation is not None:
        values["speculation"] = Speculation(args.speculation)
    return SamplingParams(
        stop=tuple(args.stop),
        seed=getattr(args, "seed", None),
        on_runaway=getattr(args, "on_runaway", None),
        **values,
    )


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="the answer is JSON of this schema")
    group.add_argument("--regex", metavar="TEXT", help="the whole answer matches this regular expression")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="the answer is one of the --choice texts"
    )
    group.add_argument(
        "--grammar", metavar="FILE", help="the answer follows this grammar: GBNF (with ::=) or Lark"
    )


def read_structured(args: argparse.Namespace) -> StructuredOutput | None:
    """The constraint of the flags, or None. Raises ConfigError for a file, InvalidRequest."""
    if args.json_schema is not None:
        return StructuredOutput.json_schema(read_text("json-schema", args.json_schema), field="--json-schema")
    if args.grammar is not None:
        return StructuredOutput.grammar(read_text("grammar", args.grammar), field="--grammar")
    if args.regex is not None:
        return StructuredOutput.regex(args.regex, field="--regex")
    return StructuredOutput.choice(args.choice, field="--choice") if args.choice else None


def read_text(flag: str, path: str) -> str:
    """The text of the file that a flag names. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{flag} {path}: {error}", flag) from None


DEFAULT_MIME_TYPE = "image/png"  # some servers require a type; Foreword reads it from the bytes


def add_image_option(parser: argparse.ArgumentParser, description: str) -> None:
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help=f"{description}; may be repeated"
    )


def user_message(text: str, images: Sequence[str]) -> Message:
    """A user message, with its images before the text. Raises InvalidRequest for an unreadable file."""
    if not images:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [*map(_image_part, images), {"type": "text", "text": text}]}


def _image_part(file: str) -> dict[str, Any]:
    try:
        data = Path(file).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(f"--image {file}: {reason}", "image") from None
    mime_type = mimetypes.guess_type(file)[0] or DEFAULT_MIME_TYPE
    url = f"data:{mime_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
