"""Drafts from text: found behind numbers, marks and escapes, written as their place needs, at low cost."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.structured_output import Vocabulary
from foreword.kernels.cpu.library import load_library
from foreword.speculation.drafters import text as text_drafter
from foreword.speculation.drafters.text import TextDrafter, TextIndex
from foreword.speculation.engine_drafter import DraftRequest
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.budget import examples, some_of

CALL, END = "<tool_call>", "</tool_call>"
CODE = """\
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("a side is negative")
    return width * height


class Square:
    side: float

    def area(self):
        return area(self.side, self.side)
"""
LINES = CODE.splitlines()


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE that joins words, spaces and signs of code."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([CODE, json.dumps(CODE)] * 4, trainer)
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in (CALL, END)])
    return Tokenizer(backend)


TOKENIZER = make_tokenizer()
VOCABULARY = replace(
    TOKENIZER.engine_vocabulary(),
    marker_ids=tuple(TOKENIZER.encode(marker, add_special_tokens=False)[0] for marker in (CALL, END)),
)


@pytest.fixture
def drafter(library: ctypes.CDLL) -> TextDrafter:
    drafter = TextDrafter((), library)
    drafter.set_vocabulary(VOCABULARY)
    return drafter


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def start(drafter: TextDrafter, prompt: str, name: str = "a", salt: str = "") -> RequestState:
    params = SamplingParams(max_tokens=100_000)
    state = RequestState(Request(name, tuple(encode(prompt)), params, 0, cache_salt=salt), 0, 1 << 24)
    assert drafter.start(state)
    return state


def draft(drafter: TextDrafter, state: RequestState, output: str = "", max_tokens: int = 64) -> str:
    """The draft behind `output`, as text. The output is read with the draft, token by token."""
    for token_id in encode(output):
        state.append([token_id])
        drafter.propose([DraftRequest(state, max_tokens)])
    (proposed,) = drafter.propose([DraftRequest(state, max_tokens)])
    if proposed is None:
        return ""
    assert len(proposed.confidence) == len(proposed.token_ids) <= max_tokens
    assert all(0 < value <= 1 for value in proposed.confidence)
    return b"".join(map(TOKENIZER.token_bytes, proposed.token_ids)).decode()


def result(form: str) -> str:
    """A tool's result, with each line of the code in a form."""
    return "\n".join(form.format(n=n, line=line) for n, line in enumerate(LINES, 1)) + "\n"


FORMS = {
    "plain": "{line}",
    "cat -n": "{n:6d}\t{line}",
    "arrow": "{n:6d}→{line}",
    "bar": "{n:3d} | {line}",
    "colon": "{n}:{line}",
    "L": "L{n}: {line}",
    "brackets": "[{n}] {line}",
    "grep": "src/shapes.py:{n}:{line}",
    "grep with context": "src/shapes.py-{n}-{line}",
    "colours": "\x1b[35msrc/shapes.py\x1b[m:\x1b[32m{n}\x1b[m:{line}\x1b[0m",
    "box": "│{line}",
}
NUMBERED = result(FORMS["cat -n"])
HEAD = "def area(width, height):\n    if width < 0"
REST = CODE[len(HEAD) :]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_lines_are_found_behind_what_a_tool_prints_before_them(drafter: TextDrafter, form: str) -> None:
    state = start(drafter, f"The file:\n{result(form)}{END}")
    call = f'{CALL}\n{{"name": "edit", "arguments": {{"old": "{json.dumps(HEAD)[1:-1]}'
    more = draft(drafter, state, call)
    assert len(more) > 60 and json.dumps(REST)[1:-1].startswith(more)


PLACES = {
    "JSON string": (
        f'{CALL}\n{{"name": "edit", "arguments": {{"old": "',
        lambda text: json.dumps(text)[1:-1],
    ),
    "JSON in JSON": (
        f'{CALL}\n{{"name": "edit", "arguments": "{{\\"old\\": \\"',
        lambda text: json.dumps(json.dumps(text)[1:-1])[1:-1],
    ),
    "Python string": (
        f"{CALL}[ns.edit(path='a.py', old='",
        lambda text: repr(text + "\"'")[1:-4],  # both quotes: the outer ones are single
    ),
    "Python string in double quotes": ('[edit(old="', lambda text: json.dumps(text)[1:-1]),
    "JSON in Python": (
        f'{CALL}[edit(arguments=\'{{"old": "',
        lambda text: repr(json.dumps(text)[1:-1] + "\"'")[1:-4],
    ),
    "XML value": (f"{CALL}\n<function=edit>\n<parameter=old>\n", str),
    "fenced code": ("Here it is:\n\n```python\n", str),
    "plain": ("", str),
}


