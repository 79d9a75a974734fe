"""`foreword chat` without a terminal: messages sent, kept and shown, and commands."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foreword.chat_formats.events import CallArguments, CallStart
from foreword.cli import chat
from foreword.cli.chat_tools import REFUSED_RESULT, TOOLS, LocalTools
from foreword.cli.client import ChatPiece, ChatResult, Tool, open_backend
from foreword.cli.command_line import build_parser
from foreword.cli.flags import Message
from foreword.cli.main import main
from foreword.core.params import SamplingParams
from foreword.errors import ContextLengthExceeded, ForewordError
from tests.support.images import png

PARAMS = SamplingParams(temperature=0.0)
METRICS = {
    "time_to_first_token_ms": 12.5,
    "tokens_per_second": 412.3,
    "draft_tokens": 50,
    "draft_tokens_acceptance": 0.8,
    "mean_acceptance_length": 3.1,
    "seed": 7,
}


class Echo:
    """Answers with the number and the last text of the messages; the second word is a draft token."""

    name = "echo"
    speculation: str | None = "speculation: echo"
    drafters: Sequence[str] | None = ("suffix",)
    sampling_defaults: Mapping[str, float] = {}

    def __init__(self) -> None:
        self.prompts: list[list[Message]] = []
        self.params: list[SamplingParams] = []

    def stream(
        self, prompt: str | Sequence[Message], params: SamplingParams, tools: Sequence[Tool] = ()
    ) -> Iterator[ChatPiece]:
        assert not isinstance(prompt, str)
        self.prompts.append(list(prompt))
        self.params.append(params)
        content = prompt[-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        if text == "long":
            raise ContextLengthExceeded("too long")
        yield ChatPiece(f"{len(prompt)} ")
        if text == "broken":
            raise ForewordError("the engine died")
        if text == "stop":
            raise KeyboardInterrupt
        off = params.speculation.method == "off"
        yield ChatPiece("other" if off and text == "inexact" else text, is_drafted=not off)
        reason = {"loop": "repetition", "cut": "length"}.get(text, "stop")
        yield ChatPiece("", finish_reason=reason, metrics={"seed": 7} if off or text == "plain" else METRICS)

    def answer(self, prompt: str | Sequence[Message], params: SamplingParams) -> ChatResult:
        return ChatResult("".join(piece.text for piece in self.stream(prompt, params)), "stop", None, None)


def talk(
    *turns: str, color: bool = False, interactive: bool = False, system: str | None = None,
    images: Sequence[str] = (), params: SamplingParams = PARAMS, backend: Echo | None = None,
) -> tuple[str, Echo]:  # fmt: skip
    """The output of the console, and the backend."""
    out, source = io.StringIO(), backend or Echo()
    console = Console(
        file=out, force_terminal=color, color_system="standard" if color else None, highlight=False, width=200
    )
    session = chat.ChatSession(source, params, console, interactive, system, images)
    if interactive:
        session.greet()
    session.talk(turns)
    return out.getvalue(), source


def notes(*turns: str, backend: Echo | None = None, params: SamplingParams = PARAMS) -> list[str]:
    """Lines that a user sees after the greeting."""
    return talk(*turns, interactive=True, backend=backend, params=params)[0].splitlines()[2:]


def users(messages: Sequence[Message]) -> list[object]:
    return [message["content"] for message in messages if message["role"] == "user"]


def test_each_turn_sends_the_conversation() -> None:
    shown, source = talk("one\n", "two\n")
    assert shown == "1 one\n3 two\n"
    assert source.prompts[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1 one"},
        {"role": "user", "content": "two"},
    ]


@pytest.mark.parametrize(("clear", "leave"), [("/clear", "/quit"), ("/reset", "/exit"), ("/CLEAR ", "/bye")])
def test_quit_empty_lines_and_clear(clear: str, leave: str) -> None:
    shown, source = talk("one", "", clear, "two", leave, "three", system="s")
    assert shown == "2 one\n2 two\n"
    assert source.prompts == [
        [{"role": "system", "content": "s"}, {"role": "user", "content": text}] for text in ("one", "two")
    ]


def test_system_message_is_replaced_and_removed() -> None:
    _, source = talk("one", "/system be kind\nand short", "two", "/system", "three", system="be brief")
    systems = [[m["content"] for m in prompt if m["role"] == "system"] for prompt in source.prompts]
    assert systems == [["be brief"], ["be kind\nand short"], []]
    assert users(source.prompts[2]) == ["one", "two", "three"]


def test_images_go_with_the_next_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = str(tmp_path / "a b.png")
    Path(image).write_bytes(png())
    _, source = talk(f"/image {image}", "one", "two", "/image nowhere.png", "three", images=[image])
    first = source.prompts[0][0]["content"]
    assert [part["type"] for part in first] == ["image_url", "image_url", "text"]
    assert first[2]["text"] == "one"
    assert users(source.prompts[2]) == [first, "two", "three"]
    assert "foreword chat: /image nowhere.png: No such file or directory\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ("long", "too long; /clear starts a new conversation, /save FILE keeps this one"),
        ("broken", "the engine died"),
    ],
)
def test_failed_message_is_left_out(turn: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown, source = talk(turn, "one")
    assert shown.endswith("1 one\n")
    assert capsys.readouterr().err == f"foreword chat: {error}\n"
    assert source.prompts[1] == [{"role": "user", "content": "one"}]


def test_interrupted_answer_is_kept_as_it_is() -> None:
    shown, source = talk("stop", "one", interactive=True)
    assert "\n1 \nstopped; what was said stays in the conversation\n3 one\n" in shown
    assert source.prompts[1][1] == {"role": "assistant", "content": "1 "}


def test_interrupt_ends_a_piped_conversation() -> None:
    with pytest.raises(KeyboardInterrupt):
        talk("stop", "one")


@pytest.mark.parametrize(("turn", "note"), [("loop", "repeated itself"), ("cut", "cut off at the end of")])
def test_early_end_is_reported(turn: str, note: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown, source = talk(turn, "one")
    assert shown == f"1 {turn}\n3 one\n"
    assert note in capsys.readouterr().err
    assert source.prompts[1][1] == {"role": "assistant", "content": f"1 {turn}"}


def test_figures_follow_each_answer() -> None:
    figures = "412 tokens/s, 50 drafted, 40 accepted, 3.1 tokens per verify step (plain decoding: 1)"
    assert notes("one", "plain") == ["1 one", figures, "3 plain", "nothing drafted"]


def test_answers_without_metrics_have_only_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "stream", lambda *_: iter([ChatPiece("hi")]))
    assert notes("one") == ["hi", "0.0 s"]


def test_compare_decodes_the_last_answer_plainly() -> None:
    source = Echo()
    lines = notes("one", "/compare", "two", backend=source, params=SamplingParams(temperature=1.0))
    assert [params.speculation.method for params in source.params] == ["auto", "off", "auto"]
    assert [params.seed for params in source.params] == [None, 7, 8]
    assert source.prompts[1] == source.prompts[0] and users(source.prompts[2]) == ["one", "two"]
    assert lines[2] == "1 one" and "times as fast (measured once" in lines[4]
    assert lines[5] == "the texts are equal"


def test_compare_reports_a_difference() -> None:
    difference = "the texts differ from character 2 on, where speculation gave 'inexact'"
    assert notes("inexact", "/compare")[-1] == difference


@pytest.mark.parametrize(
    ("turns", "error"),
    [
        (("/compare",), "/compare needs a complete answer of more than one token before it"),
        (("stop", "/compare"), "/compare needs a complete answer of more than one token before it"),
        (("plain", "/compare"), "nothing was drafted for the last answer: it was decoded plainly already"),
    ],
)
def test_compare_needs_an_answer_with_drafts(turns: Sequence[str], error: str) -> None:
    assert notes(*turns)[-1] == error


def test_compare_of_sampled_text_needs_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "stream", lambda *_: iter([ChatPiece("hi"), ChatPiece(" you")]))
    error = "/compare needs the seed, which the server did not report: start with --seed N"
    assert notes("one", "/compare", params=SamplingParams(temperature=1.0))[-1] == error
    assert notes("one", "/compare", params=SamplingParams(seed=3))[-1] == "the texts are equal"


def test_stats() -> None:
    lines = notes("/stats", "one", "two", "/stats")
    assert lines[0] == "no answer yet"
    assert "  time_to_first_token_ms: 12.5" in lines and "  seed: 7" in lines
    assert lines[-1] == "session: 2 answers, 100 drafted, 80 accepted (80%)"


def test_speculate_changes_the_following_requests() -> None:
    source = Echo()
    lines = notes("/speculate", "/speculate off", "one", "/speculate nothing", "two", backend=source)
    assert [params.speculation.method for params in source.params] == ["off", "off"]
    assert lines[:2] == ["speculation: auto", "speculation: off"]
    assert "/speculate takes one of auto, off, suffix, got nothing" in lines


def test_unknown_drafters_are_left_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "drafters", None)
    _, source = talk("/speculate eagle", "one")
    assert source.params[0].speculation.method == "eagle"


def test_save(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = notes("one", f"/save {file}", f"/save {file}", "/save", f"/save {tmp_path}/no/where")
    assert json.loads(file.read_text()) == {
        "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1 one"}]
    }
    assert lines[2:] == [
        f"2 messages are in {file}",
        f"/save {file}: File exists",
        "/save needs the name of a new file",
        f"/save {tmp_path}/no/where: No such file or directory",
    ]


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("/sav x", "did you mean /save?"),
        ("/resett", "did you mean /reset?"),
        ("/xyz", "/help lists the commands"),
        ("/see", "/help lists the commands"),
        ("/set temperature 0", "flags set sampling at the start, such as --temperature"),
    ],
)
def test_unknown_command(command: str, hint: str) -> None:
    shown, source = talk(command, interactive=True)
    assert shown.endswith(f"unknown command {command.split()[0]}: {hint}\n") and not source.prompts


@pytest.mark.parametrize("text", ["/etc/hosts is what?", " /quit", "//", "/* c */"])
def test_text_with_a_slash_is_a_message(text: str) -> None:
    assert users(talk(text)[1].prompts[0]) == [text.strip()]


def test_help_lists_every_command() -> None:
    lines = notes("/help")
    assert all(any(line.startswith(usage) for line in lines) for usage in chat.COMMANDS)
    for name in (*(usage.split()[0] for usage in chat.COMMANDS), *chat.ALIASES):
        assert "unknown command" not in talk(name, interactive=True)[0]


def test_markup_in_answers_is_plain_text() -> None:
    assert "[red]x[/red]" in talk("[red]x[/red]")[0]


def test_draft_tokens_are_coloured_with_a_legend() -> None:
    shown, _ = talk("one", interactive=True, color=True)
    assert "\x1b[32mone\x1b[0m" in shown
    assert "\x1b[32maccepted draft tokens\x1b[0m" in shown
    assert "speculation: echo" in shown
    assert "\x1b" not in talk("one", interactive=True)[0]
    assert "\x1b" not in talk("one", color=True)[0]


def test_terminals_obey_no_answer() -> None:
    assert "1 a␛[2Jb\n" in talk("a\x1b[2Jb", interactive=True)[0]
    assert talk("a\x1b[2Jb")[0] == "1 a\x1b[2Jb\n"  # a pipe gets the answer as it is


def test_piped_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chat, "open_backend", lambda args: nullcontext(Echo()))
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/exit\n"))
    assert main(["chat", "--system", "be kind"]) == 0
    assert capsys.readouterr() == ("2 one\n", "")
    monkeypatch.setattr("sys.stdin", io.StringIO("long\none\n"))
    assert main(["chat"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "1 one\n" and printed.err.startswith("foreword chat: too long")


def test_word_names_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path / "missing.gguf")]) == 2
    assert f"{tmp_path}/missing.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["a"], ["--model", "a"], ["b", "--served-model-name", "a"]])
def test_server_is_asked_for_the_model_that_is_named(words: Sequence[str]) -> None:
    args = build_parser("chat").parse_args(["chat", *words, "--base-url", "http://127.0.0.1:1"])
    with open_backend(args) as backend:
        assert backend.name == "a"


def test_unreadable_image_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--image", "nowhere.png"]) == 2
    assert capsys.readouterr().err == "foreword chat: --image nowhere.png: No such file or directory\n"


class Caller(Echo):
    """Calls tools as the message says, one call a line, and then answers with the results."""

    def __init__(self, forever: bool = False) -> None:
        super().__init__()
        self.tools: list[Sequence[Tool]] = []
        self.forever = forever

    def stream(
        self, prompt: str | Sequence[Message], params: SamplingParams, tools: Sequence[Tool] = ()
    ) -> Iterator[ChatPiece]:
        assert not isinstance(prompt, str)
        self.prompts.append(list(prompt))
        self.params.append(params)
        self.tools.append(tools)
        if prompt[-1]["role"] == "user" or self.forever:
            asked = users(prompt)[-1]
            assert isinstance(asked, str)
            yield ChatPiece("let me see")
            for index, line in enumerate(asked.splitlines()):
                name, _, argument = line.partition(" ")
                parameter = "expression" if name == "calculate" else "path"
                yield ChatPiece("", call=CallStart(index, f"id{index}", name))
                text = json.dumps({parameter: argument})
                yield from (ChatPiece("", call=CallArguments(index, part)) for part in (text[:4], text[4:]))
                if argument == "stop":
                    raise KeyboardInterrupt
            yield ChatPiece("", finish_reason="length" if "cut" in asked else "tool_calls", metrics=METRICS)
            return
        start = max(i for i, message in enumerate(prompt) if message["role"] == "user")
        results = [message["content"] for message in prompt[start:] if message["role"] == "tool"]
        if any(len(result) > 1000 for result in results):
            raise ContextLengthExceeded("too long")
        yield ChatPiece(" and ".join(results))
        yield ChatPiece("", finish_reason="stop", metrics=METRICS)


def call_tools(
    root: Path,
    *turns: str,
    answers: Sequence[str | type[BaseException]] | None = None,
    interactive: bool = True,
    backend: Echo | None = None,
) -> tuple[list[str], Caller]:
    """Lines that the user sees, and the backend; without answers all calls run."""
    out, source, left = io.StringIO(), backend or Caller(), list(answers or ())

    def ask(question: str) -> str:
        out.write(f"{question}\n")
        answer = left.pop(0)
        if not isinstance(answer, str):
            raise answer
        return answer

    runner = LocalTools(root, ask if interactive else None, answers is None)
    console = Console(file=out, highlight=False, width=200)
    session = chat.ChatSession(source, PARAMS, console, interactive, tools=runner)
    session.talk(turns)
    assert isinstance(source, Caller) and not left
    return out.getvalue().splitlines(), source


FIGURES = "412 tokens/s, 50 drafted, 40 accepted, 3.1 tokens per verify step (plain decoding: 1)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "note").write_text("hello")
    (tmp_path / "long").write_text("word\n" * 1000)
    return tmp_path


def test_calls_are_shown_asked_for_run_and_sent_back(root: Path) -> None:
    lines, source = call_tools(root, "read_file note\ncalculate 6*7", "calculate 1", answers=["y", "n", "y"])
    assert lines[:8] == [
        "let me see",
        'read_file {"path": "note"}',
        'calculate {"expression": "6*7"}',
        FIGURES,
        "Run read_file(path='note')? [y/N/a] ",
        "read_file hello",
        "Run calculate(expression='6*7')? [y/N/a] ",
        f"calculate {REFUSED_RESULT}",
    ]
    assert lines[8:10] == [f"hello and {REFUSED_RESULT}", FIGURES]
    calls = [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": text}}
        for i, (name, text) in enumerate(
            [("read_file", '{"path": "note"}'), ("calculate", '{"expression": "6*7"}')]
        )
    ]
    turn = [
        {"role": "user", "content": "read_file note\ncalculate 6*7"},
        {"role": "assistant", "content": "let me see", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "id0", "name": "read_file", "content": "hello"},
        {"role": "tool", "tool_call_id": "id1", "name": "calculate", "content": REFUSED_RESULT},
    ]
    assert source.prompts[1] == turn
    assert source.prompts[2][:5] == [
        *turn, {"role": "assistant", "content": f"hello and {REFUSED_RESULT}"}
    ]  # fmt: skip
    assert source.tools == [TOOLS] * 4


def test_calls_from_a_pipe_are_refused_but_with_yes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = call_tools(root, "read_file note", interactive=False, answers=[])
    assert lines == ["let me see", REFUSED_RESULT]
    note = f'read_file {{"path": "note"}}: {REFUSED_RESULT}; --yes runs calls without a question\n'
    assert capsys.readouterr().err == note
    assert call_tools(root, "read_file note", interactive=False)[0] == ["let me see", "hello"]
    assert capsys.readouterr().err == 'read_file {"path": "note"}: hello\n'


def test_calls_are_bounded(root: Path) -> None:
    lines, source = call_tools(root, "calculate 1\ncalculate 2\ncalculate 3", backend=Caller(forever=True))
    assert len(source.prompts) == 3 and lines[-1] == f"stopped after {chat.MAX_CALLS} calls"
    assert lines[-2] == f"calculate {chat.TOO_MANY_CALLS}" and lines[-3] == "calculate 2"
    lines, source = call_tools(
        root, "calculate 1\ncalculate 2\ncalculate 3", "calculate 4", backend=Caller(forever=True)
    )
    sent = source.prompts[3]
    assert [message["role"] for message in sent[-5:]] == ["assistant", "tool", "tool", "tool", "user"]


@pytest.mark.parametrize("key", [KeyboardInterrupt, EOFError])
def test_leaving_the_question_ends_the_turn(root: Path, key: type[BaseException]) -> None:
    lines, source = call_tools(
        root, "calculate 1\ncalculate 2\ncalculate 3", "calculate 4", answers=["y", key, "y"]
    )
    assert len(source.prompts) == 3
    results = [message["content"] for message in source.prompts[1] if message["role"] == "tool"]
    assert results == ["1", REFUSED_RESULT, REFUSED_RESULT]
    assert "stopped; the conversation goes on with the next message" in lines


def test_result_that_is_too_long_is_an_error_for_the_model(root: Path) -> None:
    lines, source = call_tools(root, "read_file long", "calculate 1")
    assert lines[3:5] == ["read_file 1000 lines, 4999 characters", chat.TOO_LONG_RESULT]
    assert [len(prompt) for prompt in source.prompts] == [1, 3, 3, 5, 7]
    assert all(message["content"] != "word\n" * 1000 for message in source.prompts[3])


def test_context_that_is_full_without_results_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Caller):
        def stream(
            self, prompt: Any, params: SamplingParams, tools: Sequence[Tool] = ()
        ) -> Iterator[ChatPiece]:
            if prompt[-1]["role"] == "tool":
                self.prompts.append(prompt)
                raise ContextLengthExceeded("too long")
            return super().stream(prompt, params, tools)

    lines, source = call_tools(root, "read_file note", backend=Full())
    assert lines[-1] == "too long; /clear starts a new conversation, /save FILE keeps this one"
    assert len(source.prompts) == 3


@pytest.mark.parametrize("turn", ["calculate 1\ncalculate cut", "calculate 1\ncalculate stop"])
def test_calls_that_are_cut_off_do_not_run(root: Path, turn: str) -> None:
    _, source = call_tools(root, turn, "one", answers=[])
    assert [message["role"] for message in source.prompts[1]] == ["user", "assistant", "user"]
    assert source.prompts[1][1] == {"role": "assistant", "content": "let me see"}


def test_compare_includes_calls_and_runs_none(root: Path) -> None:
    lines, source = call_tools(root, "calculate 1", "/compare")
    assert lines[-1] == "the texts are equal"
    lines, source = call_tools(root, "calculate 1", "calculate 2", "/compare")
    assert [params.speculation.method for params in source.params] == ["auto"] * 4 + ["off"]


def test_calls_without_tools_are_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    shown, source = talk("calculate 1", backend=Caller())
    assert shown == "let me see\n" and len(source.prompts) == 1


def test_yes_needs_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--yes"]) == 2
    assert capsys.readouterr().err == "foreword chat: --yes is for the calls of --tools\n"
