"""The model of `foreword bench agent`: random weights behind recorded answers.

A trained model of this size writes no agent's calls, and greedy output of random weights repeats itself. So
every row is computed and sampled as always, and then the recorded token takes the place of the sampled one:
drafts are verified against the text that the script holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from foreword.core.batch import SampleRow
from foreword.sampling.sampler import Sampler, SamplerOutput

CONTEXT = 40_960
VOCAB_SIZE = 8192
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 8, 512, 1408, 8, 2, 64
END, START = "<|im_end|>", "<|im_start|>"
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


class ScriptedSampler:
    """A sampler whose rows are computed, and then replaced by recorded answers."""

    def __init__(self, sampler: Sampler) -> None:
        self.answers: dict[int, Sequence[int]] = {}  # token ids with EOS, by the request's seed
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow], logprobs: bool = True) -> SamplerOutput:
        output = self.sampler(logits, rows, logprobs)
        for index, row in enumerate(rows):
            answer = self.answers.get(row.state.request.seed)
            if answer is not None:  # rows after a draft of EOS are never used
                output.token_ids[index] = answer[min(row.position - row.state.num_prompt, len(answer) - 1)]
        return output


def write_checkpoint(folder: Path, texts: Iterable[str]) -> Path:
    """Write a Llama of 27 million random weights in bfloat16, and a tokenizer trained on `texts`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": eos,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    _write_json(folder / "tokenizer_config.json", names)
    save_file(_random_weights(tokenizer.get_vocab_size()), folder / "model.safetensors", {"format": "pt"})
    return folder


def _train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in TOOL_MARKERS])
    return tokenizer


def _random_weights(vocab_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=generator).mul_(0.8 * k**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return tensors


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
