"""Several models of one server: `--models FILE.yaml | DIRECTORY | NAME,NAME`.

Reads the one file or directory, no checkpoints. docs/fleet.md explains the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from foreword.config.option_parsing import (
    compose_yaml,
    items_of,
    parse_option,
    read_option_key,
    read_option_value,
)
from foreword.config.options import Config, option_fields
from foreword.config.speculative_config import apply_speculative_config
from foreword.config.units import parse_bytes, parse_duration
from foreword.core.params import FLOAT_BOUNDS, SamplingParams
from foreword.errors import ConfigError, InvalidRequest, did_you_mean

YAML_SUFFIXES = (".yaml", ".yml")
DEFAULT_KEEP_ALIVE_S, DEFAULT_MAX_SWAP_WAIT_S = 300.0, 10.0
MAX_NAME_CHARS = 200
FLEET_FIELDS = tuple(item.name for item in option_fields() if item.metadata["group"] == "fleet")
# Options that exist once, beside those of the groups fleet and server.
SERVER_FIELDS = ("any_model_name", "max_waiting", "max_waiting_tokens")
# Options that name one model, or files of one.
ONE_MODEL_FIELDS = (
    *("model", "served_model_name", "lora_modules", "lora_dir", "embedding_model", "chat_template"),
    *("draft_model", "speculative_config", "replay_file", "trace", "replica_urls"),
)
FILE_KEYS = ("defaults", "keep_alive", "max_loaded_models", "max_swap_wait", "memory_limit", "models")
ENTRY_KEYS = ("keep_alive", "pinned", "preload", "variants")  # keys of a model that are not options
# Fields of SamplingParams that a variant may set: numbers that a request may leave out.
SAMPLING_FIELDS = (*FLOAT_BOUNDS, "top_k", "dry_allowed_length", "max_tokens")
VARIANT_KEYS = (*SAMPLING_FIELDS, "max_model_len", "speculation", "variant_of")
# A GGUF file of several parts, of which the first names the others; a projector of images.
LATER_PART = re.compile(r"-(?!0*1-)\d+-of-\d+\.gguf$", re.IGNORECASE)
PROJECTOR = "mmproj"


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """A further name of a model, which shares its engine."""

    name: str  # its API name: "qwen:creative"
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults: fields of SamplingParams
    speculation: str | None = None  # default method of its requests
    max_model_len: int | None = None  # tokens, at most the engine's


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model, as a server of this model alone would have it."""

    name: str  # the name that answers have
    config: Config
    keep_alive: float | None = DEFAULT_KEEP_ALIVE_S  # seconds; None: never unloaded for that reason
    pinned: bool = False  # loaded at the start, never evicted
    preload: bool = False  # loaded at the start, if there is room
    variants: tuple[ModelVariant, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the API that the options tell: of the model, of its adapters and variants."""
        adapters = (module.name for module in self.config.adapters)
        return (*self.config.served_names(), *adapters, *(variant.name for variant in self.variants))


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """Models that `--models` describes, with the options that go with it."""

    entries: tuple[ModelEntry, ...]  # the first is the default model
    memory_limit: int | None  # bytes of all engines; None: what the machine has, less a reserve
    max_loaded: int | None
    max_swap_wait: float  # seconds, see foreword/fleet/load_scheduler.py


def read_models(config: Config) -> ModelsConfig:
    """Read `config.models`. Flags and environment beat the file's options for all models, not a model's own.

    Raises ConfigError, with file and line where there is one.
    """
    assert config.models is not None
    for name in ONE_MODEL_FIELDS:
        if getattr(config, name) != _default(name):
            hint = "give it to its model in a models file"
            raise ConfigError(f"{name} belongs to one model, and --models is given; {hint}", name)
    path = Path(config.models)
    if path.suffix.lower() in YAML_SUFFIXES:
        return _ModelsFile(path, config).read()
    if path.is_dir() and not (path / "config.json").is_file():
        models = [str(each) for each in _find_models(path)]
        if not models:
            raise ConfigError(f"models {path}: no subdirectory with config.json and no GGUF file", "models")
    else:
        models = [name.strip() for name in config.models.split(",")]
        if not all(models):
            raise ConfigError(f"models must be names joined by commas, got {config.models!r:.200}", "models")
    alone = _without_fleet(config)
    keep_alive = _keep_alive_s(config.keep_alive)
    names = [model.rstrip("/").rsplit("/", 1)[-1] for model in models]
    entries = [
        ModelEntry(name, replace(alone, model=model, served_model_name=name), keep_alive)
        for name, model in zip(names, models, strict=True)
    ]
    _check_names(entries, dict.fromkeys(names, f"models {config.models}"))
    return models_config(config, entries)


def _find_models(path: Path) -> Iterator[Path]:
    """The models in a directory, by name."""
    for each in sorted(path.iterdir(), key=lambda each: each.name.lower()):
        if (each / "config.json").is_file():
            yield each
        elif each.suffix.lower() == ".gguf" and each.is_file():
            is_part = PROJECTOR in each.name.lower() or LATER_PART.search(each.name)
            yield from () if is_part else (each,)


class _ModelsFile:
    def __init__(self, path: Path, config: Config) -> None:
        self._path = path
        self._file = f"models file {path}"
        self._config = config
        self._given = {item.name for item in option_fields() if getattr(config, item.name) != item.default}

    def read(self) -> ModelsConfig:
        root = compose_yaml("models file", self._path)
        if root is None:
            raise ConfigError(f"{self._file} is empty; it needs `models:`", "models")
        parts: dict[str, tuple[str, yaml.Node]] = {}
        for where, key, node in items_of(self._file, root, "`option: value` lines"):
            name = key.replace("-", "_")
            if name not in FILE_KEYS:
                raise ConfigError(f"{where}: {_describe_file_key(key)}", "models")
            if name in parts:
                raise ConfigError(f"{where}: {key} is given twice", "models")
            parts[name] = (where, node)
        if "models" not in parts:
            raise ConfigError(f"{self._file} has no `models:`", "models")
        names = [name for name in parts if name in FLEET_FIELDS and name != "models"]
        own = {name: self._read_fleet_option(name, *parts[name]) for name in names}
        own = {name: value for name, value in own.items() if value is not None and name not in self._given}
        self._config = replace(self._config, **own)
        defaults = self._read_defaults(*parts["defaults"]) if "defaults" in parts else {}
        try:
            self._base = replace(_without_fleet(self._config), **defaults)
        except ConfigError as error:
            raise ConfigError(f"{parts['defaults'][0]}: {error.message}", error.param) from None
        entries, places = [], {}
        where, node = parts["models"]
        for where, name, value in items_of(self._file, node, "`name: options` lines"):
            entries.append(self._read_entry(where, name, value))
            places[name] = where
        if not entries:
            raise ConfigError(f"{self._file}: `models:` has none", "models")
        _check_names(entries, places)
        return models_config(self._config, entries)

    def _read_fleet_option(self, name: str, where: str, node: yaml.Node) -> Any:
        value = read_option_value(f"{where}: {name}", name, node)
        self._try_option(where, name, value)
        return value

    def _read_defaults(self, where: str, node: yaml.Node) -> dict[str, Any]:
        """Options of all models that neither flags nor the environment give."""
        if _is_null(node):
            return {}
        values, _ = self._read_options(node)
        for name, (value, place) in values.items():
            if name in ONE_MODEL_FIELDS:
                raise ConfigError(f"{place}: {name} belongs to one model, not to `defaults:`", name)
            self._try_option(place, name, value)
        return {name: value for name, (value, _) in values.items() if name not in self._given}

    def _read_entry(self, where: str, name: str, node: yaml.Node) -> ModelEntry:
        _check_name(where, name)
        values: dict[str, tuple[Any, str]] = {}
        extra: dict[str, tuple[str, yaml.Node]] = {}
        if not _is_null(node):
            values, extra = self._read_options(node, ENTRY_KEYS)
        options = {option: value for option, (value, _) in values.items()}
        options.setdefault("model", name)
        further = [each.strip() for each in str(options.get("served_model_name") or "").split(",")]
        options["served_model_name"] = ",".join(dict.fromkeys((name, *filter(None, further))))
        try:
            config = apply_speculative_config(replace(self._base, **options))
        except ConfigError as error:
            place = values[error.param][1] if error.param in values else f"{where}: {name}"
            raise ConfigError(f"{place}: {error.message}", error.param) from None
        keep_alive = self._config.keep_alive
        if "keep_alive" in extra:
            keep_alive = self._read_fleet_option("keep_alive", *extra["keep_alive"]) or keep_alive
        pinned, preload = (
            each in extra and self._read_switch(each, *extra[each]) for each in ("pinned", "preload")
        )
        variants: tuple[ModelVariant, ...] = ()
        if "variants" in extra and not _is_null(extra["variants"][1]):
            variants = tuple(self._read_variants(name, config, extra["variants"][1]))
        return ModelEntry(name, config, _keep_alive_s(keep_alive), pinned, preload, variants)

    def _read_options(
        self, node: yaml.Node, more: tuple[str, ...] = ()
    ) -> tuple[dict[str, tuple[Any, str]], dict[str, tuple[str, yaml.Node]]]:
        """Options of a model: (value, place) by field of Config, and (place, value) of the keys in `more`."""
        values: dict[str, tuple[Any, str]] = {}
        extra: dict[str, tuple[str, yaml.Node]] = {}
        for where, key, value in items_of(self._file, node, "`option: value` lines"):
            name = key.replace("-", "_")
            if name in values or name in extra:
                raise ConfigError(f"{where}: {key} is given twice", name)
            if name in more:
                extra[name] = (where, value)
                continue
            _check_option_of_model(where, key, more)
            values[name] = (read_option_value(f"{where}: {key}", name, value), where)
        return {name: each for name, each in values.items() if each[0] is not None}, extra

    def _read_switch(self, name: str, where: str, node: yaml.Node) -> bool:
        place = f"{where}: {name}"
        return bool(parse_option(place, "bool", _scalar(place, node)))

    def _try_option(self, where: str, name: str, value: Any) -> None:
        try:
            replace(Config(), **{name: value})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", name) from None

    # Variants

    def _read_variants(self, model: str, config: Config, node: yaml.Node) -> Iterator[ModelVariant]:
        raw: dict[str, tuple[str, dict[str, Any]]] = {}
        for where, name, value in items_of(self._file, node, "`name: values` lines"):
            _check_name(where, name)
            if ":" in name:
                problem = f"a variant is named by what follows {model + ':'!r}, without another colon"
                raise ConfigError(f"{where}: {problem}, got {name!r}", "models")
            raw[name] = (where, {} if _is_null(value) else self._read_variant(config, value))
        for name, (where, values) in raw.items():
            chain = [name]
            merged = dict(values)
            while (parent := merged.pop("variant_of", None)) is not None:
                if parent not in raw:
                    known = did_you_mean(parent, raw)
                    raise ConfigError(f"{where}: {name}: no variant {parent!r}{known}", "models")
                if parent in chain:
                    names = " -> ".join((*chain, parent))
                    raise ConfigError(f"{where}: variants refer to each other in a circle: {names}", "models")
                chain.append(parent)
                merged = {**raw[parent][1], **merged}
            sampling = {key: merged[key] for key in SAMPLING_FIELDS if key in merged}
            yield ModelVariant(
                f"{model}:{name}", sampling, merged.get("speculation"), merged.get("max_model_len")
            )

    def _read_variant(self, config: Config, node: yaml.Node) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for where, key, value in items_of(self._file, node, "`field: value` lines"):
            name = key.replace("-", "_")
            if name not in VARIANT_KEYS:
                known = f"{did_you_mean(name, VARIANT_KEYS)}; a variant has {', '.join(VARIANT_KEYS)}"
                raise ConfigError(f"{where}: unknown field {key!r}{known}", "models")
            if name in values:
                raise ConfigError(f"{where}: {key} is given twice", "models")
            values[name] = _variant_value(where, name, _scalar(f"{where}: {key}", value), config)
        return values


def _variant_value(where: str, name: str, text: str, config: Config) -> Any:
    """The checked value of a variant's field."""
    if name == "variant_of":
        return text
    if name == "speculation":
        known = ("auto", "off", *config.drafter_names())
        if text not in known:
            problem = f"must be one of {', '.join(known)}, got {text!r:.80}{did_you_mean(text, known)}"
            raise ConfigError(f"{where}: speculation {problem}", "models")
        return text
    value = parse_option(f"{where}: {name}", "float" if name in FLOAT_BOUNDS else "int", text)
    if name == "max_model_len":
        limit = config.max_model_len
        if value < 2 or (limit is not None and value > limit):
            bounds = "at least 2" if limit is None else f"between 2 and {limit}, the model's own"
            raise ConfigError(f"{where}: max_model_len must be {bounds}, got {value}", "models")
        return value
    try:
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}", "models") from None
    return value