@pytest.mark.parametrize("place", PLACES)
def test_drafts_are_written_as_their_place_needs(drafter: TextDrafter, place: str) -> None:
    opening, write = PLACES[place]
    state = start(drafter, f"The file:\n{NUMBERED}{END}")
    more = draft(drafter, state, opening + write(HEAD))
    assert len(more) > 50 and write(REST).startswith(more)


def test_escape_that_is_not_complete_is_continued(drafter: TextDrafter) -> None:
    state = start(drafter, f"{result('{n}|{line}')}{END}{CALL}" + '{"old": "')
    for token_id in [
        *encode("def area(width, height):"),
        TOKENIZER.encode("\\", add_special_tokens=False)[0],
    ]:
        state.append([token_id])
        drafter.propose([DraftRequest(state, 64)])
    (proposed,) = drafter.propose([DraftRequest(state, 64)])
    if proposed is not None:  # the tokenizer may join the backslash with what follows
        assert b"".join(map(TOKENIZER.token_bytes, proposed.token_ids)).startswith(b"n    if width")


def value_call(old: str, new: str = "") -> str:
    written = json.dumps(old)
    return f'{CALL}\n{{"name": "edit", "arguments": {{"old": {written}, "new": "{json.dumps(new)[1:-1]}'


def test_new_value_begins_as_the_old_one(drafter: TextDrafter) -> None:
    old = "\n".join(LINES[:4])
    state = start(drafter, f"{NUMBERED}{END}")
    more = draft(drafter, state, value_call(old))
    assert json.dumps(old)[1:].startswith(more) and more.endswith('"')


@pytest.mark.parametrize("quote", ["'", '"'])
def test_new_value_of_a_call_in_python_begins_as_the_old_one(drafter: TextDrafter, quote: str) -> None:
    old = "\n".join(LINES[:2])
    written = json.dumps(old)[1:-1].replace('"', quote)
    state = start(drafter, f"{NUMBERED}{END}")
    more = draft(drafter, state, f"{CALL}[edit(old={quote}{written}{quote}, new={quote}")
    assert more == written + quote


def test_bracket_and_word_begin_a_call_with_a_parenthesis_only(drafter: TextDrafter) -> None:
    table = "[package]\nname = 'demo'\nversion = '1.0'\n[package.urls]\nhome = 'example.org'\n"
    state = start(drafter, f"{table}{END}")
    assert draft(drafter, state, "[package]\nname").startswith(" = 'demo'\nversion = '1.0'\n[package.urls]")
    assert draft(drafter, state, " = 'demo'\nversion = '1.0'\n[package.urls]").startswith("\nhome = ")


def test_new_value_goes_on_behind_a_line_that_differs(drafter: TextDrafter) -> None:
    state = start(drafter, f"{NUMBERED}{END}")
    new = "def area(width, height):\n    if width < 0 or height <= 1:\n"
    more = draft(drafter, state, value_call("\n".join(LINES[:4]), new))
    assert json.dumps("        raise ValueError(")[1:-1] in more[:40]


def test_word_that_differs_is_followed_by_the_rest_of_its_line(drafter: TextDrafter) -> None:
    state = start(drafter, f"{NUMBERED}{END}")
    new = "def area(width, height):\n    if width < 0 or depth <"
    assert draft(drafter, state, value_call("\n".join(LINES[:4]), new)).startswith(" 0:\\n        raise")


def test_line_that_is_inserted_is_followed_by_the_one_before_it(drafter: TextDrafter) -> None:
    state = start(drafter, f"{NUMBERED}{END}")
    new = "def area(width, height):\n    total = 12\n"
    more = draft(drafter, state, value_call("\n".join(LINES[:4]), new))
    assert more.startswith("    if width < 0")


def test_indentation_that_changes_is_kept(drafter: TextDrafter) -> None:
    state = start(drafter, f"{NUMBERED}{END}")
    new = "        def area(width, height):\n            if width < 0 or height"
    more = draft(drafter, state, value_call("\n".join(LINES[:4]), new))
    assert more.startswith(" < 0:\\n                raise ValueError("), more


