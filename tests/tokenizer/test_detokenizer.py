import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.fakes import EOS, byte_tokenizer
from tests.support.tokenizer_builders import sentencepiece_tokenizer

BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, at_start=True)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 263), max_size=40), st.booleans())
def test_pieces_concatenate_to_the_whole(ids: list[int], skip: bool) -> None:
    assert "".join(stream(BYTES, ids, skip)) == BYTES.decode(ids, skip)


@given(st.lists(st.integers(0, 259), max_size=40), st.booleans())
def test_any_bytes_are_what_the_library_makes_of_them(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip) == BYTES._backend.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
@settings(max_examples=60)
def test_byte_fallback_text_survives(text: str) -> None:
    ids = PIECES.encode(text, add_special_tokens=False)
    assert "".join(stream(PIECES, ids)) == PIECES.decode(ids) == PIECES._backend.decode(ids)


def test_an_unfinished_character_is_held_back() -> None:
    ids = list("aé😀".encode())
    assert stream(BYTES, ids) == ["a", "", "é", "", "", "", "😀", ""]


def test_an_unfinished_character_at_the_end_becomes_a_replacement() -> None:
    assert stream(BYTES, list("é".encode())[:1]) == ["", "\ufffd"]


def test_special_tokens_are_shown_on_request() -> None:
    assert stream(BYTES, [97, EOS], skip=False) == ["a", "<|eos|>", ""]
    assert stream(BYTES, [97, EOS]) == ["a", "", ""]


@pytest.mark.parametrize(("at_start", "text"), [(True, "Hi there"), (False, " Hi there")])
def test_an_answer_keeps_the_space_that_a_text_does_not_begin_with(at_start: bool, text: str) -> None:
    detokenizer = Detokenizer(PIECES, at_start=at_start)
    ids = PIECES.encode("Hi there", add_special_tokens=False)
    assert "".join(detokenizer.feed(i) for i in ids) == text
