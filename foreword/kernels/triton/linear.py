"""To be written."""

from __future__ import annotations

__all__ = ["TritonLinear"]


class TritonLinear:
    """Mixin of TritonOps."""
