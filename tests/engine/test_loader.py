"""Loading: measured costs of the engine before, and errors."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foreword.config.options import Config
from foreword.engine import builder
from foreword.engine.loader import load
from foreword.errors import ConfigError
from tests.support.checkpoints import write_checkpoint
from tests.support.waiting import WAIT_S


def test_given_timings_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)),
        kv_cache_memory="400tokens",
        threads=1,
    )
    first = load(config, ())
    monkeypatch.delattr(builder, "StepCostProfiler")
    again = load(config, (), first.info.resolved, timings=first.proposer.timings)
    assert first.proposer.timings is not None and again.proposer.timings is first.proposer.timings


def test_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    drafter = write_checkpoint(tmp_path / "drafter", "qwen3_5_text")
    config = Config(model=str(model), draft_model=str(drafter), speculate="draft", threads=1)
    with pytest.raises(ConfigError, match="qwen3_5 has layers with state, which a draft model may not"):
        load(config, ())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_oom_while_loading_reports_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_room(*_: object) -> None:
        raise error

    monkeypatch.setattr(builder, "KVStorage", no_room)
    config = Config(
        model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)),
        kv_cache_memory="400tokens",
        threads=1,
    )
    with pytest.raises(ConfigError, match=r"out of memory .* weights need about 0.00 GiB and the KV cache"):
        load(config, ())


def test_other_load_errors_are_raised_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "KVStorage", lambda *_: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        load(
            Config(
                model=str(write_checkpoint(tmp_path / "model", "llama", seed=1)), kv_cache_memory="400tokens"
            ),
            (),
        )


def test_engine_runs_without_llguidance_and_rich(tmp_path: Path) -> None:
    """Only requests with a constraint need llguidance."""
    path = write_checkpoint(tmp_path / "model", "llama", seed=1)
    code = """if True:
        import sys
        sys.modules.update(dict.fromkeys(("rich", "llguidance"), None))
        from foreword.config.options import Config
        from foreword.core.params import SamplingParams
        from foreword.core.request import Request
        from foreword.core.structured_output import StructuredOutput
        from foreword.engine.loader import load
        engine = load(Config(model=sys.argv[1], kv_cache_memory="100tokens", max_model_len=64, threads=1), ())
        constraint = StructuredOutput.regex("a+", field="response_format")
        for name, structured in (("free", None), ("constrained", constraint)):
            params = SamplingParams(max_tokens=2, ignore_eos=True, structured=structured)
            engine.submit(Request(name, (40, 41), params, 1))
        while not engine.idle:
            for event in engine.step().events:
                print(event.request_id, getattr(event, "error", None))"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ended.returncode == 0, ended.stderr
    lines = set(ended.stdout.splitlines())
    needed = "response_format needs the Python package llguidance: pip install llguidance"
    assert lines == {"free None", f"constrained {needed}"}
