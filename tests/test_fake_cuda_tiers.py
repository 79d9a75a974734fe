"""Tiers of the KV cache on a fake GPU: copies are queued from and to pinned memory, and waited for.

The test does the work of the tiers' threads between steps, since the fake is active in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine import loader, memory_profiler
from foreword.engine.engine import Engine
from foreword.errors import ConfigError
from foreword.kv_cache.prefix_loader import PrefixLoader
from foreword.kv_cache.tier import Tier
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.device import DEVICE
from tests.support.engines import tier_stats
from tests.support.fake_cuda import FakeCuda
from tests.support.graph_capture_fake import GraphCapturableOps
from tests.support.triton_interpreter import exact_dot, fast_interpreter
from tests.test_exact_overlap import observe
from tests.test_fake_cuda import SMALL, make_engine

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real GPU")

OPTIONS: dict[str, Any] = {"kv_cache_memory": "96tokens", "kv_cache_host_memory": "1MiB"}


@pytest.fixture(autouse=True)
def worked_between_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory_profiler, "MIN_GRAPH_ROWS", 2)
    monkeypatch.setattr(Tier, "start", lambda tier: None)
    monkeypatch.setattr(PrefixLoader, "wait", lambda loader: None)
    monkeypatch.setattr(PrefixLoader, "record_step", lambda loader, num_rows, seconds: None)
    with fast_interpreter(), exact_dot():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiers") / "model", "llama", seed=5, **SMALL)


def turns() -> list[Request]:
    """Three conversations, and the first again: memory has lost it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = [tuple((i * step) % 250 for i in range(40)) for step in (3, 5, 7, 3)]
    return [Request(f"{n}", prompt, sampling, n, (EOS,)) for n, prompt in enumerate(prompts)]


def serve(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Any]]:
    """The tokens of requests that run one after another."""
    answers = {}
    for request in requests:
        engine.submit(request)
        events = []
        while not engine.idle:
            events += engine.step().events
            engine.check()
            for tier in () if engine.prefix_loader is None else engine.prefix_loader.tiers:
                while tier._work():
                    pass
        answers[request.id] = observe(events)
    return answers


def expected_of(model: Path) -> dict[str, list[Any]]:
    return serve(make_engine(model, "cpu", kv_cache_memory="96tokens"), turns())


def test_blocks_from_host_memory_keep_tokens_on_the_triton_backend(model: Path) -> None:
    with FakeCuda() as gpu:
        engine = make_engine(model, "cuda", enforce_eager=True, **OPTIONS)
        answers = serve(engine, turns())
        plain = serve(make_engine(model, "cuda", enforce_eager=True, kv_cache_memory="96tokens"), turns())
    assert engine.info.backend == "triton" and answers == plain and gpu.refused == []
    assert tier_stats(engine, "host").hit_tokens == 16
    assert answers["3"] == answers["0"]


def test_copies_are_queued_from_and_to_pinned_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tier and of torch, beside graphs and steps that overlap: none of them blocks."""
    monkeypatch.setattr(loader, "select_backend", lambda *_, **__: GraphCapturableOps())
    with FakeCuda() as gpu:
        engine = make_engine(model, "cuda", **OPTIONS)
        assert serve(engine, turns()[:3]) and engine.overlap is not None
        assert engine.overlap.num_device_steps > 0 == engine.overlap.num_errors
        (tier,) = engine.prefix_loader.tiers if engine.prefix_loader else ()
        for image in (tier.blocks.buffer(), tier.blocks.images.new_image()):
            with gpu.count_calls() as counts:
                tier.blocks.images.read(1, image)
                tier.blocks.images.write(2, image)
            assert counts == {"download": 2, "upload": 2, "wait": 2}, "K and V of a layer"
    assert gpu.refused == []


def test_disk_below_host_memory(model: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "kv_cache_dir": str(tmp_path), "enforce_eager": True}
    with FakeCuda() as gpu:
        engine = make_engine(model, "cuda", **options)
        first = serve(engine, turns())
        restarted = make_engine(model, "cuda", **options)
        assert serve(restarted, turns()[:1]) == {"0": first["0"]}
    assert tier_stats(engine, "host").hit_tokens == 16 and not tier_stats(engine, "disk").hit_tokens
    assert tier_stats(restarted, "disk").hit_tokens == 32 and not tier_stats(restarted, "host").hit_tokens
    assert tier_stats(restarted, "host").written_bytes > 0 and gpu.refused == []
    assert "kv_cache_host_memory and kv_cache_dir: not tried on a GPU yet" in engine.info.resolved.notes


def test_block_is_complete_when_it_is_published(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt that is pooled have no result to wait for: the pass itself is waited for."""
    waits: list[int] = []
    with FakeCuda():
        engine = make_engine(model, "cuda", enforce_eager=True, **OPTIONS)
        wait, on_gained = torch.cuda.synchronize, engine.scheduler.pool.on_gained
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: (waits.append(0), wait(*args)))
        seen: list[int] = []
        on_gained.append(lambda digest, block: seen.append(len(waits)))
        for pooling in ("last", "mean"):
            waits.clear()
            seen.clear()
            prompt = tuple(range(40)) if pooling == "last" else tuple(range(1, 41))
            engine.submit(Request(pooling, prompt, SamplingParams(), 0, (EOS,), pooling=pooling))
            while not engine.idle:
                engine.step()
            assert seen == [2, 4], "of 8 tokens each; the last chunk's vector is read"


def test_memory_that_cannot_be_pinned_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda() as gpu:
        gpu._register = lambda address, num_bytes, flags: 2  # type: ignore[method-assign]
        with pytest.raises(
            ConfigError, match=r"kv_cache_host_memory cannot be used: \d+ bytes of host memory cannot"
        ):
            make_engine(model, "cuda", enforce_eager=True, **OPTIONS)
