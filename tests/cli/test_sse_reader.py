"""Streams as servers send them, and as they must not."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cli import sse_reader as stream
from foreword.cli.sse_reader import EventReader, choices_of, text_of, token_ids_of
from foreword.errors import ForewordError

STREAM = ': a comment\r\ndata: {"a": "ü"}\r\n\r\nevent: x\rdata:{"b":\ndata: 1}\n\ndata: {"c": 2}\r\rdata: [DONE]\n\n'.encode()
OBJECTS = [{"a": "ü"}, {"b": 1}, {"c": 2}]


def read(*pieces: bytes) -> list[Any]:
    reader = EventReader()
    return [chunk for piece in pieces for chunk in reader.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_wherever_it_is_cut(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(STREAM)]
    assert read(*(STREAM[start:end] for start, end in pairwise(cuts))) == OBJECTS


def test_byte_by_byte() -> None:
    assert read(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == OBJECTS


def test_an_object_is_there_with_the_line_that_ends_it() -> None:
    reader = EventReader()
    assert list(reader.feed(b'data: {"a": 1}\n')) == []
    assert list(reader.feed(b"\n")) == [{"a": 1}]


def test_what_the_end_cuts_off_is_no_event() -> None:
    assert read(b'data: {"a": 1}\n\ndata: {"a": 2}\n') == [{"a": 1}]


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"x", b"[" * 100_000, b'{"a": ' * 100_000])
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(ForewordError, match="what is no JSON: "):
        read(b"data: " + data + b"\n\n")


@pytest.mark.parametrize("data", [b"1", b"null", b"[]", b'"a"'])
def test_what_is_no_object(data: bytes) -> None:
    with pytest.raises(ForewordError, match="no JSON object"):
        read(b"data: " + data + b"\n\n")


@pytest.mark.parametrize("part", [b"x" * 10, b"data: x\n"])
def test_an_event_without_end_is_not_kept(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ForewordError, match="an event of more than 100 bytes"):
        read(*[part] * 20)


def test_many_events_are_not_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    assert len(read(*[b'data: {"a": 1}\n\n'] * 50)) == 50


def test_choices() -> None:
    assert choices_of({"usage": {}}) == ()
    assert [
        text_of(choice)
        for choice in choices_of({"choices": [{"text": "a"}, {"delta": {"content": "b"}}, {"delta": {}}]})
    ] == [
        "a",
        "b",
        "",
    ]
    assert token_ids_of({"token_ids": [1]}) == [1] and token_ids_of({}) == ()


@pytest.mark.parametrize(
    "chunk",
    [{"choices": 1}, {"choices": [1]}, {"choices": {"a": 1}}, {"error": 3}, {"error": {"message": None}}],
)
def test_choices_that_are_none(chunk: dict[str, Any]) -> None:
    assert json.dumps(chunk)
    with pytest.raises(ForewordError):
        choices_of(chunk)


def test_token_ids_that_are_none() -> None:
    for ids in (1, ["a"], {"a": 1}):
        with pytest.raises(ForewordError, match="token ids that are none"):
            token_ids_of({"token_ids": ids})


@pytest.mark.parametrize("error", [{"message": ""}, {}, None, ""])
def test_an_error_without_a_message_is_told_too(error: object) -> None:
    with pytest.raises(ForewordError, match="error without a message"):
        choices_of({"error": error})
