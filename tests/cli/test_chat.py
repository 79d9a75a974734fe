"""`foreword chat` without a terminal: messages sent, kept and shown."""

import io
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from foreword.cli import chat
from foreword.cli.client import ChatPiece, ChatResult, Message
from foreword.cli.main import main
from foreword.core.params import SamplingParams
from foreword.errors import ContextLengthExceeded
from tests.support.images import png

PARAMS = SamplingParams()


class Echo:
    """Answers with the number and the last text of the messages; the second word is a draft token."""

    name = "echo"
    speculation: str | None = "speculation: echo"

    def __init__(self) -> None:
        self.prompts: list[list[Message]] = []

    def stream(self, prompt: str | Sequence[Message], params: SamplingParams) -> Iterator[ChatPiece]:
        assert not isinstance(prompt, str)
        self.prompts.append(list(prompt))
        if prompt[-1]["content"] == "long":
            raise ContextLengthExceeded("too long")
        yield ChatPiece(f"{len(prompt)} ")
        content = prompt[-1]["content"]
        yield ChatPiece(content if isinstance(content, str) else content[-1]["text"], is_drafted=True)
        yield ChatPiece("", finish_reason="repetition" if prompt[-1]["content"] == "loop" else "stop")

    def answer(self, prompt: str | Sequence[Message], params: SamplingParams) -> ChatResult:
        return ChatResult("".join(piece.text for piece in self.stream(prompt, params)), "stop", None, None)


def talk(
    *lines: str, color: bool = False, system: Sequence[Message] = (), images: Sequence[str] = ()
) -> tuple[str, Echo]:
    out, source = io.StringIO(), Echo()
    console = Console(
        file=out, force_terminal=color, color_system="standard" if color else None, highlight=False, width=200
    )
    chat.converse(source, PARAMS, console, lines, system, images)
    return out.getvalue(), source


def test_each_turn_sends_the_conversation() -> None:
    shown, source = talk("one\n", "two\n")
    assert shown == "1 one\n3 two\n"
    assert source.prompts[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1 one"},
        {"role": "user", "content": "two"},
    ]


def test_exit_empty_lines_and_clear() -> None:
    shown, source = talk(
        "one", "", "/clear", "two", "/exit", "three", system=[{"role": "system", "content": "s"}]
    )
    assert shown == "2 one\n2 two\n"
    assert len(source.prompts) == 2


def test_images_go_with_the_next_line(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(png())
    shown, source = talk(
        f"/image {tmp_path / 'a b.png'}",
        "one",
        "two",
        "/image nowhere.png",
        "lost",
        "three",
        images=[str(tmp_path / "a b.png")],
    )
    first = source.prompts[0][0]["content"]
    assert [part["type"] for part in first] == ["image_url", "image_url", "text"] and first[2][
        "text"
    ] == "one"
    assert source.prompts[1][0]["content"] == first and source.prompts[1][2]["content"] == "two"
    assert "--image nowhere.png: No such file or directory" in shown
    assert [message["content"] for message in source.prompts[2] if message["role"] == "user"] == [
        first,
        "two",
        "three",
    ]


def test_failed_line_is_dropped() -> None:
    shown, source = talk("long", "one")
    assert shown == "too long (/clear starts anew)\n1 one\n"
    assert source.prompts[1] == [{"role": "user", "content": "one"}]


def test_ended_repetition_is_reported() -> None:
    shown, source = talk("loop", "one")
    assert (
        shown
        == "1 loop\n(the answer repeated itself and was ended; --on-runaway warn lets it go on)\n3 one\n"
    )
    assert source.prompts[1][1] == {"role": "assistant", "content": "1 loop"}


def test_markup_in_answers_is_plain_text() -> None:
    assert "[red]x[/red]" in talk("[red]x[/red]")[0]


def test_draft_tokens_are_coloured_with_a_legend() -> None:
    shown, _ = talk("one", color=True)
    assert "\x1b[32mone\x1b[0m" in shown
    assert "\x1b[32maccepted draft tokens\x1b[0m" in shown
    assert "speculation: echo" in shown
    assert "\x1b" not in talk("one")[0]


def test_piped_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chat, "open_backend", lambda args: nullcontext(Echo()))
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/exit\n"))
    assert main(["chat", "--system", "be kind"]) == 0
    assert capsys.readouterr().out == "2 one\n"
