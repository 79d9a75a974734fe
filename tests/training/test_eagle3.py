"""The head: passes of training equal drafting, and files have the published names and shapes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from foreword.errors import ConfigError
from foreword.training.eagle3 import (
    Eagle3DraftModel,
    Eagle3Shape,
    default_aux_layers,
    head_config,
    write_head,
)

SHAPE = Eagle3Shape(
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=10,
    eps=1e-6,
    rope_theta=10000.0,
    context_length=100,
    aux_layers=(1, 2, 4),
)
IDS = torch.tensor([0, 2, 3, 9, 11, 12, 20, 30, 38, 39])
PUBLISHED = {  # of vLLM's and speculators' eagle3, without an embedding: the target's
    "d2t": (10,),
    "t2d": (40,),
    "fc.weight": (16, 48),
    "layers.0.input_layernorm.weight": (16,),
    "layers.0.hidden_norm.weight": (16,),
    "layers.0.post_attention_layernorm.weight": (16,),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32),
    "layers.0.self_attn.o_proj.weight": (16, 32),
    "layers.0.mlp.gate_proj.weight": (24, 16),
    "layers.0.mlp.up_proj.weight": (24, 16),
    "layers.0.mlp.down_proj.weight": (16, 24),
    "norm.weight": (16,),
    "lm_head.weight": (10, 16),
}


def make_head(shape: Eagle3Shape = SHAPE, ids: Tensor = IDS) -> Eagle3DraftModel:
    torch.manual_seed(1)
    head = Eagle3DraftModel(shape, ids)
    with torch.no_grad():
        for value in head.parameters():
            value.copy_(torch.randn_like(value) / value.shape[-1] ** 0.5 + (value.ndim == 1))
    return head


def rotated(x: Tensor, position: int) -> Tensor:
    """[heads, D], as complex numbers"""
    angles = position / SHAPE.rope_theta ** (torch.arange(0, 8, 2) / 8)
    turned = torch.complex(x[:, :4], x[:, 4:]) * torch.polar(torch.ones(4), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def draft(
    head: Eagle3DraftModel, embeddings: Tensor, aux_hidden_states: Tensor, start: int, count: int
) -> list[Tensor]:
    """Logits of a chain of one sequence, token by token with a KV cache, from the published description."""
    w = {name: value.detach() for name, value in head.named_parameters()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape, w[name], SHAPE.eps)

    keys: list[Tensor] = []
    values: list[Tensor] = []

    def run(token: Tensor, hidden: Tensor, position: int) -> Tensor:
        layer = "layers.0."
        normed = norm(hidden, f"{layer}hidden_norm.weight")
        pair = torch.cat([norm(token, f"{layer}input_layernorm.weight"), normed])
        q, k, v = (w[f"{layer}self_attn.{name}_proj.weight"] @ pair for name in "qkv")
        keys.append(rotated(k.view(2, 8), position))
        values.append(v.view(2, 8))
        q = rotated(q.view(4, 8), position)
        outputs = []
        for index in range(4):
            scores = torch.stack([key[index // 2] @ q[index] for key in keys]) / 8**0.5
            outputs.append(scores.softmax(0) @ torch.stack([value[index // 2] for value in values]))
        x = normed + w[f"{layer}self_attn.o_proj.weight"] @ torch.cat(outputs)
        y = norm(x, f"{layer}post_attention_layernorm.weight")
        up = F.silu(w[f"{layer}mlp.gate_proj.weight"] @ y) * (w[f"{layer}mlp.up_proj.weight"] @ y)
        return x + w[f"{layer}mlp.down_proj.weight"] @ up

    logits = []
    for position in range(1, start + 1):
        hidden = run(embeddings[position], w["fc.weight"] @ aux_hidden_states[position - 1], position)
    for index in range(count):
        if index:
            hidden = run(embeddings[start + index], hidden, start + index)
        logits.append(w["lm_head.weight"] @ norm(hidden, "norm.weight"))
    return logits


@torch.no_grad()
def test_passes_of_training_equal_drafting() -> None:
    head = make_head()
    lengths, starts = (12, 7), torch.tensor([[1, 2, 5, 8], [1, 2, 3, 11]])
    embeddings, aux_hidden_states = torch.randn(2, 12, 16), torch.randn(2, 12, 48)
    embeddings[1, 7:], aux_hidden_states[1, 7:] = float(7), float(7)  # padding
    passes = [head.logits(hidden) for hidden in head.unroll(embeddings, aux_hidden_states, starts, 4)]
    for row, column in ((row, column) for row in range(2) for column in range(4)):
        start = int(starts[row, column])
        if start + 4 > lengths[row]:
            continue
        for index, expected in enumerate(draft(head, embeddings[row], aux_hidden_states[row], start, 4)):
            torch.testing.assert_close(passes[index][row, column], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_files_have_the_published_names_and_shapes(tmp_path: Path, dtype: torch.dtype) -> None:
    head = make_head()
    write_head(tmp_path, head, "org/model", ["LlamaForCausalLM"], dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == PUBLISHED
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert (d2t + torch.arange(10)).tolist() == IDS.tolist() == t2d.nonzero().flatten().tolist()
    weights = head.state_dict()
    assert all(torch.equal(value, weights[name].to(dtype)) for name, value in tensors.items())
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == json.loads(
        json.dumps(head_config(SHAPE, "org/model", ["LlamaForCausalLM"], str(dtype).split(".")[1]))
    )
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 10)
    assert config["norm_before_residual"] is True, "where it is absent, engines differ"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    layer = config["transformer_layer_config"]
    assert (layer["hidden_size"], layer["num_key_value_heads"], layer["vocab_size"]) == (16, 2, 40)


def test_a_whole_vocabulary_needs_no_table(tmp_path: Path) -> None:
    head = make_head(replace(SHAPE, draft_vocab_size=40), torch.arange(40))
    write_head(tmp_path, head, "m", [], torch.bfloat16)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(PUBLISHED) - {"d2t", "t2d"}


def test_default_layers_are_different_and_exist() -> None:
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(6) == (1, 3, 5)
    for count in range(2, 80):
        layers = default_aux_layers(count)
        assert list(layers) == sorted(set(layers)) and layers[-1] <= count and len(layers) == 3
    with pytest.raises(ConfigError, match="at least 2 layers, not 1"):
        default_aux_layers(1)
