"""The matcher of a request: masks, drafts, forced tokens, reasoning, stop tokens, full lexers."""

from __future__ import annotations

import json
import os
import random
import re
from itertools import product, takewhile

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from torch import Tensor

from foreword.core.batch import SampleRow
from foreword.core.params import SamplingParams
from foreword.core.request import RequestState
from foreword.core.structured_output import RequestGrammar, StructuredOutput
from foreword.grammar import compiler as compiler_module
from foreword.grammar import limits
from foreword.grammar.compiler import CompiledGrammar, Lexer
from foreword.grammar.limits import parser_limits
from foreword.grammar.manager import GrammarManager
from tests.support.adversarial_grammars import COSTLY_REGEXES
from tests.support.budget import examples, is_full, some_of
from tests.support.grammar_walks import (
    EOS,
    begin_request,
    encode,
    legal_ids,
    open_grammar_manager,
    random_walk,
    request,
    tokenizer,
    vocab_size,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["price", "print", 7, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": -5, "maximum": 120}},
            "required": ["n"],
        },
        "code": {"type": "string", "pattern": "^[A-F]{2}-[0-9]+$"},
    },
    "required": ["name", "kind", "inner"],
    "additionalProperties": False,
}
REGEX = r"(ab|[c-e]{2,5})+-[0-9]{1,3}( (yes|no))?"
GBNF = 'root ::= "(" root ")" | word ("," word)*\nword ::= [a-d]+ "x"?\n'
CASES = {
    "schema": StructuredOutput("json_schema", json.dumps(SCHEMA)),
    "compact": StructuredOutput("json_schema", json.dumps(SCHEMA), whitespace=False),
    "regex": StructuredOutput("regex", REGEX),
    "choice": StructuredOutput("choice", json.dumps(["yes", "yes, of course", "no"])),
    "gbnf": StructuredOutput("gbnf", GBNF),
}
SEEDS = st.integers(0, 2**32)
Row = tuple[bytes, str]  # mask, and error of a row without one
Case = tuple[StructuredOutput, list[int], list[Row]]


def _conforms(name: str, text: str) -> bool:
    match name:
        case "schema" | "compact":
            jsonschema.validate(json.loads(text), SCHEMA, cls=jsonschema.Draft202012Validator)
            return name == "schema" or not re.search(r"\s", re.sub(r'"([^"\\]|\\.)*"', "", text))
        case "regex":
            return re.fullmatch(REGEX, text) is not None
        case "choice":
            return text in ("yes", "yes, of course", "no")
    is_balanced = text.count("(") == text.count(")")
    return is_balanced and re.fullmatch(r"(\()*([a-d]+x?)(,[a-d]+x?)*(\))*", text) is not None


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(25))
@given(seed=SEEDS)
def test_random_output_conforms(grammars: GrammarManager, name: str, seed: int) -> None:
    output = random_walk(begin_request(grammars, CASES[name]), random.Random(seed))
    if output[-1] == EOS:
        assert _conforms(name, tokenizer().decode(output[:-1]))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(15))
