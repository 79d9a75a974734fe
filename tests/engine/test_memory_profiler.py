"""Memory profiling: by scripted figures, and with the largest steps run on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.config.options import Config
from foreword.core.batch import Batch
from foreword.engine import builder, loader
from foreword.engine.loader import load
from foreword.engine.memory_profiler import (
    CudaMemoryMeter,
    ProfileRun,
    log_memory,
    max_graph_rows,
    oom_message,
    profile_memory,
)
from foreword.errors import ConfigError
from foreword.models.model_loader import read_model_info
from foreword.planning.hardware import hardware_info, probe_hardware
from foreword.planning.memory import DeviceMemory, estimate_memory
from foreword.planning.resolve import ResolvedConfig, resolve
from tests.support.budget import examples
from tests.support.checkpoints import write_checkpoint, write_drafter
from tests.support.graph_capture_fake import BLOCK_SIZE, CONTEXT_LEN, GraphCapturableOps
from tests.support.vision_checkpoints import write_vision_checkpoint

GIB, MIB = 1 << 30, 1 << 20
ESTIMATE = estimate_memory(80 * GIB, 79 * GIB, 0.9, 15 * GIB, 9 * GIB, 0, cuda_graphs=True)


class ScriptedMeter:
    """A GPU shared with other processes; memory that a pass holds is freed by reset()."""

    def __init__(self, total: int, others: int, weights: int) -> None:
        self.others = others
        self._total = total
        self._weights = self._held = self._peak = weights

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self.others - self._held

    def reserved(self) -> int:
        return self._held

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._held = self._peak = self._weights

    def hold(self, size: int) -> None:
        self._held = self._peak = max(self._held, self._weights + size)


class ScriptedSteps:
    """Passes of fixed size; `loads` is CUDA's own memory when kernels first run."""

    def __init__(self, meter: ScriptedMeter, run_max: int, run_graphs: int, loads: int = 0) -> None:
        self.meter = meter
        self.sizes = {"largest": run_max, "captured": run_graphs}
        self.loads = loads
        self.run: list[str] = []

    def run_max(self) -> None:
        self.meter.others += self.loads
        self._run("largest")

    def run_graphs(self) -> None:
        self._run("captured")

    def _run(self, name: str) -> None:
        self.run.append(name)
        self.meter.hold(self.sizes[name])


@settings(max_examples=examples(50))
@given(
    others=st.integers(0, 20 * GIB),
    weights=st.integers(0, 20 * GIB),
    run_max=st.integers(0, 10 * GIB),
    run_graphs=st.integers(0, GIB),
    loads=st.integers(0, GIB),
    eager=st.booleans(),
)
def test_profiled_memory_adds_up_to_the_budget(
    others: int, weights: int, run_max: int, run_graphs: int, loads: int, eager: bool
) -> None:
    """All parts and the KV cache fill the utilization share exactly."""
    meter = ScriptedMeter(80 * GIB, others, weights)
    steps = ScriptedSteps(meter, run_max, run_graphs, loads)
    memory = profile_memory(meter, replace(ESTIMATE, cuda_graphs=0) if eager else ESTIMATE, steps)
    assert memory.is_measured and steps.run == (["largest"] if eager else ["largest", "captured"])
    assert (memory.weights, memory.activations, memory.other_processes) == (weights, run_max, others + loads)
    assert memory.cuda_graphs == (0 if eager else ESTIMATE.cuda_graphs + run_graphs)
    assert (
        memory.kv_cache
        == int(0.9 * 80 * GIB) - memory.margin - memory.cuda_graphs - weights - run_max - others - loads
    )
    assert meter.reserved() == weights, "measured memory is freed"


def fake_gpu(monkeypatch: pytest.MonkeyPatch, meter: ScriptedMeter, graphs: bool = True) -> None:
    """Let resolve() and the loader take the CPU for a GPU with this memory."""

    def resolve_for_gpu(config: Config, *rest: object) -> ResolvedConfig:
        resolved = resolve(config, *rest)  # type: ignore[arg-type]
        facts = rest[1]
        share = config.gpu_memory_utilization
        memory = estimate_memory(meter.total(), meter.free(), share, resolved.weight_bytes, 0, 0, graphs)
        return replace(builder.with_kv_cache(resolved, config, memory, [facts]), device="cpu")  # type: ignore[list-item]

    monkeypatch.setattr(loader, "resolve", resolve_for_gpu)
    monkeypatch.setattr(builder, "CudaMemoryMeter", lambda: meter)


