"""Byte-level BPE from a GGUF file: `tokenizer.ggml.model` gpt2.

How text is split before the merges is told by a name alone; here it means what the tokenizer.json of that family says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from foreword.text.gguf_vocabulary import TokenizerMetadata, GGUFVocab

__all__ = ["build_byte_level_backend", "prepends_bos"]


@dataclass(frozen=True, slots=True)
class PreTokenizerConfig:
    """What a name in `tokenizer.ggml.pre` stands for.

    patterns       each splits what the ones before it left whole; matches stand alone
    gpt2_pattern   then that of GPT-2
    digits         each digit stands alone
    nfc            text is normalized first
    ignore_merges  a piece that is a token as a whole is that token, even if no merges lead there
    add_bos        where `add_bos_token` does not say
    """

    patterns: tuple[str, ...] = ()
    gpt2_pattern: bool = False
    split_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
PUNCTUATION_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEADING_CHAR = r"[^\r\n\p{L}\p{N}]?"
CL100K = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{PUNCTUATION}|{SPACES}"
QWEN = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{PUNCTUATION}|{SPACES}"
O200K = rf"{LEADING_CHAR}{UPPER}*{LOWER}+{CONTRACTIONS}?|{LEADING_CHAR}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|{PUNCTUATION_OR_SLASH}|{SPACES}"
TEKKEN = rf"{LEADING_CHAR}{UPPER}*{LOWER}+|{LEADING_CHAR}{UPPER}+{LOWER}*|\p{{N}}|{PUNCTUATION_OR_SLASH}|{SPACES}"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
LLAMA3 = PreTokenizerConfig((CL100K,), ignore_merges=True, add_bos=True)
QWEN2 = PreTokenizerConfig((QWEN,), nfc=True)
DIGITS_FIRST = PreTokenizerConfig(gpt2_pattern=True, split_digits=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizerConfig] = MappingProxyType(
    {
        "llama-bpe": LLAMA3,
        "llama3": LLAMA3,
        "llama-v3": LLAMA3,
        "qwen2": QWEN2,
        "deepseek-r1-qwen": QWEN2,
        "gpt-2": PreTokenizerConfig(gpt2_pattern=True),
        "smollm": DIGITS_FIRST,
        "starcoder": DIGITS_FIRST,
        "refact": DIGITS_FIRST,
        "dbrx": PreTokenizerConfig((CL100K,)),
        "gpt-4o": PreTokenizerConfig((O200K,)),
        "tekken": PreTokenizerConfig((TEKKEN,), ignore_merges=True, add_bos=True),
        "deepseek-v3": PreTokenizerConfig(DEEPSEEK_V3),
        "deepseek-coder": PreTokenizerConfig(DEEPSEEK_CODER, split_digits=True),
    }
)


def prepends_bos(metadata: TokenizerMetadata) -> bool:
    """Whether a text begins with the BOS token where `add_bos_token` does not say."""
    return _read_pre_tokenizer(metadata).add_bos


def build_byte_level_backend(metadata: TokenizerMetadata, vocabulary: GGUFVocab) -> tokenizers.Tokenizer:
    """Without post-processor and added tokens. Raises CheckpointError for a splitting that is not known."""
    splitting = _read_pre_tokenizer(metadata)
    merges = [_parse_merge(merge, metadata) for merge in metadata.get_strs("merges")]
    try:
        model = models.BPE(vocab=dict(vocabulary.ids), merges=merges, ignore_merges=splitting.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise metadata.error("merges", f"do not fit the tokens: {error}") from None
    backend = tokenizers.Tokenizer(model)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _build_pre_tokenizer(splitting)
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_pre_tokenizer(metadata: TokenizerMetadata) -> PreTokenizerConfig:
    name = metadata.get_str("pre")
    if name not in PRE_TOKENIZERS:
        raise metadata.error("pre", f"{name!r:.60} is not supported; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _parse_merge(merge: str, metadata: TokenizerMetadata) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        raise metadata.error("merges", f"holds {merge!r:.60}, which is no pair")
    return left, right


def _build_pre_tokenizer(config: PreTokenizerConfig) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in config.patterns
    ]
    if config.split_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=config.gpt2_pattern))
    return pre_tokenizers.Sequence(steps)
