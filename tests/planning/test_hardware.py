"""Hardware probing."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.units import format_cpus, parse_cpus
from foreword.errors import ConfigError
from foreword.planning import hardware

X86 = "processor : 0\nmodel name : Some CPU @ 2GHz\nflags : fpu sse2 avx2 avx512f avx512_bf16\n"
ARM = "processor : 0\nFeatures : fp asimd bf16 i8mm\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the files that the probe reads."""

    def write(cpuinfo: str = X86, cgroup: str = "", files: Mapping[str, str] = {}) -> None:
        for name, text in [("CPUINFO", cpuinfo), ("MEMINFO", MEMINFO), ("PROC_CGROUP", cgroup)]:
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(hardware, name, tmp_path / name)
        for name, text in files.items():
            (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "cgroup" / name).write_text(text + "\n")
        monkeypatch.setattr(hardware, "CGROUP_ROOT", tmp_path / "cgroup")
        monkeypatch.setattr(hardware, "NVIDIA_DEVICE_FILES", (tmp_path / "no-gpu",))

    return write


def test_probe_of_this_machine():
    probe = hardware.probe_hardware("cpu")
    assert probe.device == "cpu" and probe.cores >= 1
    assert 0 < probe.free_bytes <= probe.total_bytes
    info = hardware.hardware_info(probe)
    assert (info.device, info.cores, info.free_bytes) == ("cpu", probe.cores, probe.free_bytes)


@pytest.mark.parametrize(
    "cpuinfo, bfloat16", [(X86, True), (ARM, True), ("flags : fpu sse2\n", False), ("", False)]
)
def test_bfloat16_needs_cpu_support(host, cpuinfo: str, bfloat16: bool):
    host(cpuinfo)
    assert hardware.probe_hardware("auto").bfloat16 is bfloat16


def test_cpu_name_and_isa(host):
    host()
    probe = hardware.probe_hardware("auto")
    assert probe.cpu == "Some CPU @ 2GHz" and probe.isa == ("avx2", "avx512f", "avx512_bf16")


V2, V1 = "0::/a/b\n", "5:devices:/\n4:cpu,memory:/a/b\n0::/\n"


@pytest.mark.parametrize(
    "limit, used, total, free",
    [
        ("max", "0", 1000 * 1024, 600 * 1024),
        ("9223372036854771712", "0", 1000 * 1024, 600 * 1024),
        ("512000", "112000", 512000, 400000),
        ("1000000", "0", 1000000, 600 * 1024),
        ("512000", "600000", 512000, 0),
    ],
)
@pytest.mark.parametrize("group", ["a/b/", "a/", ""])
def test_memory_is_limited_by_the_cgroup(host, group: str, limit: str, used: str, total: int, free: int):
    """The cgroup, an ancestor, or in a container the root, whose path on the host does not exist."""
    host(cgroup=V2, files={f"{group}memory.max": limit, f"{group}memory.current": used})
    probe = hardware.probe_hardware("auto")
    assert (probe.total_bytes, probe.free_bytes) == (total, free)
    names = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
    host(cgroup=V1, files={f"memory/{group}{name}": text for name, text in names.items()})
    assert hardware.probe_hardware("auto") == probe
    assert hardware.hardware_info(probe).cgroup_limit == (int(limit) if free < 600 * 1024 else None)


def test_smallest_cgroup_limits_memory(host):
    files = {"memory.max": "500000", "memory.current": "300000"}
    host(cgroup=V2, files=files | {"a/b/memory.max": "400000", "a/b/memory.current": "100000"})
    probe = hardware.probe_hardware("auto")
    assert (probe.total_bytes, probe.free_bytes) == (400000, 200000)


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("", {}, 16),
        (V2, {"cpu.max": "max 100000"}, 16),
        (V2, {"cpu.max": "400000 100000"}, 4),  # docker run --cpus 4
        (V2, {"cpu.max": "3200000 100000"}, 16),
        (V2, {"cpu.max": "800000 100000", "a/b/cpu.max": "250000 100000"}, 2),  # half a core is none
        (V2, {"cpu.max": "50000 100000"}, 1),
        (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
    ],
)
def test_cores_are_limited_by_the_cgroups_time(
    host, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: Mapping[str, str], cores: int
):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: range(16))
    host(cgroup=cgroup, files=files)
    assert hardware.probe_hardware("auto").cores == cores


