"""Probes the hardware. Imports torch only where there may be a GPU."""

from __future__ import annotations

import importlib
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.config.options import Config
from foreword.config.units import format_cpus, parse_cpus
from foreword.errors import ConfigError

logger = logging.getLogger(__name__)

# Device files of NVIDIA's driver, of WSL, and of boards with unified memory.
NVIDIA_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvhost-gpu"))
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
# Files of a cgroup's memory controller, and the keys of its file cache in `memory.stat`: version 2, then 1.
CGROUP_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
# ISA extensions that kernels use, named as in /proc/cpuinfo: x86, then ARM.
ISA_EXTENSIONS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
BFLOAT16_ISA = ("avx2", "bf16")  # with these, converting bfloat16 is cheaper than reading twice the bytes
BFLOAT16_CAPABILITY = (8, 0)  # compute capability


@dataclass(frozen=True, slots=True)
class HardwareProbe:
    """Hardware of this machine; `foreword env --json` prints these fields."""

    device: str
    cpu: str
    cores: int  # CPU cores that this process may use
    isa: tuple[str, ...]  # CPU extensions that kernels use
    total_bytes: int  # the machine's, or its cgroup's if that is less
    free_bytes: int  # available: free, or file cache that the kernel drops
    cgroup_limit: int | None  # bytes that the cgroup may use, if that limits free_bytes
    bfloat16: bool  # bfloat16 weights are at least as fast as float32
    gpu: str | None = None  # name of the GPU in use
    gpu_total_bytes: int = 0
    gpu_free_bytes: int = 0
    capability: tuple[int, int] = (0, 0)  # compute capability, such as (9, 0)


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """Hardware properties that resolve() needs."""

    device: str
    cores: int
    free_bytes: int  # memory of the device
    supports_bfloat16: bool
    kernel_backend: str = "native"  # "native", "triton" or "torch", see weight_bytes()
    total_bytes: int = 0
    gpu: str | None = None  # name of the GPU
    capability: tuple[int, int] = (0, 0)  # compute capability
    native_library_error: str | None = None  # why the native library is not available
    cgroup_limit: int | None = None  # bytes; None: it does not limit free_bytes
    host_free_bytes: int | None = None  # memory of a GPU's host; None: not known


def apply_placement(config: Config) -> None:
    """Restrict this process to the cores and GPUs of its options, before it uses CUDA. Raises ConfigError."""
    if config.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.gpus
    if config.cpus is None:
        return
    cpus, available = set(parse_cpus(config.cpus)), os.sched_getaffinity(0)
    if not cpus <= available:
        missing = f"{format_cpus(cpus - available)} are not available"
        raise ConfigError(
            f"cpus {config.cpus}: {missing}; the server may use {format_cpus(available)}", "cpus"
        )
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)


def probe_hardware(device: str = "auto") -> HardwareProbe:
    """Probe for device "auto", "cpu" or "cuda". Raises ConfigError if cuda is requested and not available."""
    if device == "cuda" or (device == "auto" and any(node.exists() for node in NVIDIA_DEVICE_FILES)):
        torch = importlib.import_module("torch")
        reason = _gpu_unavailable_reason(torch)
        if reason is None:
            return _probe_gpu(torch)
        if device == "cuda":
            problem = f"device is cuda, but no NVIDIA GPU can be used here: {reason}"
            raise ConfigError(f"{problem}; `--device cpu` would work", "device")
        logger.warning("using the CPU, although an NVIDIA GPU seems to be present: %s", reason)
    cpu, isa, total, free, limit = _probe_host()
    return HardwareProbe(
        "cpu", cpu, _num_cores(), isa, total, free, limit, bool(set(isa) & set(BFLOAT16_ISA))
    )


def hardware_info(hardware: HardwareProbe) -> HardwareInfo:
    """Select the properties that resolve() needs."""
    gpu = hardware.device == "cuda"
    return HardwareInfo(
        device=hardware.device,
        cores=hardware.cores,
        free_bytes=hardware.gpu_free_bytes if gpu else hardware.free_bytes,
        supports_bfloat16=hardware.bfloat16,
        total_bytes=hardware.gpu_total_bytes if gpu else hardware.total_bytes,
        cgroup_limit=None if gpu else hardware.cgroup_limit,
        host_free_bytes=hardware.free_bytes if gpu else None,
        gpu=hardware.gpu,
        capability=hardware.capability,
    )


