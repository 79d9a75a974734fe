"""`foreword chat`: a conversation. On a terminal, accepted draft tokens are coloured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from foreword.cli.client import FINISH_NOTES, ChatBackend, add_backend_options, open_backend
from foreword.cli.flags import Message, add_image_option, add_sampling_options, read_params, user_message
from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest

__all__ = ["add_arguments", "converse", "run"]

DRAFTED_STYLE = "green"
EXIT_COMMANDS = ("/exit", "/quit")
CLEAR_COMMAND = "/clear"
IMAGE_COMMAND = "/image "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_image_option(parser, f"an image for the first line; `{IMAGE_COMMAND}FILE` adds one later")
    parser.add_argument("--no-color", action="store_true", help="no colours and no legend")
    add_backend_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    params = read_params(args)
    console = Console(no_color=args.no_color, highlight=False, soft_wrap=True)
    system = [{"role": "system", "content": args.system}] if args.system else []
    with open_backend(args) as backend:
        converse(backend, params, console, _read_lines(console), system, args.image)
    return 0


def converse(
    backend: ChatBackend,
    params: SamplingParams,
    console: Console,
    lines: Iterable[str],
    system: Iterable[Message] = (),
    images: Iterable[str] = (),
) -> None:
    """Answer each line in the context of the conversation, until /exit or the end of the input.

    `images` are files for the first line. A line that fails is left out of the conversation.
    """
    if console.is_terminal:
        _greet(backend, console)
    messages, files = list(system), list(images)
    for line in lines:
        text = line.strip()
        if text in EXIT_COMMANDS:
            return
        if text == CLEAR_COMMAND:
            messages, files = list(system), []
        elif text.startswith(IMAGE_COMMAND):
            files.append(text.removeprefix(IMAGE_COMMAND).strip())
        elif text:
            try:
                message = user_message(text, files)
            except InvalidRequest as error:
                console.print(str(error), markup=False)
            else:
                messages = _stream_answer(backend, params, console, [*messages, message])
            files = []


def _stream_answer(
    backend: ChatBackend, params: SamplingParams, console: Console, messages: list[Message]
) -> list[Message]:
    """Print one answer; returns the conversation with it, or without the last message if it fails."""
    parts: list[str] = []
    note = None
    try:
        for piece in backend.stream(messages, params):
            note = FINISH_NOTES.get(piece.finish_reason or "")
            console.print(Text(piece.text, style=DRAFTED_STYLE if piece.is_drafted else ""), end="")
            parts.append(piece.text)
    except InvalidRequest as error:
        console.print(f"{error} ({CLEAR_COMMAND} starts anew)", markup=False)
        return messages[:-1]
    except KeyboardInterrupt:
        parts.append(" ...")
    console.print()
    if note is not None:
        console.print(f"({note})", markup=False)
    return [*messages, {"role": "assistant", "content": "".join(parts)}]


def _greet(backend: ChatBackend, console: Console) -> None:
    commands = f"{IMAGE_COMMAND}FILE adds an image, {CLEAR_COMMAND} starts anew, {EXIT_COMMANDS[0]} ends"
    console.print(f"{backend.name}; {commands}", markup=False)
    if backend.speculation:
        console.print(backend.speculation, markup=False)
        if not console.no_color:
            console.print(Text("accepted draft tokens", style=DRAFTED_STYLE), Text("and other tokens"))


def _read_lines(console: Console) -> Iterator[str]:
    """Lines from the terminal, with a prompt, or from a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
