"""Shapes of the vision model and of its text-only drafter, and how they are written to disk."""

import json
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from training.corpus import END, SPECIAL
from training.tokenizer import MAX_LENGTH
from training.vision.rows import IMAGE, IMAGE_ID, NAMES, NUM_PATCHES, PATCH, PREFIX, SIDE, PatchLabels
from training.vision.scenes import COLOURS, MAX_COUNT

VOCABULARY: Final[int] = 1552  # the tokenizer's 1537, then unused rows: sizes that divide well
_END_ID: Final[int] = SPECIAL.index(END)
# (hidden size, intermediate size, layers, query heads, key and value heads)
TEXT: Final = {"target": (192, 384, 3, 6, 2), "drafter": (64, 128, 2, 2, 1)}
TOWER: Final = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
Model = LlavaForConditionalGeneration | LlamaForCausalLM

# Images come first in a message, as in training.
CHAT_TEMPLATE: Final[str] = (
    "{%- for message in messages -%}"
    "{%- set role = message['role'] -%}"
    "{%- if role == 'developer' -%}{%- set role = 'system' -%}{%- endif -%}"
    "{%- if role not in ['system', 'user', 'assistant'] -%}{%- set role = 'user' -%}{%- endif -%}"
    "{{- '<|' + role + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image>' -}}{%- endfor -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def text_config(role: str) -> LlamaConfig:
    """Heads of 32; embedding and head are tied."""
    hidden, intermediate, layers, heads, kv_heads = TEXT[role]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_END_ID,
        pad_token_id=0,
    )


def build(role: str) -> Model:
    """Return an untrained model, float32; role is "target" or "drafter"."""
    text = text_config(role)
    if role == "drafter":
        return LlamaForCausalLM(text)
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**TOWER, image_size=SIDE, patch_size=PATCH, vision_use_head=False),
        text_config=text,
        image_token_id=IMAGE_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=NUM_PATCHES,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


class VisionTrainingModel(nn.Module):
    """The model, and heads that predict the content of a patch; export drops the heads."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.model = build(role)
        self.role = role
        width = TOWER["hidden_size"]
        self.heads = nn.ModuleDict(
            {
                "names": nn.Linear(width, len(NAMES)),
                "colours": nn.Linear(width, len(COLOURS)),
                "counts": nn.Linear(width, MAX_COUNT),
                "centres": nn.Linear(width, 2),
            }
            if role == "target"
            else {}
        )

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Return the vision encoder's output for uint8 [B, 3, H, W], one row a patch: [B, P, W]."""
        tower = self.model.model.vision_tower
        embedded = tower.embeddings(pixels.float() / 127.5 - 1)
        seen: Tensor = tower.encoder(inputs_embeds=embedded).last_hidden_state
        return seen

    def patch_loss(self, image_features: Tensor, patches: PatchLabels) -> Tensor:
        """Return the sum of the heads' losses, each a mean over patches."""
        losses = [
            F.cross_entropy(
                head(image_features).float().flatten(0, 1), torch.from_numpy(getattr(patches, name)).flatten()
            )
            for name, head in self.heads.items()
        ]
        return torch.stack(losses).sum()

    def hidden(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, image_features: Tensor | None
    ) -> Tensor:
        """Return the last hidden states [B, L, W]; features replace the placeholders after the first token.

        mask    bool [B, 1, L, L]
        """
        text = self.model.model.language_model if self.role == "target" else self.model.model
        embedded = text.embed_tokens(tokens)
        if image_features is not None:
            features = self.model.model.multi_modal_projector(image_features).to(embedded.dtype)
            embedded = torch.cat([embedded[:, :1], features, embedded[:, PREFIX:]], dim=1)
        found: Tensor = text(
            inputs_embeds=embedded, position_ids=positions, attention_mask=mask, use_cache=False
        ).last_hidden_state
        return found


def export(state: dict[str, Tensor], role: str, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face checkpoint in bfloat16, with tokenizer and, for the target, image processor."""
    model = build(role)
    model.load_state_dict(state)
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    # transformers 5 nests this under rope_parameters; other readers expect it here.
    text["rope_theta"] = text["rope_parameters"]["rope_theta"]
    _write(folder / "config.json", config)
    _write(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": _END_ID, "pad_token_id": 0}
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _TOKENIZER)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    if role == "target":
        _write(folder / "preprocessor_config.json", _PREPROCESSOR)
        _write(folder / "processor_config.json", _PROCESSOR)


def with_image_token(tokenizer: Tokenizer) -> Tokenizer:
    """The text model's tokenizer with the placeholder as another special token."""
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    assert tokenizer.token_to_id(IMAGE) == IMAGE_ID
    return tokenizer


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_TOKENIZER: Final = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": SPECIAL[0],
    "bos_token": None,
    "unk_token": None,
    "image_token": IMAGE,
    "additional_special_tokens": [*SPECIAL[2:], IMAGE],
    "clean_up_tokenization_spaces": False,
    "model_max_length": MAX_LENGTH,
}
_PREPROCESSOR: Final = {
    "image_processor_type": "SiglipImageProcessor",
    "processor_class": "LlavaProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": SIDE, "width": SIDE},
}
_PROCESSOR: Final = {
    "processor_class": "LlavaProcessor",
    "image_token": IMAGE,
    "patch_size": PATCH,
    "num_additional_image_tokens": 0,
    "vision_feature_select_strategy": "full",
}
