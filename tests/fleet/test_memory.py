"""Plans of several models' memory, and what processes take."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.config.models_file import ModelEntry, ModelsConfig, read_models
from foreword.config.options import Config
from foreword.engine_client.forkserver import ForkServer
from foreword.errors import CheckpointError, ConfigError
from foreword.fleet import memory
from foreword.fleet.load_scheduler import LoadScheduler
from foreword.fleet.memory import (
    UNLIMITED,
    UNPLANNED,
    FleetPlan,
    make_fleet_plan,
    plan_fleet,
    plan_server,
    resident_bytes,
)
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import GIB, ModelInfo
from foreword.planning.memory_plan import ModelDescription

CPU = HardwareInfo("cpu", 8, 40 * GIB, supports_bfloat16=True, total_bytes=48 * GIB)
GPU = HardwareInfo("cuda", 8, 79 * GIB, True, "triton", 80 * GIB, "NVIDIA H100", (9, 0))
MODEL = ModelInfo(  # 8 GiB of weights, 64 KiB a token
    "llama", 32768, "bfloat16", parameters=4 << 30, vocab_size=1000, kv_values_per_token=32 << 10
)

ROUTER: dict[str, Any] = {
    "replicas": 0,
    "replica_urls": "http://a,http://b:8000",
    "engine_key": "a key of the engines",
}


def make_plan(
    *options: dict[str, Any],
    models: Sequence[ModelInfo] = (),
    hardware: HardwareInfo = CPU,
    limit: int | None = None,
    max_loaded: int | None = None,
    pinned: Sequence[int] = (),
) -> FleetPlan:
    """Of models with these options, called a, b, c ...; each is MODEL unless `models` has another."""
    entries = []
    for index, each in enumerate(options):
        config = Config(model="x", speculate="off", **each)
        entries.append(ModelEntry("abcdefgh"[index], config, pinned=index in pinned))
    infos = [*models, *[MODEL] * (len(options) - len(models))]
    descriptions = [ModelDescription(hardware, info) for info in infos]
    return make_fleet_plan(ModelsConfig(tuple(entries), limit, max_loaded, 10.0), descriptions)


def kv_bytes(plan: FleetPlan) -> list[int]:
    return [part.num_bytes for each in plan.plans for part in each.parts if part.name == "KV cache"]


@pytest.mark.parametrize(
    ("num_models", "max_loaded", "shares"),
    [(1, None, 2), (2, None, 4), (3, None, 6), (8, None, 8), (8, 1, 2)],
)
def test_kv_caches_share_half_of_the_memory(num_models: int, max_loaded: int | None, shares: int) -> None:
    small = replace(MODEL, parameters=1 << 20)
    models = [small] * num_models
    plan = make_plan(*[{}] * num_models, models=models, limit=6 * GIB, max_loaded=max_loaded)
    share = 6 * GIB // shares
    assert all(share - (1 << 20) < size <= share for size in kv_bytes(plan))


def test_a_kv_cache_has_at_most_4_gib_on_a_cpu() -> None:
    assert kv_bytes(make_plan({}, {})) == [4 * GIB] * 2


def test_a_kv_cache_is_at_most_what_requests_can_use() -> None:
    plan = make_plan({"max_model_len": 1024, "max_num_seqs": 2})
    assert kv_bytes(plan) == [2 * 1024 * (64 << 10)]
    resolved = plan.plans[0].resolved
    assert resolved is not None and resolved.max_model_len == 1024


def test_the_configured_kv_cache_is_kept() -> None:
    plan = make_plan({"kv_cache_memory": "1GiB"}, {"kv_cache_memory": "1600tokens"})
    assert kv_bytes(plan) == [GIB, 1600 * (64 << 10)]
    assert [each.entry.config.kv_cache_memory for each in plan.plans] == ["16384tokens", "1600tokens"]


def test_a_large_model_gets_a_smaller_kv_cache() -> None:
    """At least 512 tokens, 32 MiB."""
    limit = 8 * GIB + memory.PROCESS_BYTES + (200 << 20)
    plan = make_plan({}, {"max_model_len": 512}, limit=limit)
    assert 32 << 20 < kv_bytes(plan)[0] < 200 << 20
    assert all(each.num_bytes <= limit for each in plan.plans)


def test_the_plan_does_not_depend_on_what_is_free_at_a_load() -> None:
    """Only the limit does, if none is given; the context must not change, and with it the fingerprint."""
    before = make_plan({}, {})
    after = make_plan({}, {}, hardware=replace(CPU, free_bytes=35 * GIB))
    assert before.models == after.models and before.memory_limits != after.memory_limits


def test_the_limit_is_what_is_free_less_a_reserve() -> None:
    assert make_plan({}).memory_limits == {"cpu": 36 * GIB}
    assert make_plan({}, limit=10 * GIB).memory_limits == {"cpu": 10 * GIB}
    assert make_plan({}, limit=99 * GIB).memory_limits == {"cpu": 40 * GIB}
    gpu = make_plan({"gpu_memory_utilization": 0.75}, hardware=GPU)
    assert gpu.memory_limits == {"gpu0": 59 * GIB}


def test_what_can_never_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan({}, {}, limit=16 * GIB, pinned=[1])
    assert caught.value.message == (
        "model a can never be loaded beside the pinned b: 16.56 GiB are needed, models may use 16.00 GiB. "
        "a needs 8.28 GiB (weights 8.00, activations 0.00, process 0.25, KV cache 0.03); "
        "b needs 8.28 GiB (weights 8.00, activations 0.00, process 0.25, KV cache 0.03). "
        "What would help: a higher memory_limit, less kv_cache_memory or max_model_len, quantization"
    )


@pytest.mark.parametrize(
    ("options", "more", "part"),
    [
        ([{}], {"limit": 8 * GIB}, "model a can never be loaded: 8.28 GiB are needed"),
        ([{"max_model_len": 32768}], {"limit": 9 * GIB}, "KV cache 2.00"),
        ([{}, {}], {"limit": 16 * GIB, "pinned": [0, 1]}, "a can never be loaded beside the pinned b"),
        ([{}, {}], {"max_loaded": 1, "pinned": [0]}, "max_loaded_models 1 leaves no room beside the pinned"),
        ([{"max_model_len": 99_999}], {}, "model a: max_model_len 99999 is above the checkpoint's 32768"),
        ([{"quantization": "fp8"}], {}, "model a: quantization fp8 needs an NVIDIA GPU"),
    ],
)
def test_errors_name_the_model(options: list[dict[str, Any]], more: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(*options, **more)
    assert part in str(caught.value)


def test_all_pinned_models_may_fill_max_loaded() -> None:
    assert len(make_plan({}, {}, max_loaded=2, pinned=[0, 1]).plans) == 2


def test_pinned_models_leave_room_for_the_largest_other() -> None:
    large = replace(MODEL, parameters=8 << 30)
    plan = make_plan({}, {}, models=[MODEL, large], limit=26 * GIB, pinned=[0])
    pinned, other = plan.plans
    assert pinned.num_bytes + other.num_bytes <= 26 * GIB
    assert kv_bytes(plan)[0] > GIB


def test_a_model_that_cannot_be_read_is_named() -> None:
    models = ModelsConfig((ModelEntry("a", Config(model="x")),), None, None, 10.0)
    with pytest.raises(ConfigError, match=r"model a: config\.json is missing"):
        make_fleet_plan(models, [CheckpointError("config.json is missing")])


def test_a_gpu_holds_graphs_and_context_too() -> None:
    (plan,) = make_plan({}, hardware=GPU).plans
    assert {"weights", "KV cache", "activations", "CUDA graphs", "CUDA"} == {part.name for part in plan.parts}
    (plan,) = make_plan({"enforce_eager": True}, hardware=GPU).plans
    assert "CUDA graphs" not in {part.name for part in plan.parts}


def test_an_encoder_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    (plan,) = make_plan({"embedding_model": str(tmp_path)}).plans
    sizes = {part.name: part.num_bytes for part in plan.parts}
    assert sizes["encoder"] == memory.PROCESS_BYTES + 2000


def test_models_are_described_in_a_process_of_the_fork_server() -> None:
    async def plan() -> FleetPlan:
        fork_server = ForkServer()
        try:
            return await plan_fleet(
                read_models(Config(models="demo,demo-vision", memory_limit="4GiB")), fork_server
            )
        finally:
            await fork_server.close()

    fleet = asyncio.run(plan())
    demo, vision = fleet.plans
    assert demo.entry.config.kv_cache_memory == "65536tokens"
    assert demo.resolved is not None and demo.resolved.max_model_len == 1024
    assert "vision encoder" in {part.name for part in vision.parts}
    assert [each.entry.name for each in fleet.plans] == ["demo", "demo-vision"]


def test_models_of_each_gpu_are_described_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads CUDA_VISIBLE_DEVICES once."""
    asked: list[list[str | None]] = []

    async def describe(configs: Sequence[Config], fork_server: ForkServer) -> list[Any]:
        asked.append([config.gpus for config in configs])
        return [config.model for config in configs]

    monkeypatch.setattr(memory, "_describe_in_process", describe)
    configs = [
        Config(model=name, gpus=gpus) for name, gpus in (("a", "0"), ("b", "1"), ("c", "0"), ("d", None))
    ]
    configs.insert(1, replace(configs[0], **ROUTER))
    described = asyncio.run(memory.describe_models(configs, ForkServer()))
    assert (described, asked) == (["a", None, "b", "c", "d"], [["0", "0"], ["1"], [None]])