def _gpu_unavailable_reason(torch: Any) -> str | None:
    """Why torch cannot use a GPU, or None. A GPU may be older or newer than those torch was built for."""
    build = f"PyTorch {torch.__version__}"
    if not torch.cuda.is_available():
        return f"{build} finds none" if torch.version.cuda else f"{build} was built without CUDA"
    try:
        torch.ones(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        gpu, cause = torch.cuda.get_device_name(), str(error).splitlines()[0]
        return f"{build} does not compute on {gpu} ({cause})"
    return None


def _probe_gpu(torch: Any) -> HardwareProbe:
    cuda = torch.cuda
    free, total = cuda.mem_get_info()
    capability = cuda.get_device_capability()
    cpu, isa, host_total, host_free, cgroup_limit = _probe_host()
    return HardwareProbe(
        device="cuda",
        cpu=cpu,
        cores=_num_cores(),
        isa=isa,
        total_bytes=host_total,
        free_bytes=host_free,
        cgroup_limit=cgroup_limit,
        bfloat16=capability >= BFLOAT16_CAPABILITY,
        gpu=cuda.get_device_name(),
        gpu_total_bytes=total,
        gpu_free_bytes=free,
        capability=capability,
    )


def _probe_host() -> tuple[str, tuple[str, ...], int, int, int | None]:
    """CPU name, ISA, total and available memory, and the cgroup's limit if it applies."""
    return *_parse_cpuinfo(_read_file(CPUINFO)), *_parse_meminfo(_read_file(MEMINFO), _cgroup_limits())


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Memory limit and used bytes of this process's cgroups, with their ancestors."""
    for directory, is_v1 in _cgroup_directories("memory"):
        yield from _read_cgroup(directory, *(CGROUP_V1 if is_v1 else CGROUP_V2))


def _cgroup_directories(controller: str) -> Iterator[tuple[Path, bool]]:
    """(directory, whether of version 1) of this process's cgroups, with their ancestors.

    Inside a container /proc may have the host's path, of which only the root is mounted.
    """
    for line in _read_file(PROC_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP_ROOT / controller if controllers else CGROUP_ROOT
        directory = root / path.lstrip("/")
        while True:
            yield directory, bool(controllers)
            if directory == root:
                break
            directory = directory.parent


def _read_cgroup(
    directory: Path, limit_name: str, used_name: str, cache_keys: tuple[str, ...]
) -> Iterator[tuple[int, int]]:
    """Limit and used bytes of a cgroup that has a limit. The file cache is free: the kernel drops it."""
    limit, used = _read_file(directory / limit_name), _read_file(directory / used_name)
    if not limit.isdigit():
        return
    stat = dict(line.split() for line in _read_file(directory / "memory.stat").splitlines())
    cache = sum(int(stat.get(key, 0)) for key in cache_keys)
    yield int(limit), max((int(used) if used.isdigit() else 0) - cache, 0)


def _num_cores() -> int:
    """Cores that this process may use: its affinity, and whole cores of its cgroups' CPU time.

    More threads than the cgroup's time would be stopped for most of each period, and all wait for the last.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory, is_v1 in _cgroup_directories("cpu"):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        quota, _, period = " ".join(_read_file(directory / name) for name in files).partition(" ")
        if quota.isdigit() and period.isdigit():
            count = min(count, max(int(quota) // int(period), 1))
    return count


def _parse_cpuinfo(cpuinfo: str) -> tuple[str, tuple[str, ...]]:
    """Name and ISA extensions from /proc/cpuinfo."""
    fields = _parse_fields(cpuinfo)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, tuple(extension for extension in ISA_EXTENSIONS if extension in flags)


def _parse_meminfo(meminfo: str, cgroups: Iterable[tuple[int, int]]) -> tuple[int, int, int | None]:
    """Total and free bytes of /proc/meminfo, within the limits of the cgroups, and the limit that decides."""
    fields = _parse_fields(meminfo)
    total, free = _parse_kib(fields.get("MemTotal")), _parse_kib(fields.get("MemAvailable"))
    decisive = None
    for limit, used in cgroups:
        if max(limit - used, 0) < free:
            free, decisive = max(limit - used, 0), limit
        total = min(total, limit)
    return total, free, decisive


def _parse_kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0


def _parse_fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
