"""Small random encoder checkpoints and tokenizers of all families."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from tests.support.tokenizer_builders import CORPUS

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 80}
RANKER_OPTIONS = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@dataclass(frozen=True)
class EncoderFamily:
    """A model_type of transformers."""

    tokenizer: str  # key of TOKENIZERS
    options: dict[str, Any] = field(default_factory=dict)  # besides SMALL; None removes one


FAMILIES = {
    "bert": EncoderFamily("wordpiece"),
    "roberta": EncoderFamily("bytes", {"type_vocab_size": 1}),
    "xlm-roberta": EncoderFamily("unigram", {"type_vocab_size": 1}),
    "distilbert": EncoderFamily(
        "wordpiece", {"dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 80, **dict.fromkeys(SMALL)}
    ),
    "mpnet": EncoderFamily("wordpiece", {"pad_token_id": 1}),
    "modernbert": EncoderFamily(
        "bytes",
        {
            "num_hidden_layers": 4,
            "local_attention": 8,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "cls_token_id": 0,
            "sep_token_id": 2,
        },
    ),
}


def write_encoder(
    path: Path, family: str = "bert", ranks: bool = False, seed: int = 0, **options: Any
) -> Any:
    """Write a checkpoint; returns transformers' model of it."""
    path.mkdir(parents=True, exist_ok=True)
    shape = FAMILIES[family]
    tokenizer = TOKENIZERS[shape.tokenizer]()
    write_tokenizer(path, shape.tokenizer, tokenizer)
    values = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 130, **SMALL}
    values |= {**shape.options, **(RANKER_OPTIONS if ranks else {}), **options}
    values = {key: value for key, value in values.items() if value is not None}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **values)
    auto_class = transformers.AutoModelForSequenceClassification if ranks else transformers.AutoModel
    model = auto_class.from_config(config).eval()
    _randomize_all_weights(model)
    model.save_pretrained(path)
    return model


def _randomize_all_weights(model: Any) -> None:
    """Random weights, norms and biases included, so that each part has an effect."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.2 * weight.shape[-1] ** -0.5)
            else:
                weight.normal_(mean=1.0 if "orm" in name and name.endswith("weight") else 0.0, std=0.3)


def write_tokenizer(path: Path, kind: str, backend: tokenizers.Tokenizer) -> None:
    backend.save(str(path / "tokenizer.json"))
    begin, end = ("[CLS]", "[SEP]") if kind == "wordpiece" else ("<s>", "</s>")
    special = {"cls_token": begin, "sep_token": end, "pad_token": "[PAD]" if kind == "wordpiece" else "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def wordpiece() -> tokenizers.Tokenizer:
    """BERT's tokenizer."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.decoder = tokenizers.decoders.WordPiece()
    return backend


def unigram() -> tokenizers.Tokenizer:
    """XLM-RoBERTa's tokenizer."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.decoder = tokenizers.decoders.Metaspace()
    return backend


def byte_level() -> tokenizers.Tokenizer:
    """RoBERTa's tokenizer."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


TOKENIZERS = {"wordpiece": wordpiece, "unigram": unigram, "bytes": byte_level}