@pytest.mark.parametrize("cgroup, place, prefix", [(V2, "", ""), (V1, "memory/", "total_")])
def test_file_cache_of_the_cgroup_is_free(host, cgroup: str, place: str, prefix: str):
    """Reading a checkpoint fills the cache up to the limit."""
    stat = f"anon 90000\n{prefix}active_file 200000\n{prefix}inactive_file 50000\nshmem 9"
    names = (
        ("memory.max", "memory.current")
        if cgroup == V2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    limit, used = (place + name for name in names)
    host(cgroup=cgroup, files={limit: "512000", used: "362000", f"{place}memory.stat": stat})
    assert hardware.probe_hardware("auto").free_bytes == 400000


def test_missing_gpu_is_refused(host):
    host()
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        hardware.probe_hardware("cuda")


def test_hardware_info_has_the_gpus_memory(host):
    host()
    gpu = replace(
        hardware.probe_hardware("cpu"), device="cuda", gpu="H200", gpu_total_bytes=1000, gpu_free_bytes=900
    )
    assert hardware.hardware_info(gpu).free_bytes == 900


class FakeCuda:
    """torch.cuda with one GPU."""

    def __init__(self, capability: tuple[int, int] = (9, 0), available: bool = True) -> None:
        self.capability = capability
        self.available = available

    def is_available(self) -> bool:
        return self.available

    def mem_get_info(self) -> tuple[int, int]:
        return 900, 1000

    def get_device_capability(self) -> tuple[int, int]:
        return self.capability

    def get_device_name(self) -> str:
        return "NVIDIA X"


class FakeTorch:
    """Torch with a GPU; `fails`: without kernels for it."""

    __version__ = "2.11.0"

    def __init__(self, cuda: FakeCuda, built: str | None = "13.0", fails: bool = False) -> None:
        self.cuda = cuda
        self.version = type("version", (), {"cuda": built})
        self._fails = fails

    def ones(self, *shape: int, device: str) -> torch.Tensor:
        if self._fails:
            raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")
        return torch.ones(*shape)


@pytest.fixture
def gpu(host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Installs a fake torch and, by default, the driver's device file."""

    def put(fake: FakeTorch, node: bool = True) -> None:
        host()
        if node:
            monkeypatch.setattr(hardware, "NVIDIA_DEVICE_FILES", (tmp_path / "no-gpu", tmp_path))
        monkeypatch.setattr(hardware.importlib, "import_module", {"torch": fake}.__getitem__)

    return put


def test_probe_of_a_gpu(gpu):
    gpu(FakeTorch(FakeCuda()))
    probe = hardware.probe_hardware("auto")
    assert (probe.device, probe.gpu, probe.gpu_free_bytes, probe.bfloat16) == ("cuda", "NVIDIA X", 900, True)
    info = hardware.hardware_info(probe)
    assert (info.free_bytes, info.total_bytes, info.gpu, info.capability) == (900, 1000, "NVIDIA X", (9, 0))


@pytest.mark.parametrize(
    "capability, bfloat16", [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_old_gpus_have_no_bfloat16(gpu, capability: tuple[int, int], bfloat16: bool):
    gpu(FakeTorch(FakeCuda(capability)))
    probe = hardware.probe_hardware("auto")
    assert (probe.bfloat16, probe.capability) == (bfloat16, capability)


def test_requested_gpu_needs_no_device_file(gpu):
    """Other systems have other files. Without one, torch is imported only for `cuda`."""
    gpu(FakeTorch(FakeCuda()), node=False)
    assert hardware.probe_hardware("cuda").gpu == "NVIDIA X"
    assert hardware.probe_hardware("auto").device == "cpu"


@pytest.mark.parametrize(
    "fake, reason",
    [
        (FakeTorch(FakeCuda(available=False), built=None), "PyTorch 2.11.0 was built without CUDA"),
        (FakeTorch(FakeCuda(available=False)), "PyTorch 2.11.0 finds none"),
        (
            FakeTorch(FakeCuda((5, 0)), fails=True),
            "PyTorch 2.11.0 does not compute on NVIDIA X (CUDA error: no kernel image is",
        ),
    ],
)
def test_gpu_that_torch_cannot_use(gpu, fake: FakeTorch, reason: str, caplog: pytest.LogCaptureFixture):
    """`auto` uses the CPU and logs the reason; `cuda` raises."""
    gpu(fake)
    assert hardware.probe_hardware("auto").device == "cpu"
    assert f"although an NVIDIA GPU seems to be present: {reason}" in caplog.text
    with pytest.raises(ConfigError, match="no NVIDIA GPU can be used here: " + re.escape(reason)):
        hardware.probe_hardware("cuda")


def test_device_file_of_wsl_is_known():
    assert Path("/dev/dxg") in hardware.NVIDIA_DEVICE_FILES


@given(st.sets(st.integers(0, 40), min_size=1))
def test_cpus_are_written_as_they_are_read(cpus: set[int]) -> None:
    assert set(parse_cpus(format_cpus(cpus))) == cpus
