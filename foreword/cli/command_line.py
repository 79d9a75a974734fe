"""The command line: one module per subcommand, imported only when it runs.

The command line is read, and names of models are checked, before anything is imported that takes time.
Exit codes: 0 done, 1 it failed, 2 the command line or the configuration is wrong, 130 Ctrl-C, 143 SIGTERM;
the server ends with 0 on SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from foreword import __version__
from foreword.cli.batch_file import check_files
from foreword.cli.configuration import (
    check_foreign_keys,
    foreign_variables,
    print_line,
    read_config,
    read_log_format,
    unknown_variables,
)
from foreword.cli.flags import (
    add_check_arguments,
    add_env_arguments,
    add_run_batch_arguments,
    add_serve_arguments,
    add_train_head_arguments,
)
from foreword.cli.listener import bind
from foreword.cli.startup import startup_line
from foreword.config.foreign_flags import NO_EFFECT, translate_words
from foreword.config.models_file import read_models
from foreword.config.option_parsing import KIND_NAMES
from foreword.config.options import Config
from foreword.demo import BUNDLED, DEFAULT_MODEL
from foreword.errors import CheckpointError, ConfigError, ForewordError, Terminated, did_you_mean
from foreword.server.auth.key_file import check_quotas, read_key_file
from foreword.server.auth.usage_db import check_usage_file
from foreword.weights.hub import find_local, resolve_path

FORK_SERVER = "foreword.engine_client.forkserver"
EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand; its module, of the same name, offers `run(args) -> int`.

    start          begins the start-up line, which the module ends; empty: it has nothing to wait for
    add_arguments  declares its flags; None: the module has it, and imports neither torch nor FastAPI
    """

    name: str
    help: str
    start: str
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None

    @property
    def module(self) -> str:
        return f"foreword.{'bench.command' if self.name == 'bench' else 'cli.' + self.name.replace('-', '_')}"


COMMANDS = (
    Subcommand("serve", "start the server", "loading", add_serve_arguments),
    Subcommand("chat", "talk to a model; draft tokens are coloured", "loading"),
    Subcommand("generate", "print one answer", "loading"),
    Subcommand("run-batch", "answer a file of requests", "loading", add_run_batch_arguments),
    Subcommand(
        "train-head", "train an EAGLE-3 head, which drafts, for a model", "loading", add_train_head_arguments
    ),
    Subcommand("top", "show models, load, acceptance and usage of a running server", ""),
    Subcommand("keys", "create, limit, list and revoke API keys; their usage", ""),
    Subcommand("fleet", "a model's servers on many machines, by Ray", ""),
    Subcommand("reload", "replace a server's engines under open streams", ""),
    Subcommand("bench", "measure: latency, throughput, serve, speculate, agent, kernels, gpu", "bench"),
    Subcommand("check", "does a model fit, and does a draft model match it", "checking", add_check_arguments),
    Subcommand("env", "versions, hardware and kernel backends", "reading versions", add_env_arguments),
)
# Commands of ollama, vLLM and others. MODEL is replaced by the word that follows.
FOREIGN_COMMANDS = {
    "run": "`foreword chat MODEL` talks to a model, `foreword serve MODEL` serves it",
    "pull": "`foreword serve MODEL` downloads a model when it has a hub id (organisation/name)",
    **dict.fromkeys(
        ("list", "ls"), "there is no list of models: name a directory, a GGUF file, a hub id, or the demo"
    ),
    "ps": "`foreword top --once` shows the models of a running server, and which are loaded",
    "show": "`foreword check MODEL` describes a model",
    **dict.fromkeys(("stop", "rm"), "Ctrl-C or SIGTERM ends a server; models are ordinary files"),
    **dict.fromkeys(("create", "cp", "push"), "models are ordinary directories and files"),
    **dict.fromkeys(
        ("start", "server", "api_server", "launch_server", "openai"), "`foreword serve MODEL` starts a server"
    ),
    **dict.fromkeys(("complete", "completion"), "`foreword generate PROMPT` prints one answer"),
    **dict.fromkeys(("benchmark", "perf"), "`foreword bench speculate` and its like measure"),
    "version": "`foreword --version` prints the version",
}
# Hints where too many words are given, by command.
TOO_MANY_WORDS = {
    **dict.fromkeys(("serve", "check", "run-batch"), "names of models stand together, without flags between"),
    "chat": "messages are typed after the start; `foreword generate PROMPT` prints one answer",
    "generate": "put quotes around a prompt of several words",
}


def _format_help(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=32)


