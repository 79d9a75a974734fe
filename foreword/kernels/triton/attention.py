"""To be written."""

from __future__ import annotations

__all__ = ["TritonAttention"]


class TritonAttention:
    """Mixin of TritonOps."""
