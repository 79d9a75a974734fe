"""`foreword chat`: a conversation. On a terminal, tokens that were guessed right are coloured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from foreword.cli.answers import ENDED, Message, Source, add_source_options, open_source
from foreword.cli.images import add_image_option, user_message
from foreword.cli.sampling import add_sampling_options, read_params
from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest

__all__ = ["add_arguments", "converse", "run"]

GUESSED = "green"
LEAVE = ("/exit", "/quit")
FORGET = "/clear"
SHOW = "/image "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    add_image_option(parser, f"a picture that is shown with the first line, as `{SHOW}FILE` shows one later")
    parser.add_argument("--no-color", action="store_true", help="no colours and no legend")
    add_source_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    params = read_params(args)
    console = Console(no_color=args.no_color, highlight=False, soft_wrap=True)
    system = [{"role": "system", "content": args.system}] if args.system else []
    with open_source(args) as source:
        converse(source, params, console, _lines(console), system, args.image)
    return 0


def converse(
    source: Source,
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
        _greet(source, console)
    messages, shown = list(system), list(images)
    for line in lines:
        text = line.strip()
        if text in LEAVE:
            return
        if text == FORGET:
            messages, shown = list(system), []
        elif text.startswith(SHOW):
            shown.append(text.removeprefix(SHOW).strip())
        elif text:
            messages = _said(source, params, console, messages, text, shown)
            shown = []


def _said(
    source: Source, params: SamplingParams, console: Console, messages: list[Message], text: str, images: Sequence[str]
) -> list[Message]:
    """The conversation after a line, and the pictures that are shown with it."""
    try:
        message = user_message(text, images)
    except InvalidRequest as error:
        console.print(str(error), markup=False)
        return messages
    return _turn(source, params, console, [*messages, message])


def _turn(source: Source, params: SamplingParams, console: Console, messages: list[Message]) -> list[Message]:
    """One answer; returns the conversation with it, or as it was where there is none."""
    parts: list[str] = []
    word = None
    try:
        for piece in source.stream(messages, params):
            word = ENDED.get(piece.finish_reason or "")
            console.print(Text(piece.text, style=GUESSED if piece.guessed else ""), end="")
            parts.append(piece.text)
    except InvalidRequest as error:
        console.print(f"{error} ({FORGET} starts anew)", markup=False)
        return messages[:-1]
    except KeyboardInterrupt:
        parts.append(" ...")
    console.print()
    if word is not None:
        console.print(f"({word})", markup=False)
    return [*messages, {"role": "assistant", "content": "".join(parts)}]


def _greet(source: Source, console: Console) -> None:
    console.print(f"{source.name}; {SHOW}FILE shows a picture, {FORGET} starts anew, {LEAVE[0]} ends", markup=False)
    if source.speculation:
        console.print(source.speculation, markup=False)
        if not console.no_color:
            console.print(Text("guessed right", style=GUESSED), Text("and computed in the ordinary way"))


def _lines(console: Console) -> Iterator[str]:
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
