"""Checks of a benchmark's own claims: a figure whose conditions did not hold is not printed. No torch."""

from __future__ import annotations

from pathlib import Path

from foreword.errors import ForewordError
from foreword.kernels.cpu.library import shadowed_library

VOID = "not measured"  # printed instead of a figure
MAX_SHARE = 1.05  # largest share of a measured ceiling; beyond it the ceiling is wrong, not the figure good
CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


class RegimeError(ForewordError):
    """A measurement ran under other conditions than it claims: its figure is void."""


def require(claim: str, measured: object, wanted: object) -> None:
    """Raise RegimeError unless the two are equal."""
    if measured != wanted:
        raise RegimeError(f"{VOID}: {claim}: {measured}, not {wanted}")


def require_native_kernels() -> None:
    """Raise RegimeError where a source tree without native kernels hides an installed package with them."""
    if reason := shadowed_library():
        raise RegimeError(f"{VOID}: {reason}")


def checked_share(rate: float, ceiling: float) -> float:
    """`rate` over `ceiling`. Raises RegimeError above MAX_SHARE."""
    share = rate / ceiling
    if share > MAX_SHARE:
        raise RegimeError(f"{VOID}: the ceiling is wrong: {share:.0%} of it was reached")
    return share


def shared_cache_bytes() -> int:
    """Size of the largest cache, where what fits is not read from memory; 0 where the system does not say."""
    sizes = [path.read_text().strip() for path in CPU_CACHE.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=0)
