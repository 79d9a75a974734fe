"""One probe of the machine. Torch is imported only where there may be a GPU."""

from __future__ import annotations

import importlib
import logging
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.config.resolve import HardwareInfo
from foreword.errors import ConfigError

__all__ = ["HardwareProbe", "hardware_info", "probe_hardware"]

logger = logging.getLogger(__name__)

# One of these is there where a GPU may be: the driver's own, that of WSL, that of boards whose memory the GPU shares.
NVIDIA_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvhost-gpu"))
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
# Limit and use of this process's control group: version 2, then version 1.
CGROUP_MEMORY_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
# ISA extensions that kernels care for: x86 names as in /proc/cpuinfo, then ARM's.
ISA_EXTENSIONS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
BFLOAT16_ISA = (
    "avx2",
    "bf16",
)  # to widen bfloat16 costs next to nothing there, and it is half the bytes to read
BFLOAT16_CAPABILITY = (8, 0)  # compute capability


@dataclass(frozen=True, slots=True)
class HardwareProbe:
    """What the machine is.

    cores        CPU cores that this process may use
    isa          extensions of the CPU that kernels care for
    total_bytes  memory of the machine, or of its control group if that is less
    free_bytes   of it, what is free
    gpu          name of the GPU in use, else None; gpu_total_bytes and gpu_free_bytes are 0 without one
    capability   its compute capability, such as (9, 0); (0, 0) without one
    bfloat16     the device computes with bfloat16 weights at no less than the speed of float32
    """

    device: str
    cpu: str
    cores: int
    isa: tuple[str, ...]
    total_bytes: int
    free_bytes: int
    bfloat16: bool
    gpu: str | None = None
    gpu_total_bytes: int = 0
    gpu_free_bytes: int = 0
    capability: tuple[int, int] = (0, 0)


def probe_hardware(device: str = "auto") -> HardwareProbe:
    """Look at the machine; device is "auto", "cpu" or "cuda". Raises ConfigError for a GPU that cannot be used."""
    if device == "cuda" or (device == "auto" and any(node.exists() for node in NVIDIA_DEVICE_FILES)):
        torch = importlib.import_module("torch")
        missing = _gpu_unavailable_reason(torch)
        if missing is None:
            return _probe_gpu(torch)
        if device == "cuda":
            raise ConfigError(
                f"device is cuda, but no NVIDIA GPU can be used here: {missing}; `--device cpu` would work",
                "device",
            )
        logger.warning("the CPU computes, although there seems to be an NVIDIA GPU: %s", missing)
    cpu, isa, total, free = _probe_host()
    return HardwareProbe("cpu", cpu, _num_cores(), isa, total, free, bool(set(isa) & set(BFLOAT16_ISA)))


def hardware_info(hardware: HardwareProbe) -> HardwareInfo:
    """What `config.resolve` needs to know of it."""
    gpu = hardware.device == "cuda"
    return HardwareInfo(
        device=hardware.device,
        cores=hardware.cores,
        free_bytes=hardware.gpu_free_bytes if gpu else hardware.free_bytes,
        supports_bfloat16=hardware.bfloat16,
        total_bytes=hardware.gpu_total_bytes if gpu else hardware.total_bytes,
        gpu=hardware.gpu,
        capability=hardware.capability,
    )


def _gpu_unavailable_reason(torch: Any) -> str | None:
    """Why torch cannot compute on a GPU; None if it can. A card may be older, or newer, than all that torch was built for."""
    if not torch.cuda.is_available():
        build = f"PyTorch {torch.__version__}"
        return f"{build} finds none" if torch.version.cuda else f"{build} was built without CUDA"
    try:
        torch.ones(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        return f"PyTorch {torch.__version__} does not compute on {torch.cuda.get_device_name()} ({str(error).splitlines()[0]})"
    return None


def _probe_gpu(torch: Any) -> HardwareProbe:
    cuda = torch.cuda
    free, total = cuda.mem_get_info()
    capability = cuda.get_device_capability()
    cpu, isa, host_total, host_free = _probe_host()
    return HardwareProbe(
        device="cuda",
        cpu=cpu,
        cores=_num_cores(),
        isa=isa,
        total_bytes=host_total,
        free_bytes=host_free,
        bfloat16=capability >= BFLOAT16_CAPABILITY,
        gpu=cuda.get_device_name(),
        gpu_total_bytes=total,
        gpu_free_bytes=free,
        capability=capability,
    )


def _probe_host() -> tuple[str, tuple[str, ...], int, int]:
    """CPU name, ISA, total and free memory."""
    name, isa = _parse_cpuinfo(_read_file(CPUINFO))
    total, free = _parse_meminfo(
        _read_file(MEMINFO), ((_read_file(limit), _read_file(used)) for limit, used in CGROUP_MEMORY_FILES)
    )
    return name, isa, total, free


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parse_cpuinfo(cpuinfo: str) -> tuple[str, tuple[str, ...]]:
    """Name and ISA extensions from /proc/cpuinfo."""
    fields = dict(_split_field(line) for line in cpuinfo.splitlines() if ":" in line)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, tuple(extension for extension in ISA_EXTENSIONS if extension in flags)


def _parse_meminfo(meminfo: str, cgroups: Iterable[tuple[str, str]]) -> tuple[int, int]:
    """Total and free bytes: /proc/meminfo, lowered by the control group's limit if it has one."""
    fields = dict(_split_field(line) for line in meminfo.splitlines() if ":" in line)
    total, free = _parse_kib(fields.get("MemTotal")), _parse_kib(fields.get("MemAvailable"))
    for limit, used in cgroups:
        if limit.isdigit() and int(limit) < total:
            total = int(limit)
            free = min(free, max(total - (int(used) if used.isdigit() else 0), 0))
    return total, free


def _parse_kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0


def _split_field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
