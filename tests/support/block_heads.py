"""Heads that draft in one pass: references in plain torch (float32) from the published layouts, and files.

A reference computes the blocks of all anchors at once, as in training: an anchor is the last known token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.heads import (
    AUX_LAYERS,
    Layers,
    ReferenceHead,
    head_config,
    head_tensors,
    projection_shapes,
    random_tensor,
    record_aux_hidden_states,
    write_head,
)

MASK_ID = 269
NUM_LAYERS = 2
MARKOV_RANK = 16


def layer_tensors(
    config: dict[str, Any], prefix: str, generator: torch.Generator, qk_norm: bool = False
) -> dict[str, Tensor]:
    """Random tensors of a decoder layer."""
    size, dim = (config["hidden_size"],), (config["head_dim"],)
    shapes = {f"{prefix}{name}.weight": size for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= projection_shapes(config, prefix, config["hidden_size"])
    if qk_norm:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": dim for name in "qk"}
    return {name: random_tensor(shape, generator) for name, shape in shapes.items()}


@dataclass
class ReferenceDFlash:
    """Blocks [anchor, masks] that see the target's fused hidden states before the anchor, and themselves."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor  # [V, h]
    lm_head: Tensor  # [draft vocabulary, h]
    windows: Sequence[int | None] = (None,) * NUM_LAYERS
    causal: Sequence[bool] = (False,) * NUM_LAYERS
    samples_anchor: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None

    def blocks(self, aux: Tensor, token_ids: Sequence[int], count: int) -> Tensor:
        """Logits [L, count, draft vocabulary] of the drafts after each token; that of the first is no draft.

        aux [L, layers, H] of all tokens: a block sees those before its anchor
        """
        logits = F.linear(self.states(aux, token_ids, count), self.lm_head) * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def states(self, aux: Tensor, token_ids: Sequence[int], count: int) -> Tensor:
        """Hidden states [L, count, h] behind blocks()."""
        layers, num = Layers(self.config, self.tensors), len(token_ids)
        rows = count + (not self.samples_anchor)
        context = layers.norm(F.linear(aux.flatten(1), self.tensors["fc.weight"]), "hidden_norm")
        ids = torch.full((num, rows), MASK_ID)
        ids[:, 0] = torch.tensor(token_ids)
        anchors = torch.arange(num)[:, None].expand(num, rows).flatten()
        places = anchors + torch.arange(rows).repeat(num)
        positions = torch.cat((torch.arange(num), places))
        x = self.embedding[ids.flatten()] * self.config.get("input_embedding_scale", 1.0)
        for index in range(self.config["num_hidden_layers"]):
            mask = self.mask(index, anchors, places, num)
            x = layers(x, index, positions, mask, context)
        return layers.norm(x, "norm").view(num, rows, -1)[:, rows - count :]

    def markov(self, token_ids: Tensor) -> Tensor:
        """What DSpark adds to the logits of the next token: int64 [...] -> [..., draft vocabulary]"""
        before, after = (self.tensors.get(f"markov_head.markov_{name}.weight") for name in ("w1", "w2"))
        if before is None or after is None:
            return torch.zeros(*token_ids.shape, len(self.lm_head))
        return F.embedding(token_ids, before) @ after.T

    def draft(self, logits: Tensor, states: Tensor, last_id: int) -> tuple[list[int], list[float]]:
        """Greedy tokens behind `last_id` and the confidence head's probabilities.

        logits [count, draft vocabulary], states [count, h] of one block
        """
        token_ids, confidences, state = [last_id], [], torch.zeros(MARKOV_RANK)
        for row, hidden in zip(logits, states, strict=True):
            token = self.tensors["markov_head.markov_w1.weight"][token_ids[-1]]
            latent = token
            if "markov_head.gate_proj.weight" in self.tensors:
                latent = token * self.project("gate_proj", hidden, token).sigmoid()
            elif "markov_head.joint_proj.weight" in self.tensors:
                gate, candidate, value = self.project("joint_proj", state, token, hidden).chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                latent = value.tanh()
            weight = self.tensors["confidence_head.proj.weight"]
            features = torch.cat((hidden, token))[: weight.shape[1]]
            score = F.linear(features, weight, self.tensors["confidence_head.proj.bias"])
            confidences.append(float(score.sigmoid()))
            row = row + self.tensors["markov_head.markov_w2.weight"] @ latent
            token_ids.append(self.target_id(int(row.argmax())))
        return token_ids[1:], confidences

    def project(self, name: str, *parts: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"markov_head.{name}.{kind}"] for kind in ("weight", "bias"))
        return F.linear(torch.cat(parts), weight, bias)

    def mask(self, index: int, anchors: Tensor, places: Tensor, num: int) -> Tensor:
        window, causal = self.windows[index], self.causal[index]
        seen = torch.arange(num)[None] < anchors[:, None]
        own = anchors[:, None] == anchors[None]
        if causal:
            own = own & (places[None] <= places[:, None])
        if window is not None and causal:
            seen = seen & (torch.arange(num)[None] > places[:, None] - window)
        elif window is not None:  # of speculators: all rows of a block see as far as its anchor
            seen = seen & (torch.arange(num)[None] >= anchors[:, None] - window)
        return torch.cat((seen, own), 1)

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else draft_id