@given(seed=SEEDS, at=st.integers(0, 30))
def test_num_legal_of_one_token_agrees_with_the_mask(
    grammars: GrammarManager, name: str, seed: int, at: int
) -> None:
    grammar = begin_request(grammars, CASES[name])
    output = random_walk(begin_request(grammars, CASES[name]), random.Random(seed))[:at]
    grammar.accept(output)
    if output and output[-1] == EOS:
        return
    legal = legal_ids(grammar.mask(()))
    assert [i for i in range(vocab_size()) if grammar.num_legal([i])] == legal


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(15))
@given(seed=SEEDS, at=st.integers(0, 20), wrong=st.integers(0, 40), noise=st.integers(0, 1535))
def test_num_legal_of_a_draft_agrees_with_its_masks(
    grammars: GrammarManager, name: str, seed: int, at: int, wrong: int, noise: int
) -> None:
    output = random_walk(begin_request(grammars, CASES[name]), random.Random(seed))
    grammar, stepwise = begin_request(grammars, CASES[name]), begin_request(grammars, CASES[name])
    at = min(at, len(output) - 1)
    grammar.accept(output[:at])
    stepwise.accept(output[:at])
    draft = output[at:]
    draft[wrong % len(draft)] = noise
    expected = 0
    for token_id in draft:
        if token_id not in legal_ids(stepwise.mask(())):
            break
        expected += 1
        stepwise.accept([token_id])
        if token_id == EOS:
            break
    assert grammar.num_legal(draft) == expected


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(15))
@given(seed=SEEDS, length=st.integers(0, 12), use_first=st.booleans())
def test_mask_is_equal_on_all_ways_to_compute_it(
    grammars: GrammarManager, name: str, seed: int, length: int, use_first: bool
) -> None:
    """By a background job for the draft, on demand, or with the draft as output."""
    draw = random.Random(seed)
    output = random_walk(begin_request(grammars, CASES[name]), draw)
    if output[-1] == EOS:
        output.pop()
    at = draw.randrange(len(output) + 1)
    draft = tuple(output[at : at + length])
    prepared, plain, followed = (begin_request(grammars, CASES[name]) for _ in range(3))
    for grammar in (prepared, plain, followed):
        grammar.accept(output[:at])
    if use_first:  # must not change the state
        prepared.forced(5)
        prepared.num_legal((*draft, 3))
        prepared.must_end(draft)
    state = RequestState(request(CASES[name]), 0, 2048, prepared)
    grammars.start_masks([SampleRow(state, draft[:n]) for n in range(len(draft) + 1)])
    for n in range(len(draft) + 1):
        legal = legal_ids(prepared.mask(draft[:n]))
        assert legal == legal_ids(plain.mask(draft[:n]))
        assert legal == legal_ids(followed.mask(()))
        assert plain.must_end(draft[:n]) == followed.must_end(()) == (legal == [EOS])
        followed.accept(draft[n : n + 1])


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(15))
@given(seed=SEEDS, max_tokens=st.integers(1, 12))
def test_forced_tokens_are_the_only_legal_text_except_whitespace(
    grammars: GrammarManager, name: str, seed: int, max_tokens: int
) -> None:
    grammar = begin_request(grammars, CASES[name])
    for token_id in random_walk(begin_request(grammars, CASES[name]), random.Random(seed)):
        forced = grammar.forced(max_tokens)
        assert len(forced) <= max_tokens
        assert grammar.num_legal(forced) == len(forced)
        if forced:
            text = b"".join(map(_letters, forced))
            other = [_letters(i) for i in legal_ids(grammar.mask(())) if i != EOS]
            assert all(text.startswith(begun) or begun.startswith(text) for begun in other)
            assert forced == (EOS,) or EOS not in legal_ids(grammar.mask(()))
        grammar.accept([token_id])
    assert grammar.forced(5) == ()


def _letters(token_id: int) -> bytes:
    return b"".join(tokenizer().token_bytes(token_id).split())


@pytest.mark.parametrize(
    ("indent", "separators", "expected"),
    [
        (None, None, ', "kind": "pri'),
        (None, (",", ":"), ',"kind":"pri'),
        (2, None, ',\n  "kind": "pri'),
        ("\t", (",", ":"), ',\n\t"kind":"pri'),
    ],
)
def test_forced_text_keeps_the_style_of_the_output(
    grammars: GrammarManager, indent: int | str | None, separators: tuple[str, str] | None, expected: str
) -> None:
    properties = {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["price", "print"]},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    text = json.dumps({"name": "Clara, who", "age": 31}, indent=indent, separators=separators)
    grammar = begin_request(grammars, StructuredOutput("json_schema", json.dumps(schema)))
    grammar.accept(encode(text.rstrip().removesuffix("}").rstrip() + ","))
    forced = tokenizer().decode(grammar.forced(30))
    assert forced and ("," + forced).startswith(expected[: len(forced) + 1]) and '"kind":' in forced


def test_forced_text_includes_eos(grammars: GrammarManager) -> None:
    grammar = begin_request(grammars, StructuredOutput("choice", '["Lisbon is the capital", "Oslo is not"]'))
    assert grammar.forced(20) == ()
    grammar.accept(encode("Lis"))
    forced = grammar.forced(20)
    assert tokenizer().decode(forced) == "bon is the capital"
    assert forced[-1] == EOS
    assert grammar.forced(2) == forced[:2]
    grammar.accept(forced[:-1])
    assert grammar.must_end(()) and grammar.forced(3) == (EOS,)
    assert legal_ids(grammar.mask(())) == [EOS]
    grammar.accept([EOS, 17, 18])
    assert grammar.error is None and grammar.forced(3) == () and grammar.num_legal([17]) == 0


