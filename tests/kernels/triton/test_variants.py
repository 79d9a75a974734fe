"""The environment enables variants of kernels by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foreword.errors import ConfigError
from foreword.kernels.triton import variants
from foreword.kernels.triton.variants import VARIANTS_ENV, Variant, enabled_variants, is_enabled


@pytest.fixture(autouse=True)
def two_variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(variants, "VARIANTS", dict.fromkeys(("pdl", "tall_tiles"), Variant("change", "gain")))
    enabled_variants.cache_clear()
    yield
    enabled_variants.cache_clear()


@pytest.mark.parametrize("text", ["", " , "])
def test_all_variants_are_off_by_default(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANTS_ENV, text)
    assert not is_enabled("pdl") and not is_enabled("tall_tiles")


def test_named_variants_are_enabled_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANTS_ENV, "tall_tiles")
    assert is_enabled("tall_tiles") and not is_enabled("pdl")
    monkeypatch.setenv(VARIANTS_ENV, "pdl, tall_tiles")
    assert not is_enabled("pdl")
    enabled_variants.cache_clear()
    assert is_enabled("pdl") and is_enabled("tall_tiles")


def test_unknown_variant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANTS_ENV, "pdl,tall_tile")
    with pytest.raises(ConfigError, match="no variant 'tall_tile'; did you mean tall_tiles"):
        is_enabled("pdl")
    monkeypatch.setenv(VARIANTS_ENV, "zz")
    with pytest.raises(ConfigError, match="no variant 'zz'; known: pdl, tall_tiles"):
        enabled_variants()


def test_code_can_only_ask_for_listed_variants() -> None:
    with pytest.raises(AssertionError, match="another"):
        is_enabled("another")
