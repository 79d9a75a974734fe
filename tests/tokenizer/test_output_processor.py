from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.chat_formats.chat_format import bind_format
from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    ReasoningText,
    merge_events,
)
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.core.outputs import DraftResult, TokenEvent
from foreword.core.params import SamplingParams
from foreword.tokenizer.input_processor import make_requests
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta
from tests.support.budget import examples
from tests.support.fakes import END, EOS, byte_tokenizer, logprob_of

TOKENIZER = byte_tokenizer()


def answer(**params: Any) -> ChoiceOutput:
    return ChoiceOutput(TOKENIZER, make_requests([1], SamplingParams(**params), TOKENIZER, "r", 4096)[0])


def feed(
    to: ChoiceOutput,
    text: str | bytes,
    bursts: tuple[int, ...] = (1,),
    finish: str | None = None,
    stop_id: int | None = None,
) -> list[OutputDelta]:
    """Feed a text in bursts until the answer is finished; all but the last token of a burst were drafted."""
    raw = list(text.encode() if isinstance(text, str) else text) + ([] if stop_id is None else [stop_id])
    deltas, start = [], 0
    for size in cycle(bursts):
        ids = tuple(raw[start : start + size])
        last = start + size >= len(raw)
        marks = logprobs_of(to, ids)
        use = DraftResult("ngram", size, min(size - 1, len(ids)))
        deltas.append(
            to.feed(
                TokenEvent(
                    "r-0",
                    start,
                    ids,
                    marks,
                    draft=use,
                    finish_reason=finish if last else None,
                    stop_id=stop_id if last else None,
                )
            )
        )
        start += size
        if last or to.finished:
            return deltas
    raise AssertionError


def logprobs_of(to: ChoiceOutput, ids: tuple[int, ...]) -> tuple[Any, ...]:
    count = to.request.params.logprobs
    return () if count is None else tuple(logprob_of(i, count) for i in ids)


BURSTS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(
    st.text(alphabet="abé😀", max_size=12),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2),
    BURSTS,
    st.booleans(),
)
@settings(max_examples=examples(150))
def test_output_does_not_depend_on_bursts(
    text: str, stops: list[str], bursts: tuple[int, ...], include: bool
) -> None:
    one, many = (answer(stop=tuple(stops), include_stop_str_in_output=include) for _ in range(2))
    single, burst = feed(one, text, (1,), "length"), feed(many, text, bursts, "length")
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == (
        many.text,
        many.token_ids,
        many.finish_reason,
        many.stop_reason,
    )
    for to, deltas in ((one, single), (many, burst)):
        assert "".join(delta.text for delta in deltas) == to.text
        assert [i for delta in deltas for i in delta.event.token_ids] == to.token_ids
        assert all("".join(piece.text for piece in delta.pieces) == delta.text for delta in deltas)


def test_text_is_that_of_all_tokens() -> None:
    to = answer()
    feed(to, "naïve 😀", (3,), "length")
    assert to.text == "naïve 😀" and to.finish_reason == "length" and to.stop_reason is None


def test_stop_string_ends_the_answer_at_its_token() -> None:
    to = answer(stop=("STOP",), logprobs=2)
    deltas = feed(to, "ab STOP and more", (5,))
    assert to.text == "ab "
    assert to.num_tokens == 7 and bytes(to.token_ids) == b"ab STOP"
    assert (to.finish_reason, to.stop_reason, deltas[-1].hit_stop_string) == ("stop", "STOP", True)
    assert len(to.logprobs) == 7
    assert deltas[-1].event.draft is not None and deltas[-1].event.draft.num_accepted == 2
    assert [delta.text for delta in deltas] == ["ab ", ""]


def test_stop_string_before_stop_token_wins() -> None:
    to = answer(stop=("b",))
    deltas = feed(to, "abc", (4,), "stop", EOS)
    assert (to.text, to.num_tokens, to.stop_reason) == ("a", 2, "b")
    assert deltas[-1].event.stop_id is None


