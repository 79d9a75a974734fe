"""adapter_config.json: what is honoured, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from foreword.config.lora import LoraModule, parse_lora_modules
from foreword.config.options import Config
from foreword.errors import CheckpointError, ConfigError
from foreword.lora.config import AdapterConfig, Target, read_adapter_config

PATH = "model.layers.{}.self_attn.q_proj"
BASE: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
# As PEFT 0.21 saves it.
SAVED: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "x",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "revision": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def read(tmp_path: Path, **options: Any) -> AdapterConfig:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**BASE, **options}))
    return read_adapter_config(tmp_path / "adapter_config.json")


def test_saved_config_is_read(tmp_path: Path) -> None:
    targets = read(tmp_path, **SAVED).targets((PATH.format(3), "model.layers.3.self_attn.k_proj"))
    assert targets == {PATH.format(3): Target(8, 2.0)}


def test_patterns_match_the_end_of_a_path(tmp_path: Path) -> None:
    patterns = {"layers.1.self_attn.q_proj": 4, "k_proj": 2, r".*\.2\..*q_proj": 3}
    config = read(
        tmp_path, target_modules="all-linear", rank_pattern=patterns, alpha_pattern={"q_proj": 6, "v|o": 3}
    )
    paths = [PATH.format(layer) for layer in (0, 1, 2, 11)]
    targets = config.targets([*paths, "model.layers.0.self_attn.k_proj"])
    assert [target.rank for target in targets.values()] == [8, 4, 3, 8, 2]
    assert [targets[paths[1]].scale, targets["model.layers.0.self_attn.k_proj"].scale] == [1.5, 8.0]
    scale = read(tmp_path, use_rslora=True).targets(paths)[paths[0]].scale
    assert scale == 16 / math.sqrt(8)


def test_targets(tmp_path: Path) -> None:
    for options, targets in [
        ({"target_modules": ["q_proj"]}, {0, 1, 2}),
        ({"target_modules": "all-linear"}, {0, 1, 2}),
        ({"target_modules": ["all-linear"]}, {0, 1, 2}),
        ({"target_modules": [PATH.format(1)]}, {1}),
        ({"target_modules": ["proj"]}, set()),
        ({"target_modules": r".*\.[01]\.self_attn\.(q|k)_proj"}, {0, 1}),
        ({"target_modules": "q_proj"}, set()),
        ({"layers_to_transform": 2}, {2}),
        ({"layers_to_transform": [0, 2], "layers_pattern": "layers"}, {0, 2}),
        ({"exclude_modules": [PATH.format(0)]}, {1, 2}),
        ({"exclude_modules": r".*\.0\..*"}, {1, 2}),
    ]:
        paths = [PATH.format(layer) for layer in range(3)]
        found = read(tmp_path, **options).targets(paths)
        assert list(found) == [paths[layer] for layer in sorted(targets)]


def test_refusals(tmp_path: Path) -> None:
    for options, text in [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; only LORA is"),
        ({"peft_type": None}, "peft_type None"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"alora_invocation_tokens": [5]}, "aLoRA is not supported"),
        ({"use_qalora": True}, "QALoRA is not supported"),
        ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA is not supported"),
        ({"arrow_config": {"top_k": 1}}, "Arrow is not supported"),
        ({"kasa_config": {"beta": 1}}, "KaSA is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' is not supported: it changes the base model's weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base"),
        ({"init_lora_weights": "olora"}, "changes the base"),
        ({"init_lora_weights": "corda"}, "changes the base"),
        ({"init_lora_weights": "loftq"}, "changes the base"),
        ({"init_lora_weights": "lora_ga"}, "changes the base"),
        ({"init_lora_weights": "tomorrow"}, "init_lora_weights 'tomorrow' is not supported"),
        ({"use_tomorrow": True}, "the option use_tomorrow: True is not known"),
        ({"layers_pattern": "blocks"}, "layers_pattern 'blocks'"),
        ({"layers_to_transform": ["x"]}, "layers_to_transform must be numbers"),
        ({"r": 0}, "r must be a whole number from 1"),
        ({"r": True}, "r must be"),
        ({"r": "8"}, "r must be"),
        ({"lora_alpha": -1}, "lora_alpha must be a number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] must be"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 2}}, "no regular expression: global flags"),
        ({"use_rslora": "false"}, "use_rslora must be true or false"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"target_modules": "("}, "no regular expression"),
        ({"target_modules": [1]}, "target_modules must be names"),
        ({"target_modules": None}, "target_modules is missing"),
    ]:
        with pytest.raises(CheckpointError) as error:
            read(tmp_path, **options)
        assert text in error.value.message and str(tmp_path) in error.value.message


def test_inits_that_leave_the_base_alone(tmp_path: Path) -> None:
    for init in [True, False, None, "gaussian", "eva", "orthogonal", "mica"]:
        read(tmp_path, init_lora_weights=init)


def test_modules_of_the_command_line() -> None:
    text = 'a=/x, b = /y,{"name": "c", "path": "/z,w", "base_model_name": "m"},d=/v=1'
    assert parse_lora_modules(text) == (
        LoraModule("a", "/x"),
        LoraModule("b", "/y"),
        LoraModule("c", "/z,w", "m"),
        LoraModule("d", "/v=1"),
    )
    assert parse_lora_modules(None) == parse_lora_modules(" ") == ()


def test_bad_modules() -> None:
    for text, problem in [
        ("a", "must be name=path"),
        ("=x", "must be name=path"),
        ("a=", "must be name=path"),
        ("a=x,a=y", "two adapters are named 'a'"),
        ("{", "is not JSON"),
        ('{"name": "a"}', "name and path"),
        ('{"name": 1, "path": "x"}', "name and path"),
        ('{"name": "a", "path": "x", "pth": 1}', "unknown field 'pth'; did you mean path?"),
        ('{"name": "a", "path": "x", "base_model_name": 1}', "base_model_name"),
        ('{"name": "a", "path": "x"} b=c', "no comma before"),
    ]:
        with pytest.raises(ConfigError) as error:
            Config(lora_modules=text)
        assert problem in error.value.message


def test_slots() -> None:
    assert Config().num_lora_slots == 0
    assert Config(enable_lora=True).num_lora_slots == 1
    assert Config(lora_modules="a=x,b=y").num_lora_slots == 2
    assert Config(lora_modules="a=x", max_loras=5).num_lora_slots == 5
    with pytest.raises(ConfigError, match="max_loras 1 is below the 2 adapters"):
        Config(lora_modules="a=x,b=y", max_loras=1)
    with pytest.raises(ConfigError, match="needs --lora-dir"):
        Config(allow_runtime_lora_updating=True)
