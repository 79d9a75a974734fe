"""Shapes of the two models, and how they are written to disk."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.corpus import END, SPECIAL
from training.tokenizer import MAX_LENGTH, VOCABULARY

# Both have heads of 64: (hidden size, intermediate size, layers, query heads, key and value heads).
SHAPES = {"target": (256, 704, 6, 4, 2), "drafter": (128, 192, 2, 2, 1)}


def build(role: str) -> LlamaForCausalLM:
    """Return an untrained model, float32; role is "target" or "drafter"."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[role]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def export(state: dict[str, torch.Tensor], role: str, folder: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16; the tokenizer is written by tokenizer.py."""
    model = build(role)
    model.load_state_dict(state)
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # transformers 5 nests this under rope_parameters; other readers expect it here.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    settings = {"do_sample": False, "eos_token_id": SPECIAL.index(END), "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