def test_eos_is_counted_without_text() -> None:
    to = answer(skip_special_tokens=False)
    deltas = feed(to, "ab", (3,), "stop", EOS)
    assert (to.text, to.num_tokens, to.finish_reason, to.stop_reason) == ("ab", 3, "stop", None)
    assert not deltas[-1].hit_stop_string


def test_stop_token_text_on_request() -> None:
    hidden, shown = (
        answer(stop_token_ids=(ord("!"),)),
        answer(stop_token_ids=(ord("!"),), include_stop_str_in_output=True),
    )
    for to in (hidden, shown):
        feed(to, "ab", (2,), "stop", ord("!"))
    assert (hidden.text, hidden.stop_reason) == ("ab", ord("!"))
    assert (shown.text, shown.stop_reason) == ("ab!", ord("!"))


def test_held_back_text_comes_at_the_end() -> None:
    to = answer(stop=("STOP",))
    deltas = feed(to, "ab ST", (5,), "length")
    assert deltas[-1].text == "ab ST"


def test_stop_strings_before_min_tokens_are_ignored() -> None:
    to = answer(stop=("a",), min_tokens=2)
    feed(to, "aaaa", (4,), "length")
    assert (to.text, to.num_tokens) == ("aa", 3)


def test_pieces_mark_draft_tokens() -> None:
    to = answer(stop=("XY",))
    deltas = feed(to, "abcX", (2, 1, 1), "length")
    assert [delta.pieces for delta in deltas] == [
        (("a", "ngram", None), ("b", "", None)),
        (("c", "", None),),
        (("X", "", None),),
    ]


def test_pieces_of_draft_tokens_have_their_confidence() -> None:
    """Also if the stop string search holds a text back and releases it in parts."""
    to = answer(stop=("bcX",))
    use = DraftResult("suffix", 3, 2, (0.5, 0.25))
    end = TokenEvent("r-0", 3, (100,), finish_reason="length")
    deltas = [to.feed(TokenEvent("r-0", 0, (97, 98, 99), draft=use)), to.feed(end)]
    pieces = [piece for delta in deltas for piece in delta.pieces]
    assert pieces == [("a", "suffix", 0.5), ("b", "suffix", 0.25), ("c", "", None), ("d", "", None)]
    assert [piece.is_draft for piece in pieces] == [True, True, False, False]


def test_logprobs_have_offsets_and_bytes() -> None:
    to = answer(logprobs=1)
    feed(to, "aé", (3,), "stop", END)
    assert [(token.text, token.raw, token.offset) for token in to.logprobs] == [
        ("a", b"a", 0),
        ("\ufffd", b"\xc3", 1),
        ("\ufffd", b"\xa9", 1),
        ("<|im_end|>", b"<|im_end|>", 2),
    ]


# With a parser.

FORMAT = bind_format(FORMATS["hermes"], TOKENIZER.token_to_id, TOKENIZER.special_ids)
USE = ToolUse((Tool("f"), Tool("g")))
ANSWER = (
    '<think>\nÄh.\n</think>\n\nWell, \n<tool_call>\n{"name": "f", "arguments": {"a": "stop"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call> stop here'
)


STOPS = st.sampled_from([(), ("stop",), ("ll,", "Ä"), (" s", "st"), ("\n",), (" \n",), ("\n ", "\n\n")])


CALL = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def parsed_answer(**params: Any) -> ChoiceOutput:
    request = make_requests([1], SamplingParams(**params), TOKENIZER, "r", 4096)[0]
    return ChoiceOutput(TOKENIZER, request, ChatParser(FORMAT, USE, False, "call_{}".format))