def options(path: Path, **more: object) -> Config:
    return Config(
        **{"model": str(path), "threads": 1, "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 8}
        | more
    )


def test_kv_cache_gets_the_memory_after_the_largest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context and its RoPE follow; a replacement engine measures nothing."""
    path = write_checkpoint(tmp_path / "model", "llama", seed=1)
    meter = ScriptedMeter(600 * MIB, 500 * MIB, MIB)
    ran: list[str] = []

    def run_max(self: ProfileRun) -> None:
        ran.append("largest")
        meter.hold(24 * MIB)

    monkeypatch.setattr(ProfileRun, "run_max", run_max)
    monkeypatch.setattr(ProfileRun, "run_graphs", lambda self: None)
    fake_gpu(monkeypatch, meter, graphs=False)
    config = options(path, max_num_seqs=64, gpu_memory_utilization=0.9)
    engine = load(config, ())
    resolved = engine.info.resolved
    memory = resolved.memory
    assert memory is not None and memory.is_measured and ran == ["largest"]
    per_block = 16 * 2 * 2 * 2 * 16 * 4  # tokens, K and V, layers, heads, dimension, float32
    assert resolved.num_blocks == memory.kv_cache // per_block == (540 - 525 - 600 / 64) * MIB // per_block
    assert resolved.kv_bytes == resolved.num_blocks * per_block
    assert engine.scheduler.pool.num_free == resolved.num_blocks
    monkeypatch.setattr(builder, "profile_memory", None)
    again = load(config, (), resolved)
    assert again.info.resolved == resolved and again.info.fingerprint == engine.info.fingerprint


def test_context_limit_follows_the_measured_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context-dependent RoPE is rebuilt, as in an engine configured with this context."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = write_checkpoint(
        tmp_path / "model", "llama", seed=1, rope_scaling=rope, max_position_embeddings=128
    )
    meter = ScriptedMeter(600 * MIB, 500 * MIB, MIB)
    monkeypatch.setattr(ProfileRun, "run_max", lambda self: meter.hold(29 * MIB + 512 * 1024))
    fake_gpu(monkeypatch, meter, graphs=False)
    measured_engine = load(options(path, speculate="off"), ())
    resolved = measured_engine.info.resolved
    assert 128 < resolved.max_model_len < 512, "the measurement should change the context"
    monkeypatch.undo()
    configured_engine = load(
        options(path, speculate="off", kv_cache_memory=f"{resolved.num_blocks * 16}tokens"), ()
    )
    assert configured_engine.info.resolved.max_model_len == resolved.max_model_len
    tables = [
        [rope.cos_sin for rope in engine.model_runner.pooler._model._ropes.values()]  # type: ignore[attr-defined]
        for engine in (measured_engine, configured_engine)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*tables, strict=True))


def test_context_that_does_not_fit_reports_measured_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "model", "llama", seed=1)
    meter = ScriptedMeter(600 * MIB, 500 * MIB, MIB)
    monkeypatch.setattr(ProfileRun, "run_max", lambda self: meter.hold(60 * MIB))
    fake_gpu(monkeypatch, meter, graphs=False)
    with pytest.raises(
        ConfigError, match=r"max_model_len 400 does not fit: .*measured: weights 0.00, activations 0.06, CUDA"
    ):
        load(options(path, max_model_len=400), ())


class RecordingForward:
    """Shapes of every pass: (rows, sampled rows, largest position)."""

    def __init__(self, forward: Callable[[Batch], torch.Tensor]) -> None:
        self.forward = forward
        self.shapes: list[tuple[int, int, int]] = []

    def __call__(self, batch: Batch) -> torch.Tensor:
        rows = batch.query_start_loc[-1]
        self.shapes.append((rows, len(batch.sample_rows), int(batch.positions[:rows].max())))
        return self.forward(batch)


@pytest.mark.parametrize("speculate", ["off", "suffix,draft"])
def test_profile_run_has_the_largest_batches(tmp_path: Path, speculate: str) -> None:
    path, draft = write_checkpoint(tmp_path / "model", "llama", seed=1), write_drafter(tmp_path / "draft")
    config = options(
        path, speculate=speculate, draft_model=str(draft), kv_cache_memory="1000tokens", max_model_len=300
    )
    engine = load(config, ())
    runner, steps = engine.model_runner, engine.proposer.model_drafters
    timed: list[tuple[int, int]] = []
    for drafter in steps:
        drafter.pass_seconds = lambda rows, sampled: timed.append((rows, sampled)) or 0.0  # type: ignore[method-assign]
    forward = runner.forward = RecordingForward(runner.forward)
    ProfileRun(engine.info.resolved, engine.batch_builder, runner, steps).run_max()
    prompt, scored, full_batch = forward.shapes
    assert prompt == (64, 1, 298), "a prompt chunk of a full step at the end of the context"
    assert scored == (64, 64, 63)
    assert full_batch[:2] == ((64, 64) if steps else (8, 8)), "the rows of 8 requests with drafts"
    assert timed == ([(64, 8)] if steps else [])
    engine.check()


def test_graph_memory_is_measured_at_its_largest_rows(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "llama", seed=1)
    engine = load(
        options(path, kv_cache_memory="1000tokens", max_num_batched_tokens=512, max_num_seqs=300), ()
    )
    runner = engine.model_runner
    forward = runner.forward = RecordingForward(runner.forward)
    ProfileRun(engine.info.resolved, engine.batch_builder, runner).run_graphs()
    assert forward.shapes[0][:2] == (512, 512) == (max_graph_rows(engine.info.resolved),) * 2, "with drafts"
    resolved = replace(engine.info.resolved, max_num_batched_tokens=4096, drafters=())
    drafting = replace(resolved, drafters=("ngram",), num_speculative_tokens=5)
    rows = [
        [max_graph_rows(replace(one, max_num_seqs=n)) for n in (1, 64, 128, 600)]
        for one in (resolved, drafting)
    ]
    assert rows == [[256, 256, 256, 600], [256, 384, 512, 600]], "verified rows, at most 512"


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_vision_encoder_encodes_its_largest_image(tmp_path: Path, family: str) -> None:
    engine = load(options(write_vision_checkpoint(tmp_path, family), kv_cache_memory="400tokens"), ())
    vision_encoder = engine.model_runner.pooler._model.vision_encoder
    assert vision_encoder is not None
    image = vision_encoder.make_max_image(50)
    assert image.num_tokens <= 50 or not family.startswith("qwen")
    assert image.num_tokens > 40 or not family.startswith("qwen")
    pieces, costs = vision_encoder.encode(image), []
    with torch.inference_mode():
        while True:
            try:
                costs.append(next(pieces))
            except StopIteration as end:
                features = end.value
                break
    assert features.shape == (image.num_tokens, vision_encoder.feature_size)


def test_graph_capture_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft models have graphs too, unless enforce_eager is set."""
    path, draft = write_checkpoint(tmp_path / "model", "llama", seed=1), write_drafter(tmp_path / "draft")
    monkeypatch.setattr(loader, "select_backend", lambda *_, **__: GraphCapturableOps())
    seen: list[tuple[str, int, int]] = []
    more = {"kv_cache_memory": "400tokens", "max_model_len": CONTEXT_LEN, "block_size": BLOCK_SIZE}
    more |= {"draft_model": str(draft), "draft_length": "fixed"}
    engine = load(options(path, **more), (), on_progress=lambda *progress: seen.append(progress))
    sizes = seen[-1][-1]
    assert seen[-2 * sizes :] == [("graphs", done, sizes) for _ in range(2) for done in range(1, sizes + 1)]
    assert "graphs" in engine.info.load_seconds and engine.info.num_cuda_graphs == 0, "a CPU has no graphs"
    assert "graphs" not in load(options(path, enforce_eager=True, **more), ()).info.load_seconds


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
def test_profile_runs_on_triton_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with random weights."""
    backend = pytest.importorskip("foreword.kernels.triton.backend")
    path = write_checkpoint(tmp_path / "model", "llama", seed=1, num_hidden_layers=1)
    (path / "model.safetensors").unlink()
    monkeypatch.setattr(loader, "select_backend", lambda *_, eager, **__: backend.TritonOps(eager=eager))
    meter = ScriptedMeter(2000 * MIB, 300 * MIB, MIB)
    fake_gpu(monkeypatch, meter)
    shape = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "max_model_len": 32, "load_format": "dummy"}
    engine = load(options(path, speculate="off", **shape), ())
    resolved = engine.info.resolved
    assert resolved.memory is not None and resolved.memory.is_measured and resolved.num_blocks == 2 * 2
    assert engine.info.backend == "triton" and "graphs" in engine.info.load_seconds


def test_graphs_over_their_allowance_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "foreword"):
        log_memory(ESTIMATE, ESTIMATE.cuda_graphs)
        assert (
            "72.00 of 80.00 GiB may be used; estimated: weights 15.00, activations 10.00, CUDA graphs 1.00"
            in caplog.text
        )
        assert not [record for record in caplog.records if record.levelno > logging.INFO]
        log_memory(ESTIMATE, 3 * GIB)
        assert "CUDA graphs took 3.00 GiB, 1.00 were set aside: lower --gpu-memory-utilization" in caplog.text


def test_oom_message_names_the_figures(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    resolved = resolve(Config(model=str(path)), hardware_info(probe_hardware("cpu")), read_model_info(path))
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1.00 GiB free."
    )
    on_gpu = oom_message(replace(resolved, device="cuda", memory=ESTIMATE), error)
    assert "72.00 of 80.00 GiB may be used; estimated: weights 15.00" in on_gpu
    assert on_gpu.endswith(
        "would need less (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.)"
    )
    assert oom_message(resolved, MemoryError()).endswith(
        "--quantization or --kv-cache-memory would need less"
    )


def test_cuda_memory_meter_reads_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Total, free, reserved and peak are read from torch."""
    figures = {"mem_get_info": (30, 80), "memory_reserved": 20, "max_memory_reserved": 25}
    done: list[str] = []
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda figure=figure: figure)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    meter = CudaMemoryMeter()
    assert (meter.total(), meter.free(), meter.reserved(), meter.peak()) == (80, 30, 20, 25)
    done.clear()
    meter.reset()
    assert done == ["synchronize", "empty_cache", "reset_peak_memory_stats"], (
        "running kernels may still allocate"
    )


def test_kv_cache_is_the_rest_of_the_budget() -> None:
    memory = DeviceMemory(24 * GIB, 0.5, GIB, 2 * GIB, 3 * GIB, 0, GIB)
    assert memory.kv_cache == 12 * GIB - 7 * GIB - 384 * MIB
