"""The `foreword` command: one module per subcommand, imported only when it runs.

Exit codes: 0 done, 1 it failed, 2 the command line or the configuration is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from foreword import __version__
from foreword.errors import CheckpointError, ConfigError, ForewordError

__all__ = ["COMMANDS", "Subcommand", "build_parser", "main"]

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand; its module offers `add_arguments(parser)` and `run(args) -> int`."""

    name: str
    module: str
    help: str


COMMANDS = (
    Subcommand("serve", "foreword.cli.serve", "start the server"),
    Subcommand("chat", "foreword.cli.chat", "talk to a model; draft tokens are coloured"),
    Subcommand("generate", "foreword.cli.generate", "print one answer"),
    Subcommand("run-batch", "foreword.cli.run_batch", "answer a file of requests"),
    Subcommand("keys", "foreword.cli.keys", "create, list and revoke API keys"),
    Subcommand(
        "bench", "foreword.bench.command", "measure: latency, throughput, serve, speculate, kernels, gpu"
    ),
    Subcommand("check", "foreword.cli.check", "does a model fit, and does a draft model match it"),
    Subcommand("env", "foreword.cli.env", "versions, hardware and kernel backends"),
)


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line and without abbreviations; the usage is in --help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors meant for the user are one line on stderr."""
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = _command_name(argv)
    with _exit_cleanly_on_signal(chosen):
        return _run(build_parser(chosen).parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    try:
        return int(args.run(args))
    except ForewordError as error:
        return _print_error(error, args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        return EXIT_FAILURE


@contextmanager
def _exit_cleanly_on_signal(chosen: str | None) -> Iterator[None]:
    """Exit with 0 on SIGTERM while `serve` is still being imported; later it handles the signal itself."""
    if chosen != "serve" or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; only the chosen command's module is imported and adds its arguments."""
    parser = Parser(prog="foreword", description="LLM inference and serving with exact speculative decoding.")
    parser.add_argument("--version", action="version", version=f"foreword {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.help, description=command.help[:1].upper() + command.help[1:] + "."
        )
        if command.name == chosen:
            module: Any = importlib.import_module(command.module)
            module.add_arguments(sub)
            if sub.get_default("run") is None:
                sub.set_defaults(run=module.run)
    return parser


def _command_name(argv: Sequence[str]) -> str | None:
    return next((word for word in argv if not word.startswith("-")), None)


def _print_error(error: ForewordError, args: argparse.Namespace) -> int:
    if str(getattr(args, "log_level", "")).lower() == "debug":
        logging.getLogger("foreword").exception("failed")
    print(f"foreword {args.command}: {error}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError | CheckpointError) else EXIT_FAILURE
