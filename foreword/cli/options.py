"""Flags, environment variables and the config file, all derived from the fields of `Config`.

Precedence: flag, then FOREWORD_* environment variable, then config file, then default. Whatever is
wrong is a ConfigError that names the option, and its source where it cannot be read at all.

Flags for the sampling parameters of one answer.

Flags that say what an answer must look like.

Pictures of the command line: files become parts of a message, as a server takes them.
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
from foreword.core.structured import StructuredOutput
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

Message = Mapping[str, Any]  # `content` is a text, or a list of parts

GROUPS = ("model", "scheduler", "speculation", "pictures", "server")
ENGINE_GROUPS = ("model", "scheduler", "speculation", "pictures")
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
    """Add a flag for each field of Config in `groups` or named in `more`, and --config.

    Flags that are not given leave nothing behind, so that the sources below them can speak.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these options, dashes or underscores"
    )
    sections = {name: parser.add_argument_group(name) for name in GROUPS if name in groups or more}
    for item in option_fields():
        if item.metadata["group"] in groups or item.name in more:
            _add_option(sections[item.metadata["group"]], item)


def read_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Config:
    """The Config that flags, environment and file make together.

    Raises ConfigError for an unknown key, a wrong type or an impossible value.
    """
    path = getattr(args, "config", None) or environ.get(PREFIX + "CONFIG")
    values = _from_file(Path(path)) if path else {}
    values.update(_from_environment(environ))
    values.update(
        {item.name: getattr(args, item.name) for item in option_fields() if hasattr(args, item.name)}
    )
    return Config(**values).with_speculative_config()


def help_text(item: Any) -> str:
    """Help of one field with its default, unless the text tells it already."""
    text = str(item.metadata["help"])
    if "(default" in text or item.default is None or isinstance(item.default, bool) or item.default == "":
        return text
    return f"{text} (default: {item.default})"


def type_name(item: Any) -> str:
    """ "str", "int", "float" or "bool": the type of a field, None aside."""
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
    """Values of FOREWORD_* variables; an empty one counts as not set."""
    given = {item: environ.get(environment_name(item.name), "") for item in option_fields()}
    return {
        item.name: _parse(environment_name(item.name), type_name(item), text)
        for item, text in given.items()
        if text
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
    """Options of a YAML file. Every value is read as text and parsed like a flag: YAML's own `off` is a boolean."""
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}", "config") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"config file {path} is not YAML: {' '.join(str(error).split())}", "config"
        ) from None
    if not given:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"config file {path} must hold `option: value` lines", "config")
    return dict(
        _file_option(path, str(key), value) for key, value in given.items() if value not in ("", "null", "~")
    )


def _file_option(path: Path, key: str, value: object) -> tuple[str, Any]:
    item = _check_known(path, key)
    source = f"config file {path}: {key}"
    if not isinstance(value, str):
        raise ConfigError(f"{source} must be a single value", item.name)
    return item.name, _parse(source, type_name(item), value)


def _check_known(path: Path, key: str) -> Any:
    items = {item.name: item for item in option_fields()}
    name = key.replace("-", "_")
    if name not in items:
        close = difflib.get_close_matches(name, items, n=1)
        hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
        raise ConfigError(f"config file {path}: unknown option {key!r}{hint}", "config")
    return items[name]


def engine_fields(config: Config) -> dict[str, Any]:
    """What `config` says beyond the defaults, as keyword arguments of `LLM`."""
    return {
        item.name: getattr(config, item.name)
        for item in option_fields()
        if getattr(config, item.name) != item.default
    }


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """A field of SamplingParams that is also a flag. (`--seed` and `--on-runaway` are fields of Config.)"""

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
    SamplingFlag(
        "typical_p", float, 1.0, "keep tokens about as surprising as expected, up to this probability"
    ),
    SamplingFlag(
        "top_n_sigma",
        float,
        0.0,
        "keep tokens at most so many standard deviations below the likeliest; 0 keeps all",
    ),
    SamplingFlag("xtc_probability", float, 0.0, "how often to exclude likely tokens"),
    SamplingFlag(
        "xtc_threshold", float, 0.1, "likely are those of at least this probability; the last of them stays"
    ),
    SamplingFlag("presence_penalty", float, 0.0, "subtract from tokens that the answer has already"),
    SamplingFlag(
        "frequency_penalty", float, 0.0, "subtract for every time that the answer has a token already"
    ),
    SamplingFlag("repetition_penalty", float, 1.0, "divide by this what prompt or answer have already"),
    SamplingFlag("dry_multiplier", float, 0.0, "subtract from tokens that would go on with a repeat"),
    SamplingFlag("dry_base", float, 1.75, "times this for each token that the repeat is longer than allowed"),
    SamplingFlag("dry_allowed_length", int, 2, "longest repeat that may go on for the multiplier alone"),
)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for item in FLAGS:
        group.add_argument(
            "--" + item.name.replace("_", "-"),
            type=item.type,
            default=item.default,
            metavar="N",
            help=item.help,
        )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be repeated",
    )
    group.add_argument(
        "--speculation", metavar="METHOD", help="for this answer: auto, off, or the name of one drafter"
    )


def read_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that were given, the defaults elsewhere. Raises InvalidRequest."""
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
    group.add_argument(
        "--json-schema", metavar="FILE", help="the answer is a JSON document that conforms to this schema"
    )
    group.add_argument("--regex", metavar="TEXT", help="the whole answer matches this expression")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="the answer is this, or another --choice"
    )
    group.add_argument(
        "--grammar", metavar="FILE", help="the answer follows this grammar: GBNF (with ::=) or Lark"
    )


def read_structured(args: argparse.Namespace) -> StructuredOutput | None:
    """What was asked for, or None. Raises ConfigError for a file that cannot be read, InvalidRequest for what is none."""
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


DEFAULT_MIME_TYPE = "image/png"  # some servers want to be told a type; ours looks at the bytes


def add_image_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help=f"{what}; may be given several times"
    )


def user_message(text: str, images: Sequence[str]) -> Message:
    """What the user says, behind the pictures that are shown. Raises InvalidRequest for a file that cannot be read."""
    return {
        "role": "user",
        "content": [*map(_part, images), {"type": "text", "text": text}] if images else text,
    }


def _part(file: str) -> dict[str, Any]:
    try:
        data = Path(file).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidRequest(f"--image {file}: {reason}", "image") from None
    kind = mimetypes.guess_type(file)[0] or DEFAULT_MIME_TYPE
    return {
        "type": "image_url",
        "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"},
    }
