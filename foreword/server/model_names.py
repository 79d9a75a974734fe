"""The names of one model in the API: its own, those of its variants, its encoder and its LoRA adapters."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foreword.config.lora import AdapterInfo, LoraModule
from foreword.config.models_file import ModelEntry
from foreword.embedding.client import EncoderClient
from foreword.engine_client.base import EngineClient
from foreword.errors import AdapterConflict, ConfigError, InvalidRequest, ModelNotFound, shown

MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class ServedName:
    """A resolved model name."""

    name: str  # in answers
    names: tuple[str, ...]  # all names of the same model
    root: str  # the model's name, or the adapter's path
    parent: str | None = None  # name of the adapter's base
    adapter: AdapterInfo | None = None  # known once the model is loaded
    is_encoder: bool = False

    def fingerprint(self, engine: str) -> str:
        """The fingerprint of answers, from that of the engine."""
        if self.adapter is None:
            return engine
        return "fw_" + hashlib.blake2b((engine + self.adapter.digest).encode(), digest_size=8).hexdigest()

    @property
    def digest(self) -> str:
        """The adapter's digest; empty without one."""
        return "" if self.adapter is None else self.adapter.digest


class ModelNames:
    """The names of a model, loaded or not. Adapters come and go, and stay through unloads of their model."""

    def __init__(self, entry: ModelEntry) -> None:
        """Raises ConfigError for an adapter with the name of a model, or of another base."""
        config = entry.config
        self.model_name = entry.name
        self._model_names = (entry.name, *(name for name in config.served_names() if name != entry.name))
        self._variants = tuple(variant.name for variant in entry.variants)
        self._encoder = None if config.embedding_model is None else Path(config.embedding_model).name
        self._lora_dir = Path(config.lora_dir) if config.lora_dir else None
        self._modules = config.adapters  # loaded by the engine at its start
        self._adapters: dict[str, AdapterInfo | None] = {module.name: None for module in self._modules}
        self._pending: set[str] = set()  # names of adapters that are being loaded
        self._client: EngineClient | None = None  # None: not loaded
        self._lock = asyncio.Lock()  # held while the engine changes
        _check_adapter_names(self._modules, self._model_names)

    def attach(self, client: EngineClient, encoder: EncoderClient | None) -> None:
        """The model is loaded. Raises ConfigError for an encoder with the name of the model or an adapter."""
        if encoder is not None and encoder.info is not None:
            self._encoder = encoder.info.name
        if self._encoder in (*self._model_names, *self._adapters):
            raise ConfigError(
                f"two models are called {self._encoder!r}; rename one with --served-model-name",
                "served_model_name",
            )
        self._client = client

    def detach(self) -> None:
        """The model is no longer loaded; `modules` are those of its next load."""
        self._modules = self.modules
        self._adapters = {module.name: None for module in self._modules}
        self._client = None

    @property
    def all(self) -> tuple[str, ...]:
        """The names of the generating model, of its variants, of the encoder, and of adapters."""
        encoders = () if self._encoder is None else (self._encoder,)
        return (*self._model_names, *self._variants, *encoders, *self._adapters)

    @property
    def default(self) -> ServedName:
        """The generating model."""
        return ServedName(self.model_name, self._model_names, self.model_name)

    def find(self, name: str | None) -> ServedName | None:
        """The resolved name; None is the generating model. Returns None for a name of another model."""
        if name is None or name in self._model_names:
            return self.default
        if name in self._variants:
            return ServedName(name, (name, *self._model_names), self.model_name, self.model_name)
        if name == self._encoder:
            return ServedName(name, (name,), name, is_encoder=True)
        if name in self._adapters:
            info = self._adapter_info(name)
            return ServedName(name, (name,), self._adapter_path(name), self.model_name, info)
        return None

    def _adapter_info(self, name: str) -> AdapterInfo | None:
        """None while the model is not loaded."""
        info = self._adapters[name]
        if info is None and self._client is not None and self._client.info is not None:
            names = [module.name for module in self._modules]
            info = self._adapters[name] = self._client.info.adapters[names.index(name)]
        return info

    def _adapter_path(self, name: str) -> str:
        info = self._adapter_info(name)
        return next(m.path for m in self._modules if m.name == name) if info is None else info.path

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> None:
        """Load an adapter from `lora_dir`. `in_place`: it takes the place of the one of this name.

        Open requests of the one before end with it; then its slot is free.
        Raises InvalidRequest, AdapterConflict, and errors of EngineClient.load_adapter().
        """
        if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(
                f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters", "lora_name"
            )
        if name in self._pending or (name in self.all and not (in_place and name in self._adapters)):
            hint = ": load_inplace replaces it" if name in self._adapters else ""
            raise InvalidRequest(f"a model is called {name!r} already{hint}", "lora_name")
        assert self._client is not None, "adapters are loaded into an engine"
        source = self._find_adapter(path)
        self._pending.add(name)
        try:
            async with self._lock:
                info = await self._client.load_adapter(str(source))
                before = self._adapter_info(name) if name in self._adapters else None
                self._adapters[name] = info
        finally:
            self._pending.remove(name)
        if before is not None:
            await self._free(before)

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        """The adapters, for an engine that is to load them at its start."""
        return tuple(LoraModule(name, self._adapter_path(name)) for name in self._adapters)

    def _find_adapter(self, path: str) -> Path:
        """The path within `lora_dir`, without links. Raises InvalidRequest."""
        assert self._lora_dir is not None, "without --lora-dir nothing is loaded at run time"
        root = self._lora_dir.resolve()
        try:
            source = (root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise InvalidRequest(
                f"lora_path: no adapter {shown(path, 200)} in --lora-dir", "lora_path"
            ) from None
        if not source.is_relative_to(root) or source == root:
            raise InvalidRequest(f"lora_path: {shown(path, 200)} is not in --lora-dir", "lora_path")
        return source

    async def unload_adapter(self, name: str) -> None:
        """Forget the name at once, and free the slot once no open request uses it. Raises ModelNotFound."""
        if name not in self._adapters:
            raise ModelNotFound(f"no adapter is called {shown(name, 200)}", "lora_name")
        info = self._adapter_info(name)
        assert info is not None, "adapters are unloaded from an engine"
        del self._adapters[name]
        await self._free(info)

    async def _free(self, info: AdapterInfo) -> None:
        """Unload an adapter that has no name any more. Requests that were on their way may be first."""
        assert self._client is not None
        while not self._is_named(info):
            await self._client.wait_unused(info.digest)
            async with self._lock:
                if self._is_named(info):
                    return
                with suppress(AdapterConflict):
                    await self._client.unload_adapter(info.digest)
                    return

    def _is_named(self, info: AdapterInfo) -> bool:
        """Whether a name stands for an adapter of the same content."""
        infos = map(self._adapter_info, self._adapters)
        return any(other is not None and other.digest == info.digest for other in infos)


def _check_adapter_names(modules: Iterable[LoraModule], model_names: Iterable[str]) -> None:
    """Raises ConfigError for an adapter with the name of a model, or of another base."""
    known = tuple(model_names)
    for module in modules:
        if module.name in known:
            raise ConfigError(
                f"an adapter and the model are both called {shown(module.name, 200)}; rename one",
                "lora_modules",
            )
        if module.base_model_name is not None and module.base_model_name not in known:
            problem = f"base_model_name of {shown(module.name, 200)} is {shown(module.base_model_name, 200)}"
            raise ConfigError(f"lora_modules: {problem}; the model is called {known[0]!r}", "lora_modules")
