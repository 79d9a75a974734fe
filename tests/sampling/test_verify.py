"""Verification is sampling."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.sampling.verify import verify

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
