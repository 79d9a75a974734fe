"""To be written."""

from __future__ import annotations

__all__ = ["TritonSampling"]


class TritonSampling:
    """Mixin of TritonOps."""