class _NoEffect(argparse.Action):
    """A flag that changes nothing, and keeps the words before it from taking those after it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        pass


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line that name the nearest flag, and without abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=_format_help)
        self.refusals: list[str] = []  # lines about refused flags of other servers, reported together

    def error(self, message: str) -> NoReturn:
        message = re.sub(
            r"invalid (int|float) value: ", lambda match: f"must be {KIND_NAMES[match[1]]}, got ", message
        )
        message = re.sub(r"^argument (.+?): (?=must |expected )", r"\1 ", message).removeprefix("argument ")
        message = message.replace("the following arguments are required", "missing")
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message == f"missing: {action.metavar}":
                message += f", one of {', '.join(action.choices)}"
        self._print_refusals()
        print_line(self.prog, f"{message} (see {self.prog} --help)", logging.ERROR)
        self.exit(EXIT_USAGE)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses words that are left over here, where the flags of the command are known.

        A command that has options of Config takes flags of other servers, too.
        """
        own = self._option_string_actions
        notes: list[str] = []
        if "--config" in own and has_foreign_words(args, own):
            args, notes, self.refusals = translate_words(args, own)
            if NO_EFFECT in args and NO_EFFECT not in own:
                self.add_argument(NO_EFFECT, action=_NoEffect, nargs=0, help=argparse.SUPPRESS)
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest))
        if self.refusals:
            self._print_refusals()
            self.exit(EXIT_USAGE)
        for line in notes:
            print_line(self.prog, line)
        return namespace, rest

    def _print_refusals(self) -> None:
        for line in self.refusals:
            print_line(self.prog, line, logging.ERROR)

    def _unknown(self, rest: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in rest if word.startswith("-") and word != "-"), None)
        if flag is not None:
            return f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}"
        hint = TOO_MANY_WORDS.get(self.prog.rpartition(" ")[2])
        takes_words = any(not action.option_strings for action in self._actions)
        if not takes_words and "--model" in self._option_string_actions:
            hint = f"`--model {rest[0]}` names a model"
        return f"{rest[0]!r} is one word too many" + (f": {hint}" if hint else "")

    def _get_option_tuples(self, option_string: str) -> Any:
        """A short flag may be joined to its value (-iFILE), but is not completed (-p to -pp)."""
        tuples = super()._get_option_tuples(option_string)
        return [each for each in tuples if each[1] == option_string[:2]]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            problem = f"must be one of {', '.join(names)}, got {value!r}{did_you_mean(str(value), names)}"
            raise argparse.ArgumentError(action, problem)


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


def _parse(words: list[str]) -> argparse.Namespace:
    if not words:
        words = ["--help"]
    elif words[0] == "help":
        words = [*(word for word in words[1:] if not word.startswith("-")), "--help"]
    name = words[0]
    names = [command.name for command in COMMANDS]
    parser = build_parser(name if name in names else None)
    if name in names or name in ("-h", "--help", "--version"):
        return parser.parse_args(words)
    if name.startswith("-"):
        parser.error(f"flags follow a command, such as `foreword serve {name}`")
    if name in FOREIGN_COMMANDS:
        model = next((word for word in words[1:] if not word.startswith("-")), "MODEL")
        hint = FOREIGN_COMMANDS[name].replace("MODEL", model)
        print_line("foreword", f"no command {name!r}: {hint}", logging.ERROR)
        parser.exit(EXIT_USAGE)
    if "/" in name or name.endswith(".gguf") or name in BUNDLED:
        parser.error(f"{name!r} is no command; `foreword serve {name}` serves a model")
    parser.error(f"unknown command {name!r}{did_you_mean(name, names)}")


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; only the chosen command's module is imported and adds its arguments."""
    parser = Parser(
        prog="foreword",
        description="LLM inference and serving with exact speculative decoding.",
        epilog="`foreword COMMAND --help` explains a command; `foreword serve` serves the bundled demo.",
    )
    parser.add_argument("--version", action="version", version=f"foreword {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.help, description=command.help[:1].upper() + command.help[1:] + "."
        )
        if command.name == chosen:
            add_arguments = command.add_arguments
            if add_arguments is None:
                module: Any = importlib.import_module(command.module)
                add_arguments = module.add_arguments
            add_arguments(sub)
            _finish(sub)
            sub.set_defaults(module=command.module, start=command.start)
    return parser


