"""Server-sent events, valid and invalid."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cli import client as stream
from foreword.cli.client import EventReader, choices_of, text_of, token_ids_of
from foreword.errors import ForewordError

STREAM = (
    ': a comment\r\ndata: {"a": "ü"}\r\n\r\nevent: x\r'
    'data:{"b":\ndata: 1}\n\ndata: {"c": 2}\r\rdata: [DONE]\n\n'
).encode()
OBJECTS = [{"a": "ü"}, {"b": 1}, {"c": 2}]


def read(*pieces: bytes) -> list[Any]:
    reader = EventReader()
    return [chunk for piece in pieces for chunk in reader.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_stream_cut_anywhere_gives_the_same(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(STREAM)]
    assert read(*(STREAM[start:end] for start, end in pairwise(cuts))) == OBJECTS


def test_byte_by_byte() -> None:
    assert read(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == OBJECTS


def test_object_is_yielded_with_its_last_line() -> None:
    reader = EventReader()
    assert list(reader.feed(b'data: {"a": 1}\n')) == []
    assert list(reader.feed(b"\n")) == [{"a": 1}]


def test_incomplete_event_is_dropped() -> None:
    assert read(b'data: {"a": 1}\n\ndata: {"a": 2}\n') == [{"a": 1}]


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"x", b"[" * 100_000, b'{"a": ' * 100_000])
def test_invalid_json_raises(data: bytes) -> None:
    with pytest.raises(ForewordError, match="not a JSON object: "):
        read(b"data: " + data + b"\n\n")


@pytest.mark.parametrize("data", [b"1", b"null", b"[]", b'"a"'])
def test_other_json_raises(data: bytes) -> None:
    with pytest.raises(ForewordError, match="not a JSON object"):
        read(b"data: " + data + b"\n\n")


@pytest.mark.parametrize("part", [b"x" * 10, b"data: x\n"])
def test_endless_event_raises(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ForewordError, match="an event of more than 100 bytes"):
        read(*[part] * 20)


def test_many_small_events_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_invalid_choices_raise(chunk: dict[str, Any]) -> None:
    assert json.dumps(chunk)
    with pytest.raises(ForewordError):
        choices_of(chunk)


def test_invalid_token_ids_raise() -> None:
    for ids in (1, ["a"], {"a": 1}):
        with pytest.raises(ForewordError, match="invalid token ids"):
            token_ids_of({"token_ids": ids})


@pytest.mark.parametrize("error", [{"message": ""}, {}, None, ""])
def test_error_without_a_message_raises(error: object) -> None:
    with pytest.raises(ForewordError, match="error without a message"):
        choices_of({"error": error})