def test_model_of_other_machines_takes_no_memory_here() -> None:
    entries = [ModelEntry(name, Config(model="x", **ROUTER)) for name in "ab"]
    entries[1] = replace(entries[1], config=Config(model="x", speculate="off"))
    models = ModelsConfig(tuple(entries), 9 * GIB, None, 10.0)
    plan = make_fleet_plan(models, [None, ModelDescription(CPU, MODEL)])
    assert [(each.device, each.num_bytes > 0) for each in plan.plans] == [
        (memory.ELSEWHERE, False),
        ("cpu", True),
    ]
    alone = make_plan({}, limit=9 * GIB)
    assert plan.plans[1].parts == alone.plans[0].parts, "the KV cache shares memory with nobody"
    scheduler = LoadScheduler(plan.plans, plan.memory_limits, None, 10.0)
    assert [scheduler.why_not(name) for name in "ab"] == [None, None]


def test_each_replica_counts() -> None:
    options = {"kv_cache_memory": "1600tokens"}
    one, two = make_plan(options, {**options, "replicas": 2}).plans
    assert two.num_bytes == 2 * one.num_bytes
    assert one.resolved is not None and two.resolved is not None
    assert one.resolved.num_blocks == two.resolved.num_blocks


@pytest.mark.full
def test_a_broken_checkpoint_ends_the_plan(tmp_path: Path) -> None:
    async def plan() -> None:
        fork_server = ForkServer()
        try:
            await plan_fleet(read_models(Config(models=f"demo,{tmp_path}/broken")), fork_server)
        finally:
            await fork_server.close()

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"architectures": ["Unknown"]}')
    with pytest.raises(ConfigError, match=r"model broken: .* lacks `model_type`"):
        asyncio.run(plan())