def test_all_stop_ids_are_legal_where_the_output_may_end(grammars: GrammarManager) -> None:
    vocabulary = tokenizer().vocabulary()
    other = next(i for i in vocabulary.special_ids if i not in vocabulary.eos_ids)
    grammar = begin_request(grammars, CASES["choice"], eos_token_ids=(other,))
    grammar.accept(encode("yes"))
    legal = legal_ids(grammar.mask(()))
    assert other in legal and EOS not in legal
    assert grammar.num_legal([other]) == 1 and grammar.num_legal([EOS]) == 0
    grammar = begin_request(
        grammars,
        CASES["choice"],
        eos_token_ids=(other,),
        params=SamplingParams(stop_token_ids=(EOS,), structured=CASES["choice"]),
    )
    assert not {other, EOS} & set(legal_ids(grammar.mask(())))
    grammar.accept(encode("yes"))
    assert {other, EOS} <= set(legal_ids(grammar.mask(())))


def test_matcher_starts_after_the_resumed_output(grammars: GrammarManager) -> None:
    grammar = begin_request(grammars, CASES["choice"], resume_output_ids=encode("yes, of"))
    assert tokenizer().decode(grammar.forced(9)) == " course"


END = (41, 42)


def _is_all_but_eos(mask: Tensor | None) -> bool:
    """What may follow inside of reasoning: the constrained text is still to come."""
    return legal_ids(mask) == [i for i in range(vocab_size()) if i != EOS]


def test_reasoning_ends_inside_a_draft(grammars: GrammarManager) -> None:
    grammar = begin_request(grammars, CASES["choice"], reasoning_end_ids=(END, (43,)))
    answer = encode("yes")
    draft = (9, 41, 9, *END, *answer, EOS, 9)
    assert grammar.forced(4) == ()
    assert grammar.num_legal(draft) == len(draft) - 1
    assert grammar.num_legal((9, 9, 9)) == 3
    assert grammar.num_legal((9, *END, 9)) == 3
    assert _is_all_but_eos(grammar.mask(draft[:4])) and not grammar.must_end(draft[:4])
    assert grammar.num_legal((9, EOS, 9)) == 1
    fresh = begin_request(grammars, CASES["choice"])
    assert legal_ids(grammar.mask(draft[:5])) == legal_ids(fresh.mask(()))
    assert legal_ids(grammar.mask(draft[: 5 + len(answer)])) == legal_ids(fresh.mask(answer))
    state = RequestState(request(CASES["choice"]), 0, 2048, grammar)
    grammars.start_masks([SampleRow(state, draft[:n]) for n in range(len(draft) - 1)])
    assert [_is_all_but_eos(grammar.mask(draft[:n])) for n in range(len(draft) - 1)] == [
        n < 5 for n in range(len(draft) - 1)
    ]
    grammar.accept(draft[:4])  # ends with the first token of an end sequence
    assert _is_all_but_eos(grammar.mask(())) and _is_all_but_eos(grammar.mask((9,)))
    assert legal_ids(grammar.mask((42,))) == legal_ids(fresh.mask(()))
    grammar.accept((42, *answer[:1]))
    fresh.accept(answer[:1])
    assert legal_ids(grammar.mask(())) == legal_ids(fresh.mask(()))


def test_reasoning_may_end_in_the_prompt(grammars: GrammarManager) -> None:
    grammar = begin_request(grammars, CASES["choice"], reasoning_end_ids=(END,), prompt_ids=(1, 41, 42, 8))
    assert grammar.mask(()) is not None
    grammar = begin_request(
        grammars, CASES["choice"], reasoning_end_ids=(END,), prompt_ids=(1, 41, 42, *range(50, 120))
    )
    assert _is_all_but_eos(grammar.mask(()))


