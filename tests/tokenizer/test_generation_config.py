"""Sampling defaults of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.errors import CheckpointError
from foreword.tokenizer.generation_config import GenerationConfig, read_generation_config
from foreword.tokenizer.generation_config import read_gguf_generation_config as read_gguf
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.checkpoints import EOS, write_checkpoint, write_json

VALUES = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 30}
PARAMS = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


def checkpoint(path: Path, **values: Any) -> Path:
    write_checkpoint(path)
    write_json(path / "generation_config.json", {"eos_token_id": EOS, **values})
    return path


def test_values_are_fields_of_sampling_params() -> None:
    config = read_generation_config(
        {**VALUES, "min_p": 0.05, "typical_p": 0.9, "do_sample": False, "num_beams": 4, "penalty_alpha": 0.6},
        "file",
    )
    assert config == GenerationConfig({**PARAMS, "min_p": 0.05, "typical_p": 0.9}, 30)
    assert SamplingParams(**config.params).top_k == 20  # type: ignore[arg-type]
    assert str(config).startswith("temperature 0.7, top_k 20, ") and str(config).endswith("max_tokens 30")


@pytest.mark.parametrize("value", [None, 1.0, 50.0])
def test_null_and_whole_floats_are_understood(value: float | None) -> None:
    config = read_generation_config({"top_k": value}, "file")
    assert config.params == ({} if value is None else {"top_k": int(value)})
    assert not config.warnings and type(config.params.get("top_k", 0)) is int


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", -1, "temperature must be between 0 and 100, got -1"),
        ("temperature", "hot", "temperature must be a number"),
        ("top_p", 0, "top_p must be above 0"),
        ("top_k", 1.5, "top_k must be an integer"),
        ("max_new_tokens", 0, "max_tokens must be at least 1"),
        ("top_p", True, "top_p must be a number"),
    ],
)
def test_invalid_value_is_a_warning(key: str, value: Any, reason: str) -> None:
    config = read_generation_config({"min_p": 0.1, key: value}, "x.json")
    assert config.as_dict() == {"min_p": 0.1}
    (warning,) = config.warnings
    assert warning.startswith(f"x.json: {key} is not used: {reason}")


def test_damaged_file_does_not_stop_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """config.json names the end of an answer too. An invalid id there would never end one."""
    path = write_checkpoint(tmp_path)
    (path / "generation_config.json").write_text("{")
    prepared = prepare_checkpoint(Config(model=str(path)))
    assert prepared.tokenizer.eos_token_ids == (EOS,)
    assert "generation_config.json is not JSON" in caplog.text
    write_json(path / "generation_config.json", {"eos_token_id": "x"})
    with pytest.raises(CheckpointError, match="eos_token_id must be an id"):
        Tokenizer.from_directory(path)


def test_gguf_keys_are_rounded_to_their_digits() -> None:
    metadata = {
        "general.sampling.temp": 0.699999988079071,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.949999988079071,
        "general.sampling.penalty_repeat": 1.0499999523162842,
        "general.sampling.mirostat": 2,
    }
    assert read_gguf(metadata, "file").params == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(("option", "params"), [("auto", PARAMS), ("none", {}), ("vllm", {})])
def test_option_turns_defaults_off(tmp_path: Path, option: str, params: dict[str, float]) -> None:
    path = checkpoint(tmp_path, **VALUES)
    prepared = prepare_checkpoint(Config(model=str(path), generation_config=option))
    assert prepared.tokenizer.generation_config.params == params
    assert prepared.tokenizer.eos_token_ids == (EOS,)


def test_llm_uses_defaults_where_no_params_are_given(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, temperature=0.0, max_new_tokens=5)
    options: dict[str, Any] = {"kv_cache_memory": "400tokens", "threads": 1}
    llm = LLM(str(path), **options)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
    greedy = [llm.generate("the", SamplingParams(temperature=0.0, max_tokens=5)), llm.generate("the")]
    assert greedy[0][0].token_ids == greedy[1][0].token_ids and len(greedy[1][0].token_ids) == 5
    assert len(llm.generate("the", SamplingParams(ignore_eos=True))[0].token_ids) == 5
    short = LLM(str(path), default_max_tokens=3, **options)
    assert len(short.generate("the", SamplingParams(ignore_eos=True))[0].token_ids) == 3
