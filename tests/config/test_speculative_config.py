"""vLLM's speculative_config."""

import json
import re
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.config.speculative_config import apply_speculative_config, ignored_speculative_fields
from foreword.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}, ("ngram", None, 5, 3)),
        ({"model": "[ngram]", "num_speculative_tokens": 2}, ("ngram", None, 2, 4)),
        ({"model": "small/model", "num_speculative_tokens": 3}, ("draft", "small/model", 3, 4)),
        ({"method": "draft_model", "model": "small"}, ("draft", "small", None, 4)),
        ({"method": "suffix", "num_speculative_tokens": 8}, ("suffix", None, 8, 4)),
        ({"method": "mtp", "num_speculative_tokens": 2}, ("mtp", None, 2, 4)),
        ({"method": "qwen3_next_mtp"}, ("mtp", None, None, 4)),
        ({"method": "gemma4_mtp", "model": "assistant"}, ("mtp", "assistant", None, 4)),
        ({"method": "mtp", "model": "target"}, ("mtp", None, None, 4)),
        ({"model": "head", "parallel_drafting": True}, ("draft", "head", None, 4)),
        ({"method": "eagle3", "model": "head"}, ("eagle3", "head", None, 4)),
        ({"method": "eagle3", "model": "head", "parallel_drafting": True}, ("eagle3", "head", None, 4)),
        ({"method": "dflash", "model": "head", "num_speculative_tokens": 15}, ("dflash", "head", 15, 4)),
        ({"method": "dspark", "model": "head", "parallel_drafting": True}, ("dflash", "head", None, 4)),
        ({"model": "small", "parallel_drafting": False}, ("draft", "small", None, 4)),
        ({"num_speculative_tokens": 3}, ("auto", None, 3, 4)),
        ({"prompt_lookup_max": 3, "model": None}, ("ngram", None, None, 3)),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, ("ngram", None, None, 4)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, ("suffix", None, None, 4)),
        ({"disable_by_batch_size": 8, "rejection_sample_method": "strict"}, ("auto", None, None, 4)),
    ],
)
def test_vllm_speculative_config(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = apply_speculative_config(Config(model="target", speculative_config=json.dumps(given)))
    assert apply_speculative_config(config) == config
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
        ('{"method": "eagle3"}', "or with a model draft_model, eagle3, dflash, dspark or mtp, got 'eagle3'"),
        ('{"tree": 1}', "'tree'; known: method, model, parallel_drafting, num_speculative_tokens, "),
        (
            '{"rejection_sample_method": "synthetic"}',
            'only be "strict" or "standard" or "block", got "synthetic"',
        ),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"num_speculative_tokens": "5"}', "num_speculative_tokens must be int"),
        (
            '{"method": "draft_model", "model": "m", "parallel_drafting": true}',
            "parallel_drafting can only be false with draft_model: only trained heads draft in one pass",
        ),
        ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "can only be 1, got 2"),
        (
            '{"method": "draft_model"}',
            "or with a model draft_model, eagle3, dflash, dspark or mtp, got 'draft_model'",
        ),
        ('{"parallel_drafting": true, "prompt_lookup_max": 3}', "can only be false with ngram"),
        ('{"method": "suffix", "parallel_drafting": true}', "can only be false with suffix"),
    ],
)
def test_refused_speculative_config_names_the_accepted_values(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        apply_speculative_config(Config(speculative_config=text))