def test_full_lexer_is_replaced(grammars: GrammarManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with one constraint share a lexer: if one fills it, the others go on."""
    monkeypatch.setattr(
        compiler_module, "parser_limits", lambda kind, for_check=False: _limits(max_lexer_states=60)
    )
    large = StructuredOutput("regex", "[a-z]{1,40}[0-9]{1,40}#")
    words = [begin_request(grammars, large) for _ in range(6)]
    for number, grammar in enumerate(words):
        for char in "a" * (number + 1) * 3 + "7" * (number + 1) * 3:
            assert grammar.num_legal(encode(char)[:1])
            assert legal_ids(grammar.mask(()))
            grammar.accept(encode(char)[:1])
        assert grammar.error is None


def test_outputs_that_fill_a_shared_lexer_get_their_own(
    grammars: GrammarManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they shared the next one too, lexers would be compiled and filled every few tokens."""
    new_lexer, lexers = CompiledGrammar.new_lexer, []

    def count(compiled: CompiledGrammar) -> Lexer:
        lexers.append(new_lexer(compiled))
        return lexers[-1]

    def cost(texts: list[str], end: str) -> int:
        """Of the fullest lexer, after these outputs of one grammar in turn."""
        regex = StructuredOutput("regex", rf"([a-z]{{1,8}}[ -]){{5,80}}{end}")
        outputs = [begin_request(grammars, regex) for _ in texts]
        for column in zip(*texts, strict=True):
            for output, char in zip(outputs, column, strict=True):
                output.mask(())
                output.accept(encode(char)[:1])
        assert all(output.error is None for output in outputs)
        return max(output._lexer.read_cost(output._llg) for output in outputs)

    monkeypatch.setattr(CompiledGrammar, "new_lexer", count)
    monkeypatch.setattr(limits, "MAX_COST_PER_S", 10**12)  # the cost is read at each mask
    words = [["x" * ((3 * k + j) % 8 + 1) for j in range(20)] for k in range(6)]
    texts = ["-".join(text)[:60] for text in words]
    alone, together = cost(texts[:1], "!"), cost(texts, ":")
    assert together > 1.2 * alone
    monkeypatch.setattr(limits, "MAX_LEXER_COST", (alone + together) // 2)
    lexers.clear()
    cost(texts, ";")
    assert len(texts) < len(lexers) <= 2 * len(texts)


def test_cost_is_read_where_a_row_might_exceed_its_limit(
    grammars: GrammarManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lexer that is nearly full is not read at each mask."""
    costs: list[int] = []

    def read_cost(lexer: Lexer, llg: LLMatcher) -> int:
        costs.append(limits.MAX_LEXER_COST)
        return costs[-1]

    lexer = Lexer(begin_request(grammars, CASES["regex"])._lexer.prototype)
    monkeypatch.setattr(Lexer, "read_cost", read_cost)
    for _ in range(1000):
        lexer.unread_s += 0.01 * limits.MAX_ROW_COST / limits.MAX_COST_PER_S
        assert not lexer.is_full(lexer.prototype)
    most = 1000 * 0.01 * limits.MAX_ROW_COST / (limits.MAX_ROW_COST - limits.MAX_LEXER_COST)
    assert 0.8 * most < len(costs) <= most
    assert "RUST_LIB_BACKTRACE" in os.environ, "a backtrace in each error makes reads slow"


def test_full_slow_lexer_is_not_used_for_later_requests(
    grammars: GrammarManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compiler_module, "parser_limits", lambda kind, for_check=False: _limits(max_lexer_states=60)
    )
    monkeypatch.setattr(compiler_module, "RECOMPILE_CPU_S", 0.0)
    large = StructuredOutput("regex", "[a-z]{1,40}[0-9]{1,40}!")
    first = begin_request(grammars, large)
    for char in "a" * 30 + "7" * 30:
        first.mask(())
        first.accept(encode(char)[:1])
    assert first.error is not None
    later = begin_request(grammars, large)
    assert legal_ids(later.mask(())) and later.error is None


def test_llguidance_error_is_reported_after_equal_masks(
    grammars: GrammarManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compiler_module, "parser_limits", lambda kind, for_check=False: _limits(max_items_in_row=50)
    )
    ambiguous = StructuredOutput("lark", 'start: s\ns: s s s | s s | "a"?')
    grammar, plain = begin_request(grammars, ambiguous), begin_request(grammars, ambiguous)
    letter = encode("a")[0]
    while grammar.error is None:
        assert plain.error is None
        before = legal_ids(grammar.mask(()))
        draft = (letter,) * 9  # may exceed a limit, which must not change the rows before
        assert grammar.mask(draft) is not None and legal_ids(grammar.mask(())) == before
        assert legal_ids(plain.mask(())) == before
        grammar.accept([letter])
        plain.accept([letter])
    assert "items" in grammar.error and plain.error == grammar.error
    assert legal_ids(grammar.mask(())) == [] and grammar.num_legal([letter]) == 0 and grammar.forced(3) == ()


def _rows(grammars: GrammarManager, structured: StructuredOutput, seed: int) -> tuple[list[int], list[Row]]:
    """A random output of a request alone, and its rows."""
    draw, grammar = random.Random(seed), begin_request(grammars, structured)
    output: list[int] = []
    rows = [_row(grammar, ())]
    while not rows[-1][1] and len(output) < (60 if is_full() else 20):
        text = [i for i in legal_ids(grammar.mask(())) if i != EOS]
        if not text:
            break
        output.append(draw.choice(text))
        grammar.accept(output[-1:])
        rows.append(_row(grammar, ()))
    return output, rows


def _row(grammar: RequestGrammar, draft: tuple[int, ...]) -> Row:
    mask = grammar.mask(draft)
    assert mask is not None
    return mask.numpy().tobytes(), "" if mask.any() else str(grammar.error)


def _check_drafted(grammars: GrammarManager, case: Case, draw: random.Random) -> None:
    """Drafts that follow the output, and leave it at their end; and the drafter's calls between them."""
    structured, output, rows = case
    grammar, at = begin_request(grammars, structured), 0
    while at < len(output):
        length = draw.randint(0, 8)
        wrong = [draw.choice(output) for _ in range(2)]
        draft = (*output[at : at + length], *wrong)
        draft = (*grammar.forced(3), *draft) if draw.random() < 0.1 else draft
        draft = tuple(i for i in draft[: grammar.num_legal(draft)] if i != EOS)
        state = RequestState(request(structured), 0, 2048, grammar)
        grammars.start_masks([SampleRow(state, draft[:n]) for n in range(len(draft) + 1)])
        grammar.must_end(draft[:1])
        accepted = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, output[at:], strict=False))
        )
        for row in range(accepted + 1):  # a failure behind a draft has a reason once the draft is output
            is_equal = _row(grammar, draft[:row])[: 1 if row else 2] == rows[at + row][: 1 if row else 2]
            assert is_equal, (structured.text, at, row, len(rows))
        accepted = min(accepted + 1, len(output) - at)
        grammar.accept(output[at : at + accepted])
        at += accepted
    assert _row(grammar, ()) == rows[-1], (structured.text, len(rows))


