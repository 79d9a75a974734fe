"""The sampler: results of rows, independent of their batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.core.batch import SampleRow
from foreword.core.outputs import TokenLogprob
from foreword.kernels.reference.sampling import ReferenceSampling
from foreword.kernels.registry import select_backend
from foreword.sampling.sampler import ALL_MASKED, NON_FINITE, Sampler, SamplerOutput
from tests.support import kernel_rows as kinds
from tests.support.budget import examples
from tests.support.sample_rows import (
    EOS,
    JSON,
    NEVER_SAMPLED,
    VOCAB_SIZE,
    EveryThirdGrammar,
    make_row,
    make_state,
)

PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"temperature": 0.7, "logprobs": 0, "seed": 2**63},
    {"top_k": 5},
    {"top_p": 0.9, "temperature": 1.3},
    {"min_p": 0.1, "logprobs": 2, "seed": 2**64 - 1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "temperature": 0.0, "logprobs": 1},
    {"frequency_penalty": -1.0, "top_k": 40, "top_p": 0.5, "min_p": 0.01},
    {"logit_bias": {3: 4.0, 9: -2.0}, "min_tokens": 9, "seed": 0},
    {"allowed_token_ids": (1, 2, 8, 9), "bad_words_ids": ((8,), (1, 2))},
    {"typical_p": 0.6, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"dry_multiplier": 3.0, "dry_allowed_length": 0, "dry_breakers": ((1,),), "temperature": 0.0},
    {
        "dry_multiplier": 1.0,
        "dry_allowed_length": 1,
        "dry_penalty_last_n": 5,
        "top_n_sigma": 1.5,
        "logprob_token_ids": (4, 999),
    },
)


@pytest.fixture(scope="module", params=["reference", "selected"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    ops = ReferenceSampling() if request.param == "reference" else select_backend("cpu")
    return Sampler(ops, VOCAB_SIZE, NEVER_SAMPLED, test_mode=True)  # type: ignore[arg-type]


def logits(rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def build(which: int, draft: list[int]) -> SampleRow:
    return make_row(draft=draft, output=(9, 8, 1), **PARAMS[which])


def line(sampled: SamplerOutput, r: int) -> tuple[int, TokenLogprob | None, int]:
    return sampled.token_ids[r], sampled.logprobs[r], sampled.logits_hashes[r]


@given(
    chosen=st.lists(
        st.tuples(
            st.integers(0, len(PARAMS) - 1),
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from(kinds.ROW_KINDS + kinds.NON_FINITE_KINDS),
        ),
        min_size=1,
        max_size=7,
    ),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(60))
def test_row_result_does_not_depend_on_the_batch(
    sampler: Sampler, chosen: list[tuple[int, list[int], str]], seed: int
) -> None:
    values = torch.stack(
        [kinds.make_row(kind, VOCAB_SIZE, seed + i) for i, (_, _, kind) in enumerate(chosen)]
    )
    rows = [build(which, draft) for which, draft, _ in chosen]
    together = sampler(values.clone(), rows)
    for r, row in enumerate(rows):
        assert repr(line(sampler(values[r : r + 1].clone(), [row]), 0)) == repr(line(together, r))


def test_draft_rows_equal_single_steps(sampler: Sampler) -> None:
    """Rows of a draft equal plain decoding after the draft is committed."""
    draft = [9, 3, 3, 250]
    values = logits(5)
    for params in PARAMS:
        state = make_state(output=(9, 8), **params)
        verified = sampler(values.clone(), [SampleRow(state, tuple(draft[:n])) for n in range(5)])
        for n in range(5):
            plain = make_state(output=(9, 8, *draft[:n]), **params)
            assert line(sampler(values[n : n + 1].clone(), [SampleRow(plain)]), 0) == line(verified, n)


def test_logprobs_are_of_the_raw_distribution(sampler: Sampler) -> None:
    values = logits(1)
    row = make_row(
        output=(9,), logprobs=4, temperature=0.3, top_k=2, logit_bias={17: 50.0}, repetition_penalty=2.0
    )
    (found,) = sampler(values.clone(), [row]).logprobs
    values[0, list(NEVER_SAMPLED)] = -torch.inf
    exact = torch.log_softmax(values.double(), 1)[0]
    order = exact.argsort(descending=True, stable=True).tolist()
    assert found is not None
    assert found.token_id == 17
    assert found.logprob == pytest.approx(exact[17].item(), abs=1e-5)
    assert found.rank == order.index(17) + 1
    assert [token_id for token_id, _ in found.top] == order[:4]
    assert [value for _, value in found.top] == pytest.approx(exact[order[:4]].tolist(), abs=1e-5)


def test_logprobs_of_requested_ids(sampler: Sampler) -> None:
    """Of the raw distribution; ids without a token or outside of the vocabulary have -inf."""
    values = logits(2)
    rows = [
        make_row(temperature=0.0, top_k=1, logprob_token_ids=(7, NEVER_SAMPLED[0], 10**6)),
        make_row(logprobs=1),
    ]
    asked, plain = sampler(values.clone(), rows).logprobs
    values[:, list(NEVER_SAMPLED)] = -torch.inf
    exact = torch.log_softmax(values.double(), 1)[0]
    assert asked is not None and plain is not None
    assert [token_id for token_id, _ in asked.requested] == [7, NEVER_SAMPLED[0], 10**6]
    assert [value for _, value in asked.requested] == [
        pytest.approx(exact[7].item(), abs=1e-5),
        -math.inf,
        -math.inf,
    ]
    assert (asked.top, plain.requested, len(plain.top)) == ((), (), 1)


def test_rank_ties_go_to_the_lower_id(sampler: Sampler) -> None:
    values = torch.zeros(1, VOCAB_SIZE)
    values[0, 100] = 1.0
    rows = [
        make_row(logprobs=2, temperature=0.0, allowed_token_ids=(token_id,)) for token_id in (100, 0, 150)
    ]
    found = sampler(values.repeat(3, 1), rows).logprobs
    assert [logprob.rank for logprob in found if logprob] == [1, 2, 151]
    assert all(logprob and [token_id for token_id, _ in logprob.top] == [100, 0] for logprob in found)


def test_prompt_logprobs_are_of_the_next_tokens(sampler: Sampler) -> None:
    values = logits(3)
    found = sampler.prompt_logprobs(values.clone(), [4, 250, 7], 2)
    values[:, list(NEVER_SAMPLED)] = -torch.inf
    exact = torch.log_softmax(values.double(), 1)
    assert [logprob.token_id for logprob in found] == [4, 250, 7]
    assert [logprob.logprob for logprob in found] == pytest.approx(
        exact[[0, 1, 2], [4, 250, 7]].tolist(), abs=1e-5
    )
    assert [logprob.top[0][0] for logprob in found] == exact.argmax(1).tolist()
    assert all(len(logprob.top) == 2 for logprob in found)


def test_logprobs_are_per_row(sampler: Sampler) -> None:
    rows = [make_row(), make_row(logprobs=0), make_row(logprobs=5), make_row()]
    found = sampler(logits(4), rows).logprobs
    assert [logprob and len(logprob.top) for logprob in found] == [None, 0, 5, None]
    assert sampler(logits(4), rows, logprobs=False).logprobs == [None] * 4


def test_never_sampled_ids_are_not_sampled(sampler: Sampler) -> None:
    values = torch.zeros(2, VOCAB_SIZE)
    values[:, list(NEVER_SAMPLED)] = 100.0
    sampled = sampler(values, [make_row(temperature=0.0, logprobs=1), make_row(logprobs=1)])
    assert sampled.token_ids[0] == 0
    assert sampled.token_ids[1] not in NEVER_SAMPLED
    assert all(
        logprob and logprob.top[0] == (0, pytest.approx(-math.log(VOCAB_SIZE - 2)))
        for logprob in sampled.logprobs
    )


# Parameters, kind of the row, and why it has no token
NO_TOKEN: tuple[tuple[dict[str, object], str, int], ...] = (
    ({"allowed_token_ids": (EOS,), "min_tokens": 5}, "plain", ALL_MASKED),
    ({"allowed_token_ids": (3,), "bad_words_ids": ((3,),), "temperature": 0.0}, "few", ALL_MASKED),
    (
        {"structured": JSON, "grammar": EveryThirdGrammar(0), "allowed_token_ids": (1, 2, 4)},
        "plain",
        ALL_MASKED,
    ),
    *((params, kind, NON_FINITE) for params in PARAMS for kind in kinds.NON_FINITE_KINDS),
)


def test_row_without_legal_token_does_not_affect_others(sampler: Sampler) -> None:
    sound = logits(1)[0]
    (expected,) = sampler(sound[None].clone(), [make_row()]).token_ids
    for params, kind, why in NO_TOKEN:
        values = torch.stack([sound, kinds.make_row(kind, VOCAB_SIZE, 1), sound])
        sampled = sampler(values, [make_row(), make_row(**{"logprobs": 2, **params}), make_row()])
        assert sampled.token_ids == [expected, why, expected], (params, kind)
        assert sampled.logprobs[1] is None


def test_hashes_differ_by_one_bit(sampler: Sampler) -> None:
    values = logits(1).repeat(3, 1)
    values[2, 5] = values[2, 5].nextafter(torch.tensor(9.0))
    hashes = sampler(values, [make_row(), make_row(top_k=3), make_row()]).logits_hashes
    assert hashes[0] == hashes[1] != hashes[2]
    assert (
        Sampler(select_backend("cpu"), VOCAB_SIZE, NEVER_SAMPLED)(logits(1), [make_row()]).logits_hashes == []
    )


def test_all_64_seed_bits_matter(sampler: Sampler) -> None:
    flat = torch.zeros(1, VOCAB_SIZE)
    tokens = {
        seed: sampler(flat.clone(), [make_row(seed=seed)]).token_ids[0]
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
    }
    assert len(set(tokens.values())) == len(tokens)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str
)
def test_frequencies_match_the_filtered_softmax(params: dict[str, float]) -> None:
    """Chi-square over positions: with at most 7 degrees of freedom, p(> 29.9) is 1e-4."""
    values = torch.full((VOCAB_SIZE,), -torch.inf)
    values[:8] = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -1.5, 1.8])
    probabilities = torch.softmax(values / params.get("temperature", 1.0), 0)[:8]
    order = probabilities.argsort(descending=True, stable=True)
    sizes = {"top_k": 4, "top_p": int((probabilities[order].cumsum(0) < 0.7).sum()) + 1}
    size = next((sizes[name] for name in params if name in sizes), 8)
    allowed = torch.zeros(8).index_fill(0, order[:size], 1.0).bool() & (
        probabilities >= params.get("min_p", 0) * probabilities.max()
    )
    count = 1500
    state = make_state(seed=5, **params)
    rows = [SampleRow(state, (0,) * n) for n in range(count)]
    sampler = Sampler(select_backend("cpu"), VOCAB_SIZE, NEVER_SAMPLED)
    drawn = torch.tensor(sampler(values.repeat(count, 1), rows).token_ids).bincount(minlength=8)
    expected = torch.where(allowed, probabilities, 0) / probabilities[allowed].sum() * count
    assert drawn[~allowed].sum() == 0
    assert float(((drawn - expected) ** 2 / expected)[allowed].sum()) < 29.9
