import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.budget import examples
from tests.support.fakes import EOS, byte_tokenizer
from tests.support.tokenizer_builders import sentencepiece_tokenizer

BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, at_start=True)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 263), max_size=40), st.booleans())
def test_pieces_concatenate_to_decode(ids: list[int], skip: bool) -> None:
    assert "".join(stream(BYTES, ids, skip)) == BYTES.decode(ids, skip)


@given(st.lists(st.integers(0, 259), max_size=40), st.booleans())
def test_decode_equals_the_tokenizers_library(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip) == BYTES._backend.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
@settings(max_examples=examples(60))
def test_byte_fallback_round_trip(text: str) -> None:
    ids = PIECES.encode(text, add_special_tokens=False)
    assert "".join(stream(PIECES, ids)) == PIECES.decode(ids) == PIECES._backend.decode(ids)


def test_unfinished_character_is_held_back() -> None:
    ids = list("aé😀".encode())
    assert stream(BYTES, ids) == ["a", "", "é", "", "", "", "😀", ""]


def test_unfinished_character_at_the_end_is_replaced() -> None:
    assert stream(BYTES, list("é".encode())[:1]) == ["", "\ufffd"]


def test_special_tokens_on_request() -> None:
    assert stream(BYTES, [97, EOS], skip=False) == ["a", "<|eos|>", ""]
    assert stream(BYTES, [97, EOS]) == ["a", "", ""]


@pytest.mark.parametrize(("at_start", "text"), [(True, "Hi there"), (False, " Hi there")])
def test_leading_space_is_dropped_only_at_start(at_start: bool, text: str) -> None:
    detokenizer = Detokenizer(PIECES, at_start=at_start)
    ids = PIECES.encode("Hi there", add_special_tokens=False)
    assert "".join(detokenizer.feed(i) for i in ids) == text