@dataclass
class ReferencePEagle(ReferenceHead):
    """Blocks [pair of the anchor, masked pairs], each of which sees the pairs of known tokens before it."""

    later: list[int] = field(default_factory=list)  # layers after the first

    def blocks(self, aux: Tensor, token_ids: Sequence[int], count: int) -> Tensor:
        """As ReferenceDFlash: the anchor's pair has the hidden state before it."""
        num, layers = len(token_ids), Layers(self.config, self.tensors)
        hidden, ids = self.fuse(aux)[:-1], torch.tensor(token_ids)[1:]
        masks = self.fuse(self.tensors["mask_hidden"].view(1, *aux.shape[1:]))
        depths = torch.arange(1, count).repeat(num - 1)
        chains = torch.arange(num - 1)[:, None].expand(num - 1, count - 1).flatten()
        anchors = torch.cat((torch.arange(num - 1), chains))
        depths = torch.cat((torch.zeros(num - 1, dtype=torch.int64), depths))
        tokens = torch.cat((ids, torch.full((len(chains),), MASK_ID)))
        states = torch.cat((hidden, masks.expand(len(chains), -1)))
        known = (depths[None] == 0) & (anchors[None] <= anchors[:, None])
        mask = known | ((anchors[None] == anchors[:, None]) & (depths[None] <= depths[:, None]))
        positions = anchors + depths
        x = self.first_layer(states, tokens, positions, mask)
        for index in self.later:
            x = layers(x, index, positions, mask, x[:0])
        logits = F.linear(self.norm(x, "norm"), self.lm_head)
        first, rest = logits[: num - 1, None], logits[num - 1 :].view(num - 1, count - 1, logits.shape[1])
        none = logits.new_zeros(1, count, logits.shape[-1])
        return torch.cat((none, torch.cat((first, rest), 1)))


BlockReference = ReferenceDFlash | ReferencePEagle


def greedy_tokens(reference: BlockReference, logits: Tensor, last_id: int) -> list[int]:
    """Tokens of a draft behind `last_id`; logits [count, draft vocabulary] of blocks()."""
    token_ids = [last_id]
    for row in logits:
        if isinstance(reference, ReferenceDFlash):
            row = row + reference.markov(torch.tensor(token_ids[-1]))
        token_ids.append(reference.target_id(int(row.argmax())))
    return token_ids[1:]


def dflash_config(model: Path, **options: Any) -> dict[str, Any]:
    """The original's layout for a target of two layers: `target_layer_ids` name them by their outputs."""
    config = head_config(model)
    for key in ("eagle_aux_hidden_state_layer_ids", "eagle_config", "architectures"):
        del config[key]
    own = {"mask_token_id": MASK_ID, "target_layer_ids": [each - 1 for each in AUX_LAYERS[1:]]}
    return {
        **config,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": NUM_LAYERS,
        "num_target_layers": num_layers_of(model),
        "block_size": 8,
        "dflash_config": own,
        **options,
    }


def num_layers_of(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int({**config, **config.get("text_config", {})}["num_hidden_layers"])


def dspark_config(model: Path, **options: Any) -> dict[str, Any]:
    """SpecForge's layout of a DSpark head."""
    config = dflash_config(model, **options)
    own = {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": MARKOV_RANK,
        "projector_type": "dspark",
    }
    return {
        **config,
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {**config["dflash_config"], **own},
    }


def markov_tensors(
    vocab_size: int,
    draft_vocab_size: int,
    hidden_size: int,
    seed: int = 0,
    kind: str = "vanilla",
    confidence_reads_token: bool = True,
) -> dict[str, Tensor]:
    """Random tensors of a DSpark head beside those of DFlash."""
    generator, rank = torch.Generator().manual_seed(seed + 7), MARKOV_RANK
    width = hidden_size + rank * confidence_reads_token
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab_size, rank),
        "markov_head.markov_w2.weight": (draft_vocab_size, rank),
        "confidence_head.proj.weight": (1, width),
        "confidence_head.proj.bias": (1,),
    }
    if kind != "vanilla":
        name, inputs, outputs = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 2, 3)}[kind]
        shapes[f"markov_head.{name}.weight"] = (rank * outputs, hidden_size + rank * inputs)
        shapes[f"markov_head.{name}.bias"] = (rank * outputs,)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if kind != "vanilla":  # a gate makes the bias smaller
        tensors["markov_head.markov_w2.weight"] *= 4
    return tensors


