"""openai and `foreword chat`: what tests/clients does not ask of every client, such as errors."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from foreword.cli.chat import ChatSession
from foreword.cli.chat_tools import LocalTools
from foreword.cli.client import HTTPBackend
from foreword.core.params import SamplingParams
from tests.server.conftest import MODEL, RunningServer

USER = [{"role": "user", "content": "Tell me about a person."}]


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")
    street: str = Field(max_length=20)
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    mood: Literal["happy", "sad"]
    addresses: list[Address] = Field(max_length=2)
    nickname: Annotated[str, Field(max_length=10)] | None


# openai


def test_openai_parse(demo: RunningServer) -> None:
    completion = demo.openai.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Person, max_tokens=1000, seed=1
    )
    message = completion.choices[0].message
    assert isinstance(message.parsed, Person) and message.refusal is None
    assert Person.model_validate_json(message.content) == message.parsed
    assert completion.usage.completion_tokens > 0


def test_openai_stream_with_parsing(demo: RunningServer) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": USER,
        "response_format": Person,
        "max_tokens": 1000,
        "seed": 1,
    }
    with demo.openai.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(parsed, Person)
    assert (
        parsed == demo.openai.chat.completions.parse(**options).choices[0].message.parsed
    )  # the same, streamed or not


def test_openai_refuses_truncated_json(demo: RunningServer) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        demo.openai.chat.completions.parse(model=MODEL, messages=USER, response_format=Person, max_tokens=3)


# foreword chat --tools


def test_chat_of_the_terminal_calls_tools(demo: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("The fox lives in the forest.\n")
    (tmp_path / "docs").mkdir()
    shown = io.StringIO()
    tools = LocalTools(tmp_path, None, runs_all=True)
    with closing(HTTPBackend(demo.url, None)) as backend:
        console = Console(file=shown, width=200)
        session = ChatSession(backend, SamplingParams(temperature=0.0), console, False, tools=tools)
        session.talk(
            ["Read notes.txt", "List the files", "What is 12 * (7 + 3)?", "What is the prefix cache?"]
        )
    *answers, last = shown.getvalue().splitlines()
    assert answers == [
        "The file says:",
        "The fox lives in the forest.",
        "I see these files:",
        "docs/",
        "notes.txt",
        "The result is 120.",
    ]
    assert last.startswith("The prefix cache keeps the keys and values")
    assert session.num_failures == 0