def test_word_that_an_edit_replaced_is_replaced_again(drafter: TextDrafter) -> None:
    done = value_call("    return width * height", "    return breadth * height") + f'"}}}}\n{END}'
    state = start(drafter, f"{NUMBERED}{END}{done}")
    more = draft(drafter, state, value_call("    if width < 0 or height < 0:"))
    assert more.startswith("    if breadth < 0")


def test_diff_has_marks_and_added_lines_repeat_removed_ones(drafter: TextDrafter) -> None:
    state = start(drafter, f"{NUMBERED}{END}")
    patch = "@@ shapes @@\n def area(width, height):\n-    if width < 0 or height < 0:\n"
    opening = f'{CALL}\n{{"name": "patch", "arguments": {{"input": "'
    assert draft(drafter, state, opening + json.dumps(patch)[1:-1]).startswith("-        raise ValueError(")
    assert draft(drafter, state, "+").startswith("    if width < 0 or height < 0:")
    assert draft(drafter, state, "    if width <= 0:\\n         raise").startswith(" ValueError(")


def test_result_that_is_a_diff_is_read_in_one_version(drafter: TextDrafter) -> None:
    removed, added = "-    if width < 0:", "+    if width < 0 or height < 0:"
    diff = f"@@ -1,3 +1,3 @@\n def area(width, height):\n{removed}\n{added}\n         raise E\n"
    state = start(drafter, f"{diff}{END}{CALL}" + '{"old": "')
    more = draft(drafter, state, "def area(width, height):\\n    if width < 0 or")
    assert more.startswith(" height < 0:\\n        raise")


def test_draft_ends_where_the_tool_skipped_lines(drafter: TextDrafter) -> None:
    hits = "a.py:3:total = compute(first_value)\na.py:90:other = 12\n"
    state = start(drafter, f"{hits}{END}{CALL}" + '{"old": "')
    assert "other" not in draft(drafter, state, "total = compute(")


def test_draft_whose_tokens_would_join_the_output_is_dropped(drafter: TextDrafter) -> None:
    """The output ends within a word of the source that is one token: it is another word."""
    (whole,) = encode("width")[:1]
    assert TOKENIZER.token_bytes(whole) == b"width"
    state = start(drafter, f"{CODE}{END}" + "def area(")
    state.append([encode("w")[0]])
    assert drafter.propose([DraftRequest(state, 8)]) == [None]


def test_text_of_another_request_is_never_drafted(drafter: TextDrafter, library: ctypes.CDLL) -> None:
    """Neither of a live one nor of a finished one, of any key: a draft depends on its request alone."""
    alone = TextDrafter((), library)
    alone.set_vocabulary(VOCABULARY)
    other = start(drafter, f"{NUMBERED}{END}", "other", "key")
    assert draft(drafter, other, value_call(LINES[0])) != ""
    drafter.finish("other", tuple(encode(CODE)))
    live = start(drafter, CODE, "live", "key")
    assert draft(drafter, live, "class Square:") != ""
    for salt in ("", "key", "another key"):
        name = f"mine {salt}"
        mine, its = (
            start(drafter, "Write a function.", name, salt),
            start(alone, "Write a function.", name, salt),
        )
        output = f'{CALL}\n{{"old": "{json.dumps(HEAD)[1:-1]}'
        assert draft(drafter, mine, output) == draft(alone, its, output) == ""


def test_state_ends_with_the_request(drafter: TextDrafter) -> None:
    states = [start(drafter, CODE, name) for name in "abc"]
    drafter.check("abc")
    for state in states:
        drafter.finish(state.id)
    drafter.check(())


def test_nothing_is_drafted_without_a_tokenizer(library: ctypes.CDLL) -> None:
    drafter = TextDrafter((), library)
    drafter.set_vocabulary(TOKENIZER.vocabulary())
    state = RequestState(Request("a", (1,), SamplingParams(), 0), 0, 100)
    assert drafter.start(state) is False
    drafter.check(())


