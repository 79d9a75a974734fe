"""An engine's start and its first requests on a fake GPU that compiles kernels for sm_90 and runs none.

    python -m tests.support.triton_start '{"model": PATH, "compile": true, ...}'

takes options of Config and prints a JSON line, a `StartReport`. Without "compile" kernels are only counted.
Kernels write zeros.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import get_cache_key, make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.kernels.triton import checks
from foreword.kernels.triton.precompile import ZeroOutputs
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda

CAPABILITY = (9, 0)
MAX_SHARED = 227 * 1024
TOTAL_BYTES = 8 << 30  # of the GPU
PROMPT_LENGTHS = (3, 20, 40, 100, 300)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.8, "logit_bias": {65: 3.0}, "prompt_logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": (70, 71, 72, 73)},
)


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A kernel that was compiled, or read from the cache on disk."""

    name: str
    stage: str  # "load" or "serve"
    in_thread: bool  # beside the main thread
    launches: int  # of all kernels before
    is_cached: bool


@dataclass(slots=True)
class StartReport:
    kernels: list[KernelEvent] = field(default_factory=list)
    launches: int = 0
    load_cpu_s: float = 0.0  # of all threads and of the assembler's processes
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # by the fake GPU


class FakeDriver:
    """Triton's driver: loads and launches nothing."""

    def __init__(self, report: StartReport) -> None:
        self._report = report
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": MAX_SHARED},
            load_binary=lambda *_: (0, 0, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *_: object) -> None:
        self._report.launches += 1

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Kernel:
    """Takes the place of a compiled kernel."""

    metadata = function = packed_metadata = None

    def __init__(self, source: Any, run: Callable[..., None]) -> None:
        self.src = source
        self.run = run

    def launch_metadata(self, *_: object) -> None: ...


class StartObserver:
    def __init__(self) -> None:
        self.report = StartReport()
        self.stage = "load"
        self._driver = FakeDriver(self.report)
        self._cached: set[str] = set()

    def install(self, compile_kernels: bool) -> None:
        knobs.compilation.listener = self._listen
        driver.set_active(self._driver)
        if not compile_kernels:
            triton.compiler.compile = self._count
        run = JITFunction.run

        def run_plainly(kernel: Any, *args: Any, **options: Any) -> Any:
            with torch._C.DisableTorchFunction():  # Triton reads the addresses of tensors
                return run(kernel, *args, **options)

        JITFunction.run = run_plainly

    def _listen(self, *, src: Any, cache_hit: bool, **_: object) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()
        self.report.kernels.append(
            KernelEvent(src.name, self.stage, in_thread, self.report.launches, cache_hit)
        )

    def _count(self, source: Any, target: Any, options: Any, _env_vars: Any = None) -> Kernel:
        backend = make_backend(target)
        key = get_cache_key(
            source, backend, backend.parse_options(dict(options)), get_cache_invalidating_env_vars()
        )
        knobs.compilation.listener(src=source, cache_hit=key in self._cached)
        self._cached.add(key)
        return Kernel(source, self._driver.launch)


def observe_start(compile: bool = False, **options: Any) -> StartReport:
    observer = StartObserver()
    report = observer.report
    observer.install(compile)
    fake_cuda.TOTAL_BYTES = TOTAL_BYTES
    trial = checks.row_mismatches, checks.attention_mismatches
    with FakeCuda(CAPABILITY) as gpu:
        checks.row_mismatches, checks.attention_mismatches = trial  # the fake has smaller ones
        with ZeroOutputs():
            config = Config(device="cuda", **options)
            started = _cpu_s()
            engine = load(
                config, never_sampled_ids=(7,), on_progress=lambda *stage: report.progress.append(stage)
            )
            report.load_cpu_s = _cpu_s() - started
            observer.stage = "serve"
            _serve(engine)
    report.refused = gpu.refused
    return report


def _serve(engine: Engine) -> None:
    """Prompts of several lengths alone, then requests of every kind at once."""
    for number, length in enumerate(PROMPT_LENGTHS):
        _submit(engine, f"prompt {number}", length, {"temperature": 0.0})
        _run(engine)
    for number, length in enumerate(PROMPT_LENGTHS):
        for kind, params in enumerate(PARAMS):
            _submit(engine, f"{number}, {kind}", length, params)
    _run(engine)


def _submit(engine: Engine, name: str, length: int, params: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, **params)
    engine.submit(Request(name, tuple(range(40, 40 + length)), sampling, 1, (1,)))


def _run(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    print(json.dumps(asdict(observe_start(**json.loads(sys.argv[1])))))
