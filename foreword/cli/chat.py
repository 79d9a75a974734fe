"""`foreword chat`: a conversation. On a terminal, accepted draft tokens are coloured."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from foreword.chat_formats.events import CallArguments, CallStart, ToolCall
from foreword.cli.chat_input import History, history_path, piped_turns, typed_turns
from foreword.cli.chat_tools import REFUSED_RESULT, TOOLS, LocalTools, error_result, join_calls
from foreword.cli.client import ChatBackend, ChatPiece, add_backend_options, finish_note, open_backend
from foreword.cli.configuration import read_config
from foreword.cli.flags import (
    Message,
    add_image_option,
    add_model_word,
    add_sampling_options,
    read_params,
    usage_errors,
    user_message,
)
from foreword.cli.terminal import StyledText, WordWrapper, replace_unknown_characters, show_controls
from foreword.core.params import SEED_MASK, SamplingParams, Speculation
from foreword.errors import ConfigError, ContextLengthExceeded, ForewordError, InvalidRequest

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
COMMANDS: Mapping[str, str] = {
    "/help": "show this list",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/image FILE": "add an image to the next message",
    "/speculate METHOD": "draft with auto, off, or one drafter; without METHOD, show which",
    "/compare": "answer the last message again with plain decoding, and compare text and time",
    "/stats": "show figures of the last answer and of the session",
    "/save FILE": "write the conversation to a new file, as JSON messages",
    "/clear": "start a new conversation (also /reset); the system message stays",
    "/quit": "leave (also /exit, Ctrl-D)",
}
ALIASES = {"/reset": "/clear", "/exit": "/quit", "/bye": "/quit", "/?": "/help"}
FOREIGN_COMMANDS = {"/set": "flags set sampling at the start, such as --temperature"}  # ollama's
HELP_NOTE = (
    'A \\ at the end of a line, or """ before and after, makes a message of several lines. '
    "Ctrl-C ends an answer. A message that begins with a / is sent after a space."
)
MIN_SIMILARITY = 0.75  # similarity of a suggested command
MAX_SHOWN_RESULT = 80  # characters
MAX_CALLS = 8  # tool calls to answer one message
TOO_MANY_CALLS = error_result(f"at most {MAX_CALLS} calls for a message")
TOO_LONG_RESULT = error_result("the result is too long for the context")
COMMAND = re.compile(r"(/\?|/\w+)(?:\s+(.*))?", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_image_option(parser, "an image for the first message; `/image FILE` adds one later")
    parser.add_argument("--no-color", action="store_true", help="no colours and no legend")
    parser.add_argument(
        "--no-history", action="store_true", help="neither read nor keep the messages of earlier sessions"
    )
    parser.add_argument(
        "--tools",
        action="store_true",
        help="the model may read files here and calculate; each call is asked for",
    )
    parser.add_argument("--yes", action="store_true", help="run calls of --tools without a question")
    add_backend_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves. From a pipe, each line is a message; 1 if one was not answered."""
    with usage_errors():  # before the model is loaded
        read_params(args)
        user_message("", args.image)
    if args.yes and not args.tools:
        raise ConfigError("--yes is for the calls of --tools", "yes")
    replace_unknown_characters(sys.stdin, sys.stdout)
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    console = Console(no_color=args.no_color or None, highlight=False)
    with open_backend(args) as backend:
        params = read_params(args, backend.sampling_defaults)
        tools = LocalTools(Path.cwd(), input if is_interactive else None, args.yes) if args.tools else None
        session = ChatSession(backend, params, console, is_interactive, args.system, args.image, tools)
        if not is_interactive:
            session.talk(piped_turns(sys.stdin))
            return 1 if session.num_failures else 0
        session.greet()
        session.talk(typed_turns(session.say, _open_history(args, session)))
    return 0


def _open_history(args: argparse.Namespace, session: ChatSession) -> History | None:
    if args.no_history:
        return None
    try:
        return History(history_path(), [key for key in (read_config(args).api_key or "").split(",") if key])
    except (OSError, RuntimeError) as error:
        session.say(f"messages are not kept for later sessions: {error}")
        return None


@dataclass(frozen=True, slots=True)
class _Answer:
    messages: Sequence[Message]  # the conversation that it answers
    params: SamplingParams
    text: str
    calls: tuple[ToolCall, ...]  # complete ones
    elapsed_s: float
    decode_s: float  # time between the first and the last token
    is_complete: bool  # Ctrl-C did not end it
    metrics: Mapping[str, Any] | None  # None: not reported

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        if not self.calls:
            return {"role": "assistant", "content": self.text}
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.text or None, "tool_calls": calls}

    @property
    def said(self) -> str:
        """Text and calls, without the ids of calls."""
        return self.text + "".join(f"{call.name} {call.arguments}\n" for call in self.calls)

    def metric(self, name: str) -> float | None:
        value = (self.metrics or {}).get(name)
        return value if isinstance(value, int | float) else None

    @property
    def num_drafted(self) -> int:
        return int(self.metric("draft_tokens") or 0)

    @property
    def num_accepted(self) -> int:
        return round(self.num_drafted * (self.metric("draft_tokens_acceptance") or 0.0))

    def figures(self) -> str:
        """Speed and speculation. `plain decoding: 1` compares steps, not time; `/compare` measures time."""
        if self.metrics is None:
            return f"{self.elapsed_s:.1f} s"
        rate, length = self.metric("tokens_per_second"), self.metric("mean_acceptance_length")
        parts = [] if rate is None else [f"{rate:.3g} tokens/s" if rate < 100 else f"{rate:.0f} tokens/s"]
        if not self.num_drafted:
            return ", ".join([*parts, "nothing drafted"])
        parts.append(f"{self.num_drafted} drafted, {self.num_accepted} accepted")
        if length is not None:
            parts.append(f"{length:.1f} tokens per verify step (plain decoding: 1)")
        return ", ".join(parts)


class _AnswerView:
    """Shows one answer as it streams: reasoning, text and calls to a user, the text alone to a pipe."""

    def __init__(self, console: Console, is_interactive: bool, has_colors: bool) -> None:
        self.has_begun = False
        self._file = console.file
        self._is_interactive = is_interactive
        self._has_colors = has_colors
        self._wrapper = WordWrapper(lambda: console.width)
        self._is_dim = False  # reasoning
        self._last = ""  # text that was shown
        self._has_calls = False

    def show(self, piece: ChatPiece) -> None:
        self.has_begun = True
        self._has_calls |= piece.call is not None
        text = piece.text
        if piece.call is not None:
            text = f"{piece.call.name} " if isinstance(piece.call, CallStart) else piece.call.text
        if not text:
            return
        if not self._is_interactive:
            if piece.call is None and not piece.is_reasoning:
                self._last = text
                self._write([(text, False)])
            return
        if piece.is_reasoning != self._is_dim or isinstance(piece.call, CallStart):
            self._begin_line()
            self._is_dim = piece.is_reasoning
        self._last = text
        self._write(self._wrapper.feed(show_controls(text), piece.is_drafted))

    def end(self) -> None:
        """Show what is held back, and end the line; an empty answer is an empty line."""
        self._begin_line()
        if not self._last and not self._has_calls:
            self._write([("\n", False)])
        if self._has_colors:
            self._file.write(RESET)  # Ctrl-C may have come between colours
        self._file.flush()

    def _begin_line(self) -> None:
        self._write(self._wrapper.flush())
        if self._last and not self._last.endswith("\n"):
            self._write(self._wrapper.feed("\n"))
            self._last = "\n"

    def _write(self, runs: Iterable[StyledText]) -> None:
        for is_drafted, group in groupby(runs, itemgetter(1)):
            text = "".join(part for part, _ in group)
            color = GREEN if is_drafted else DIM if self._is_dim else ""
            self._file.write(f"{color}{text}{RESET}" if color and self._has_colors else text)
        self._file.flush()


class ChatSession:
    """Answers messages in the context of a conversation, and obeys commands.

    is_interactive  a user types and reads: wrapped lines, colours and figures; else answers alone go to the
                    console, and notes and errors to stderr
    images          files for the first message
    """

    def __init__(
        self,
        backend: ChatBackend,
        params: SamplingParams,
        console: Console,
        is_interactive: bool,
        system: str | None = None,
        images: Iterable[str] = (),
        tools: LocalTools | None = None,
    ) -> None:
        self._backend = backend
        self._params = params
        self._console = console
        self._is_interactive = is_interactive
        self._has_colors = is_interactive and not console.no_color and console.color_system is not None
        self._system = system
        self._images = list(images)
        self._tools = tools
        self._messages: list[Message] = []  # all but the system message
        self._answers: list[_Answer] = []
        self.num_failures = 0

    def greet(self) -> None:
        self.say(f"{self._backend.name}; /help lists commands, Ctrl-D leaves")
        if self._backend.speculation:
            self.say(self._backend.speculation)
        if self._tools is not None:
            self.say(f"tools for {self._tools.root}: {', '.join(self._tools.names)}")
        if self._has_colors and self._backend.drafters != ():
            self._print(f"{GREEN}accepted draft tokens{RESET} and other tokens")

    def talk(self, turns: Iterable[str]) -> None:
        """Answer or obey each turn, until /quit or the end."""
        for turn in turns:
            command = COMMAND.fullmatch(turn.rstrip())
            if command is None:
                self._ask(turn.strip())
                continue
            name = ALIASES.get(command[1].lower(), command[1].lower())
            if name == "/quit":
                return
            self._obey(name, (command[2] or "").strip())

    def say(self, text: str) -> None:
        """A line to the user that is no part of the conversation."""
        if not self._is_interactive:
            print(text, file=sys.stderr)
            return
        shown = self._wrap(text)
        self._print(f"{DIM}{shown}{RESET}" if self._has_colors else shown)

    def _wrap(self, text: str) -> str:
        wrapper = WordWrapper(lambda: self._console.width)
        return "".join(part for part, _ in [*wrapper.feed(show_controls(text)), *wrapper.flush()])

    def _print(self, text: str) -> None:
        self._console.file.write(text + "\n")
        self._console.file.flush()

    def _ask(self, text: str) -> None:
        """Answer a message. One that fails is left out of the conversation."""
        if not text:
            return
        images, self._images = self._images, []
        try:
            message = user_message(text, images)
        except InvalidRequest as error:
            return self._fail(str(error))
        turn: list[Message] = [message]
        results: list[Message] = []  # results of the last calls
        while True:
            try:
                answer = self._answer([*self._conversation(), *turn], self._next_params(), bool(results))
            except ContextLengthExceeded:
                turn[-len(results) :] = [{**result, "content": TOO_LONG_RESULT} for result in results]
                results = []
                continue
            if answer is None or not (answer.text or answer.calls or answer.is_complete):
                return
            turn.append(answer.message)
            self._answers.append(answer)
            if not answer.calls:
                break
            num_run = sum(one["role"] == "tool" for one in turn)
            results, goes_on = self._run_calls(answer.calls, MAX_CALLS - num_run)
            turn += results
            if not goes_on:
                break
        self._messages += turn

    def _run_calls(self, calls: Sequence[ToolCall], room: int) -> tuple[list[Message], bool]:
        """Results as messages, and whether the model goes on; `room` is the number of calls that may run."""
        assert self._tools is not None
        results: list[Message] = []
        is_stopped = False
        for call in calls:
            content = REFUSED_RESULT if is_stopped else TOO_MANY_CALLS
            if not is_stopped and len(results) < room:
                try:
                    content = self._tools.run(call)
                except (KeyboardInterrupt, EOFError):
                    if not self._is_interactive:
                        raise
                    self.say("")
                    is_stopped, content = True, REFUSED_RESULT
            results.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
            self._show_result(call, content)
        if len(calls) > room:
            self.say(f"stopped after {MAX_CALLS} calls")
        elif is_stopped:
            self.say("stopped; the conversation goes on with the next message")
        return results, not is_stopped and len(calls) <= room

    def _show_result(self, call: ToolCall, result: str) -> None:
        shown = result
        if len(result) > MAX_SHOWN_RESULT or "\n" in result:
            shown = f"{len(result.splitlines())} lines, {len(result)} characters"
        if not self._is_interactive:
            hint = "; --yes runs calls without a question" if result == REFUSED_RESULT else ""
            shown = f"{call.arguments:.{MAX_SHOWN_RESULT}}: {shown}{hint}"
        self.say(show_controls(f"{call.name} {shown}"))

    def _next_params(self) -> SamplingParams:
        """With the seed after the last answer's: for requests without one, history depends on the server."""
        metrics = self._answers[-1].metrics if self._answers else None
        seed = (metrics or {}).get("seed")
        if self._params.seed is not None or not isinstance(seed, int):
            return self._params
        return replace(self._params, seed=(seed + 1) & SEED_MASK)

    def _answer(
        self, messages: Sequence[Message], params: SamplingParams, raises_length: bool = False
    ) -> _Answer | None:
        """Show one answer with its figures; None if it fails.

        raises_length  raise ContextLengthExceeded for a conversation that does not fit
        """
        texts: list[str] = []
        parts: list[CallStart | CallArguments] = []
        tools = () if self._tools is None else TOOLS
        finish_reason, metrics, is_complete = None, None, True
        view = _AnswerView(self._console, self._is_interactive, self._has_colors)
        started_s = time.perf_counter()
        first_s = last_s = started_s
        try:
            for piece in self._backend.stream(messages, params, tools):
                last_s = time.perf_counter()
                first_s = first_s if view.has_begun else last_s
                finish_reason, metrics = piece.finish_reason, piece.metrics
                if piece.call is not None:
                    parts.append(piece.call)
                elif not piece.is_reasoning:
                    texts.append(piece.text)
                view.show(piece)
        except ForewordError as error:
            if view.has_begun:
                view.end()
            if raises_length and isinstance(error, ContextLengthExceeded):
                raise
            hint = "; /clear starts a new conversation, /save FILE keeps this one"
            self._fail(f"{error}{hint if isinstance(error, ContextLengthExceeded) else ''}")
            return None
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            is_complete = False
        view.end()
        answer = _Answer(
            messages,
            params,
            "".join(texts),
            join_calls(parts) if tools and is_complete and finish_reason != "length" else (),
            last_s - started_s,
            last_s - first_s,
            is_complete,
            metrics,
        )
        if (note := finish_note(finish_reason, params, self._backend.sampling_defaults)) is not None:
            self.say(note)
        if not is_complete:
            self.say("stopped; what was said stays in the conversation")
        elif self._is_interactive:
            self.say(answer.figures())
        return answer

    def _fail(self, message: str) -> None:
        """Show an error: to a user not dimmed, else on stderr as errors of all commands."""
        self.num_failures += 1
        if self._is_interactive:
            self._print(self._wrap(message))
        else:
            print(f"foreword chat: {message}", file=sys.stderr)

    def _conversation(self) -> list[Message]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def _obey(self, name: str, argument: str) -> None:
        """Call the method of the command, as the `cmd` module names it: do_help(argument)."""
        method: Callable[[str], None] | None = getattr(self, f"do_{name[1:]}", None)
        if method is not None:
            return method(argument)
        names = [*(usage.split()[0] for usage in COMMANDS), *ALIASES]
        close = difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
        hint = FOREIGN_COMMANDS.get(name, hint)
        self._fail(f"unknown command {name}: {hint}")

    def do_help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, description in COMMANDS.items():
            self.say(f"{usage:<{width}}  {description}")
        self.say(HELP_NOTE)

    def do_system(self, text: str) -> None:
        before, self._system = self._system, text or None
        removed = "no system message" if before is None else f"system message removed: {before}"
        self.say("system message set" if text else removed)

    def do_image(self, file: str) -> None:
        try:
            user_message("", [file])
        except InvalidRequest as error:
            return self._fail(str(error).replace("--image", "/image"))
        self._images.append(file)
        self.say(f"{file} goes with the next message")

    def do_speculate(self, method: str) -> None:
        drafters = self._backend.drafters
        known = None if drafters is None else ("auto", "off", *drafters)
        if method and known is not None and method not in known:
            return self._fail(f"/speculate takes one of {', '.join(known)}, got {method}")
        if method:
            speculation = replace(self._params.speculation, method=method)
            self._params = replace(self._params, speculation=speculation)
        none = " (no drafter is loaded: start with --speculate auto)" if drafters == () else ""
        self.say(f"speculation: {self._params.speculation.method}{none}")

    def do_compare(self, _: str) -> None:
        """Decode the last answer plainly, shown alike, because showing takes time too.

        It is not decoded with speculation again: drafters would find it in what they have seen.
        """
        last = self._answers[-1] if self._answers else None
        if last is None or not last.is_complete or not last.decode_s:
            return self._fail("/compare needs a complete answer of more than one token before it")
        if last.metrics is not None and not last.num_drafted:
            return self._fail("nothing was drafted for the last answer: it was decoded plainly already")
        seed = (last.metrics or {}).get("seed", last.params.seed)
        if not isinstance(seed, int) and not last.params.greedy:
            return self._fail("/compare needs the seed, which the server did not report: start with --seed N")
        params = replace(last.params, seed=seed, speculation=Speculation("off"))
        plain = self._answer(last.messages, params)
        if plain is None or not plain.is_complete:
            return None
        first = "; the first answer of a session is slower" if len(self._answers) == 1 else ""
        self.say(
            f"from first to last token {last.decode_s:.2f} s, with plain decoding {plain.decode_s:.2f} s: "
            f"{plain.decode_s / last.decode_s:.2f} times as fast (measured once{first})"
        )
        if plain.said == last.said:
            return self.say("the texts are equal")
        pairs = enumerate(zip(plain.said, last.said, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(plain.said), len(last.said)))
        self._fail(
            f"the texts differ from character {start} on, where speculation gave {last.said[start:]!r:.40}"
        )

    def do_stats(self, _: str) -> None:
        if not self._answers:
            return self.say("no answer yet")
        last = self._answers[-1]
        self.say(f"last answer: {last.figures()}")
        for name, value in (last.metrics or {}).items():
            self.say(f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")
        drafted = sum(answer.num_drafted for answer in self._answers)
        accepted = sum(answer.num_accepted for answer in self._answers)
        share = f" ({accepted / drafted:.0%})" if drafted else ""
        self.say(f"session: {len(self._answers)} answers, {drafted} drafted, {accepted} accepted{share}")

    def do_save(self, file: str) -> None:
        if not file:
            return self._fail("/save needs the name of a new file")
        text = json.dumps({"messages": self._conversation()}, ensure_ascii=False, indent=2)
        try:
            with Path(file).expanduser().open("x", encoding="utf-8") as output:
                output.write(text + "\n")
        except (OSError, ValueError, RuntimeError) as error:
            return self._fail(f"/save {file}: {error.strerror if isinstance(error, OSError) else error}")
        self.say(f"{len(self._messages)} messages are in {file}")

    def do_clear(self, _: str) -> None:
        self._messages, self._images = [], []
        self.say("new conversation")
