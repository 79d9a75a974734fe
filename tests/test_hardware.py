"""What a machine says of itself, and what is made of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreword import hardware
from foreword.errors import ConfigError

X86 = "processor : 0\nmodel name : Some CPU @ 2GHz\nflags : fpu sse2 avx2 avx512f avx512_bf16\n"
ARM = "processor : 0\nFeatures : fp asimd bf16 i8mm\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the files that the probe reads."""

    def write(cpuinfo: str = X86, limit: str | None = None, used: str = "0") -> None:
        for name, text in [("CPUINFO", cpuinfo), ("MEMINFO", MEMINFO)]:
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(hardware, name, tmp_path / name)
        if limit is not None:
            (tmp_path / "max").write_text(limit + "\n")
            (tmp_path / "current").write_text(used + "\n")
        monkeypatch.setattr(hardware, "CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
        monkeypatch.setattr(hardware, "NVIDIA_NODE", tmp_path / "no-gpu")

    return write


def test_this_machine():
    found = hardware.probe("cpu")
    assert found.device == "cpu" and found.cores >= 1
    assert 0 < found.free_bytes <= found.total_bytes
    made = hardware.machine(found)
    assert (made.device, made.cores, made.free_bytes) == ("cpu", found.cores, found.free_bytes)


@pytest.mark.parametrize("cpuinfo, bfloat16", [(X86, True), (ARM, True), ("flags : fpu sse2\n", False), ("", False)])
def test_bfloat16_only_where_it_costs_nothing(host, cpuinfo: str, bfloat16: bool):
    host(cpuinfo)
    assert hardware.probe("auto").bfloat16 is bfloat16


def test_name_and_extensions(host):
    host()
    found = hardware.probe("auto")
    assert found.cpu == "Some CPU @ 2GHz" and found.isa == ("avx2", "avx512f", "avx512_bf16")


@pytest.mark.parametrize(
    "limit, used, total, free",
    [
        (None, "0", 1000 * 1024, 600 * 1024),
        ("max", "0", 1000 * 1024, 600 * 1024),
        ("9223372036854771712", "0", 1000 * 1024, 600 * 1024),
        ("512000", "112000", 512000, 400000),
        ("1000000", "0", 1000000, 600 * 1024),
        ("512000", "600000", 512000, 0),
    ],
)
def test_memory_within_the_control_group(host, limit: str | None, used: str, total: int, free: int):
    host(limit=limit, used=used)
    found = hardware.probe("auto")
    assert (found.total_bytes, found.free_bytes) == (total, free)


def test_a_gpu_that_is_not_there(host):
    host()
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        hardware.probe("cuda")


def test_memory_of_the_gpu_counts_where_there_is_one(host):
    host()
    gpu = replace(hardware.probe("cpu"), device="cuda", gpu="H200", gpu_total_bytes=1000, gpu_free_bytes=900)
    assert hardware.machine(gpu).free_bytes == 900


class FakeCuda:
    """torch.cuda of a machine with one GPU."""

    is_available = staticmethod(lambda: True)
    mem_get_info = staticmethod(lambda: (900, 1000))
    get_device_capability = staticmethod(lambda: (9, 0))
    get_device_name = staticmethod(lambda: "NVIDIA H200")


def test_a_gpu(host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    host()
    monkeypatch.setattr(hardware, "NVIDIA_NODE", tmp_path)
    fake = type("torch", (), {"cuda": FakeCuda})
    monkeypatch.setattr(hardware.importlib, "import_module", {"torch": fake}.__getitem__)
    found = hardware.probe("auto")
    assert (found.device, found.gpu, found.gpu_free_bytes, found.bfloat16) == ("cuda", "NVIDIA H200", 900, True)
