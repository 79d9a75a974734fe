"""Passes, drafts and rounds on Triton's kernels, in its interpreter: the bits of the plain loop on the same kernels."""

from pathlib import Path

import pytest
import torch

from foreword.core.batch import Chunk, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kernels.triton.backend import TritonOps
from tests.executor.test_decode_loop import UNUSED, Host, blocks_of, copied, lane_of, prompt_pass
from tests.support.checkpoints import write_drafter
from tests.support.graph_capture_fake import BLOCK_SIZE, CONTEXT_LEN, GraphTestBed
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}

pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED, reason="the bed lies on the CPU, where only the interpreter computes"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("triton") / "model", seed=5, **SMALL)


def beds(path: Path) -> tuple[GraphTestBed, GraphTestBed]:
    captured, plain = GraphTestBed(path, TritonOps()), GraphTestBed(path, TritonOps())
    for bed in (captured, plain):
        bed.clear_cache()
    captured.reserve(4)
    return captured, plain


def test_a_padded_pass(path: Path) -> None:
    with exact_dot():
        captured, plain = beds(path)
        chunks = [Chunk([40, 41], 0, blocks_of(0)[:1], 2), Chunk([42], 0, blocks_of(1)[:1], 1)]
        batch = build_batch(chunks, BLOCK_SIZE, 1, "cpu")
        assert torch.equal(captured.forward(batch), plain.forward(batch))


def test_rounds_are_what_the_host_decodes(path: Path) -> None:
    """Two requests in a bucket, one greedy, one with every filter; the second round is launched before the first is collected."""
    with exact_dot():
        (target, plain_target), (drafter, plain_drafter) = beds(path), beds(path)
        params = [
            SamplingParams(temperature=0),
            SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01),
        ]
        states = [
            RequestState(Request(f"{n}", (40 + n, 41), one, 2**63 + n), n, 4096)
            for n, one in enumerate(params)
        ]
        for bed in (target, plain_target, drafter, plain_drafter):
            prompt_pass(bed, states)
        rounds = target.forward.get_decode_loop(
            BLOCK_SIZE, torch.tensor(UNUSED), drafter.forward, with_hashes=True
        )
        rounds.start([lane_of(n, state, CONTEXT_LEN, drafted=True) for n, state in enumerate(states)])
        host = Host(plain_target, plain_drafter, copied(states))
        rounds.launch([0, 1], 1)
        rounds.launch([1], 0)
        assert rounds.collect() == host.round([0, 1], 1)
        assert rounds.collect() == host.round([1], 0)
