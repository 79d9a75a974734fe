"""Small tokenizers of the families in use, built without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from foreword.tokenizer.files import TokenizerFiles
from foreword.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Das ist größer, naïve café; 東京 и Москва.",
    "def main(argv: list[str]) -> int:\n    for i in range(10):\n        print(f'{i:>3}')\n    return 0\n",
    '{"name": "value", "list": [1, 2, 3], "nested": {"a": null}}',
    "Hi there, hello there, general speculation of tokens is exact.",
] * 4

DIFFICULT_TEXTS = [
    "",
    " ",
    "plain words",
    "  leading and trailing  ",
    "tabs\tand\nlines\r\n\n\nend",
    " " * 77 + "x" + " " * 130,
    "naïve café ﬁ ½ ß İ ı Å Å é",
    "日本語のテキスト 한국어 ไทย עברית العربية हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 😀😀",
    "zero\u200bwidth\u00a0nbsp\ufeffbom \ufffd \x00\x01\x7f",
    "def f(x):\n    return {k: v for k, v in x.items()}  # comment\n\n\n",
    "<|im_start|>user\nhello<|im_end|>",
    "text <|eos|> inside<|eos|><|bos|>",
    "<s>not always special</s> [INST] x [/INST] ▁under ▁▁score",
    "1234567890 12,345.67 0x1F",
    "'s 't 're don't CAN'T",
    "https://example.org/a?b=c&d=%20#e",
]


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE with a pattern, as in Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens([AddedToken("[INST]", special=False)])
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback, as in Llama 2 and Mistral."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    trained = tokenizers.Tokenizer(models.BPE())
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = normalizer
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    for token in sorted(model["vocab"], key=model["vocab"].__getitem__):
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return backend


def sentencepiece_tokenizer() -> Tokenizer:
    return Tokenizer(
        sentencepiece_backend(), TokenizerFiles(special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    )


def write_checkpoint(
    path: Path, backend: tokenizers.Tokenizer, tokenizer_config: dict[str, Any], /, **files: Any
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and further JSON files by name."""
    backend.save(str(path / "tokenizer.json"))
    for name, content in {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config},
        **files,
    }.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path