def test_tokenizer_is_parsed_when_idle_or_at_the_first_continuation(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse = Backend.from_str

    class Parser:
        @staticmethod
        def from_str(text: str) -> Backend:
            parsed.append(text)
            return parse(text)

    monkeypatch.setattr(text_drafter.tokenizers, "Tokenizer", Parser)
    drafter = TextDrafter((), library)
    drafter.set_vocabulary(VOCABULARY)
    state = start(drafter, NUMBERED + END)
    assert draft(drafter, state, "Something else") == ""
    assert not parsed and not drafter.is_timed, "nothing had to be encoded"
    other = start(drafter, NUMBERED + END, "b")
    assert draft(drafter, other, "class Square:") != ""
    assert parsed == [VOCABULARY.tokenizer] and drafter.is_timed
    idle = TextDrafter((), library)
    idle.set_vocabulary(VOCABULARY)
    idle.prepare()
    assert len(parsed) == 2
    assert draft(idle, start(idle, NUMBERED + END), "class Square:") != "" and len(parsed) == 2


def test_tokenizer_that_cannot_be_parsed_fails_once(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error drops the draft; then texts are not searched, and later requests have no drafts."""
    drafter = TextDrafter((), library)
    drafter.set_vocabulary(replace(VOCABULARY, tokenizer="{}"))
    state = start(drafter, NUMBERED + END)
    state.append(encode("class Square:"))
    with pytest.raises(Exception, match="Model missing"):
        drafter.propose([DraftRequest(state, 8)])
    state.append(encode("\n"))
    monkeypatch.setattr(TextIndex, "propose", pytest.fail)
    assert drafter.propose([DraftRequest(state, 8)]) == [None]
    drafter.set_vocabulary(VOCABULARY)
    assert drafter.start(RequestState(Request("b", (1,), SamplingParams(), 0), 0, 100)) is False
    drafter.finish("a")
    drafter.check(())


HOSTILE = {
    "quotes": lambda n: CALL + '"' * n,
    "quotes in JSON": lambda n: CALL + '{"a": "' + '"' * n,
    "empty strings": lambda n: CALL + "[" + '"",' * (n // 3),
    "backslashes": lambda n: CALL + '{"a": "' + "\\" * n,
    "nested escapes": lambda n: CALL + '{"a": "' + '{\\"b\\": \\"{\\\\\\"c\\\\\\": \\\\\\"x' * (n // 32),
    "half surrogates": lambda n: CALL + '{"a": "' + "\\ud83d" * (n // 6),
    "low surrogates": lambda n: CALL + '{"a": "' + "\\udc00x\\ud83d\\ude00" * (n // 19),
    "one line": lambda n: "word " * (n // 5),
    "same lines": lambda n: "return value\n" * (n // 13),
    "empty lines": lambda n: "\n" * n,
    "brackets": lambda n: CALL + "[" * n,
    "objects": lambda n: CALL + '{"a": ' * (n // 6),
    "colours": lambda n: "\x1b[" + "0;" * (n // 2),
    "added lines": lambda n: "@@ a @@\n- first line here\n" + "+ more of the lines\n" * (n // 20),
    "separators": lambda n: "=======\nsome text here\n" * (n // 23),
    "tags": lambda n: "<parameter=a>\nsome words here\n</parameter>\n" * (n // 42),
    "numbers": lambda n: "".join(f"{k}:{k}:" for k in range(n // 12)),
    "calls": lambda n: "[f('a')]\n[b(\n" * (n // 12),
    "names in brackets": lambda n: "[name\n[a.b.c\n" * (n // 13),
    "values": lambda n: CALL + "{" + '"a": "some words here",' * (n // 23),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_costs_in_proportion(library: ctypes.CDLL, make: object) -> None:
    """Work is counted: reading, indexing, 400 proposals. Twice the text is at most twice the work."""
    assert callable(make)
    works = []
    for size in (40_000, 80_000):
        index = TextIndex(library, VOCABULARY)
        text, ids = index.start(), encode(make(size))
        index.propose(text, ids[:-400])
        before = index.work(text)
        for token_id in ids[-400:]:
            index.propose(text, [token_id])
        works.append((before, index.work(text) - before))
        index.finish(text)
    (read, proposed), (read_twice, proposed_twice) = works
    assert read_twice < 2.3 * read + 1000 and read < 20 * 40_000
    assert (
        proposed_twice < 1.5 * proposed + 400 * 1024 and proposed < 400 * 8000
    )  # a line has up to 1,024 bytes


@pytest.mark.parametrize("text", some_of(["=", "\n", "some words of prose "], 3))
def test_memory_of_texts_is_bounded(library: ctypes.CDLL, text: str) -> None:
    """Also of long tokens: a prompt of them holds many times what the same number of common ones does."""
    vocabulary = replace(VOCABULARY, tokens=(text.encode() * (64 // len(text)),), marker_ids=(), eos_ids=())
    index = TextIndex(library, replace(vocabulary, special_ids=()))
    texts = [index.start() for _ in range(40)]
    index.propose(texts[0], [0] * 131_072)
    assert index.memory() < 20 << 20
    for each in texts[1:]:
        index.propose(each, [0] * 30_000)
    for each in texts:
        index.propose(each, [0])
    assert index.memory() < 400 << 20
    for each in texts:
        index.finish(each)
    assert index.memory() == 0


def test_prompts_are_read_in_several_calls(drafter: TextDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many choices of one prompt begin together: no call reads all of them."""
    read: list[int] = []
    propose = TextIndex.propose

    def count(index: TextIndex, text_id: int, new_ids: Sequence[int], max_bytes: int) -> Any:
        read.append(len(new_ids))
        return propose(index, text_id, new_ids, max_bytes)

    monkeypatch.setattr(TextIndex, "propose", count)
    monkeypatch.setattr(text_drafter, "MAX_READ_TOKENS", 40)
    prompt = f"{CODE}{END}class Square:\n    side"
    states = [start(drafter, prompt, name) for name in "abc"]
    length = len(states[0].tokens)
    assert 40 < length < 80
    requests = [DraftRequest(state, 8) for state in states]
    drafts: list[Any] = [None] * 3
    for _ in range(8):
        read.clear()
        drafts = [new or old for new, old in zip(drafter.propose(requests), drafts, strict=True)]
        assert sum(read) <= 40
    assert len({draft.token_ids for draft in drafts}) == 1
    (again,) = drafter.propose(requests[:1])
    assert again == drafts[0], "what was found is not forgotten"


def test_old_text_is_forgotten(library: ctypes.CDLL) -> None:
    """A document is bounded; what is left is still found."""
    index = TextIndex(library, VOCABULARY)
    text = index.start()
    rng = Random(0)
    for _ in range(60):
        index.propose(text, encode("".join(f"value_{rng.random()} = {rng.random()}\n" for _ in range(300))))
    found, _ = index.propose(text, encode(f"{END}{CODE}{END}class Square:\n    side"))
    assert found.startswith(b": float\n")


tokens = st.lists(st.integers(0, len(VOCABULARY.tokens) - 1), max_size=60)
SIGNS = (
    *('"', "\\", "{", "}", "[", "]", ",", ":", "\n", " ", "\\u", "d83d", "de00", "\x1b", "12\t", "12:"),
    *("@@\n", "+", "-", "=====\n", "<a>\n", "```\n", "def area(", "width", CALL, END, "é", "\r\n"),
)
texts = st.lists(st.sampled_from(SIGNS), max_size=80).map("".join)


@settings(max_examples=examples(600), deadline=None)
@given(prompt=texts, outputs=st.lists(st.one_of(tokens, texts.map(encode)), max_size=5))
def test_any_text_gives_valid_drafts(prompt: str, outputs: list[list[int]]) -> None:
    library, reason = load_library()
    if library is None:
        pytest.skip(reason)
    drafter = TextDrafter((), library)
    drafter.set_vocabulary(VOCABULARY)
    state = start(drafter, CODE + prompt + " ")
    for output in outputs:
        state.append(output)
        (proposed,) = drafter.propose([DraftRequest(state, 16)])
        if proposed is not None:
            assert 0 < len(proposed.token_ids) == len(proposed.confidence) <= 16
            assert all(0 <= token_id < len(VOCABULARY.tokens) for token_id in proposed.token_ids)
            assert all(0 < value <= 1 for value in proposed.confidence)
    drafter.finish("a")
    drafter.check(())


def test_ids_of_no_vocabulary_and_texts_that_are_none(library: ctypes.CDLL) -> None:
    index = TextIndex(library, VOCABULARY)
    text = index.start()
    assert index.propose(text, [-1, 2**31 - 1, len(VOCABULARY.tokens)]) == (b"", index._products[:0])
    for handle in (text + 1, -1, 2**31 - 1):
        with pytest.raises(ValueError, match="no such text"):
            index.propose(handle, [1])
        with pytest.raises(ValueError, match="the text is not in the index"):
            index.finish(handle)
        assert index.work(handle) == -1
    index.finish(text)
    assert index.num_texts() == 0


def test_vocabulary_without_bytes_is_taken(library: ctypes.CDLL) -> None:
    tokens: Sequence[bytes] = (b"", b"a", b"")
    index = TextIndex(library, Vocabulary(tuple(tokens), (0,), (2,)))
    assert index.propose(index.start(), [0, 1, 2, 1]) == (b"", index._products[:0])
