from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.core.batch import Batch, Chunk, SampleRow, build_batch
from foreword.core.outputs import StepOutput
from foreword.engine.batch_builder import ModelInput
from foreword.engine.model_runner import ModelRunner
from foreword.engine.scheduler import ScheduledRequest
from foreword.engine.timers import StepTimer
from foreword.kernels.reference.backend import ReferenceOps
from foreword.kernels.triton.sampling import TritonSampling
from foreword.sampling.sampler import Sampler
from tests.support.device import DEVICE
from tests.support.fake_cuda import FakeCuda
from tests.support.sample_rows import VOCAB_SIZE, make_state


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a real GPU")
@pytest.mark.parametrize("samples", [False, True])
def test_step_synchronizes_once(samples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a step without sampled rows: its time must not count for the next step."""
    state = make_state(temperature=0.0)
    request = ScheduledRequest(state, 0, len(state.tokens), samples)

    def forward(batch: Batch) -> Tensor:
        return torch.zeros(len(batch.sample_rows), VOCAB_SIZE, device="cuda")

    model: Any = SimpleNamespace(
        head=None,
        vocab_size=VOCAB_SIZE,
        uses_mrope=False,
        has_states=False,
        compile_logits=lambda kv: forward,
        ops=ReferenceOps(),
    )
    none: Any = None
    with FakeCuda() as gpu:
        waits = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
        runner = ModelRunner(model, none, Sampler(TritonSampling(), VOCAB_SIZE, ()), none, StepTimer())
        chunk = Chunk(state.tokens, 0, (1,), int(samples))
        rows = (SampleRow(state),) if samples else ()
        batch = ModelInput((request,), build_batch([chunk], 16, 1, "cuda"), rows, (0,) * samples, ((),))
        assert runner.run(batch) == (StepOutput(token_ids=(0,) if samples else ()),)
        assert len(waits) + gpu.counts["look"] == 1 and len(waits) == (not samples)
        assert not gpu.refused
        monkeypatch.undo()
