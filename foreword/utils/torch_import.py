"""The import of torch, without a third of it: its Python kernels for the meta device. No torch here."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Final

__all__ = ["load_meta_kernels", "skip_meta_kernels"]

META_KERNELS: Final = "torch._meta_registrations"


def skip_meta_kernels() -> None:
    """Leave them out of the first import of torch: only tracing, and tensors without data, use them.

    For processes of our own: other code may expect all of torch.
    """
    if "torch" not in sys.modules:
        sys.modules[META_KERNELS] = ModuleType(META_KERNELS)


def load_meta_kernels() -> None:
    """Import what skip_meta_kernels() left out, before other code uses torch; may be called twice."""
    module = sys.modules.get(META_KERNELS)
    if module is not None and module.__spec__ is None:
        del sys.modules[META_KERNELS]
        importlib.import_module(META_KERNELS)
