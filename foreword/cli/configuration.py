"""The Config of a command: flags, environment variables, config file.

Precedence: flag, FOREWORD_* environment variable, config file, default. A ConfigError names the option. Flags
of other servers are answered with ours (`foreword/config/foreign_flags.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from foreword.cli.flags import flag
from foreword.cli.startup import startup_line
from foreword.config.foreign_flags import describe_variable
from foreword.config.option_parsing import (
    SERVICE_SCHEMES,
    compose_yaml,
    items_of,
    parse_option,
    read_option_key,
    read_option_value,
    type_name,
)
from foreword.config.options import Config, option_fields
from foreword.config.speculative_config import apply_speculative_config
from foreword.core.params import RANDOM_SEED
from foreword.errors import ConfigError, did_you_mean
from foreword.utils.logging import JSONFormatter

PREFIX = "FOREWORD_"
OTHER_VARIABLES = ("FOREWORD_CONFIG", "FOREWORD_NATIVE", "FOREWORD_TRITON_VARIANTS")  # not options
TEST_PREFIX = "FOREWORD_TEST_"
FOREIGN_PREFIXES = ("VLLM_", "LLAMA_ARG_", "SGLANG_")
FOREIGN_KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY", "LLAMA_ARG_API_KEY", "LLAMA_ARG_API_KEY_FILE")
# Kubernetes sets these for a service whose name begins with such a prefix.
SERVICE_VARIABLE = re.compile(
    r"(FOREWORD|VLLM|SGLANG)_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)\w*)"
)


def environment_name(name: str) -> str:
    """ "max_model_len" -> "FOREWORD_MAX_MODEL_LEN"."""
    return PREFIX + name.upper()


def read_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Config:
    """The Config of flags, environment and file. Raises ConfigError."""
    path = getattr(args, "config", None) or environ.get(PREFIX + "CONFIG")
    values = _from_file(Path(path)) if path else {}
    values.update(_from_environment(environ))
    given = {item.name: getattr(args, item.name) for item in option_fields() if hasattr(args, item.name)}
    words = [*getattr(args, "model_words", ()), *filter(None, [getattr(args, "model_word", None)])]
    name, model = "models" if len(words) > 1 else "model", ",".join(words)
    if words and given.setdefault(name, model) != model:
        problem = f"two models are given, {model} and {flag(name)} {given[name]}; leave one out"
        raise ConfigError(problem, name)
    values.update(given)
    if values.get("seed") == RANDOM_SEED:
        values["seed"] = None
    _check_swallowed_model(args, values)
    return apply_speculative_config(Config(**values))


def read_log_format(words: Sequence[str]) -> str:
    """`log_format` as far as these words and the config file can be read: their errors are written in it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-format", nargs="?", default=os.environ.get(environment_name("log_format")))
    parser.add_argument("--config", nargs="?", default=os.environ.get(PREFIX + "CONFIG"))
    given, _ = parser.parse_known_args(words)
    if not given.log_format and given.config:
        root = None
        with contextlib.suppress(ConfigError):  # read_config() reports it
            root = compose_yaml("config file", Path(given.config))
        if isinstance(root, yaml.MappingNode):
            options = {str(key.value): value.value for key, value in root.value}
            given.log_format = options.get("log-format", options.get("log_format"))
    return "json" if given.log_format == "json" else "text"


def print_line(prog: str, message: str, level: int = logging.WARNING) -> None:
    """Write a message of the command line to stderr, in the log format of the start-up line."""
    text = f"{prog}: {message}"
    if startup_line.log_format == "json":
        record = logging.LogRecord(prog.replace(" ", "."), level, "", 0, message, None, None)
        text = JSONFormatter(logging.Formatter()).format(record)
    print(text, file=sys.stderr)


def _check_swallowed_model(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Raises ConfigError if --served-model-name may have taken the MODEL that follows it for a name."""
    words: list[str] = getattr(args, "served_model_name_words", [])
    if len(words) > 1 and values.get("model") is None:
        raise ConfigError(
            f"--served-model-name {' '.join(words)}: no MODEL is given; if {words[-1]!r} is the model, "
            "put it before this flag; if these are names of the demo, join them with commas",
            "served_model_name",
        )


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of FOREWORD_* variables; an empty one counts as not set, unless the option guards access.

    An option may have a second variable, which other programs read too.
    """
    names = {item: environment_name(item.name) for item in option_fields()}
    for item, name in names.items():
        if not environ.get(name) and environ.get(item.metadata["variable"]):
            names[item] = item.metadata["variable"]
    return {
        item.name: parse_option(name, type_name(item), environ[name])
        for item, name in names.items()
        if environ.get(name) or (name in environ and item.metadata["guards_access"])
    }


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each FOREWORD_* variable that is no option, with the nearest one.

    They are no errors: a platform may set variables of this prefix, as Kubernetes does for services.
    """
    known = {*OTHER_VARIABLES, *(environment_name(item.name) for item in option_fields())}
    return [
        f"unknown environment variable {name} has no effect{did_you_mean(name, known)}"
        for name in sorted(environ)
        if name.startswith(PREFIX)
        and name not in known
        and not name.startswith(TEST_PREFIX)
        and not SERVICE_VARIABLE.fullmatch(name)
        and not environ[name].startswith(SERVICE_SCHEMES)
    ]


def foreign_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """At most one line, which names the set variables of other servers and our flags for them."""
    shown = []
    for name in sorted(environ):
        value = environ[name]
        is_service = SERVICE_VARIABLE.fullmatch(name) or value.startswith(SERVICE_SCHEMES)
        if value and not is_service and name.startswith(FOREIGN_PREFIXES) and name not in FOREIGN_KEYS:
            ours = describe_variable(name, value)
            shown.append(f"{name} (here {ours})" if ours else name)
    return [f"variables of other servers have no effect: {', '.join(shown)}"] if shown else []


def check_foreign_keys(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where a server would be open although another server's variable has a key for it."""
    name = next((name for name in FOREIGN_KEYS if environ.get(name)), None)
    if name is not None and config.api_key is None and config.api_key_file is None:
        raise ConfigError(
            f"{name} is set, but has no effect here, and the server would be open: set FOREWORD_API_KEY "
            f"(or --api-key, --api-key-file), or unset {name}",
            "api_key",
        )


def _from_file(path: Path) -> dict[str, Any]:
    """Options of a YAML file."""
    file = f"config file {path}"
    root = compose_yaml("config file", path)
    values: dict[str, Any] = {}
    for where, key, node in () if root is None else items_of(file, root, "`option: value` lines"):
        name = read_option_key(where, key)
        if name in values:
            raise ConfigError(f"{where}: {key} is given twice", name)
        values[name] = read_option_value(f"{where}: {key}", name, node)
    return {name: value for name, value in values.items() if value is not None}


def engine_fields(config: Config) -> dict[str, Any]:
    """The options that differ from their defaults, as keyword arguments of `LLM`."""
    values = {item: getattr(config, item.name) for item in option_fields()}
    return {item.name: value for item, value in values.items() if value != item.default}


def to_environment(config: Config) -> dict[str, str]:
    """The options as variables: keys are not for a command line, which every user of a machine can read."""
    return {
        environment_name(name): json.dumps(value) if isinstance(value, bool) else str(value)
        for name, value in engine_fields(config).items()
    }
