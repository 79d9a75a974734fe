"""Flags: those of `Config`, of requests, and of the commands whose modules take time to import."""

from __future__ import annotations

import argparse
import base64
import mimetypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.config.option_parsing import PARSERS, type_name
from foreword.config.options import option_fields
from foreword.core.params import SamplingParams, Speculation
from foreword.core.structured_output import StructuredOutput
from foreword.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]  # `content` is a text or a list of parts

METAVARS = {"str": "TEXT", "int": "N", "float": "X"}
DEFAULT_MIME_TYPE = "image/png"  # some servers require a type; Foreword reads it from the bytes
GROUPS = ("model", "scheduler", "speculation", "images", "fleet", "server")
ENGINE_GROUPS = ("model", "scheduler", "speculation", "images")


def flag(name: str) -> str:
    """ "max_model_len" -> "--max-model-len"."""
    return "--" + name.replace("_", "-")


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


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_words(parser)
    add_config_options(parser)


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_words(parser)
    add_config_options(parser, (*ENGINE_GROUPS, "fleet"), more=("engine_key", "log_level"))


def add_run_batch_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_words(parser)
    parser.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="requests, one JSON object per line"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results; existing ones stay")
    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="use this server instead of loading a model"
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at once (default: twice what the engine runs)"
    )
    add_config_options(parser)


MAX_SIZE = 1 << 17
DTYPES = ("float32", "bfloat16")
# Flags of `train-head`: name, type, default, help, and limits of a number or choices of a text. Fields of
# AnswerOptions, TrainingOptions and Eagle3Shape.
TRAIN_HEAD_FLAGS: Mapping[str, Sequence[tuple[str, Any, Any, str, tuple[Any, ...]]]] = {
    "answers": (
        ("max_tokens", int, 512, "longest answer in tokens", (1, MAX_SIZE)),
        ("temperature", float, 0.0, "of answers; 0 takes the likeliest token", (0, 100)),
    ),
    "training": (
        ("epochs", int, 3, "how often each answer is learned", (1, 1000)),
        ("batch_tokens", int, 4096, "tokens of a step, with padding", (1, 1 << 22)),
        ("max_length", int, 2048, "tokens of an answer with its prompt; the rest is cut", (2, 1 << 22)),
        ("ttt_steps", int, 3, "passes of training-time test, 1 to 7: longer chains cost more", (1, 7)),
        ("loss_decay", float, 0.8, "weight of each further pass in the loss", (0.01, 1)),
        ("learning_rate", float, 1.0, "factor of the learning rates", (1e-6, 1e3)),
        (
            *("train_dtype", str, "auto"),
            "matrix products in float32 or bfloat16; auto: what the hardware has",
            ("auto", *DTYPES),
        ),
    ),
    "head": (
        ("draft_vocab_size", int, 32000, "the most frequent tokens, which the head predicts", (1, 1 << 31)),
        ("aux_layers", str, None, "layers before which it reads, as 2,16,29 (default: three of them)", ()),
        ("intermediate_size", int, None, "of its MLP (default: the model's)", (1, MAX_SIZE)),
        ("num_attention_heads", int, None, "of its layer (default: the model's)", (1, MAX_SIZE)),
        ("num_key_value_heads", int, None, "of its layer (default: the model's)", (1, MAX_SIZE)),
        ("head_dtype", str, "bfloat16", "type of the weights in the file: bfloat16 or float32", DTYPES),
    ),
}


def add_train_head_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    parser.add_argument("data", metavar="DATA", help="JSONL: messages, a prompt or a text in each line")
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="the head; the same command continues a run"
    )
    for title, flags in TRAIN_HEAD_FLAGS.items():
        group = parser.add_argument_group(title)
        for name, kind, default, text, allowed in flags:
            help_ = text if default is None else f"{text} (default: {default})"
            options = {"choices": allowed} if kind is str and allowed else {"type": kind}
            metavar = METAVARS[kind.__name__]
            group.add_argument(flag(name), **options, default=default, metavar=metavar, help=help_)
    add_config_options(parser, ENGINE_GROUPS, more=("log_level",))


def add_env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def add_model_word(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_word", nargs="?", metavar="MODEL", help="same as --model")


def add_model_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_words", nargs="*", metavar="MODEL", help="same as --model; several: --models")