def test_resident_memory_of_a_process_group() -> None:
    code = "import sys; data = bytearray(b'x') * (64 << 20); print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], process_group=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        size = resident_bytes([process.pid])
        process.stdin.close()
    assert 64 << 20 <= size < 128 << 20
    assert resident_bytes([process.pid]) == 0


def test_without_shares_all_pages_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "statm").write_text("100 7 3 1 0 9 0")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "read_proc_stat", lambda pid: ["S", "0", str(pid)])
    page = 4096
    monkeypatch.setattr(memory.os, "sysconf", lambda name: page)
    assert resident_bytes([1]) == 7 * page
    (tmp_path / "1" / "smaps_rollup").write_text("x [rollup]\nRss: 9 kB\nPss:      5 kB\n")
    assert resident_bytes([1]) == 5 * 1024
    assert resident_bytes([2]) == 0


@pytest.mark.full
async def test_model_that_is_alone_is_planned_only_with_a_limit_or_keep_alive() -> None:
    with ForkServer() as fork_server:
        for options in ({}, {"keep_alive": "-1"}):
            plan = await plan_server(Config(model="demo", **options), fork_server)
            (only,) = plan.plans
            assert only.entry.name == "demo" and only.entry.pinned and only.resolved is None
            assert plan.memory_limits == {UNPLANNED: UNLIMITED}
        (limited,) = (await plan_server(Config(model="demo", memory_limit="1GiB"), fork_server)).plans
        assert limited.entry.pinned and limited.resolved is not None and limited.num_bytes < 1 << 30
        (passing,) = (await plan_server(Config(model="demo", keep_alive="5m"), fork_server)).plans
        assert passing.resolved is not None and passing.entry.preload and not passing.entry.pinned
        with pytest.raises(ConfigError, match="demo can never be loaded"):
            await plan_server(Config(model="demo", memory_limit="1MiB"), fork_server)
        await fork_server.close()
