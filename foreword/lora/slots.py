"""The adapters that an engine has loaded, each in a slot of its layers' tables."""

from __future__ import annotations

from pathlib import Path

from foreword.config.lora import AdapterInfo
from foreword.core.request import NO_LORA
from foreword.errors import AdapterConflict, ConfigError, ModelNotFound
from foreword.layers.lora import LoraLayers
from foreword.lora.adapter import read_adapter


class AdapterSlots:
    """Loads and unloads adapters, which requests name by their digests."""

    def __init__(self, layers: LoraLayers) -> None:
        self._layers = layers
        self._slots: list[AdapterInfo | None] = [None] * (layers.limits.max_loras if layers.limits else 0)

    @property
    def loaded(self) -> tuple[AdapterInfo, ...]:
        return tuple(info for info in self._slots if info is not None)

    def slot_of(self, digest: str) -> int:
        """The slot of a loaded adapter; NO_LORA for none. Raises ModelNotFound."""
        if not digest:
            return NO_LORA
        for slot, info in enumerate(self._slots):
            if info is not None and info.digest == digest:
                return slot
        raise ModelNotFound("the adapter of this request is not loaded", "model")

    def load(self, path: str, digest: str | None = None) -> AdapterInfo:
        """Load an adapter; one with the same content is loaded once.

        digest  of the adapter that a restarted engine gets back: another content is refused
        Raises CheckpointError, ConfigError, AdapterConflict.
        """
        limits = self._layers.limits
        if limits is None:
            raise ConfigError("LoRA is off: --enable-lora or --lora-modules turns it on", "enable_lora")
        adapter = read_adapter(Path(path), self._layers.shapes, limits.max_rank, self._layers.dtype)
        info = adapter.info
        if digest not in (None, info.digest):
            raise ConfigError(f"the adapter {path} has changed since it was loaded", "lora_modules")
        for loaded in self._slots:
            if loaded is not None and loaded.digest == info.digest:
                return loaded
        if None not in self._slots:
            raise AdapterConflict(
                f"all {len(self._slots)} slots of --max-loras have adapters: unload one first", "lora_name"
            )
        slot = self._slots.index(None)
        self._layers.fill(slot, adapter.weights)
        self._slots[slot] = info
        return info

    def unload(self, digest: str) -> None:
        """Free the slot of an adapter that no request uses; does nothing if it is not loaded."""
        for slot, info in enumerate(self._slots):
            if info is not None and info.digest == digest:
                self._layers.clear(slot)
                self._slots[slot] = None
