"""What the registry selects is what it describes."""

from __future__ import annotations

import pytest

from foreword.errors import ConfigError
from foreword.kernels.cpu.library import ISAS, isas
from foreword.kernels.registry import describe, select


def test_the_first_available_backend_is_selected() -> None:
    available = [backend.name for backend in describe() if backend.available]
    exact = [name for name in available if not name.startswith("fast-math")]
    assert select("cpu").name == exact[0]
    assert select("cpu", fast_math=True).name == next(name for name in available if name.startswith("fast-math"))
    assert select("cuda").name == "reference"
    assert all(backend.reason for backend in describe())


@pytest.mark.parametrize("isa", isas())
def test_an_instruction_set_can_be_forced(isa: str) -> None:
    assert select("cpu", isa=isa).name == f"cpu-{isa}"


def test_torch_can_be_asked_for() -> None:
    assert select("cpu", isa="reference").name in ("reference+native", "reference")


@pytest.mark.parametrize("isa", sorted(set(ISAS) - set(isas())))
def test_an_instruction_set_that_is_not_there_is_refused(isa: str) -> None:
    with pytest.raises(ConfigError, match=f"cpu_isa {isa} cannot be used here"):
        select("cpu", isa=isa)


def test_an_instruction_set_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_isa portable"):
        select("cuda", isa="portable")
    if isas():
        with pytest.raises(ConfigError, match="no effect with --fast-math"):
            select("cpu", fast_math=True, isa="portable")
