"""Captured passes, drafts and decode loops on interpreted Triton kernels equal the host loop."""

from pathlib import Path

import pytest
import torch

from foreword.core.batch import Chunk, build_batch
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kernels.triton.backend import TritonOps
from tests.support.checkpoints import write_checkpoint, write_drafter
from tests.support.graph_capture_fake import BLOCK_SIZE, CONTEXT_LEN, GraphTestBed
from tests.support.host_decode_loop import (
    NEVER_SAMPLED_IDS,
    HostDecodeLoop,
    blocks_of,
    compute_prompts,
    slot_of,
)
from tests.support.triton_interpreter import IS_INTERPRETED, exact_dot

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}

pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED, reason="the test bed is on the CPU, which needs the interpreter"
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


def test_padded_graph_pass(path: Path) -> None:
    with exact_dot():
        captured, plain = beds(path)
        chunks = [Chunk([40, 41], 0, blocks_of(0)[:1], 2), Chunk([42], 0, blocks_of(1)[:1], 1)]
        batch = build_batch(chunks, BLOCK_SIZE, 1, "cpu")
        assert torch.equal(captured.forward(batch), plain.forward(batch))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
def test_padded_graph_pass_of_experts(tmp_path: Path, family: str) -> None:
    """Sinks, biases and gpt-oss's activation; a shared expert. Padding rows choose experts as well."""
    path = write_checkpoint(tmp_path / "model", family)
    with exact_dot():
        captured, plain = beds(path)
        chunks = [Chunk([40, 41], 0, blocks_of(0)[:1], 2), Chunk([42], 0, blocks_of(1)[:1], 1)]
        batch = build_batch(chunks, BLOCK_SIZE, 1, "cpu")
        assert torch.equal(captured.forward(batch), plain.forward(batch))


def test_decode_loop_matches_host_decoding(path: Path) -> None:
    """One greedy and one filtered request; the second step is launched before the first is collected."""
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
            compute_prompts(bed, states)
        rounds = target.forward.get_decode_loop(
            BLOCK_SIZE, torch.tensor(NEVER_SAMPLED_IDS), drafter.forward, with_hashes=True
        )
        rounds.start([slot_of(n, state, CONTEXT_LEN, drafted=True) for n, state in enumerate(states)])
        host = HostDecodeLoop(plain_target, plain_drafter, states)
        rounds.launch([0, 1], 1)
        rounds.launch([1], 0)
        assert rounds.collect() == host.round([0, 1], 1)
        assert rounds.collect() == host.round([1], 0)
