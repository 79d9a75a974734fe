"""Arguments of vLLM's LLM are answered like its flags."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword.cli.command_line import build_parser
from foreword.cli.configuration import read_config
from foreword.config.foreign_flags import find_foreign, foreign_flags, translate_keywords, translate_words
from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.llm import LLM

SPEC_TOKENS = {"speculative_config": '{"num_speculative_tokens": 3}'}
RECORD = Path(__file__).with_name("peer_flags.txt")  # written by benchmarks/peer_flags.py
# A value that works, of flags that do not take "4".
SAMPLES = {
    "--config": "/dev/null",
    "--cors-origins": "http://localhost:8080",
    "--device": "cpu",
    "--dtype": "auto",
    "--generation-config": "auto",
    "--gpu-memory-utilization": "0.5",
    "--kv-cache-dtype": "fp8",
    "--load-format": "dummy",
    "--log-level": "INFO",
    "--lora-modules": "a=b",
    "--quantization": "awq",
    "--root-path": "/v",
    "--speculative-config": '{"num_speculative_tokens": 2}',
    "--spec-method": "ngram",
    "--spec-model": "m",
    "-q": "int8",
    "--limit-mm-per-prompt": '{"image": 2}',
    "--api-prefix": "/v",
}


def recorded_options() -> Iterator[dict[str, str]]:
    """Names of each option of vLLM and llama-server, with what follows them: "", "=", "==", "?" or "*"."""
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        if line.startswith("-"):
            words = (word for word in line.split() if word.startswith("-"))
            yield {word.rstrip("=?*"): word[len(word.rstrip("=?*")) :] for word in words}


def test_every_flag_of_the_recorded_peers_is_answered() -> None:
    parser = build_parser("serve")._actions[-1].choices["serve"]  # type: ignore[union-attr, call-overload, index]
    own = parser._option_string_actions
    options = list(recorded_options())
    assert len(options) > 500
    for names in options:
        for name, suffix in names.items():
            found = find_foreign(name)
            assert found or name in own, f"{name} has no answer in foreign_flags.toml"
            if found and name not in own and not found[1]:  # a value must not be taken for a model
                assert bool(found[0].names[name]) == bool(suffix), f"{name} takes {suffix or 'no value'}"


def test_recorded_flags_that_are_taken_start() -> None:
    """Each becomes options of a Config that is valid; the others have a line that refuses them."""
    parser = build_parser("serve")._actions[-1].choices["serve"]  # type: ignore[union-attr, call-overload, index]
    own, num_taken = parser._option_string_actions, 0
    for names in recorded_options():
        for name, suffix in names.items():
            if name in ("-h", "--help"):
                continue
            found = find_foreign(name)
            entry = found[0] if found and name not in own else None
            values = [*entry.only, *entry.values] if entry else []
            value = SAMPLES.get(name, values[0] if values else SAMPLES.get(entry.ours if entry else "", "4"))
            words, notes, refusals = translate_words([name, *([value] if suffix else [])], own)
            if refusals:
                assert entry and (entry.refused or entry.always), refusals
                continue
            read_config(parser.parse_args(words), {})
            assert notes or name in own, name
            num_taken += 1
    assert num_taken > 600


def test_words_that_are_no_flags_stay() -> None:
    words = ["-creative writing", "- list", "-5", "-", "--magic=1", "--", "-fa"]
    assert translate_words(words, {"--max-model-len"}) == (words, [], [])


def test_names_are_unique_and_not_ours() -> None:
    own = {f"--{field}".replace("_", "-") for field in Config.__dataclass_fields__}
    tables = {source: flags for source, flags in foreign_flags().items() if source != "values"}
    names = [name for flags in tables.values() for entry in flags for name in entry.names]
    assert len(set(names)) == len(names)
    assert not set(names) & own


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"max_num_seqs": 4, "seed": None}, {"max_num_seqs": 4, "seed": None}),
        ({"tensor_parallel_size": 1, "tokenizer_mode": "auto", "revision": None}, {}),
        ({"enable_prefix_caching": True}, {"prefix_caching": True}),
        ({"trust_remote_code": False, "enable_sleep_mode": False}, {}),
        ({"kv_cache_memory_bytes": 1 << 30, "max_logprobs": 20}, {"kv_cache_memory": "1073741824"}),
        ({"limit_mm_per_prompt": {"image": 2}, "spec_tokens": 3}, {"max_images": 2, **SPEC_TOKENS}),
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
    _, notes = translate_keywords({"trust_remote_code": True, "async_scheduling": True, "swap_space": 4})
    assert notes == [
        "trust_remote_code has no effect: no code of a checkpoint is ever run",
        "async_scheduling is --overlap here",
        "swap_space has no effect: preempted requests are computed again, not swapped",
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_modellen": 3}, "LLM has no option 'max_modellen'; did you mean max_model_len?"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size can only be 1, got '2'"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides can only be {}, got '{\"a\": 1}'"),
        ({"lora_adapters": "a=b"}, "lora_adapters: use --lora-modules name=path"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill: prompts are always computed in chunks"),
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