def _check_option_of_model(where: str, key: str, more: tuple[str, ...]) -> None:
    """Raises ConfigError for an unknown option, or one of the server."""
    name = read_option_key(where, key, more)
    item = next(item for item in option_fields() if item.name == name)
    if name in FILE_KEYS and name != "models":
        hint = "it stands at the top of the file, for all models"
        raise ConfigError(f"{where}: {key} is no option of a model: {hint}", name)
    elif not _is_option_of_model(item):
        hint = "give it as a flag, in the environment or in --config"
        raise ConfigError(f"{where}: {key} is an option of the server, not of a model: {hint}", name)


def _is_option_of_model(item: Any) -> bool:
    return item.metadata["group"] not in ("fleet", "server") and item.name not in SERVER_FIELDS


def _describe_file_key(key: str) -> str:
    """The error of a key at the top of the file."""
    name = key.replace("-", "_")
    item = next((item for item in option_fields() if item.name == name), None)
    if item is None:
        return f"unknown option {key!r}{did_you_mean(name, FILE_KEYS)}"
    if _is_option_of_model(item):
        return f"{key} is an option of models: put it below `defaults:` or a model"
    return f"{key} is an option of the server: give it as a flag, in the environment or in --config"


def _check_name(where: str, name: str) -> None:
    if (
        not name.strip()
        or name != name.strip()
        or "," in name
        or not name.isprintable()
        or len(name) > MAX_NAME_CHARS
    ):
        problem = f"has 1 to {MAX_NAME_CHARS} printable characters without commas"
        raise ConfigError(f"{where}: a model's name {problem}, got {name!r:.80}", "models")


