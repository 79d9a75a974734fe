"""Files of the bundled text models: complete, small, with equal tokenizers."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from safetensors import safe_open
from tokenizers import Tokenizer

from foreword import LLM, SamplingParams, demo
from foreword.models.heads.head_loader import read_head_info
from tests.support.budget import examples

FOLDERS = (demo.MODEL, demo.DRAFTER)
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
TOKENIZER = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        assert all(weights.get_slice(name).get_dtype() == "BF16" for name in weights.keys())  # noqa: SIM118
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda one: one.name)
def test_checkpoint_is_complete(folder: Path) -> None:
    assert sorted(one.name for one in folder.iterdir()) == sorted(FILES)
    config = read_json(folder / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 1024


def test_bundle_fits_in_32_mb() -> None:
    assert sum(file.stat().st_size for folder in FOLDERS for file in folder.iterdir()) <= 32e6


def test_draft_model_is_10_to_50_times_smaller() -> None:
    assert 10 <= parameters(demo.MODEL) / parameters(demo.DRAFTER) <= 50


def test_head_is_small_and_fits_the_model() -> None:
    assert sum(file.stat().st_size for file in demo.HEAD.iterdir()) <= 1.2e6
    config = read_json(demo.HEAD / "config.json")
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "demo",
        "architectures": ["LlamaForCausalLM"],
    }
    info = read_head_info(demo.HEAD, demo.MODEL)
    assert (
        info.architecture == "eagle3"
        and info.vocab_size == read_json(demo.MODEL / "config.json")["vocab_size"]
    )


def test_head_drafts_the_examples() -> None:
    conversations = [[{"role": "user", "content": text}] for _, text in demo.EXAMPLES]
    params, options = (
        SamplingParams(temperature=0, max_tokens=100),
        {"threads": 1, "kv_cache_memory": "8000tokens"},
    )
    plain = LLM("demo", speculate="off", **options).chat(conversations, params)
    head = LLM(
        "demo",
        draft_model=str(demo.HEAD),
        speculate="eagle3",
        draft_length="fixed",
        num_speculative_tokens=3,
        **options,
    )
    drafted = head.chat(conversations, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    num_steps = sum(output.metrics.verify_steps for output in drafted if output.metrics)
    num_tokens = sum(len(output.token_ids) - 1 for output in drafted)
    assert num_tokens / num_steps > 2, "as training measured on held-out answers, and more"


def test_tokenizers_are_equal() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (demo.MODEL / name).read_bytes() == (demo.DRAFTER / name).read_bytes()


def test_every_id_has_a_token() -> None:
    size = read_json(demo.MODEL / "config.json")["vocab_size"]
    assert TOKENIZER.get_vocab_size() == size
    assert all(TOKENIZER.id_to_token(i) is not None for i in range(size))


def test_eos_token_is_consistent() -> None:
    name = read_json(demo.MODEL / "tokenizer_config.json")["eos_token"]
    end = TOKENIZER.token_to_id(name)
    for folder in FOLDERS:
        assert read_json(folder / "config.json")["eos_token_id"] == end
        assert read_json(folder / "generation_config.json")["eos_token_id"] == end


@settings(max_examples=examples(200))
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_tokenizer_round_trips_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens() -> None:
    assert [TOKENIZER.id_to_token(i) for i in TOKENIZER.encode("2026").ids] == list("2026")


def test_chat_template_takes_system_prompts_and_tool_messages() -> None:
    template = Environment().from_string(read_json(demo.MODEL / "tokenizer_config.json")["chat_template"])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "tool", "content": "12"},
        {"role": "tool", "content": "3"},
    ]
    rest = (
        "<|user|>Hello<|end|><|assistant|>Hi<|end|>"
        "<|user|><tool_response>12</tool_response><tool_response>3</tool_response><|end|><|assistant|>"
    )
    assert template.render(messages=messages, add_generation_prompt=True) == (
        f"<|system|>Be brief.<|end|>{rest}"
    )
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}},
        {"type": "function", "function": {"name": "now"}},
    ]
    named = "Tools:\nadd(a, b)\nnow()<|end|>"
    rendered = template.render(messages=messages, tools=tools, add_generation_prompt=True)
    assert rendered == f"<|system|>Be brief.\n{named}{rest}"
    assert template.render(messages=messages[1:], tools=tools, add_generation_prompt=True) == (
        f"<|system|>{named}{rest}"
    )


def test_examples_cover_all_workloads() -> None:
    assert len(demo.EXAMPLES) >= 12
    assert {kind for kind, _ in demo.EXAMPLES} == {"faq", "edit", "json", "story"}
