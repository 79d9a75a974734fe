"""Flags, environment variables and the config file, from the fields of `Config`, and flags of requests.

Precedence: flag, FOREWORD_* environment variable, config file, default. A ConfigError names the option. Flags
of other servers are answered with ours (`foreword/config/foreign_flags.py`).
"""

from __future__ import annotations

import argparse
import base64
import logging
import mimetypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from foreword.cli.startup import startup_line
from foreword.config.foreign_flags import describe_variable
from foreword.config.option_text import (
    PARSERS,
    SERVICE_SCHEMES,
    compose_yaml,
    items_of,
    parse_option,
    read_option_key,
    read_option_value,
    type_name,
)
from foreword.config.options import Config, option_fields
from foreword.core.params import SamplingParams, Speculation
from foreword.core.structured_output import StructuredOutput
from foreword.errors import ConfigError, InvalidRequest, did_you_mean
from foreword.utils.logging import JSONFormatter

Message = Mapping[str, Any]  # `content` is a text or a list of parts

GROUPS = ("model", "scheduler", "speculation", "images", "fleet", "server")
ENGINE_GROUPS = ("model", "scheduler", "speculation", "images")
PREFIX = "FOREWORD_"
OTHER_VARIABLES = ("FOREWORD_CONFIG", "FOREWORD_NATIVE", "FOREWORD_TRITON_VARIANTS")  # that are no options
TEST_PREFIX = "FOREWORD_TEST_"
RANDOM_SEED = -1  # as of llama-server
FOREIGN_PREFIXES = ("VLLM_", "LLAMA_ARG_", "SGLANG_")
FOREIGN_KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY", "LLAMA_ARG_API_KEY", "LLAMA_ARG_API_KEY_FILE")
FLEET_OPTIONS = ("memory_limit", "keep_alive", "max_loaded_models", "max_swap_wait")
# Kubernetes sets these for a service whose name begins with such a prefix.
SERVICE_VARIABLE = re.compile(
    r"(FOREWORD|VLLM|SGLANG)_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)\w*)"
)


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
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show the rarely needed flags too")
    sections = {name: parser.add_argument_group(name) for name in GROUPS if name in groups or more}
    for item in option_fields():
        if item.metadata["group"] in groups or item.name in more:
            # Where words follow that are no flags, such as a prompt, a flag takes one word.
            is_many = item.metadata["many"] and "server" in groups
            action = _add_option(sections[item.metadata["group"]], item, is_many)
            if not item.metadata["common"]:
                _hide(action)


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
    return Config(**values).with_speculative_config()


