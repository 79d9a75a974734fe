"""Pooling, normalization and prompts from the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.embedding.sentence_transformers import PoolingConfig, read_pooling_config
from foreword.errors import CheckpointError

PREFIX = "sentence_transformers.models."
ALL_OFF = {
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}


def write(path: Path, pooling: dict[str, Any] | None = None, *others: str, **files: Any) -> Path:
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}Transformer"}]
    if pooling is not None:
        modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{PREFIX}Pooling"})
        (path / "1_Pooling").mkdir()
        config = {"word_embedding_dimension": 48, **ALL_OFF, **pooling}
        (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    modules += [{"idx": 2, "name": "2", "path": f"2_{kind}", "type": PREFIX + kind} for kind in others]
    (path / "modules.json").write_text(json.dumps(modules))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_default_pooling_is_the_mean(tmp_path: Path) -> None:
    assert read_pooling_config(tmp_path) == PoolingConfig(pooling="mean", normalize=False)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_modes_are_read(tmp_path: Path, mode: dict[str, Any], pooling: str) -> None:
    assert read_pooling_config(write(tmp_path, mode)).pooling == pooling


def test_normalization_limit_and_prompts_are_read(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "passage"}
    write(
        tmp_path,
        {"pooling_mode_mean_tokens": True},
        "Normalize",
        sentence_bert_config={"max_seq_length": 100, "do_lower_case": False},
        config_sentence_transformers=prompts,
    )
    assert read_pooling_config(tmp_path) == PoolingConfig("mean", True, 100, prompts["prompts"], "passage")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "pooling_mode_mean_sqrt_len_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "exactly one of"),
        ({}, "exactly one of"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
        ({"pooling_mode_mean_tokens": True, "something_new": 1}, "something_new"),
    ],
)
def test_unsupported_pooling_option_is_named(tmp_path: Path, mode: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_pooling_config(write(tmp_path, mode))


def test_unsupported_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Dense"):
        read_pooling_config(write(tmp_path, {"pooling_mode_cls_token": True}, "Dense"))


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_pooling_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"prompts": "query: "}, "prompts must map names to texts"),
        ({"prompts": {"query": 1}}, "prompts must map names to texts"),
        ({"prompts": {}, "default_prompt_name": {"a": 1}}, "is none of its prompts"),
    ],
)
def test_bad_prompts_are_rejected(tmp_path: Path, file: Any, message: str) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(file))
    with pytest.raises(CheckpointError, match=message):
        read_pooling_config(tmp_path)
