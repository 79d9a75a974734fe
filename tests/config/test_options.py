"""Config fields and their checks."""

import json
import re
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.config.speculative_config import apply_speculative_config, ignored_speculative_fields
from foreword.config.units import parse_bytes, parse_cpus, parse_duration
from foreword.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"hang_timeout": 0}, "hang_timeout"),
        ({"queue_timeout": -1}, "queue_timeout"),
        ({"client_timeout": 0}, "client_timeout"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_waiting_tokens": 0}, "max_waiting_tokens"),
        ({"default_max_tokens": -1}, "default_max_tokens"),
        ({"on_runaway": "panic"}, "on_runaway"),
        ({"block_size": 24}, "block_size"),
        ({"block_size": 512}, "block_size"),
        ({"port": 70_000}, "port"),
        ({"device": "tpu"}, "device"),
        ({"quantization": "int3"}, "quantization"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype"),
        ({"cpu_isa": "sse2"}, "cpu_isa"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": "4k"}, "max_model_len"),
        ({"max_model_len": True}, "max_model_len"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min"),
        ({"replay_error_rate": 1.5}, "replay_error_rate"),
        ({"speculate": "ngram,magic"}, "speculate"),
        ({"speculate": "3"}, "speculate"),
        ({"speculate": "draft"}, "draft_model"),
        ({"speculate": "replay"}, "replay_file"),
        ({"speculate": "ngram,ngram"}, "speculate"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"log_interval": float("nan")}, "log_interval"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_invalid_option_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "[-_]")) as caught:
        Config(**options)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("options", "drafters"),
    [
        ({}, ("grammar", "prediction", "suffix")),
        ({"speculate": "off"}, ()),
        ({"speculate": "off", "draft_model": "d"}, ()),
        ({"num_speculative_tokens": 0}, ()),
        ({"draft_model": "d"}, ("grammar", "prediction", "suffix", "draft")),
        ({"speculate": "draft, ngram", "draft_model": "d"}, ("draft", "ngram")),
    ],
)
def test_drafters_keep_their_order(options: dict[str, Any], drafters: tuple[str, ...]) -> None:
    assert Config(**options).drafter_names() == drafters


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}, ("ngram", None, 5, 3)),
        ({"model": "[ngram]", "num_speculative_tokens": 2}, ("ngram", None, 2, 4)),
        ({"model": "small/model", "num_speculative_tokens": 3}, ("draft", "small/model", 3, 4)),
        ({"method": "draft_model", "model": "small"}, ("draft", "small", None, 4)),
        ({"method": "suffix", "num_speculative_tokens": 8}, ("suffix", None, 8, 4)),
        ({"num_speculative_tokens": 3}, ("auto", None, 3, 4)),
        ({"prompt_lookup_max": 3, "model": None}, ("ngram", None, None, 3)),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, ("ngram", None, None, 4)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, ("suffix", None, None, 4)),
        ({"disable_by_batch_size": 8, "rejection_sample_method": "strict"}, ("auto", None, None, 4)),
    ],
)
def test_vllm_speculative_config(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = apply_speculative_config(Config(speculative_config=json.dumps(given)))
    assert (
        config.speculate,
        config.draft_model,
        config.num_speculative_tokens,
        config.prompt_lookup_max,
    ) == expected


def test_speculative_fields_without_effect_are_noted_once() -> None:
    text = json.dumps({"method": "ngram", "disable_by_batch_size": 8, "draft_tensor_parallel_size": 1})
    config = apply_speculative_config(Config(speculative_config=text))
    assert apply_speculative_config(config) == config, "applied again, as a bench does for its engine"
    assert list(ignored_speculative_fields(config)) == ["disable_by_batch_size"]
    assert not apply_speculative_config(Config(speculative_config='{"method": "ngram"}')).speculative_config


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"method": "eagle3"}', "got 'eagle3': trained heads are not supported yet"),
        ('{"method": "deepseek_mtp", "model": "m"}', "trained heads are not supported yet"),
        ('{"tree": 1}', "'tree'; known: method, model, num_speculative_tokens, prompt_lookup_min, "),
        (
            '{"rejection_sample_method": "synthetic"}',
            'only be "strict" or "standard" or "block", got "synthetic"',
        ),
    ],
)
def test_refused_speculative_config_says_what_is_taken(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        apply_speculative_config(Config(speculative_config=text))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"method": "eagle3"}',
        '{"method": "ngram", "tree": 1}',
        '{"num_speculative_tokens": "5"}',
        '{"method": "ngram", "draft_tensor_parallel_size": 2}',
        '{"method": "draft_model"}',
    ],
)
def test_invalid_speculative_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        apply_speculative_config(Config(speculative_config=text))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"suffix_corpus_memory": "some"}, "suffix_corpus_memory"),
        ({"draft_length": "long"}, "draft_length"),
        ({"replay_cost": True}, "replay_cost"),
    ],
)
def test_invalid_speculation_option_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Config(**options)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 * GIB), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("1000", 1000)]
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["", "many", "2 parsecs", "1.2.3GB", "-1GB"])
def test_invalid_bytes_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        parse_bytes("kv_cache_memory", text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("2d", 172_800.0),
        ("300", 300.0),
        ("0", 0.0),
        (" 5M ", 300.0),
        ("-1", None),
        ("-5m", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration("keep_alive", text) == seconds


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("3", (3,)), ("0-3", (0, 1, 2, 3)), ("8,0-1", (0, 1, 8)), ("0-7:2, 4", (0, 2, 4, 6)), ("1,1", (1,))],
)
def test_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "0-3:0", "0,,1", "99999999999"])
def test_cpus_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match='cpus must be like "0-7,16-23"'):
        Config(cpus=text)


@pytest.mark.parametrize("text", ["", "a", "0,", "-1", "0 1"])
def test_gpus_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match='gpus must be like "0" or "0,1"'):
        Config(gpus=text)


@pytest.mark.parametrize("text", ["", "m", "5 m", "5x", "5m3", "1e3", "inf", "--1", "5m-3s", "never"])
def test_durations_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="keep_alive must be like"):
        parse_duration("keep_alive", text)
