"""The version, where every package may read it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