def dflash_tensors(config: dict[str, Any], num_aux: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors without embedding and output layer."""
    generator, size = torch.Generator().manual_seed(seed), config["hidden_size"]
    tensors = {
        "fc.weight": random_tensor((size, num_aux * size), generator),
        "hidden_norm.weight": random_tensor((size,), generator),
        "norm.weight": random_tensor((size,), generator),
    }
    for index in range(config["num_hidden_layers"]):
        tensors |= layer_tensors(config, f"layers.{index}.", generator, qk_norm=True)
    return tensors


def p_eagle_config(model: Path, **options: Any) -> dict[str, Any]:
    return head_config(model, pard_token=MASK_ID, **options)


def p_eagle_tensors(config: dict[str, Any], seed: int = 0, **options: bool) -> dict[str, Tensor]:
    """Tensors of an EAGLE-3 head, those of further layers, and of masks."""
    tensors = head_tensors(config, config["hidden_size"], seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    for index in range(1, config["num_hidden_layers"]):
        tensors |= layer_tensors(config, f"layers.{index}.", generator, options.get("qk_norm", False))
    tensors["mask_hidden"] = torch.randn(1, 3 * config["hidden_size"], generator=generator)
    return tensors


def train_block_head(
    path: Path, model: Path, texts: Sequence[Sequence[int]], method: str, steps: int = 120, count: int = 3
) -> Path:
    """A head that knows the texts: `method` is "dflash", "dspark" or "p-eagle"; trained on all anchors."""
    weights = load_file(model / "model.safetensors")
    ends = ("embed_tokens.weight", "embeddings.weight", "wte.weight")
    embedding = next(value.float() for name, value in weights.items() if name.endswith(ends))
    if method in ("dflash", "dspark"):
        aux_layers = AUX_LAYERS[1:]
        if method == "dflash":
            config = dflash_config(model, block_size=count + 1)
        else:
            config = dspark_config(model, block_size=count)
        tensors = dflash_tensors(config)
        if method == "dspark":
            tensors |= markov_tensors(config["vocab_size"], config["vocab_size"], config["hidden_size"])
        tensors["lm_head.weight"] = random_tensor(
            (config["vocab_size"], config["hidden_size"]), torch.Generator().manual_seed(3)
        )
    else:
        config, aux_layers = p_eagle_config(model), AUX_LAYERS
        tensors = p_eagle_tensors(config)
    for value in tensors.values():
        value.requires_grad_()
    reference = make_reference(config, tensors, embedding, tensors["lm_head.weight"])
    recorded = record_aux_hidden_states(model, texts, aux_layers)
    optimizer = torch.optim.Adam(tensors.values(), lr=4e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for text, aux in zip(texts, recorded, strict=True):
            answers = torch.tensor(text)[2:].unfold(0, count, 1)  # of anchors with `count` tokens behind
            logits = reference.blocks(aux, text, count)[1 : 1 + len(answers)]
            if method == "dspark":
                before = torch.tensor(text)[1:-1].unfold(0, count, 1)
                logits = logits + reference.markov(before)
            loss = loss + F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return write_head(path, config, {name: value.detach() for name, value in tensors.items()})


def make_reference(
    config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor, lm_head: Tensor
) -> BlockReference:
    if "dflash_config" in config:
        samples_anchor = "markov_rank" in config["dflash_config"]
        return ReferenceDFlash(config, tensors, embedding, lm_head, samples_anchor=samples_anchor)
    return ReferencePEagle(
        config, tensors, embedding, lm_head, later=[*range(1, config["num_hidden_layers"])]
    )


def read_reference(model: Path, head: Path) -> BlockReference:
    """The reference of train_block_head()."""
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    return make_reference(config, tensors, embedding, tensors["lm_head.weight"])
