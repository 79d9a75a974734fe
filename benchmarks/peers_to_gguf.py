"""A checkpoint as GGUF files. Runs in the environment of the peers.

    python peers_to_gguf.py gguf CHECKPOINT OUT.gguf        bfloat16, as in the checkpoint
    python peers_to_gguf.py quantize IN.gguf OUT.gguf TYPE  by llama.cpp: q8_0, q4_0, q4_k_m, f16

The names of tensors and metadata are those of llama.cpp's converter.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
FILE_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7, "q4_k_m": 15}  # enum llama_ftype
BFLOAT16_FILE = 32


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bfloat16 bits as uint16) of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", 8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def permute_for_rope(bits: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows of q and k for llama.cpp's `llama`, which rotates neighbours instead of halves."""
    return bits.reshape(heads, 2, -1, *bits.shape[1:]).swapaxes(1, 2).reshape(bits.shape)


def to_gguf(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), config["model_type"])
    add_metadata(writer, config)
    add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, bits in read_tensors(checkpoint / "model.safetensors"):
        target = gguf_name(name)
        part = target.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            bits = permute_for_rope(bits, heads[part])
        if bits.ndim == 1:
            writer.add_tensor(target, as_float32(bits))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(BFLOAT16_FILE)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    kinds = (
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
        for token in sorted(vocab, key=vocab.__getitem__)
    )
    writer.add_token_types(list(kinds))
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(len(vocab) - 1)
    writer.add_add_bos_token(False)


def quantize(source: Path, out: Path, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[kind]
    params.nthread = len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params):
        raise SystemExit(f"{source} could not be quantized to {kind}")


def main() -> None:
    actions = {"gguf": to_gguf, "quantize": quantize}
    action, source, out, *more = sys.argv[1:]
    actions[action](Path(source), Path(out), *more)


if __name__ == "__main__":
    main()