def _finish(parser: argparse.ArgumentParser) -> None:
    """Give the parser, or those of its subcommands, a short usage if it has options of Config."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                _finish(sub)
    if "--config" in parser._option_string_actions:
        parser.usage = " ".join((parser.prog, "[flags]", *_required_words(parser)))


def _required_words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings:
            dots = " ..." if action.nargs == "*" else ""
            yield f"[{action.metavar}{dots}]" if action.nargs in ("?", "*") else str(action.metavar)
        elif action.required:
            yield f"{action.option_strings[0]} {action.metavar}"


def run_command_line(words: Sequence[str], is_process: bool = False) -> int:
    """Run one command and return its exit code. Errors meant for the user are one line on stderr.

    is_process  answer signals, and show what the command waits for
    """
    startup_line.log_format = read_log_format(words)
    args = _parse(list(words))
    try:
        config = _check_config(args, is_process) if hasattr(args, "config") else None
        if is_process and args.start:
            startup_line.begin(f"foreword {__version__}: {_describe_start(args, config)}")
        with contextlib.ExitStack() as stack:
            if args.command == "serve":  # the engine imports torch while this process imports the server
                args.fork_server = stack.enter_context(importlib.import_module(FORK_SERVER).ForkServer())
            run = getattr(args, "run", None) or importlib.import_module(args.module).run
            gc.enable()
            if is_process:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if args.command != "serve":
                    signal.signal(signal.SIGTERM, _terminate)
            code = int(run(args))
        sys.stdout.flush()
        return code
    except ForewordError as error:
        startup_line.end()
        return _print_error(error, args)
    except KeyboardInterrupt:
        startup_line.end()
        print_line(f"foreword {args.command}", "interrupted", logging.INFO)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        return EXIT_FAILURE


def _check_config(args: argparse.Namespace, fetch: bool) -> Config:
    """The options; unknown variables get a warning. Raises ConfigError or CheckpointError.

    fetch  download models with a hub id now, before the start-up line of the command
    """
    config = read_config(args)
    warnings = unknown_variables()
    if args.command == "serve":
        check_foreign_keys(config)
        _check_server_files(config)
    elif args.command == "run-batch":
        check_files(Path(args.input), Path(args.output))
    prog = f"foreword {args.command}"
    if _server_url(args) is None:
        warnings += foreign_variables()
    for line in warnings:
        print_line(prog, f"warning: {line}")
    if _server_url(args) is None:
        configs = [config]
        if config.models is not None:
            configs = [entry.config for entry in read_models(config).entries]
        draft_models = (each.draft_model for each in configs if each.runs_draft_model)
        for name in (
            *(each.model for each in configs),
            *draft_models,
            *(each.embedding_model for each in configs),
        ):
            if name is not None and name not in BUNDLED and find_local(name, BUNDLED) is None and fetch:
                _fetch(prog, name)
    return config


def _fetch(prog: str, name: str) -> None:
    """Download a model unless it is in the hub's cache. Raises CheckpointError."""
    print_line(prog, f"fetching {name}, unless it is in the hub's cache", logging.INFO)
    startup_line.begin(f"{prog}: fetching {name}", at_once=False)
    try:
        resolve_path(name, partial(startup_line.on_load, "download"))
    finally:
        startup_line.end()


def _check_server_files(config: Config) -> None:
    """Raises ConfigError for files and addresses of the server that cannot be used, before slow imports."""
    if config.api_key_file is not None:
        key_file = Path(config.api_key_file)
        check_quotas(read_key_file(key_file), key_file, config.usage_db is not None)
    if config.usage_db is not None:
        check_usage_file(Path(config.usage_db))
    if config.uds is None:
        bind(config.host, config.port).close()
    elif not (folder := Path(config.uds).parent).is_dir():
        raise ConfigError(f"cannot listen on uds {config.uds}: {folder} is no directory", "uds")


def _server_url(args: argparse.Namespace) -> str | None:
    """The running server that the command uses instead of loading a model."""
    url = getattr(args, "base_url", None) or getattr(args, "url", None)
    return None if url is None else str(url)


def _describe_start(args: argparse.Namespace, config: Config | None) -> str:
    start = f"{args.start} {args.bench}" if args.start == "bench" else str(args.start)
    if config is None:
        return start
    if (url := _server_url(args)) is not None:
        return f"{args.command} at {url}"
    if config.models is not None:
        return f"{args.command}: reading {config.models}"
    draft = f" and {config.draft_model}" if config.runs_draft_model else ""
    return f"{start} {config.models or config.model or DEFAULT_MODEL}{draft}"


def _terminate(signum: int, frame: object) -> NoReturn:
    raise Terminated(EXIT_TERMINATED)


def _print_error(error: ForewordError, args: argparse.Namespace) -> int:
    if str(getattr(args, "log_level", "")).lower() == "debug":
        logging.getLogger("foreword").exception("failed")
    print_line(f"foreword {args.command}", str(error), logging.ERROR)
    return EXIT_USAGE if isinstance(error, ConfigError | CheckpointError) else EXIT_FAILURE