@given(BURSTS, STOPS, st.booleans())
@settings(max_examples=examples(100))
def test_events_do_not_depend_on_bursts(
    bursts: tuple[int, ...], stop: tuple[str, ...], include: bool
) -> None:
    whole, cut = (
        parsed_answer(stop=stop, include_stop_str_in_output=include and bool(stop)) for _ in range(2)
    )
    feed(whole, ANSWER, (1000,), "stop", END)
    deltas = feed(cut, ANSWER, bursts, "stop", END)
    assert cut.events == whole.events == merge_events(event for delta in deltas for event in delta.events)
    assert (cut.finish_reason, cut.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert cut.text == whole.text == "".join(delta.text for delta in deltas)
    for delta in deltas:
        texts = [event.text for event in delta.events if not isinstance(event, CallStart | CallEnd)]
        assert "".join(piece.text for piece in delta.pieces) == "".join(texts)


def test_stop_strings_are_searched_in_content_alone() -> None:
    output = parsed_answer(stop=("stop",))
    feed(output, ANSWER, (3,), "stop", END)
    assert output.events == (
        ReasoningText("Äh."),
        ContentText("Well,"),
        *(CallStart(0, "call_0", "f"), CallArguments(0, '{"a": "stop"}'), CallEnd(0)),
        *(CallStart(1, "call_1", "g"), CallArguments(1, "{}"), CallEnd(1)),
        ContentText(" "),
    )
    assert (output.finish_reason, output.stop_reason) == ("tool_calls", "stop")


def test_stop_string_in_what_the_parser_held_back() -> None:
    """The end of the answer shows that a text begins no marker; it may hold a stop string."""
    output = parsed_answer(stop=("ool",))
    feed(output, "Hi <tool", (3,), "stop", EOS)
    assert (output.text, output.finish_reason, output.stop_reason) == ("Hi <t", "stop", "ool")


@pytest.mark.parametrize("use", [ToolUse(), USE], ids=["plain", "tools"])
@pytest.mark.parametrize("name", ["hermes", "mistral-args", "llama-json", "granite"])
def test_stop_string_of_newlines_ends_the_answer_at_its_token(name: str, use: ToolUse) -> None:
    """Newlines without end would never stop the answer if their search waited for a text."""
    for begin in ("Hi", ""):
        request = make_requests([1], SamplingParams(stop=("\n\n",)), TOKENIZER, "r", 4096)[0]
        parser = ChatParser(bind_format(FORMATS[name], TOKENIZER.token_to_id), use, False, str)
        output = ChoiceOutput(TOKENIZER, request, parser)
        feed(output, begin + "\n\n\n\n\n\nyou")
        assert (output.text, output.num_tokens, output.stop_reason) == (begin, len(begin) + 2, "\n\n")


@given(
    st.text(alphabet="ab \n", max_size=12),
    st.lists(st.text(alphabet="a \n", min_size=1, max_size=3), max_size=2),
    BURSTS,
    st.booleans(),
    st.integers(0, 4),
)
@settings(max_examples=examples(150))
def test_whitespace_is_searched_with_tools_as_without(
    text: str, stops: list[str], bursts: tuple[int, ...], include: bool, min_tokens: int
) -> None:
    params = {"stop": tuple(stops), "include_stop_str_in_output": include, "min_tokens": min_tokens}
    plain, parsed = answer(**params), parsed_answer(**params)
    feed(plain, text, (1,), "stop", EOS)
    deltas = feed(parsed, text, bursts, "stop", EOS)
    assert (parsed.text, parsed.num_tokens, parsed.stop_reason) == (
        plain.text,
        plain.num_tokens,
        plain.stop_reason,
    )
    assert "".join(piece.text for delta in deltas for piece in delta.pieces) == plain.text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (f"A\n\n{CALL}", "\n\n", ("A", 3, "\n\n")),
        (f"A\n\n{CALL}\n\nB", "A\n\nB", ("A\n\nB", -1, None)),  # none spans a call
        ("<think>\n\nA\n\n</think>\n\nB\n\nC", "\n\n", ("B", 25, "\n\n")),  # reasoning is not
        ("A\n</think>\n\nB", "A\nB", ("A\n</think>\n\nB", -1, None)),
    ],
)
def test_whitespace_before_markers_is_searched(
    text: str, stop: str, expected: tuple[str, int, str | None]
) -> None:
    output = parsed_answer(stop=(stop,))
    feed(output, text, (1,), "stop")
    num_tokens = expected[1] if expected[1] >= 0 else len(text)
    assert (output.text, output.num_tokens, output.stop_reason) == (expected[0], num_tokens, expected[2])


