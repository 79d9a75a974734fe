"""Arguments of vLLM's LLM are answered like its flags."""

import logging
from typing import Any

import pytest

from foreword.config.foreign_flags import translate_keywords
from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.llm import LLM


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"max_num_seqs": 4, "seed": None}, {"max_num_seqs": 4, "seed": None}),
        ({"tensor_parallel_size": 1, "tokenizer_mode": "auto", "revision": None}, {}),
        ({"enable_prefix_caching": True}, {}),
        ({"hf_overrides": {}, "override_generation_config": {}}, {}),
        ({"enable_prefix_caching": False}, {"prefix_caching": False}),
        ({"disable_log_stats": True}, {"log_interval": 0.0}),
        ({"enable_lora": True, "max_loras": 2}, {"enable_lora": True, "max_loras": 2}),
        ({"enable_expert_parallel": False, "disable_custom_all_reduce": False}, {}),
        ({"ngram_prompt_lookup_max": 3}, {"prompt_lookup_max": 3}),
        ({"speculative_config": {"method": "ngram"}}, {"speculative_config": '{"method": "ngram"}'}),
    ],
)
def test_keywords_become_fields(options: dict[str, Any], fields: dict[str, Any]) -> None:
    translated, _ = translate_keywords(options)
    assert translated == fields
    Config(**translated)


def test_keyword_without_effect_has_a_note() -> None:
    _, notes = translate_keywords({"trust_remote_code": True, "tensor_parallel_size": 1, "swap_space": 4})
    assert notes == [
        "trust_remote_code has no effect: no code of a checkpoint is ever run",
        "swap_space has no effect: preempted requests are computed again, not swapped",
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_modellen": 3}, "LLM has no option 'max_modellen'; did you mean max_model_len?"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size can only be 1, got 2"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides can only be {}, got {'a': 1}"),
        ({"lora_adapters": "a=b"}, "lora_adapters: use --lora-modules name=path"),
        ({"tokenizer": "x"}, "tokenizer: the checkpoint's own tokenizer is used"),
    ],
)
def test_keyword_that_is_not_honoured_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate_keywords(options)
    assert str(caught.value).startswith(reason)


def test_llm_takes_keywords_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(
            trust_remote_code=True,
            kv_cache_memory="2000tokens",
            speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        )
    assert llm.info.resolved.drafters == ("ngram",)
    assert "trust_remote_code has no effect" in caplog.text
