"""adapter_config.json of PEFT: what is honoured is read, everything else is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError
from foreword.weights.config_reader import read_json
from foreword.weights.module_patterns import NamePattern, find_first

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
ANY_MODULE = NamePattern("", "start")
# Initializations that change nothing but the adapter. The others subtract it from the base's weights.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
BASE_CHANGING_INITS = re.compile("pissa.*|olora|corda.*|loftq|lora_ga")
# Options that change the product or further weights, by what they are called.
VARIANTS: Mapping[str, str] = {
    "use_dora": "DoRA",
    "lora_bias": "lora_bias",
    "modules_to_save": "modules_to_save",
    "trainable_token_indices": "trainable_token_indices",
    "target_parameters": "target_parameters",
    "layer_replication": "layer_replication",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "megatron_config",
}
# Training, bookkeeping, and options of variants that are refused by their own switch.
IGNORED = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("fan_in_fan_out", "inference_mode", "lora_dropout", "lora_ga_config", "loftq_config"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
        *("use_bdlora_config", "velora_config"),
    )
)
READ = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "bias", "use_rslora"),
        *("init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    )
)
LAYER_INDEX = re.compile(r"layers\.(\d+)\.")
MAX_RANK, MAX_ALPHA = 1 << 16, 1e9


@dataclass(frozen=True, slots=True)
class Target:
    """Config of the adapter of one linear layer."""

    rank: int
    scale: float  # alpha over the rank, or over its root with rsLoRA


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales by module path, such as `model.layers.0.self_attn.q_proj`, and which are targets."""

    source: Path
    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[NamePattern, ...]
    exclude_modules: tuple[NamePattern, ...]
    layers: tuple[int, ...] | None  # None: all
    rank_pattern: Mapping[NamePattern, int]
    alpha_pattern: Mapping[NamePattern, float]

    def targets(self, paths: Sequence[str]) -> dict[str, Target]:
        """The linear layers among these that PEFT adapts. Raises CheckpointError."""
        targeted, excluded = self._find(self.target_modules, paths), self._find(self.exclude_modules, paths)
        ranks, alphas = self._find(self.rank_pattern, paths), self._find(self.alpha_pattern, paths)
        targets = {}
        for path in paths:
            if path in excluded or path not in targeted or not self._has_layer(path):
                continue
            rank = self.rank_pattern[ranks[path]] if path in ranks else self.rank
            alpha = self.alpha_pattern[alphas[path]] if path in alphas else self.alpha
            targets[path] = Target(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))
        return targets

    def _has_layer(self, path: str) -> bool:
        index = LAYER_INDEX.search(path)
        return self.layers is None or (index is not None and int(index[1]) in self.layers)

    def _find(
        self, patterns: Sequence[NamePattern] | Mapping[NamePattern, float], paths: Sequence[str]
    ) -> dict[str, NamePattern]:
        """The first pattern of each path that has any."""
        known = tuple(patterns)
        found = zip(paths, find_first(known, paths, str(self.source)), strict=True)
        return {path: known[index] for path, index in found if index >= 0}


def read_adapter_config(file: Path) -> AdapterConfig:
    """Raises CheckpointError for whatever is not honoured, which it names."""
    values = read_json(file)
    reader = _Reader(values, file)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise reader.error(f"peft_type {kind!r:.80} is not supported; only LORA is")
    for name, variant in VARIANTS.items():
        if values.get(name):
            raise reader.error(f"{variant} is not supported ({name}: {values[name]!r:.80})")
    if values.get("bias", "none") != "none":
        raise reader.error(f"bias {values['bias']!r:.80} is not supported: only none is")
    init = values.get("init_lora_weights", True)
    if init not in PLAIN_INITS:
        problem = f"init_lora_weights {init!r:.80} is not supported"
        if BASE_CHANGING_INITS.fullmatch(str(init).lower()):
            problem += (
                ": it changes the base model's weights; "
                "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) makes it a plain LoRA"
            )
        raise reader.error(problem)
    for name, value in values.items():
        if name not in READ and name not in IGNORED and name not in VARIANTS and value:
            raise reader.error(f"the option {name}: {value!r:.80} is not known, so it is not honoured")
    layers = values.get("layers_to_transform")
    pattern = values.get("layers_pattern")
    if pattern not in (None, [], "layers", ["layers"]):
        raise reader.error(f"layers_pattern {pattern!r:.80} is not supported: only layers is")
    config = AdapterConfig(
        source=file,
        rank=reader.integer("r", values.get("r", 8)),
        alpha=reader.number("lora_alpha", values.get("lora_alpha", 8)),
        use_rslora=reader.boolean("use_rslora", values.get("use_rslora") or False),
        target_modules=reader.modules("target_modules"),
        exclude_modules=reader.modules("exclude_modules"),
        layers=None if layers in (None, []) else reader.layers(layers),
        rank_pattern=reader.patterns("rank_pattern", reader.integer),
        alpha_pattern=reader.patterns("alpha_pattern", reader.number),
    )
    if not config.target_modules:
        raise reader.error("target_modules is missing")
    return config


class _Reader:
    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        self._values = values
        self._file = file

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {problem}", "lora_modules")

    def integer(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_RANK:
            raise self.error(f"{name} must be a whole number from 1 to {MAX_RANK}, got {value!r:.80}")
        return value

    def number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_ALPHA:
            raise self.error(f"{name} must be a number above 0, at most {MAX_ALPHA:g}, got {value!r:.80}")
        return float(value)

    def boolean(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r:.80}")
        return value

    def modules(self, name: str) -> tuple[NamePattern, ...]:
        """A regular expression, or names, which are whole paths or their ends."""
        value = self._values.get(name)
        if value in (None, ""):
            return ()
        if value in (ALL_LINEAR, [ALL_LINEAR]):
            return (ANY_MODULE,)
        if isinstance(value, str):
            return (self._pattern(name, value, "whole"),)
        if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return tuple(NamePattern(re.escape(item), "end") for item in value)
        raise self.error(f"{name} must be names or a regular expression, got {value!r:.80}")

    def layers(self, value: object) -> tuple[int, ...]:
        indexes = value if isinstance(value, list) else [value]
        if not all(isinstance(index, int) and not isinstance(index, bool) for index in indexes):
            raise self.error(f"layers_to_transform must be numbers of layers, got {value!r:.80}")
        return tuple(indexes)

    def patterns(self, name: str, read: Any) -> dict[NamePattern, Any]:
        value = self._values.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(f"{name} must be an object, got {value!r:.80}")
        return {
            self._pattern(name, key, "end"): read(f"{name}[{key!r:.80}]", item) for key, item in value.items()
        }

    def _pattern(self, name: str, text: str, place: str) -> NamePattern:
        pattern = NamePattern(text, place)
        try:
            pattern.compile()
        except (re.error, RecursionError, OverflowError) as error:
            raise self.error(f"{name}: {text!r:.80} is no regular expression: {error}") from None
        return pattern
