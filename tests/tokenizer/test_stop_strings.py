import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.tokenizer import stop_strings
from foreword.tokenizer.stop_strings import StopStrings

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


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
    borders = stop_strings._borders
    monkeypatch.setattr(stop_strings, "_borders", lambda text: [calls.append(text), borders(text)][1])
    matchers = [StopStrings(("shared", "borders")) for _ in range(100)]
    assert sorted(calls) == ["borders", "shared"]
    assert matchers[0].feed("shar") == ("", None) and matchers[1].feed("ed") == ("ed", None)
    assert matchers[0].feed("ed") == ("", "shared")
