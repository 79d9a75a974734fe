import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.tokenizer import detokenizer
from foreword.tokenizer.detokenizer import Detokenizer, StopStrings
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.budget import examples
from tests.support.fakes import EOS, byte_tokenizer
from tests.support.tokenizer_builders import sentencepiece_tokenizer

BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()
WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


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


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the first position where a stop string ends, and the longest one there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(WORDS, max_size=3), st.lists(st.text(alphabet="abc", max_size=5), max_size=8), st.booleans())
def test_stop_search_does_not_depend_on_chunks(stops: list[str], pieces: list[str], include: bool) -> None:
    matcher = StopStrings(tuple(stops), include)
    shown, stop = "", None
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            break
    assert (shown + matcher.flush(), stop) == expected("".join(pieces), stops, include)


@given(
    st.lists(WORDS, max_size=3),
    st.lists(st.tuples(st.text(alphabet="abc", max_size=3), st.booleans(), st.booleans()), max_size=8),
    st.booleans(),
)
def test_peeked_text_is_searched_when_it_comes(
    stops: list[str], pieces: list[tuple[str, bool, bool]], include: bool
) -> None:
    """Whether it is fed later or dropped."""
    matcher = StopStrings(tuple(stops), include)
    text, peeked, shown, stop = "", "", "", None
    for piece, is_peeked, is_dropped in pieces:
        if is_peeked:
            peeked += piece
            released = matcher.peek(piece)
            assert released in ("", peeked)
        else:
            if is_dropped:
                matcher.drop_peeked()
                peeked = ""
            released = peeked + piece
        if released or not is_peeked:
            more, stop = matcher.feed(released)
            shown, text, peeked = shown + more, text + released, ""
        assert (stop is not None) == (expected(text + peeked, stops, include)[1] is not None)
        if stop is not None:
            break
    assert (shown + matcher.flush(), stop) == expected(text, stops, include)


@given(st.lists(WORDS, min_size=1, max_size=3), st.text(alphabet="abc", max_size=12))
def test_only_prefixes_of_stop_strings_are_held_back(stops: list[str], text: str) -> None:
    if any(stop in text for stop in stops):
        return
    shown, _ = StopStrings(tuple(stops)).feed(text)
    held = max(
        k for k in range(5) if k == 0 or (k <= len(text) and any(s.startswith(text[-k:]) for s in stops))
    )
    assert shown == text[: len(text) - held]


def test_include_holds_nothing_back() -> None:
    stops = StopStrings(("END",), include=True)
    assert [stops.feed(piece) for piece in ("a E", "N", "D b")] == [("a E", None), ("N", None), ("D", "END")]


def test_stop_string_without_search_is_ignored() -> None:
    stops = StopStrings(("aa",))
    assert stops.feed("aa", search=False) == ("a", None)
    assert stops.feed("a") == ("", "aa")


def test_choices_share_the_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    borders = detokenizer._borders
    monkeypatch.setattr(detokenizer, "_borders", lambda text: [calls.append(text), borders(text)][1])
    matchers = [StopStrings(("shared", "borders")) for _ in range(100)]
    assert sorted(calls) == ["borders", "shared"]
    assert matchers[0].feed("shar") == ("", None) and matchers[1].feed("ed") == ("ed", None)
    assert matchers[0].feed("ed") == ("", "shared")
