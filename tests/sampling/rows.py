"""Sampler rows for tests, of requests that need no engine."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.core.rows import SampleRow

VOCAB_SIZE = 300
UNUSED = (297, 299)
EOS = 2


def make_state(
    output: Sequence[int] = (),
    prompt: Sequence[int] = (5, 6, 7, 6),
    seed: int = 11,
    bad_words_ids: tuple[tuple[int, ...], ...] = (),
    **params: object,
) -> RequestState:
    """A request that already has some output."""
    request = Request(
        id="r",
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        eos_token_ids=(EOS,),
        bad_words_ids=bad_words_ids,
    )
    state = RequestState(request, arrival=0, max_model_len=1000)
    state.append(output)
    return state


def make_row(draft: Sequence[int] = (), **state: object) -> SampleRow:
    return SampleRow(make_state(**state), tuple(draft))  # type: ignore[arg-type]
