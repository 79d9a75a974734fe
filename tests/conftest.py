"""Options of the test suite and its differences between machines: docs/development.md."""

import ctypes
import functools
import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from foreword.kernels.cpu.library import ISAS, load_library, supported_isas
from foreword.kernels.registry import ISA_REQUIREMENTS
from tests.support import budget
from tests.support.cpu_kernels import force_isa, isas_under_test
from tests.support.device import DEVICE, PARTIAL, limit_memory_info, missing_package, num_workers

TESTS = Path(__file__).parent

# Without a GPU, Triton's kernels run in its interpreter; Triton reads this when a kernel is defined.
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Each HTTP client would read all authorities anew, which takes 30 ms; no test speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_report_header() -> str:
    """Name the instruction sets whose kernels this run does not test."""
    run, missing = isas_under_test(), set(ISAS) - set(supported_isas())
    rest = [isa + f" (needs {ISA_REQUIREMENTS[isa]})" * (isa in missing) for isa in ISAS if isa not in run]
    return f"CPU kernels: {', '.join(run) or 'not built'}; not run: {', '.join(rest) or 'none'}"


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist share one GPU: each worker and its servers see a share of the memory."""
    config.addinivalue_line("markers", "full: run by `make test-all` (pytest --full), not by `make test`")
    budget.set_full(config.getoption("--full"))
    # No test depends on the clock: machines differ, and a kernel is compiled at its first call.
    settings.register_profile(
        "no-clock",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=budget.examples(300),
    )
    settings.load_profile("no-clock")
    # A shell without job control starts commands in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("--full") and names_of(config) == ["tests"]:
        sys.modules.update(dict.fromkeys(FULL_PACKAGES))
    force_isa()
    if DEVICE == "cpu":
        return
    count = num_workers()
    if count > 1:
        torch.cuda.set_per_process_memory_fraction(0.9 / count)
        torch.cuda.mem_get_info = limit_memory_info(
            torch.cuda.mem_get_info, torch.cuda.memory_reserved, count
        )
        os.environ.setdefault("FOREWORD_GPU_MEMORY_UTILIZATION", f"{0.9 / count:.3f}")


# Packages of the extra `test-all`, hidden from `make test` where they are installed.
FULL_PACKAGES = (
    "axe_playwright_python",
    "kubernetes_validate",
    "langchain_openai",
    "litellm",
    "matplotlib",
    "mcp",
    "opentelemetry.exporter",
    "opentelemetry.sdk",
    "playwright",
    "ray",
    "triton",
)

# Modules that `make test` neither runs nor imports: slow, or in need of packages of the extra `test-all`.
FULL_ONLY = {
    "bench/gpu",
    "bench/speculate",
    "benchmarks",
    "clients",
    "core/test_upload.py",
    "demo/test_training.py",
    "demo/test_vision_training.py",
    "embedding/test_client.py",
    "engine/test_memory_profiler.py",
    "engine/test_model_runner.py",
    "engine_client/test_images.py",
    "cuda_graphs",
    "kernels/test_cpu_process.py",
    "kernels/triton",
    "weights/test_dummy_weights.py",
    "models/vision/test_qwen_bits.py",
    "multimodal/test_image_loader_workers.py",
    "sampling/test_sampler_transfers.py",
    "server/test_admin.py",
    "server/test_embedding_servers.py",
    "server/test_fair_share.py",
    "server/test_features.py",
    "server/test_fuzz.py",
    "server/test_fuzz_api.py",
    "server/test_runaway.py",
    "server/test_slow_clients.py",
    "server/test_speculation.py",
    "server/test_vision_server.py",
    "test_choices.py",
    "test_exact_overlap.py",
    "test_fake_cuda.py",
    "test_fake_cuda_tiers.py",
    "test_images.py",
    "test_load.py",
    "tokenizer/test_chat_template_images.py",
    "ui",
}


def names_of(config: pytest.Config) -> list[str]:
    """Last names of the paths on the command line."""
    return [Path(arg.split("::")[0]).name for arg in config.args]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave FULL_ONLY out, unless --full is given or the path is named on the command line."""
    named = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    is_named = any(path == collection_path or path in collection_path.parents for path in named)
    is_default = names_of(config) == ["tests"]
    name = collection_path.relative_to(TESTS).as_posix() if collection_path.is_relative_to(TESTS) else ""
    skip = not config.getoption("--full") and (is_default or not is_named) and name in FULL_ONLY
    return True if skip else None


def pytest_collection_finish() -> None:
    """A full garbage collection over all modules stops a server in this process for 0.6 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries report what they still find at the end of the process."""
    gc.unfreeze()


def pytest_runtest_setup() -> None:
    """A command or an engine of an earlier test may have changed what all of the process shares."""
    logging.getLogger("foreword").setLevel(logging.NOTSET)
    # Workers share few cores: threads that wait for each other cost a hundred times what they gain.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The native kernels."""
    built, reason = load_library()
    return built or pytest.skip(reason)


class PartialModule(pytest.Module):
    """A test module that is skipped if a package it needs is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            name = missing_package(error)
            if name is None:
                raise
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return PartialModule.from_parent(parent, path=module_path) if PARTIAL else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="every test, with more hypothesis examples and combinations"
    )
    parser.addoption(
        "--full-product",
        action="store_true",
        help="every combination of settings in test_exact, not only pairs",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]
