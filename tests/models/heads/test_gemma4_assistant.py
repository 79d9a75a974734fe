"""Gemma 4's assistants, written by transformers, against its own drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from foreword import LLM, SamplingParams
from foreword.errors import CheckpointError
from foreword.models.heads.head_loader import read_head_info
from tests.support.checkpoints import change_tensors, write_checkpoint
from tests.support.cpu_kernels import isas_under_test
from tests.support.gemma4_checkpoints import FULL, SLIDING
from tests.support.head_runner import BACKENDS, DRAFT, HeadRunner

TEXT = [(37 * i * i + 11 * i) % 250 for i in range(60)]  # longer than the window of 24
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared": ({}, {}),
    "values are keys": (
        {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, FULL],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
        },
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
}


def write_assistant(path: Path, target: Path, **options: Any) -> Path:
    """A random assistant of three layers, by transformers."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_kv_shared_layers": 3}
    same = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim")
    text = Gemma4TextConfig(
        **{key: config[key] for key in (*same, "sliding_window", "rope_parameters")},
        **sizes,
        **options,
        layer_types=[SLIDING, SLIDING, FULL],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=512,
    )
    assistant = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=config["hidden_size"])
    torch.manual_seed(3)
    model = Gemma4AssistantForCausalLM(assistant).float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_norm = "norm" in name
            value.normal_(float(is_norm), 0.2 if is_norm else 1.5 * value.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return path


class Bed:
    """A target and an assistant, ours and those of transformers."""

    def __init__(self, folder: Path, variant: str) -> None:
        target, assistant = VARIANTS[variant]
        self.model = write_checkpoint(folder / "model", "gemma4_text", seed=2, **target)
        self.head = write_assistant(folder / "head", self.model, **assistant)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.target = load(self.model, dtype=torch.float32, attn_implementation="eager").eval()
        loaded: Any = Gemma4AssistantForCausalLM.from_pretrained(
            self.head, dtype=torch.float32, attn_implementation="eager"
        )
        self.assistant = loaded.eval()

    @torch.no_grad()
    def draft(self, ids: list[int], count: int) -> list[Tensor]:
        """Logits of the greedy draft tokens after `ids`."""
        options = {"output_hidden_states": True, "return_shared_kv_states": True}
        output = self.target(torch.tensor([ids[:-1]]), **options)
        hidden, token = output.hidden_states[-1][:, -1:], torch.tensor([ids[-1:]])
        chain = []
        for _ in range(count):
            embedding = self.target.get_input_embeddings()(token)
            drafted = self.assistant(
                inputs_embeds=torch.cat((embedding, hidden), -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=output.shared_kv_states,
                use_cache=False,
            )
            chain.append(drafted.logits[0, -1])
            token, hidden = drafted.logits.argmax(-1), drafted.last_hidden_state
        return chain


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return Bed(tmp_path_factory.mktemp("assistant"), request.param)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chains_of_a_whole_text_equal_transformers(bed: Bed, backend: str) -> None:
    runner = HeadRunner(bed.model, bed.head, backend, TEXT)
    done = 0
    for length in (2, 3, 9, 24, 25, 26, 40, len(TEXT)):
        runner.commit(done, length - 1)
        done = length - 1
        for step, (row, expected) in enumerate(
            zip(runner.chain(length, DRAFT), bed.draft(TEXT[:length], DRAFT), strict=True)
        ):
            torch.testing.assert_close(row, expected, rtol=2e-3, atol=2e-3, msg=f"{length}, {step}")


@pytest.mark.parametrize("isa", isas_under_test())
def test_draft_loop_equals_passes_one_by_one(bed: Bed, isa: str) -> None:
    runner = HeadRunner(bed.model, bed.head, isa, TEXT)
    for length in (2, 25, len(TEXT)):
        runner.commit(0, length - 1)
        expected = [int(row.argmax()) for row in runner.chain(length, DRAFT)]
        assert list(runner.draft_in_loop(length, DRAFT).token_ids) == expected


def test_answers_are_equal_with_the_assistant(bed: Bed) -> None:
    prompts = [{"prompt_token_ids": TEXT[: 7 * i + 2]} for i in range(6)]
    params = [SamplingParams(max_tokens=24, temperature=0.5 * (i % 2), seed=i) for i in range(6)]
    options: dict[str, Any] = {"max_model_len": 127, "kv_cache_memory": "400tokens", "test_mode": True}
    plain = LLM(str(bed.model), speculate="off", **options).generate(prompts, params)
    llm = LLM(str(bed.model), draft_model=str(bed.head), speculate="mtp", draft_length="fixed", **options)
    drafted = llm.generate(prompts, params)
    assert [answer.outputs[0].token_ids for answer in plain] == [
        answer.outputs[0].token_ids for answer in drafted
    ]
    assert [answer.outputs[0].logits_hashes for answer in plain] == [
        answer.outputs[0].logits_hashes for answer in drafted
    ]
    llm.check()


def test_another_target_is_refused_by_name(bed: Bed, tmp_path: Path) -> None:
    info = read_head_info(bed.head, bed.model)
    assert (info.architecture, info.kv_values_per_token, info.hidden_values_per_token) == ("mtp", 0, 64)
    llama = write_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(CheckpointError, match="is made for a Gemma 4 of hidden size 64, this one is llama"):
        read_head_info(bed.head, llama)
    narrow = write_checkpoint(tmp_path / "narrow", "gemma4_text", global_head_dim=16)
    with pytest.raises(CheckpointError, match=r"needs K and V of . heads of 32 in global layers"):
        read_head_info(bed.head, narrow)
    wider = {"vocab_size": 300, "vocab_size_per_layer_input": 300}
    other = write_checkpoint(tmp_path / "other", "gemma4_text", **wider)
    with pytest.raises(CheckpointError, match="the assistant head has 272 tokens, the model 300"):
        read_head_info(bed.head, other)
    change_tensors(bed.head, **{"pre_projection.weight": torch.zeros(32, 32)})
    with pytest.raises(CheckpointError, match=r"pre_projection\.weight"):
        read_head_info(bed.head, bed.model)
