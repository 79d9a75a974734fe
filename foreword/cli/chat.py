"""`foreword chat`: a conversation. On a terminal, tokens that were guessed right are coloured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from foreword.cli.client import FINISH_NOTES, ChatBackend, add_backend_options, open_backend
from foreword.cli.options import Message, add_image_option, add_sampling_options, read_params, user_message
from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest

__all__ = ["add_arguments", "converse", "run"]

DRAFTED_STYLE = "green"
EXIT_COMMANDS = ("/exit", "/quit")
CLEAR_COMMAND = "/clear"
IMAGE_COMMAND = "/image "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    add_image_option(
        parser, f"a picture that is shown with the first line, as `{IMAGE_COMMAND}FILE` shows one later"
    )
    parser.add_argument("--no-color", action="store_true", help="no colours and no legend")
    add_backend_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    params = read_params(args)
    console = Console(no_color=args.no_color, highlight=False, soft_wrap=True)
    system = [{"role": "system", "content": args.system}] if args.system else []
    with open_backend(args) as source:
        converse(source, params, console, _read_lines(console), system, args.image)
    return 0


def converse(
    backend: ChatBackend,
    params: SamplingParams,
    console: Console,
    lines: Iterable[str],
    system: Iterable[Message] = (),
    images: Iterable[str] = (),
) -> None:
    """Answer each line with all of the conversation before it, until /exit or the end of the input.

    A line that cannot be answered is left out of the conversation.

    images  files of pictures that the first line is about
    """
    if console.is_terminal:
        _greet(backend, console)
    messages, shown = list(system), list(images)
    for line in lines:
        text = line.strip()
        if text in EXIT_COMMANDS:
            return
        if text == CLEAR_COMMAND:
            messages, shown = list(system), []
        elif text.startswith(IMAGE_COMMAND):
            shown.append(text.removeprefix(IMAGE_COMMAND).strip())
        elif text:
            messages = _handle_line(backend, params, console, messages, text, shown)
            shown = []


def _handle_line(
    backend: ChatBackend,
    params: SamplingParams,
    console: Console,
    messages: list[Message],
    text: str,
    images: Sequence[str],
) -> list[Message]:
    """The conversation after a line, and the pictures that are shown with it."""
    try:
        message = user_message(text, images)
    except InvalidRequest as error:
        console.print(str(error), markup=False)
        return messages
    return _stream_answer(backend, params, console, [*messages, message])


def _stream_answer(
    backend: ChatBackend, params: SamplingParams, console: Console, messages: list[Message]
) -> list[Message]:
    """One answer; returns the conversation with it, or as it was where there is none."""
    parts: list[str] = []
    word = None
    try:
        for piece in backend.stream(messages, params):
            word = FINISH_NOTES.get(piece.finish_reason or "")
            console.print(Text(piece.text, style=DRAFTED_STYLE if piece.is_drafted else ""), end="")
            parts.append(piece.text)
    except InvalidRequest as error:
        console.print(f"{error} ({CLEAR_COMMAND} starts anew)", markup=False)
        return messages[:-1]
    except KeyboardInterrupt:
        parts.append(" ...")
    console.print()
    if word is not None:
        console.print(f"({word})", markup=False)
    return [*messages, {"role": "assistant", "content": "".join(parts)}]


def _greet(backend: ChatBackend, console: Console) -> None:
    console.print(
        f"{backend.name}; {IMAGE_COMMAND}FILE shows a picture, {CLEAR_COMMAND} starts anew, {EXIT_COMMANDS[0]} ends",
        markup=False,
    )
    if backend.speculation:
        console.print(backend.speculation, markup=False)
        if not console.no_color:
            console.print(
                Text("guessed right", style=DRAFTED_STYLE), Text("and computed in the ordinary way")
            )


def _read_lines(console: Console) -> Iterator[str]:
    """Lines from the keyboard with a prompt, or from a pipe without one."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
