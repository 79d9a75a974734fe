"""Terminal output: wrapped words, control characters, encodings."""

import io
import re
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from foreword.cli.terminal import WordWrapper, replace_unknown_characters, show_controls

MARKDOWN = st.text(alphabet=st.sampled_from("ab你 \t\n`~e\u0301"), max_size=120)


def wrap(pieces: Sequence[str], width: int) -> str:
    wrapper = WordWrapper(lambda: width)
    runs = [run for piece in pieces for run in wrapper.feed(piece)]
    return "".join(text for text, _ in [*runs, *wrapper.flush()])


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    ends = [*(end for end in accumulate(cuts) if end < len(text)), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def without_inserted_breaks(wrapped: str, text: str) -> str:
    """`wrapped` without the breaks that `text` lacks; everything else must be equal."""
    kept = []
    for char in wrapped:
        if char != "\n" or text[len(kept) : len(kept) + 1] == "\n":
            kept.append(char)
    return "".join(kept)


@given(MARKDOWN, st.integers(1, 12), st.lists(st.integers(1, 5)))
def test_text_without_the_inserted_breaks_is_unchanged(text: str, width: int, cuts: list[int]) -> None:
    assert without_inserted_breaks(wrap(pieces_of(text, cuts), width), text) == text


@given(MARKDOWN, st.integers(1, 12), st.lists(st.integers(1, 5)))
def test_breaks_do_not_depend_on_the_pieces(text: str, width: int, cuts: list[int]) -> None:
    assert wrap(pieces_of(text, cuts), width) == wrap([text], width)


@given(st.text(alphabet="ab你 \n", max_size=80), st.integers(8, 20))
def test_no_line_is_wider_than_the_terminal(text: str, width: int) -> None:
    text = re.sub("([ab]){6,}|( )  *", r"\1\2", text)  # longer words and spaces are left to the terminal
    assert max(cell_len(line) for line in wrap([text], width).split("\n")) <= width


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=9), max_size=30), st.integers(10, 20))
def test_words_stay_whole(words: list[str], width: int) -> None:
    assert wrap([" ".join(words)], width).split() == words


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("one two three", 8, "one two \nthree"),
        ("one two", 7, "one \ntwo"),  # the last column is left for a space
        ("see https://example.org/long now", 10, "see \nhttps://example.org/long now"),
        ("你好世界", 6, "你好\n世界"),
        ("你好世abc", 8, "你好世\nabc"),
        ("a 👍👍👍", 6, "a 👍\n👍👍"),
        ("one cafe\u0301 x", 9, "one cafe\u0301 \nx"),
        ("```\nprint('one two three')\n```\none two three", 8,
         "```\nprint('one two three')\n```\none two \nthree"),
        ("~~~\n```\none two three\n~~~\none two three", 8, "~~~\n```\none two three\n~~~\none two \nthree"),
        ("a\tone", 11, "a\t\none"),
    ],
)  # fmt: skip
def test_breaks(text: str, width: int, expected: str) -> None:
    assert wrap(list(text), width) == expected


def test_words_of_several_pieces_keep_their_style() -> None:
    wrapper = WordWrapper(lambda: 8)
    assert wrapper.feed("one tw") == [(char, False) for char in "one "]
    assert wrapper.feed("ofold", is_drafted=True) == [
        ("\n", False), ("t", False), ("w", False), *((char, True) for char in "ofold"),
    ]  # fmt: skip


def test_width_may_change_between_pieces() -> None:
    widths = [40]
    wrapper = WordWrapper(lambda: widths[0])
    shown = wrapper.feed("one two three ")
    widths[0] = 8
    shown += wrapper.feed("four ")
    assert "".join(text for text, _ in shown) == "one two three \nfour "


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert show_controls("a\x1b]0;title\x07b\x9b1m\x7f\tc\r\n") == "a␛]0;title␇b\ufffd1m␡\tc\n"


def test_characters_outside_the_encoding_are_replaced() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    replace_unknown_characters(stream)
    stream.write("café")
    stream.flush()
    assert stream.buffer.getvalue() == b"caf?"  # type: ignore[attr-defined]
