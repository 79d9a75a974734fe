"""A checkpoint for recorded answers: random weights of a known shape, a tokenizer of the sessions' texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from foreword.bench.shapes import SHAPES, ModelShape

CONTEXT = 40_960
VOCAB_SIZE = 8192
SMALL: Final = ModelShape("27m", (), 8, 512, 1408, 8, 2, 64)  # vocab 0: that of the tokenizer
AGENT_SHAPES: Final = {SMALL.name: SMALL, **SHAPES}
END, START = "<|im_end|>", "<|im_start|>"
# Words, digits one by one, punctuation with the newlines behind it, spaces but for the last before a word.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOL_MARKERS = ("<tool_call>", "</tool_call>")
# Hermes' form, as Qwen2.5's template writes it.
TEMPLATE = """\
{%- macro turn(role, content) -%}
{{- '<|im_start|>' + role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endmacro -%}
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- if tools -%}
{%- set ns = namespace(text=system + '\\n\\n# Tools\\nCall one as JSON: name and arguments.\\n<tools>') -%}
{%- for tool in tools -%}{%- set ns.text = ns.text + '\\n' + (tool | tojson) -%}{%- endfor -%}
{{- turn('system', ns.text + '\\n</tools>') -}}
{%- elif system -%}
{{- turn('system', system) -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- turn('user', '<tool_response>\\n' + message['content'] + '\\n</tool_response>') -}}
{%- elif message['role'] == 'assistant' -%}
{%- set ns = namespace(text=message['content'] or '') -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] -%}
{%- set ns.text = ns.text + ('\\n' if ns.text else '') + '<tool_call>\\n{"name": "' + function['name'] -%}
{%- set ns.text = ns.text + '", "arguments": ' + (function['arguments'] | tojson) + '}\\n</tool_call>' -%}
{%- endfor -%}
{{- turn('assistant', ns.text) -}}
{%- elif message['role'] != 'system' -%}
{{- turn(message['role'], message['content']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def write_tokenizer(folder: Path, texts: Iterable[str]) -> Tokenizer:
    """Write a tokenizer trained on `texts`, with a chat template. It splits texts as Qwen2.5's does."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "generation_config.json", {"eos_token_id": tokenizer.token_to_id(END)})
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    _write_json(folder / "tokenizer_config.json", names)
    return tokenizer


def write_checkpoint(folder: Path, texts: Iterable[str], shape: ModelShape = SMALL) -> Path:
    """Write a Llama of random weights in bfloat16 and its tokenizer. Ids beyond its own are padding."""
    tokenizer = write_tokenizer(folder, texts)
    vocab_size = max(tokenizer.get_vocab_size(), shape.vocab)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id(END),
    }
    _write_json(folder / "config.json", config)
    save_file(_random_weights(shape, vocab_size), folder / "model.safetensors", {"format": "pt"})
    return folder


def _train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in TOOL_MARKERS])
    return tokenizer


def _random_weights(shape: ModelShape, vocab_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner, head_dim = shape.hidden, shape.intermediate, shape.head_dim

    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=generator).mul_(0.8 * k**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden).bfloat16()
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(heads * head_dim, hidden)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, shape.heads * head_dim)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, inner)
    return tensors


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
