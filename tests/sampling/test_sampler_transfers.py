from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foreword.core.batch import SampleRow
from foreword.kernels.reference.sampling import ReferenceSampling
from foreword.kernels.triton.sampling import TritonSampling
from foreword.sampling.sampler import ALL_MASKED, NON_FINITE, Sampler
from tests.support.device import DEVICE
from tests.support.fake_cuda import FakeCuda
from tests.support.sample_rows import JSON, NEVER_SAMPLED, VOCAB_SIZE, EveryThirdGrammar, make_row

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real GPU")

CUDA = torch.device("cuda")
MASKS: dict[str, Any] = {
    "structured": JSON,
    "grammar": EveryThirdGrammar(0, free=(1,)),
    "bad_words_ids": ((3,),),
    "min_tokens": 9,
}
FILTERS: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
FILTERS |= {"xtc_probability": 0.5, "xtc_threshold": 0.1}
PENALTIES = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "dry_multiplier": 1.0,
    "logit_bias": {5: 1.0},
}


@pytest.mark.parametrize(
    "rows",
    [
        [make_row(temperature=0.0)],
        [make_row(temperature=0.0), make_row(draft=(7, 8), **FILTERS)],
        [make_row(draft=(1,) * n, temperature=0.0, **MASKS) for n in range(2)],
        [
            make_row(output=(9, 6, 9), **PENALTIES, temperature=0.7),
            make_row(output=(5, 6, 5, 6, 5), **PENALTIES),
        ],
        [make_row(**FILTERS), make_row(output=(9,), logprobs=3, **PENALTIES)],
    ],
    ids=["greedy", "filters", "masks", "penalties", "logprobs"],
)
def test_sampling_is_one_upload_and_one_sync(rows: Sequence[SampleRow]) -> None:
    """After the first step, which uploads the never-sampled ids."""
    logits = 4 * torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = Sampler(TritonSampling(), VOCAB_SIZE, NEVER_SAMPLED)(logits.clone(), rows)
    with FakeCuda() as gpu:
        sampler = Sampler(TritonSampling(), VOCAB_SIZE, NEVER_SAMPLED)
        sampler(logits.to(CUDA, copy=True), rows)
        there = logits.to(CUDA, copy=True)
        with gpu.count_calls() as counts:
            assert sampler(there, rows) == expected
        assert counts["upload"] == counts["look"] + counts["wait"] == 1 and not counts["blocking upload"]
        assert not gpu.refused


def test_launch_does_not_wait() -> None:
    """The results survive later work on the same logits."""
    rows = [make_row(**FILTERS), make_row(output=(9, 6, 9), logprobs=3, **PENALTIES)]
    logits = 4 * torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = Sampler(ReferenceSampling(), VOCAB_SIZE, NEVER_SAMPLED, test_mode=True)(logits.clone(), rows)
    with FakeCuda() as gpu:
        sampler = Sampler(TritonSampling(), VOCAB_SIZE, NEVER_SAMPLED, test_mode=True)
        sampler(logits.to(CUDA, copy=True), rows)
        there = logits.to(CUDA, copy=True)
        with gpu.count_calls() as counts:
            pending = sampler.launch(there, rows)
        assert not counts["look"] + counts["wait"] + counts["blocking upload"] and pending.token_ids.is_cuda
        there.fill_(torch.nan)
        pending.token_ids.fill_(7)
        with gpu.count_calls() as counts:
            assert pending.read() == expected
        assert dict(counts) == {"wait": 1} and not gpu.refused


def test_all_masked_differs_from_non_finite() -> None:
    row = make_row(temperature=0.0, allowed_token_ids=NEVER_SAMPLED)
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[1] = -torch.inf
    logits[2, 70] = torch.nan
    logits[3, :64] = -torch.inf
    expected = [ALL_MASKED, NON_FINITE, NON_FINITE, ALL_MASKED]
    reference = Sampler(ReferenceSampling(), VOCAB_SIZE, NEVER_SAMPLED)
    assert reference(logits.clone(), [row] * 4).token_ids == expected
    with FakeCuda():
        sampler = Sampler(TritonSampling(), VOCAB_SIZE, NEVER_SAMPLED)
        assert sampler(logits.to(CUDA, copy=True), [row] * 4).token_ids == expected
