"""The registry selects the backend that it lists first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.errors import ConfigError
from foreword.kernels import registry
from foreword.kernels.cpu.library import ISAS, supported_isas
from foreword.kernels.gpu import GPUInfo
from foreword.kernels.registry import list_backends, native_unavailable_reason, select_backend, source_digest
from foreword.kernels.triton import variants
from tests.support.cpu_kernels import isas_under_test
from tests.support.waiting import WAIT_S


def available(part: str) -> list[str]:
    """Names of available backends that contain `part`, or of all exact ones if it is empty."""
    names = [backend.name for backend in list_backends() if backend.available]
    return [name for name in names if (part in name if part else "fast-math" not in name)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Pretend a GPU on which the Triton kernels run, or are refused for a reason."""

    def put(reason: str | None) -> None:
        monkeypatch.setattr(registry, "current_gpu", lambda: GPUInfo("NVIDIA X", (9, 0)))
        monkeypatch.setattr(registry, "triton_unavailable_reason", lambda *_: reason)

    return put


def test_first_available_backend_is_selected(gpu: Callable[[str | None], None]) -> None:
    gpu("Triton is not installed")
    assert select_backend("cpu").name == available("")[0]
    assert select_backend("cpu", fast_math=True).name == available("fast-math")[0]
    assert (
        select_backend("cuda").name == "reference"
        and select_backend("cuda", fast_math=True).name == "fast-math"
    )
    assert all(backend.reason for backend in list_backends())


@pytest.mark.parametrize("eager", [True, False])
def test_triton_is_selected_on_a_gpu(gpu: Callable[[str | None], None], eager: bool) -> None:
    pytest.importorskip("triton")
    gpu(None)
    ops = select_backend("cuda", eager=eager)
    assert ops.name == available("")[0] == "triton" and ops.supports_graphs
    assert getattr(ops, "eager") is eager  # noqa: B009 (a field of this backend alone)
    assert native_unavailable_reason("cuda") is None
    assert select_backend("cpu").name != "triton"


def test_missing_triton_is_reported(gpu: Callable[[str | None], None]) -> None:
    gpu("Triton is not installed")
    assert (
        native_unavailable_reason("cuda")
        == "the reference backend (torch) is used, which is slower: Triton is not installed"
    )
    assert (
        next(backend for backend in list_backends() if backend.name == "triton").reason
        == "Triton is not installed"
    )


@pytest.mark.full
def test_triton_is_not_imported_without_a_gpu() -> None:
    code = (
        "import sys; from foreword.kernels.registry import list_backends, select_backend; "
        "select_backend('cpu'); list_backends(); "
        "assert not any(name.split('.')[0] == 'triton' or 'kernels.triton' in name for name in sys.modules)"
    )
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=hidden, timeout=WAIT_S)


@pytest.mark.parametrize("isa", isas_under_test())
def test_isa_can_be_forced(isa: str) -> None:
    assert select_backend("cpu", isa=isa).name == f"cpu-{isa}"


def test_reference_can_be_forced() -> None:
    assert select_backend("cpu", isa="reference").name in ("reference+native", "reference")


@pytest.mark.parametrize("isa", sorted(set(ISAS) - set(supported_isas())))
def test_missing_isa_is_refused(isa: str) -> None:
    with pytest.raises(ConfigError, match=f"cpu_isa {isa} cannot be used here"):
        select_backend("cpu", isa=isa)


def test_isa_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_isa portable"):
        select_backend("cuda", isa="portable")
    if supported_isas():
        with pytest.raises(ConfigError, match="no effect with --fast-math"):
            select_backend("cpu", fast_math=True, isa="portable")


def test_kernel_source_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(
        Path(registry.__file__).parent, tmp_path / "kernels", ignore=shutil.ignore_patterns("*.so", "csrc")
    )
    digest = source_digest()
    monkeypatch.setattr(registry, "__file__", str(copy / "registry.py"))
    assert source_digest() == digest
    with (copy / "triton" / "product.py").open("a") as file:
        file.write("# rounds differently\n")
    assert source_digest() != digest


def test_enabled_variants_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = source_digest()
    monkeypatch.setattr(variants, "enabled_variants", lambda: frozenset({"pdl"}))
    assert source_digest() != digest
