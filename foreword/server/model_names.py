"""The one place that turns a name in the API into a model, its adapter and its file."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foreword.config.lora import AdapterInfo, LoraModule
from foreword.embedding.client import EncoderClient
from foreword.engine_client.base import EngineClient
from foreword.errors import AdapterConflict, ConfigError, InvalidRequest, ModelNotFound

MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a name stands for."""

    name: str  # in answers
    names: tuple[str, ...]  # all names of it
    root: str  # the model's name, or the adapter's path
    parent: str | None = None  # name of the adapter's base
    adapter: AdapterInfo | None = None
    is_encoder: bool = False

    def fingerprint(self, engine: str) -> str:
        """The fingerprint of answers, from that of the engine."""
        if self.adapter is None:
            return engine
        return "fw_" + hashlib.blake2b((engine + self.adapter.digest).encode(), digest_size=8).hexdigest()

    @property
    def digest(self) -> str:
        """Of the adapter; empty without one."""
        return "" if self.adapter is None else self.adapter.digest


class ModelNames:
    """The generating model, its variants and its encoder, and LoRA adapters, which come and go."""

    def __init__(
        self,
        client: EngineClient,
        model_name: str,
        aliases: Iterable[str] = (),
        encoder: EncoderClient | None = None,
        modules: Iterable[LoraModule] = (),
        takes_any: bool = False,
        lora_dir: Path | None = None,
        variants: Iterable[str] = (),
    ) -> None:
        """modules    adapters that the engine loads at its start
        takes_any  other names mean the generating model
        variants   further names of the generating model, which answers bear
        lora_dir   what load_adapter() loads lies in it
        """
        self.model_name = model_name
        self._model_names = (model_name, *aliases)
        self._variants = tuple(variants)
        self._client = client
        self._encoder = encoder
        self._modules = tuple(modules)
        self._takes_any = takes_any
        self._lora_dir = lora_dir
        # None: in the order of `modules`, what the engine has loaded at its start
        self._adapters: dict[str, AdapterInfo | None] = {module.name: None for module in self._modules}
        self._pending: set[str] = set()  # names of adapters that are being loaded
        self._lock = asyncio.Lock()  # of changes in the engine
        check_adapter_names(self._modules, self._model_names)

    @property
    def all(self) -> tuple[str, ...]:
        """The names of the generating model, of its variants, of the encoder, and of adapters."""
        encoder = self._encoder.info if self._encoder is not None else None
        encoders = () if encoder is None else (encoder.name,)
        return (*self._model_names, *self._variants, *encoders, *self._adapters)

    def resolve(self, name: str | None) -> ServedModel:
        """What `name` stands for; None is the generating model. Raises ModelNotFound."""
        encoder = self._encoder.info if self._encoder is not None else None
        if name is None or name in self._model_names:
            return self._generating_model
        if name in self._variants:
            return ServedModel(name, (name, *self._model_names), self.model_name, self.model_name)
        if encoder is not None and name == encoder.name:
            return ServedModel(name, (name,), name, is_encoder=True)
        if name in self._adapters:
            info = self._adapter_info(name)
            return ServedModel(name, (name,), info.path, self.model_name, info)
        if self._takes_any:
            return self._generating_model
        raise ModelNotFound(f"the model {name!r:.200} does not exist", "model")

    @property
    def _generating_model(self) -> ServedModel:
        return ServedModel(self.model_name, self._model_names, self.model_name)

    def _adapter_info(self, name: str) -> AdapterInfo:
        info = self._adapters[name]
        if info is None:
            assert self._client.info is not None, "a request before the engine has started"
            names = [module.name for module in self._modules]
            info = self._adapters[name] = self._client.info.adapters[names.index(name)]
        return info

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> ServedModel:
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
        return self.resolve(name)

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        """The adapters, for an engine that is to load them at its start."""
        return tuple(LoraModule(name, self._adapter_info(name).path) for name in self._adapters)

    def _find_adapter(self, path: str) -> Path:
        """The path within `lora_dir`, without links. Raises InvalidRequest."""
        assert self._lora_dir is not None, "without --lora-dir nothing is loaded at run time"
        root = self._lora_dir.resolve()
        try:
            source = (root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise InvalidRequest(f"lora_path: no adapter {path!r:.200} in --lora-dir", "lora_path") from None
        if not source.is_relative_to(root) or source == root:
            raise InvalidRequest(f"lora_path: {path!r:.200} is not in --lora-dir", "lora_path")
        return source

    async def unload_adapter(self, name: str) -> None:
        """Forget the name at once, and free the slot once no open request uses it. Raises ModelNotFound."""
        if name not in self._adapters:
            raise ModelNotFound(f"no adapter is called {name!r:.200}", "lora_name")
        info = self._adapter_info(name)
        del self._adapters[name]
        await self._free(info)

    async def _free(self, info: AdapterInfo) -> None:
        """Unload an adapter that has no name any more. Requests that were on their way may be first."""
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
        return any(self._adapter_info(name).digest == info.digest for name in self._adapters)


def check_adapter_names(modules: Iterable[LoraModule], model_names: Iterable[str]) -> None:
    """Raises ConfigError for an adapter with the name of a model, or of another base."""
    known = tuple(model_names)
    for module in modules:
        if module.name in known:
            raise ConfigError(
                f"an adapter and the model are both called {module.name!r:.200}; rename one", "lora_modules"
            )
        if module.base_model_name is not None and module.base_model_name not in known:
            problem = f"base_model_name of {module.name!r:.200} is {module.base_model_name!r:.200}"
            raise ConfigError(f"lora_modules: {problem}; the model is called {known[0]!r}", "lora_modules")
