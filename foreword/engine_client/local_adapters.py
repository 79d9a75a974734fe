"""The LoRA adapters that an engine in the caller's process holds, within its slots."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.config.lora import AdapterInfo, LoRARequest
from foreword.engine_client.local import LocalClient
from foreword.errors import AdapterConflict, InvalidRequest

LoraInput = str | LoRARequest  # a name of `lora_modules`, or an adapter by its path


class LocalAdapters:
    """Loads adapters on first use. Those of paths give way, the least recently used first."""

    def __init__(self, client: LocalClient, names: Sequence[str]) -> None:
        """names  of the adapters that the engine was started with; these stay"""
        self._client = client
        self._pinned = frozenset(info.digest for info in client.info.adapters)
        # By name, or by path; the last was used most recently.
        self._adapters: dict[str, AdapterInfo] = dict(zip(names, client.info.adapters, strict=True))

    def load(self, adapters: Sequence[LoraInput | None]) -> list[str]:
        """Digests, empty for the base model. Adapters of one call are in memory together.

        Raises InvalidRequest for an unknown name, AdapterConflict for more adapters than slots.
        """
        needed: list[str] = []
        for adapter in adapters:
            needed.append("" if adapter is None else self._load(adapter, needed))
        return needed

    def _load(self, adapter: LoraInput, needed: Sequence[str]) -> str:
        request = LoRARequest(adapter) if isinstance(adapter, str) else adapter
        key = request.lora_path or request.lora_name
        if key not in self._adapters and not request.lora_path:
            names = ", ".join(sorted(self._adapters)) or "none"
            raise InvalidRequest(
                f"no adapter is named {key!r:.200}; loaded: {names}; lora_path loads another", "lora_request"
            )
        info = self._adapters.pop(key, None)
        while info is None:
            try:
                info = self._client.load_adapter(request.lora_path)
            except AdapterConflict:
                self._evict(needed)
        self._adapters[key] = info
        return info.digest

    def _evict(self, needed: Sequence[str]) -> None:
        """Unload the adapter of a path that was not used for longest. Raises AdapterConflict."""
        for oldest in self._adapters.values():
            if oldest.digest not in self._pinned and oldest.digest not in needed:
                self._client.unload_adapter(oldest.digest)
                self._adapters = {  # also its other paths
                    key: info for key, info in self._adapters.items() if info.digest != oldest.digest
                }
                return
        limit = self._client.info.resolved.max_loras
        raise AdapterConflict(f"more adapters are needed at a time than --max-loras {limit}", "lora_request")
