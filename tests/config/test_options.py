"""Config fields and their checks."""

from typing import Any

import pytest

from foreword.config.options import Config
from foreword.errors import ConfigError

ENGINE_KEY = "a key of the engines"


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
        ({"suffix_corpus_memory": "some"}, "suffix_corpus_memory"),
        ({"draft_length": "long"}, "draft_length"),
        ({"replay_cost": True}, "replay_cost"),
        ({"kv_cache_disk": "much"}, "kv_cache_disk"),
        ({"kv_cache_dir": "kv", "prefix_caching": False}, "kv_cache_dir"),
        ({"kv_cache_host_memory": "much"}, "kv_cache_host_memory"),
        ({"kv_cache_host_memory": "1GiB", "prefix_caching": False}, "kv_cache_host_memory"),
        ({"kv_cache_host_memory": "1GiB", "trace": "t"}, "trace"),
        ({"kv_cache_dir": "kv", "trace": "t"}, "trace"),
        ({"kv_cache_disk": "1GiB"}, "kv_cache_disk"),
        ({"replicas": 0}, "replicas"),
        ({"replica_urls": "http://a:1"}, "engine_key"),
        ({"replica_urls": "10.0.0.1:8000", "engine_key": ENGINE_KEY}, "replica_urls"),
        ({"replica_urls": "http://a,http://a/", "engine_key": ENGINE_KEY}, "replica_urls"),
        *(({"served_model_name": names}, "served_model_name") for names in ("a,a", "a,,b", ",", " ")),
        *(({"root_path": path}, "root_path") for path in ("llm", "/", "/llm/", "/a b", "/a//b", "http://x")),
        *(({"gpus": gpus}, "gpus") for gpus in ("", "a", "0,", "-1", "0 1")),
    ],
)
def test_invalid_option_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "[-_]")) as caught:
        Config(**options)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("options", "drafters"),
    [
        ({}, ("grammar", "prediction", "suffix", "text")),
        ({"speculate": "off"}, ()),
        ({"speculate": "off", "draft_model": "d"}, ()),
        ({"num_speculative_tokens": 0}, ()),
        ({"draft_model": "d"}, ("grammar", "prediction", "suffix", "text", "draft")),
        ({"speculate": "draft, ngram", "draft_model": "d"}, ("draft", "ngram")),
    ],
)
def test_drafters_keep_their_order(options: dict[str, Any], drafters: tuple[str, ...]) -> None:
    assert Config(**options).drafter_names() == drafters


def test_path_of_a_proxy_may_have_several_parts() -> None:
    assert Config(root_path="/team-1/llm").root_path
