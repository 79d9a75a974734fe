"""Flags, environment variables and the config file, all derived from the fields of `Config`.

Precedence: flag, then FOREWORD_* environment variable, then config file, then default. Whatever is
wrong is a ConfigError that names the option, and its source where it cannot be read at all.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from foreword.config import Config, option_fields
from foreword.errors import ConfigError

__all__ = ["GROUPS", "add_config_options", "environment_name", "flag", "read_config"]

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


def add_config_options(parser: argparse.ArgumentParser, groups: Sequence[str] = GROUPS, more: Sequence[str] = ()) -> None:
    """Add a flag for each field of Config in `groups` or named in `more`, and --config.

    Flags that are not given leave nothing behind, so that the sources below them can speak.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options, dashes or underscores")
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
    values.update({item.name: getattr(args, item.name) for item in option_fields() if hasattr(args, item.name)})
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
    return {item.name: _parse(environment_name(item.name), type_name(item), text) for item, text in given.items() if text}


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
        raise ConfigError(f"config file {path} is not YAML: {' '.join(str(error).split())}", "config") from None
    if not given:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"config file {path} must hold `option: value` lines", "config")
    return dict(_file_option(path, str(key), value) for key, value in given.items() if value not in ("", "null", "~"))


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
    return {item.name: getattr(config, item.name) for item in option_fields() if getattr(config, item.name) != item.default}
