"""Each processor against its counterpart in transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import SampleRow
from foreword.kernels.reference.sampling import ReferenceSampling
from foreword.sampling.logits_processors import PIPELINE, MinTokens, active_processors
from tests.support.budget import examples
from tests.support.sample_rows import EOS, JSON, VOCAB_SIZE, EveryThirdGrammar, apply, make_row, make_state

OPS = ReferenceSampling()
PROMPT = (5, 6, 7, 6)
OUTPUT = (9, 6, 9, 120)
DRAFT = (9, 40)
HISTORY = torch.tensor([[*PROMPT, *OUTPUT, *DRAFT]])

IDS = st.integers(9, 15) | st.integers(0, VOCAB_SIZE - 1)  # few, so that they repeat

Ours = dict[str, object]


def logits(rows: int = 1, seed: int = 0) -> Tensor:
    return 4 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def process(values: Tensor, *rows: SampleRow) -> Tensor:
    """Run the pipeline on rows with the same processors."""
    changed = values.clone()
    for step in active_processors(rows[0].state.request):
        apply(step, OPS, changed, rows)  # type: ignore[arg-type]
    return changed


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"temperature": 0.6}, transformers.TemperatureLogitsWarper(0.6)),
        ({"top_k": 7}, transformers.TopKLogitsWarper(7)),
        ({"top_p": 0.8}, transformers.TopPLogitsWarper(0.8)),
        ({"min_p": 0.05}, transformers.MinPLogitsWarper(0.05)),
        ({"typical_p": 0.7}, transformers.TypicalLogitsWarper(0.7)),
        ({"typical_p": 0.2}, transformers.TypicalLogitsWarper(0.2)),
        ({"repetition_penalty": 1.4}, transformers.RepetitionPenaltyLogitsProcessor(1.4)),
        ({"repetition_penalty": 0.7}, transformers.RepetitionPenaltyLogitsProcessor(0.7)),
        ({"bad_words_ids": ((3,), (40, 8), (9, 40, 4), (6, 40, 1), (120, 7))},
         transformers.NoBadWordsLogitsProcessor(
             [[3], [40, 8], [9, 40, 4], [6, 40, 1], [120, 7]], eos_token_id=[EOS])),
        ({"logit_bias": {1: 2.5, 7: -100.0}},
         transformers.SequenceBiasLogitsProcessor([[[1], 2.5], [[7], -100.0]])),
        ({"allowed_token_ids": (1, 7, 250)},
         transformers.SuppressTokensLogitsProcessor([i for i in range(VOCAB_SIZE) if i not in (1, 7, 250)])),
        ({"min_tokens": 7, "stop_token_ids": (33,)},
         transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, [EOS, 33])),
        ({"min_tokens": 6, "stop_token_ids": (33,)},
         transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [EOS, 33])),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_like_transformers(ours: Ours, theirs: transformers.LogitsProcessor) -> None:
    values = logits()
    row = make_row(draft=DRAFT, output=OUTPUT, prompt=PROMPT, **ours)
    assert torch.equal(process(values, row), theirs(HISTORY, values.clone()))


def test_min_tokens_masks_stop_ids_until_the_bound() -> None:
    """With min_tokens 7, the row of token 7 may not sample a stop id, the next row may."""
    state = make_state(output=OUTPUT, min_tokens=7)
    changed = process(logits(3), SampleRow(state, (1, 1)), SampleRow(state, (1, 1, 1)), SampleRow(state))
    assert (changed[:, EOS] == -torch.inf).tolist() == [True, False, True]


def test_grammar_masks_each_draft_row() -> None:
    state = make_state(structured=JSON, grammar=EveryThirdGrammar(0, free=(1,)))
    rows = [SampleRow(state, (7,) * n) for n in range(4)]
    values = logits(4)
    changed = process(values, *rows)
    for n, line in enumerate(changed):
        kept = list(range(VOCAB_SIZE)) if n == 1 else list(range(n % 3, VOCAB_SIZE, 3))
        assert line.isfinite().nonzero()[:, 0].tolist() == kept
        assert torch.equal(line[kept], values[n, kept])


def test_complete_grammar_overrides_min_tokens() -> None:
    state = make_state(structured=JSON, grammar=EveryThirdGrammar(0, over=3), min_tokens=10)
    changed = process(logits(4), *(SampleRow(state, (7,) * n) for n in range(4)))
    assert changed[:, EOS].isfinite().tolist() == [False, False, False, True]
    assert changed[3].isfinite().sum() == 1


def test_grammar_is_not_asked_once_min_tokens_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """must_end() cancels the job that computes the masks, and may rebuild the matcher."""
    grammar = EveryThirdGrammar(0)
    state = make_state(structured=JSON, grammar=grammar, output=OUTPUT, min_tokens=len(OUTPUT) + 1)
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(EveryThirdGrammar, "must_end", lambda self, draft: bool(asked.append(draft)))
    MinTokens().biases(SampleRow(state, (7,)))
    assert asked == []
    MinTokens().biases(SampleRow(state))
    assert asked == [()]


def test_count_penalties_include_the_draft() -> None:
    values = logits()
    row = make_row(draft=DRAFT, output=OUTPUT, prompt=PROMPT, presence_penalty=0.5, frequency_penalty=0.25)
    expected = values.clone()
    for token_id, count in {9: 3, 6: 1, 120: 1, 40: 1}.items():
        expected[0, token_id] -= 0.5 + 0.25 * count
    assert torch.equal(process(values, row), expected)


def test_dry_penalty_grows_with_the_repeat() -> None:
    """... 1 2 3 [4] ... 2 3 [5] ... 1 2 3: 4 continues three tokens, 5 two, 8 one, which is free."""
    row = make_row(
        prompt=(1, 2, 3, 4, 0, 2, 3, 5, 0),
        output=(9, 3, 8, 1, 2),
        draft=(3,),
        dry_multiplier=0.5,
        dry_base=2.0,
        dry_breakers=((9,),),
    )
    values = logits()
    expected = values.clone()
    expected[0, 4] -= 0.5 * 2.0
    expected[0, 5] -= 0.5
    assert torch.equal(process(values, row), expected)


def test_dry_penalty_never_masks() -> None:
    row = make_row(output=(7,) * 500, dry_multiplier=100.0, dry_base=100.0, temperature=1e-5)
    changed = process(logits(), row)
    assert changed.isfinite().all()
    assert changed.argmin() == 7


def test_greedy_rows_skip_temperature_and_filters() -> None:
    row = make_row(
        temperature=9e-6,
        top_k=3,
        top_p=0.5,
        min_p=0.5,
        typical_p=0.5,
        top_n_sigma=1.0,
        xtc_probability=1.0,
        xtc_threshold=0.0,
    )
    assert active_processors(row.state.request) == ()


def test_processors_run_in_order() -> None:
    """Temperature runs after penalties and before filters; every requested processor runs."""
    row = make_row(
        draft=DRAFT,
        output=OUTPUT,
        structured=JSON,
        bad_words_ids=((40, 8),),
        allowed_token_ids=tuple(range(200)),
        logit_bias={9: 18.0},
        min_tokens=50,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        dry_multiplier=2.0,
        dry_allowed_length=1,
        top_n_sigma=99.0,
        temperature=0.5,
        top_k=5,
        typical_p=0.999999,
        top_p=0.999999,
        min_p=1e-9,
        xtc_probability=1.0,
        xtc_threshold=0.6,
    )
    assert active_processors(row.state.request) == PIPELINE
    values = logits()
    changed = process(values, row)
    assert changed[0, 9].item() == pytest.approx(((values[0, 9].item() + 18.0) / 1.3 - 1.5) / 0.5, rel=1e-5)
    assert 1 < changed.isfinite().sum() <= 5


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.3},
        {"bad_words_ids": ((9, 40, 4), (3,))},
        {"min_tokens": 7},
        {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_breakers": ((11,), (12, 13))},
        {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    ],
    ids=lambda asked: next(iter(asked)),
)
@given(draft=st.lists(IDS, max_size=6), output=st.lists(IDS, max_size=6))
@settings(max_examples=examples(40))
def test_draft_history_equals_committed_history(asked: Ours, draft: list[int], output: list[int]) -> None:
    values = logits()
    drafted = make_row(draft=draft, output=output, **asked)
    committed = make_row(output=[*output, *draft], **asked)
    assert torch.equal(process(values, drafted), process(values, committed))
    assert drafted.position == committed.position


def test_rows_have_separate_histories() -> None:
    rows = [
        make_row(output=output, repetition_penalty=1.5, frequency_penalty=1.0)
        for output in ((), (9,), (8, 8, 8))
    ]
    together = process(logits(3), *rows)
    alone = [process(logits(3)[i : i + 1], row) for i, row in enumerate(rows)]
    assert torch.equal(together, torch.cat(alone))


def test_resumed_tokens_count_as_output() -> None:
    row = make_row(output=OUTPUT, frequency_penalty=1.0, min_tokens=5)
    request = row.state.request
    resumed = type(request)(
        **{**{f: getattr(request, f) for f in request.__slots__}, "resume_output_ids": OUTPUT}
    )
    again = SampleRow(type(row.state)(resumed, 0, 1000))
    assert torch.equal(process(logits(), row), process(logits(), again))


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    row = make_row(
        logit_bias={VOCAB_SIZE: 5.0},
        stop_token_ids=(10**9,),
        min_tokens=3,
        bad_words_ids=((VOCAB_SIZE,),),
        prompt=(10**6, 1),
    )
    changed = process(logits(), row)
    expected = logits()
    expected[0, EOS] = -torch.inf
    assert torch.equal(changed, expected)


def test_last_tokens_span_output_and_draft() -> None:
    row = make_row(draft=(1, 2), output=(3,), prompt=(4, 5))
    assert [row.last_tokens(count) for count in range(7)] == [
        (), (2,), (1, 2), (3, 1, 2), (5, 3, 1, 2), (4, 5, 3, 1, 2), (4, 5, 3, 1, 2)
    ]  # fmt: skip