def test_whitespace_between_calls_is_not_searched() -> None:
    output = parsed_answer(stop=("\n",))
    feed(output, ANSWER[ANSWER.index("<tool_call>") :], (3,), "stop", END)
    assert output.parser is not None and output.parser.num_calls == 2 and output.stop_reason is None


@pytest.mark.parametrize("end", ["length", "stop"])
def test_reasoning_tokens_are_tokens_of_the_answer(end: str) -> None:
    """Wherever the answer ends: within a character, whose rest is no token, and within its markers."""
    raw = "<think>\nÄh Ä.\n</think>\n\nWell".encode()
    thought = raw.index(b"\n\nWell")
    for burst in (1, 3, 1000):
        for length in range(1, len(raw) + 1):
            output = parsed_answer()
            feed(output, raw[:length], (burst,), end)
            assert output.num_tokens == length and output.num_reasoning_tokens <= min(length, thought)


@given(
    BURSTS,
    st.sampled_from(
        [
            ("qwen3-coder", "In Rust write <function=foo> as usual."),
            ("qwen3-coder", "<think>I <function=foo></think>Write <function=f>"),
            ("llama-json", ' {"city": "Rome", "days": 2}'),
            ("llama-json", '{"name": "x", "parameters": {}} or {'),
            ("pythonic", "[f(), h()] no"),
            ("hermes", ANSWER),
            ("hermes", f"A {CALL} B <tool_call>C</tool_call>{CALL}<tool_call>"),
        ]
    ),
)
@settings(max_examples=examples(100))
def test_logprobs_of_content_do_not_depend_on_bursts(bursts: tuple[int, ...], case: tuple[str, str]) -> None:
    """A text that looks like a call is content once the parser has decided so."""
    name, text = case
    bound = bind_format(FORMATS[name], TOKENIZER.token_to_id)
    outputs, streamed = [], []
    for sizes in ((1000,), bursts):
        request = make_requests([1], SamplingParams(logprobs=0), TOKENIZER, "r", 4096)[0]
        output = ChoiceOutput(TOKENIZER, request, ChatParser(bound, USE, False, str))
        deltas = feed(output, text, sizes, "stop", EOS)
        outputs.append(output)
        streamed.append([token for delta in deltas for token in delta.content_logprobs])
        assert streamed[-1] == [token for token in output.logprobs if token.content_group is not None]
        assert [token.raw for token in output.logprobs] == [
            token.raw for delta in deltas for token in delta.logprobs
        ]
    assert outputs[0].logprobs == outputs[1].logprobs and streamed[0] == streamed[1]
    parser = outputs[0].parser
    assert parser is not None
    num_parsed = parser.num_reasoning_tokens + parser.num_call_tokens
    assert len(streamed[0]) == outputs[0].num_tokens - num_parsed
    if not parser.num_calls and not parser.num_reasoning_tokens:
        assert len(streamed[0]) == outputs[0].num_tokens
        assert {token.content_group for token in streamed[0]} == {0}


def test_unfinished_call_is_no_reason_to_call() -> None:
    output = parsed_answer()
    feed(output, ANSWER[: ANSWER.index('"stop"')], (3,), "stop", END)
    assert output.finish_reason == "stop" and output.events[-1] == CallArguments(0, '{"a": ')


def test_events_of_a_long_answer_take_linear_time() -> None:
    """Merging is one pass: a quadratic one would copy gigabytes."""
    texts = [ReasoningText("x" * 50) for _ in range(40_000)]
    (merged,) = merge_events(texts)
    assert isinstance(merged, ReasoningText) and len(merged.text) == 2_000_000
