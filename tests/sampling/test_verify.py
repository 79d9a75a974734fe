"""Verification is sampling, of a request and on tensors."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.kernels.reference.decode_ops import count_accepted
from foreword.sampling.verify import verify
from tests.support.budget import examples

IDS = st.integers(0, 2)


@given(
    st.lists(IDS, max_size=8).flatmap(
        lambda draft: st.tuples(
            st.just(draft), st.lists(IDS, min_size=len(draft) + 1, max_size=len(draft) + 1)
        )
    )
)
def test_accepts_while_draft_equals_sample(case: tuple[list[int], list[int]]) -> None:
    draft, sampled = case
    accepted = verify(sampled, draft)
    assert 0 <= accepted <= len(draft)
    assert sampled[:accepted] == draft[:accepted]
    assert accepted == len(draft) or sampled[accepted] != draft[accepted]


def test_row_without_token_accepts_nothing() -> None:
    assert verify([-1, 5], [4]) == 0
    assert verify([4, -1, 6], [4, 6]) == 1
    assert verify([-1], []) == 0


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sampled_ids [n, 1 + d], draft_ids [n, d], num_draft_tokens [n]: few different ids, so some match."""
    count, depth = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    ids = st.integers(-1, 1)

    def matrix(width: int) -> torch.Tensor:
        return torch.tensor(draw(st.lists(ids, min_size=count * width, max_size=count * width))).long()

    num_draft = draw(st.lists(st.integers(0, depth), min_size=count, max_size=count))
    return matrix(1 + depth).view(count, 1 + depth), matrix(depth).view(count, depth), torch.tensor(num_draft)


def verified(sampled: torch.Tensor, drafts: torch.Tensor, num_draft: torch.Tensor) -> list[int]:
    rows = zip(sampled.tolist(), drafts.tolist(), num_draft.tolist(), strict=True)
    return [verify(tokens[: 1 + length], draft[:length]) for tokens, draft, length in rows]


@given(batches())
@settings(max_examples=examples(200))
def test_count_accepted_equals_verify(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    accepted = count_accepted(*batch)
    assert accepted.dtype == torch.int64 and accepted.tolist() == verified(*batch)
