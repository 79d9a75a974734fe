"""The engine on a graph-capturable backend: equal tokens with overlap on and off, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.cuda_graphs import graph_runner as recorded
from foreword.cuda_graphs.decode_loop import DeviceDecodeLoop
from foreword.engine import loader as load
from tests.support.checkpoints import write_checkpoint, write_drafter
from tests.support.graph_capture_fake import BLOCK_SIZE, CONTEXT_LEN, GraphCapturableOps, TapedGraphPool

PROMPTS: Any = [{"prompt_token_ids": list(range(40, 41 + 3 * n))} for n in range(4)]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2**63 + 1, max_tokens=12),
    SamplingParams(temperature=0.7, top_k=30, min_p=0.01, seed=5, max_tokens=7, repetition_penalty=1.1),
]


def answers(model: Path, drafter: Path | None, overlap: bool) -> list[tuple[int, ...]]:
    speculation: dict[str, Any] = {"speculate": "off"}
    if drafter is not None:
        speculation = {
            "speculate": "draft",
            "draft_model": str(drafter),
            "draft_length": "fixed",
            "num_speculative_tokens": 3,
        }
    options = {
        "max_model_len": CONTEXT_LEN,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": "600tokens",
        "threads": 1,
    }
    llm = LLM(
        str(model),
        overlap=overlap,
        test_mode=True,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        **options,
        **speculation,
    )
    first = llm.generate(PROMPTS[:3], PARAMS[:3])  # sampled on the device, unlike the last
    return [tuple(output.token_ids) for output in [*first, *llm.generate(PROMPTS, PARAMS)]]


def test_tokens_equal_with_overlap_and_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[int] = []

    def launch(self: DeviceDecodeLoop, active_slots: Sequence[int], num_draft_tokens: int) -> None:
        launched.append(num_draft_tokens)
        return plain_launch(self, active_slots, num_draft_tokens)

    plain_launch = DeviceDecodeLoop.launch
    monkeypatch.setattr(DeviceDecodeLoop, "launch", launch)
    monkeypatch.setattr(load, "select_backend", lambda *_, **__: GraphCapturableOps())
    monkeypatch.setattr(recorded, "CudaGraphPool", TapedGraphPool)
    model = write_checkpoint(tmp_path / "model", "llama", seed=5, **SMALL)
    drafter = write_drafter(tmp_path / "drafter")
    plain = answers(model, None, overlap=False)
    assert plain[:3] == plain[3:6]
    assert answers(model, drafter, overlap=False) == plain and not launched
    assert answers(model, None, overlap=True) == plain
    assert launched and set(launched) == {0}
    assert answers(model, drafter, overlap=True) == plain
    assert set(launched) == {0, 3}
    assert "running ahead failed" not in caplog.text