def read_log_format(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """`log_format` as far as these words and the config file can be read: their errors are written in it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-format", nargs="?", default=environ.get(environment_name("log_format")))
    parser.add_argument("--config", nargs="?", default=environ.get(PREFIX + "CONFIG"))
    given, _ = parser.parse_known_args(words)
    if not given.log_format and given.config:
        try:
            options = yaml.load(Path(given.config).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
            given.log_format = options.get("log-format", options.get("log_format"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, AttributeError):
            pass  # read_config() reports it
    return "json" if given.log_format == "json" else "text"


def print_line(prog: str, message: str, level: int = logging.WARNING) -> None:
    """Write a message of the command line to stderr, in the log format of the start-up line."""
    text = f"{prog}: {message}"
    if startup_line.log_format == "json":
        record = logging.LogRecord(prog.replace(" ", "."), level, "", 0, message, None, None)
        text = JSONFormatter(logging.Formatter()).format(record)
    print(text, file=sys.stderr)


def help_text(item: Any) -> str:
    """Help of one field, with its default."""
    text = str(item.metadata["help"])
    if "(default" in text or item.default is None or isinstance(item.default, bool) or item.default == "":
        return text
    return f"{text} (default: {item.default})"


class _HelpAll(argparse.Action):
    """Prints the help with the flags that `_hide` took out of it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for action in parser._actions:
            action.help = getattr(action, "full_help", action.help)
        parser.print_help()
        parser.exit()


def _hide(action: Any) -> None:
    """Show the flag by --help-all only."""
    action.full_help, action.help = action.help, argparse.SUPPRESS


class NoEffectAction(argparse.Action):
    """A flag that changes nothing, and keeps the words before it from taking those after it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        pass


def has_foreign_words(words: Sequence[str], own: Mapping[str, argparse.Action]) -> bool:
    """Whether a word is no flag of ours, or gives one a value that it does not take."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "--":
            break
        name, _, value = word.partition("=")
        action, value = own.get(name), value or following
        if action is None:
            if re.match(r"-\D", word):
                return True
        elif (action.choices and value not in action.choices) or (
            action.type is int and not value.isdecimal()
        ):
            return True
    return False


def _add_option(section: Any, item: Any, is_many: bool) -> argparse.Action:
    help_ = help_text(item).replace("%", "%%")
    kind = type_name(item)
    common = {"dest": item.name, "default": argparse.SUPPRESS, "help": help_}
    if kind == "bool":
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif item.metadata["choices"]:
        options = {"choices": item.metadata["choices"]}
    elif is_many:
        options = {"nargs": "+", "action": _JoinWords, "metavar": METAVARS[kind]}
    else:
        options = {"type": PARSERS[kind], "metavar": METAVARS[kind]}
    action: argparse.Action = section.add_argument(flag(item.name), **options, **common)
    return action


class _JoinWords(argparse.Action):
    """Several words as one value, joined by commas; `NAME_words` keeps their number."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, ",".join(values))
        setattr(namespace, f"{self.dest}_words", values)


def _check_swallowed_model(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Raises ConfigError if --served-model-name may have taken the MODEL that follows it for a name."""
    words: list[str] = getattr(args, "served_model_name_words", [])
    if len(words) > 1 and values.get("model") is None:
        raise ConfigError(
            f"--served-model-name {' '.join(words)}: no MODEL is given; if {words[-1]!r} is the model, "
            "put it before this flag; if these are names of the demo, join them with commas",
            "served_model_name",
        )


METAVARS = {"str": "TEXT", "int": "N", "float": "X"}


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


def unused_options(config: Config) -> list[str]:
    """At most one line, which names the given options of several models where one is served."""
    names = [flag(name) for name in FLEET_OPTIONS if getattr(config, name) is not None]
    if not names or config.models is not None:
        return []
    verb = "has" if len(names) == 1 else "have"
    return [f"{', '.join(names)} {verb} no effect with one model: use --models, as for several"]


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


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """A field of SamplingParams that is also a flag; `--seed` and `--on-runaway` are fields of Config."""

    name: str
    type: Any
    default: Any
    help: str
    common: bool = False  # shown by --help


NO_DEFAULTS: Mapping[str, Any] = {}
FLAGS = (
    SamplingFlag(
        "max_tokens", int, 512, "longest answer in tokens (default: the checkpoint's, else 512)", common=True
    ),
    SamplingFlag(
        "temperature",
        float,
        0.0,
        "0 takes the likeliest token (default: the checkpoint's, else 0)",
        common=True,
    ),
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
        action = group.add_argument(flag(item.name), type=item.type, metavar="N", help=item.help)
        if not item.common:
            _hide(action)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be repeated",
    )
    group.add_argument("--speculation", metavar="METHOD", help="auto, off, or the name of one drafter")


def read_params(args: argparse.Namespace, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
    """Sampling parameters of the flags, else of `defaults`, else of FLAGS. Raises InvalidRequest."""
    values = {item.name: item.default for item in FLAGS} | dict(defaults)
    values |= {name: value for name in values if (value := getattr(args, name, None)) is not None}
    if args.speculation is not None:
        values["speculation"] = Speculation(args.speculation)
    return SamplingParams(
        stop=tuple(args.stop),
        seed=getattr(args, "seed", None),
        on_runaway=getattr(args, "on_runaway", None),
        **values,
    )


@contextmanager
def usage_errors() -> Iterator[None]:
    """An invalid flag of a request is an error of the command line: InvalidRequest becomes ConfigError."""
    try:
        yield
    except InvalidRequest as error:
        raise ConfigError(error.message, error.param) from None


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
