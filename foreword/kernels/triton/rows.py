"""To be written."""

from __future__ import annotations

__all__ = ["TritonRows"]


class TritonRows:
    """Mixin of TritonOps."""
