"""Random checkpoints with an MTP head, and such a head in plain torch, around a layer of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import change_config, change_tensors, scaled_weight, write_checkpoint

QWEN_FAMILIES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
DEEPSEEK_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
MTP_FAMILIES = (*QWEN_FAMILIES, *DEEPSEEK_FAMILIES)
LAYER = 1  # of the checkpoints: it has attention, and experts if any layer has


class MTPNames:
    """Names of a head's tensors in the checkpoints of a family."""

    def __init__(self, family: str, num_layers: int) -> None:
        is_qwen = family in QWEN_FAMILIES
        self.prefix = "mtp." if is_qwen else f"model.layers.{num_layers}."
        self.fc = self.prefix + ("fc" if is_qwen else "eh_proj")
        self.embedding_norm = self.prefix + ("pre_fc_norm_embedding" if is_qwen else "enorm")
        self.hidden_norm = self.prefix + ("pre_fc_norm_hidden" if is_qwen else "hnorm")
        self.norm = self.prefix + ("norm" if is_qwen else "shared_head.norm")
        self.layer = self.prefix + ("layers.0." if is_qwen else "")


def write_mtp_checkpoint(path: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint of write_checkpoint() with a random MTP head."""
    write_checkpoint(path, family, seed, **overrides)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    stored = load_file(path / "model.safetensors")
    names, size = MTPNames(family, config["num_hidden_layers"]), config["hidden_size"]
    source = f"model.layers.{LAYER}."
    shapes = {
        names.layer + name.removeprefix(source): value.shape
        for name, value in stored.items()
        if name.startswith(source)
    }
    shapes[f"{names.fc}.weight"] = torch.Size((size, 2 * size))
    for norm in (names.embedding_norm, names.hidden_norm, names.norm):
        shapes[f"{norm}.weight"] = torch.Size((size,))
    generator = torch.Generator().manual_seed(seed + 77)
    dtype = stored["model.embed_tokens.weight"].dtype
    for name, shape in shapes.items():
        value = scaled_weight(name, torch.randn(shape, generator=generator), config)
        stored[name] = value.to(dtype)
    if family in DEEPSEEK_FAMILIES:  # copies that published files have
        stored[f"{names.prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"{names.prefix}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    if family != "qwen3_next":
        key = "mtp_num_hidden_layers" if family in QWEN_FAMILIES else "num_nextn_predict_layers"
        change_config(path, **{key: 1})
    return path


def mtp_gguf_keys(checkpoint: Path) -> dict[str, Any]:
    """Keys of write_gguf() for a checkpoint with a head."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    num_layers = config["num_hidden_layers"]
    keys: dict[str, Any] = {"block_count": num_layers + 1, "nextn_predict_layers": 1}
    if config["model_type"] in QWEN_FAMILIES:
        kinds = config.get("layer_types") or ["full_attention"] * num_layers
        keys["attention__recurrent_layers"] = [*(kind != "full_attention" for kind in kinds), False]
    return keys


class ReferenceMTP:
    """The head of a checkpoint in float32. A pair is token p and the target's hidden state at p - 1."""

    def __init__(self, path: Path, scratch: Path) -> None:
        """scratch: an empty directory, for a copy whose layer is that of the head"""
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        family = config["model_type"]
        self.names = names = MTPNames(family, config["num_hidden_layers"])
        self.tensors = {name: value.float() for name, value in load_file(path / "model.safetensors").items()}
        self._eps, self._offset = config["rms_norm_eps"], float(family in QWEN_FAMILIES)
        self.target = _load(path)
        shutil.copytree(path, scratch, dirs_exist_ok=True)
        prefix = f"model.layers.{LAYER}."
        inner = [name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)]
        change_tensors(scratch, **{prefix + name: self.tensors[names.layer + name] for name in inner})
        self._decoder = _load(scratch).model

    @torch.no_grad()
    def hidden(self, ids: Sequence[int]) -> Tensor:
        """Hidden states of the target behind its last norm [T, H]"""
        states: Tensor = self.target.model(torch.tensor([ids])).last_hidden_state[0]
        return states

    def logits(self, ids: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tokens after ids[i], whose hidden state before is hidden[i]: [n, V], and recycled [n, H]."""
        names, count = self.names, len(ids)
        embeddings = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        normed = self._norm(names.embedding_norm, embeddings), self._norm(names.hidden_norm, hidden)
        x = (torch.cat(normed, -1) @ self.tensors[f"{names.fc}.weight"].T)[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotation = self._decoder.rotary_emb(x, positions)
        y = self._decoder.layers[LAYER](
            x, position_embeddings=rotation, attention_mask=mask, position_ids=positions
        )
        recycled = self._norm(names.norm, y[0] if isinstance(y, tuple) else y)[0]
        return recycled @ self.tensors["lm_head.weight"].T, recycled

    @torch.no_grad()
    def draft(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """The `count` greedy draft tokens after `ids`, and the logits [V] of each."""
        tokens, hidden = [*ids], [*self.hidden(ids[:-1])]
        chain = []
        for _ in range(count):
            logits, recycled = self.logits(tokens[1:], torch.stack(hidden))
            chain.append(logits[-1])
            tokens.append(int(logits[-1].argmax()))
            hidden.append(recycled[-1])
        return tokens[len(ids) :], chain

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)
        return x * scale * (self.tensors[f"{name}.weight"] + self._offset)


def train_mtp(path: Path, scratch: Path, texts: Sequence[Sequence[int]], steps: int = 60) -> None:
    """Train a checkpoint's head, all but its layer, to predict the tokens of texts."""
    reference = ReferenceMTP(path, scratch)
    names = reference.names
    trained = [f"{name}.weight" for name in (names.fc, names.embedding_norm, names.hidden_norm, names.norm)]
    for name in trained:
        reference.tensors[name].requires_grad_()
    optimizer = torch.optim.Adam([reference.tensors[name] for name in trained], lr=0.01)
    hidden = [reference.hidden(text) for text in texts]
    for step in range(steps):
        text, states = texts[step % len(texts)], hidden[step % len(texts)]
        logits, _ = reference.logits(text[1:-1], states[:-2])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.tensor(text[2:])).backward()
        optimizer.step()
    change_tensors(path, **{name: reference.tensors[name].detach() for name in trained})


def _load(path: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
