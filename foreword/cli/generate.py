"""`foreword generate PROMPT`: one answer, streamed to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from foreword.cli.client import add_backend_options, finish_note, open_backend
from foreword.cli.flags import (
    Message,
    add_image_option,
    add_sampling_options,
    add_structured_options,
    read_params,
    read_structured,
    read_text,
    usage_errors,
    user_message,
)
from foreword.cli.startup import startup_line
from foreword.cli.terminal import replace_unknown_characters, show_controls, stderr_console
from foreword.errors import ConfigError, ForewordError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text, without the chat template")
    add_image_option(parser, "an image for the prompt")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: text, finish_reason, token_ids, metrics"
    )
    parser.add_argument("--prediction", metavar="FILE", help="a text that the answer resembles, for drafting")
    add_backend_options(parser)
    add_sampling_options(parser)
    add_structured_options(parser)


def run(args: argparse.Namespace) -> int:
    prediction = None if args.prediction is None else read_text("prediction", args.prediction)
    if args.raw and args.image:
        raise ConfigError("--image needs the chat template, which --raw leaves out", "image")
    with usage_errors():  # before the model is loaded
        read_params(args)
        structured = read_structured(args)
        text = _read_stdin() if args.prompt == "-" else args.prompt
        prompt: str | Sequence[Message] = text if args.raw else [user_message(text, args.image)]
    note = None
    replace_unknown_characters(sys.stdout)
    with open_backend(args) as backend:
        defaults = backend.sampling_defaults
        params = replace(read_params(args, defaults), prediction=prediction, structured=structured)
        startup_line.begin("foreword generate: waiting for the answer", at_once=False)
        if args.json:
            result = backend.answer(prompt, params)
            startup_line.end()
            print(json.dumps(asdict(result), ensure_ascii=False))
            return 0
        is_begun = False
        try:
            for piece in backend.stream(prompt, params):
                startup_line.end()
                is_begun = True
                shown = show_controls(piece.text) if sys.stdout.isatty() else piece.text
                print(shown, end="", flush=True)
                note = finish_note(piece.finish_reason, params, defaults)
        except (ForewordError, KeyboardInterrupt):
            if is_begun:
                print(flush=True)
            raise
    print(flush=True)  # before a note on stderr, which may be the same pipe
    if note is not None:
        stderr_console().print(f"foreword generate: {note}", markup=False)
    return 0


def _read_stdin() -> str:
    """Raises ConfigError for bytes that are no text."""
    if sys.stdin.isatty():
        startup_line.end()
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on stdin is not a text: {error}", "prompt") from None