def _check_names(entries: list[ModelEntry], places: Mapping[str, str]) -> None:
    """Raises ConfigError for a name that stands for two models, adapters or variants."""
    owners: dict[str, str] = {}
    for entry in entries:
        encoder = entry.config.embedding_model
        encoders = () if encoder is None else (encoder.rstrip("/").rsplit("/", 1)[-1],)
        for name in (*entry.names, *encoders):
            if name in owners:
                both = (
                    f"of {entry.name}"
                    if owners[name] == entry.name
                    else f"of {owners[name]} and {entry.name}"
                )
                problem = f"two models are called {name!r}: names {both}, with aliases, adapters and variants"
                raise ConfigError(f"{places[entry.name]}: {problem}", "models")
            owners[name] = entry.name


def models_config(config: Config, entries: list[ModelEntry]) -> ModelsConfig:
    """The entries with the options of the server."""
    limit = None if config.memory_limit is None else parse_bytes("memory_limit", config.memory_limit)
    wait_s = DEFAULT_MAX_SWAP_WAIT_S if config.max_swap_wait is None else config.max_swap_wait
    first, *others = entries  # only the first answers to any name
    others = [replace(each, config=replace(each.config, any_model_name=False)) for each in others]
    return ModelsConfig((first, *others), limit, config.max_loaded_models, wait_s)


def _without_fleet(config: Config) -> Config:
    return replace(config, **{name: _default(name) for name in FLEET_FIELDS})


def _default(name: str) -> Any:
    return next(item.default for item in fields(Config) if item.name == name)


def _keep_alive_s(text: str | None) -> float | None:
    return DEFAULT_KEEP_ALIVE_S if text is None else parse_duration("keep_alive", text)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~")


def _scalar(where: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where} must be a single value", "models")
    return str(node.value)