@pytest.mark.parametrize(("seed", "is_slow"), some_of(product(range(examples(20)), (False, True)), 3))
def test_failure_depends_on_the_tokens_alone(
    seed: int, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, other requests, a warm lexer, slow compilation and resumption change no mask and no failure."""
    draw = random.Random(seed)
    monkeypatch.setattr(compiler_module, "RECOMPILE_CPU_S", 0.0 if is_slow else 10.0)
    cost = draw.choice((8_000, 40_000, 200_000))
    monkeypatch.setattr(limits, "MAX_ROW_COST", cost)
    monkeypatch.setattr(limits, "MAX_LEXER_COST", cost * 4 // 5)
    for regex in COSTLY_REGEXES if is_full() else draw.sample(COSTLY_REGEXES, 1):
        structured = StructuredOutput("regex", regex)
        with open_grammar_manager() as alone, open_grammar_manager() as warm:
            output, rows = _rows(alone, structured, seed)
            _rows(warm, structured, seed + 1)
            _check_drafted(warm, (structured, output, rows), draw)
            for at in range(draw.randrange(3), len(rows), 1 if is_full() else 9):
                grammar = begin_request(warm, structured, resume_output_ids=tuple(output[:at]))
                assert _row(grammar, ()) == rows[at], (regex, at, len(rows))


def test_costly_answers_fail_at_a_limit_and_finish_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the test before matter, and the usual ones allow long answers."""
    structured = StructuredOutput("regex", COSTLY_REGEXES[0])
    words = encode("the house of the rising sun and the old man's " * 12)
    with open_grammar_manager() as grammars:
        grammar = begin_request(grammars, structured, resume_output_ids=words)
        assert _row(grammar, ())[1] == ""
    monkeypatch.setattr(limits, "MAX_ROW_COST", 8_000)
    with open_grammar_manager() as grammars:
        grammar = begin_request(grammars, structured, resume_output_ids=words)
        assert _row(grammar, ())[1] == "lexer error: too many expressions constructed"


def _limits(**changed: int) -> object:
    usual = parser_limits("regex")
    names = (
        "max_items_in_row",
        "initial_lexer_fuel",
        "step_lexer_fuel",
        "step_max_items",
        "max_lexer_states",
        "max_grammar_size",
    )
    values = {name: getattr(usual, name) for name in names}
    return type(usual)(**{**values, **changed}, verbose_errors=True)
