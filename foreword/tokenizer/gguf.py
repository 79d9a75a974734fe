"""The tokenizer of a GGUF file, built from its metadata.

`tokenizer.ggml.model` gpt2 is byte-level BPE. The file only names its pre-tokenizer; the regular expressions
here are those of the family's tokenizer.json. `llama` is SentencePiece's BPE, with scores and no merges: the
merges are all splits of a token into two tokens, ordered by the token's score. `gemma4` is the same with
merges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from foreword.errors import CheckpointError, shown
from foreword.tokenizer.files import TokenizerFiles
from foreword.tokenizer.generation_config import read_gguf_generation_config
from foreword.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KEY_PREFIX = "tokenizer.ggml."
SPACE = "▁"
TOKENIZER_MODELS = ("gemma4", "gpt2", "llama")
MODEL_WITH_MERGES = "gemma4"
SPECIAL_TOKEN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "sep_token": "seperator_token_id",  # sic
        "pad_token": "padding_token_id",
        "cls_token": "cls_token_id",
        "mask_token": "mask_token_id",
    }
)
END_TOKEN_KEYS = ("eot_token_id", "eom_token_id")
# Control tokens that end an answer in every vocabulary: most files name only one of theirs.
END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
AMBIGUOUS_TOKENS = ("<EOT>",)
# Never plain text, although some files mark them as normal or user-defined; llama.cpp overrides them too.
KNOWN_CONTROL_TOKENS = frozenset(
    (
        *END_TOKENS,
        "<|im_start|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|begin_of_text|>",
        "<start_of_turn>",
        "<|turn>",
    )
).difference(AMBIGUOUS_TOKENS)
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
RSTRIP_ARCHITECTURE = "phi3"  # its control tokens strip the spaces after them; there is no key for it


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """Values below `tokenizer.ggml.`; the get methods raise CheckpointError."""

    values: Mapping[str, Any]
    source: str  # name of the file, for errors

    def get_str(self, key: str) -> str:
        value = self.get_optional(key, str)
        if value is None:
            raise self.error(key, "is missing")
        return str(value)

    def get_optional(self, key: str, expected_type: type) -> Any:
        """The value, or None if it is missing."""
        value = self.values.get(KEY_PREFIX + key)
        if value is not None and type(value) is not expected_type:
            raise self.error(key, f"must be of type {expected_type.__name__}, got {shown(value, 60)}")
        return value

    def get_bool(self, key: str, default: bool) -> bool:
        value = self.get_optional(key, bool)
        return default if value is None else bool(value)

    def get_strs(self, key: str) -> list[str]:
        values = self.get_optional(key, list)
        if not values or type(values[0]) is not str:
            raise self.error(key, "must be a list of texts")
        return list(values)

    def get_floats(self, key: str, length: int) -> list[float] | None:
        values: list[float] | None = self.get_optional(key, list)
        if values is None:
            return None
        if len(values) != length or type(values[0]) not in (int, float):
            raise self.error(key, f"must be a list of {length} numbers, one for each token")
        return values

    def get_token_id(self, key: str, vocab_size: int) -> int | None:
        value: int | None = self.get_optional(key, int)
        if value is not None and not 0 <= value < vocab_size:
            raise self.error(key, f"is {value}; the vocabulary has {vocab_size} tokens")
        return value

    def get_token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        values: list[Any] = self.get_optional(key, list) or []
        if not all(type(value) is int and 0 <= value < vocab_size for value in values):
            raise self.error(key, f"must be ids below {vocab_size}, got {values!s:.60}")
        return tuple(values)

    def require_value(self, key: str, allowed: Any) -> None:
        """Refuse a value other than `allowed`, the default."""
        value = self.values.get(KEY_PREFIX + key)
        if value not in (None, allowed):
            raise self.error(key, f"{shown(value, 60)} is not supported")

    def error(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: `{KEY_PREFIX}{key}` {reason}", "model")


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """The tokens of a file, without unused ones."""

    ids: Mapping[str, int]
    token_types: Sequence[float]  # type of each id
    scores: Sequence[float] | None  # score of each id
    size: int  # number of ids, unused ones included

    @classmethod
    def from_metadata(cls, metadata: TokenizerMetadata) -> GGUFVocab:
        """Raises CheckpointError for lists of unequal lengths and duplicate tokens."""
        tokens = metadata.get_strs("tokens")
        types = metadata.get_floats("token_type", len(tokens)) or [NORMAL] * len(tokens)
        used = [(token, index) for index, token in enumerate(tokens) if types[index] != UNUSED]
        ids = dict(used)
        if len(ids) < len(used):
            token, index = next(pair for pair in used if ids[pair[0]] != pair[1])
            raise metadata.error("tokens", f"holds {shown(token, 60)} twice, as {index} and {ids[token]}")
        return cls(ids, types, metadata.get_floats("scores", len(tokens)), len(tokens))

    def tokens_of_type(self, *token_types: int) -> list[str]:
        return [token for token, index in self.ids.items() if self.token_types[index] in token_types]


@dataclass(frozen=True, slots=True)
class PreTokenizerConfig:
    """The meaning of a name in `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...] = ()  # matches are pieces; each pattern splits the pieces of those before it
    gpt2_pattern: bool = False  # then GPT-2's pattern
    split_digits: bool = False  # each digit is a piece
    nfc: bool = False  # normalize first
    ignore_merges: bool = False  # a piece that is a token needs no merges
    add_bos: bool = False  # default of `add_bos_token`


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
PUNCTUATION_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEADING_CHAR = r"[^\r\n\p{L}\p{N}]?"
CL100K = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{PUNCTUATION}|{SPACES}"
BAILING = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{PUNCTUATION}|\s*[\r\n]|\s+(?!\S)|\s+"  # line ends one by one
SEED_CODER = rf"{CONTRACTIONS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
QWEN = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{PUNCTUATION}|{SPACES}"
QWEN_WITH_MARKS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
O200K = (
    rf"{LEADING_CHAR}{UPPER}*{LOWER}+{CONTRACTIONS}?|{LEADING_CHAR}{UPPER}+{LOWER}*{CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{PUNCTUATION_OR_SLASH}|{SPACES}"
)
TEKKEN = (
    rf"{LEADING_CHAR}{UPPER}*{LOWER}+|{LEADING_CHAR}{UPPER}+{LOWER}*|\p{{N}}|{PUNCTUATION_OR_SLASH}|{SPACES}"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
LLAMA3 = PreTokenizerConfig((CL100K,), ignore_merges=True, add_bos=True)
QWEN2 = PreTokenizerConfig((QWEN,), nfc=True)
QWEN35 = PreTokenizerConfig((QWEN_WITH_MARKS,), nfc=True)
DIGITS_FIRST = PreTokenizerConfig(gpt2_pattern=True, split_digits=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizerConfig] = MappingProxyType(
    {
        "llama-bpe": LLAMA3,
        "llama3": LLAMA3,
        "llama-v3": LLAMA3,
        "lfm2": LLAMA3,
        "qwen2": QWEN2,
        "qwen35": QWEN35,
        "deepseek-r1-qwen": QWEN2,
        "gpt-2": PreTokenizerConfig(gpt2_pattern=True),
        "exaone4": PreTokenizerConfig(gpt2_pattern=True),
        "smollm": DIGITS_FIRST,
        "starcoder": DIGITS_FIRST,
        "refact": DIGITS_FIRST,
        "command-r": DIGITS_FIRST,
        "exaone": DIGITS_FIRST,
        "dbrx": PreTokenizerConfig((CL100K,)),
        "glm4": PreTokenizerConfig((CL100K,)),
        "chatglm-bpe": PreTokenizerConfig((CL100K,)),
        "minimax-m2": PreTokenizerConfig((O200K,)),
        "stablelm2": PreTokenizerConfig((QWEN,)),
        "hunyuan": PreTokenizerConfig((QWEN,)),
        "solar-open": PreTokenizerConfig((QWEN,)),
        "bailingmoe": PreTokenizerConfig((BAILING,)),
        "bailingmoe2": PreTokenizerConfig((BAILING,)),
        "seed-coder": PreTokenizerConfig((SEED_CODER,)),
        "gpt-4o": PreTokenizerConfig((O200K,)),
        "tekken": PreTokenizerConfig((TEKKEN,), ignore_merges=True, add_bos=True),
        "deepseek-v3": PreTokenizerConfig(DEEPSEEK_V3),
        "hunyuan-dense": PreTokenizerConfig(DEEPSEEK_V3),
        "deepseek-coder": PreTokenizerConfig(DEEPSEEK_CODER, split_digits=True),
    }
)


def build_byte_level_backend(metadata: TokenizerMetadata, vocabulary: GGUFVocab) -> tokenizers.Tokenizer:
    """Without post-processor and added tokens. Raises CheckpointError."""
    pre_tokenizer = _read_pre_tokenizer(metadata)
    merges = _read_merges(metadata, vocabulary)
    model = _build_bpe(metadata, vocabulary.ids, merges, ignore_merges=pre_tokenizer.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre_tokenizer.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _build_pre_tokenizer(pre_tokenizer)
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_pre_tokenizer(metadata: TokenizerMetadata) -> PreTokenizerConfig:
    name = metadata.get_str("pre")
    if name not in PRE_TOKENIZERS:
        raise metadata.error(
            "pre", f"{shown(name, 60)} is not supported; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _read_merges(metadata: TokenizerMetadata, vocabulary: GGUFVocab) -> list[tuple[str, str]]:
    """A vocabulary of single bytes needs no merges, and the `gguf` package leaves out an empty list."""
    listed = metadata.get_optional("merges", list)
    is_needed = listed is None and any(len(token) > 1 for token in vocabulary.tokens_of_type(NORMAL))
    merges = metadata.get_strs("merges") if listed or is_needed else []
    pairs = [merge.partition(" ") for merge in merges]
    if not all(left and right for left, _, right in pairs):
        wrong = next("".join(parts) for parts in pairs if not (parts[0] and parts[2]))
        raise metadata.error("merges", f"holds {shown(wrong, 60)}, which is not a pair of tokens")
    return [(left, right) for left, _, right in pairs]


def _build_bpe(
    metadata: TokenizerMetadata, ids: Mapping[str, int], merges: list[tuple[str, str]], **options: Any
) -> models.BPE:
    try:
        return models.BPE(vocab=dict(ids), merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise metadata.error("merges", f"do not fit the tokens: {error}") from None


def _build_pre_tokenizer(config: PreTokenizerConfig) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in config.patterns
    ]
    if config.split_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=config.gpt2_pattern))
    return pre_tokenizers.Sequence(steps)


def build_sentencepiece_backend(metadata: TokenizerMetadata, vocabulary: GGUFVocab) -> tokenizers.Tokenizer:
    """Without post-processor and added tokens."""
    metadata.require_value("remove_extra_whitespaces", False)
    metadata.require_value("precompiled_charsmap", [])
    prefix = metadata.get_bool("add_space_prefix", metadata.get_str("model") != MODEL_WITH_MERGES)
    ids = {
        _normalize_spaces(token, vocabulary.token_types[index]): index
        for token, index in vocabulary.ids.items()
    }
    if len(ids) < len(vocabulary.ids):
        raise metadata.error("tokens", "holds runs of spaces twice, as spaces and as ▁")
    unknown = vocabulary.tokens_of_type(UNKNOWN)
    if metadata.get_str("model") == MODEL_WITH_MERGES:
        metadata.require_value("pre", MODEL_WITH_MERGES)
        merges = _read_merges(metadata, vocabulary)
    else:
        merges = _build_merges(_merge_scores(metadata, vocabulary, ids))
    unk_token = unknown[0] if unknown else None
    model = _build_bpe(metadata, ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def is_space_run(token: str) -> bool:
    """Whether a token consists of spaces or ▁ only."""
    return not token.strip(" " + SPACE)


def _normalize_spaces(token: str, token_type: float) -> str:
    """Some converters write user-defined tokens of spaces with spaces instead of ▁."""
    return token.replace(" ", SPACE) if token_type == USER_DEFINED and is_space_run(token) else token


def _merge_scores(
    metadata: TokenizerMetadata, vocabulary: GGUFVocab, ids: Mapping[str, int]
) -> dict[str, float]:
    """Scores of the tokens that result from merges; user-defined ones come first, the longest first.

    If all scores are equal, the converter did not know them: the order of ids counts.
    """
    if vocabulary.scores is None:
        raise metadata.error("scores", "is missing")
    kinds, scores = vocabulary.token_types, vocabulary.scores
    normal = [index for index in ids.values() if kinds[index] == NORMAL]
    known = len({scores[index] for index in normal}) > 1
    by_token = {
        token: scores[index] if known else -index for token, index in ids.items() if kinds[index] == NORMAL
    }
    return by_token | {
        token: float("inf")
        for token, index in ids.items()
        if kinds[index] == USER_DEFINED and is_space_run(token)
    }


def _build_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """By score; of equal scores the longer left part first, as transformers converts SentencePiece files."""
    cuts = sorted(_iter_splits(scores), key=lambda cut: (cut[0], cut[1], cut[2]), reverse=True)
    return [(left, right) for *_, left, right in cuts]


def _iter_splits(scores: Mapping[str, float]) -> Iterator[tuple[float, int, int, str, str]]:
    """(score, length left, length right, left, right) of each split of a token into two tokens."""
    for token, score in scores.items():
        length = len(token)
        for cut in range(1, length):
            left = token[:cut]
            if left in scores:
                right = token[cut:]
                if right in scores:
                    yield score, cut, length - cut, left, right


def build_gguf_tokenizer(values: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer of a file's metadata; `source` names the file. Raises CheckpointError with the key."""
    metadata = TokenizerMetadata(values, source)
    model = metadata.get_str("model")
    if model not in TOKENIZER_MODELS:
        raise metadata.error(
            "model", f"{shown(model, 60)} is not supported; known: {', '.join(TOKENIZER_MODELS)}"
        )
    metadata.require_value("normalizer.lowercase", False)
    metadata.require_value("normalizer.strip_accents", False)
    metadata.require_value("add_sep_token", False)
    vocabulary = _with_control_tokens(GGUFVocab.from_metadata(metadata))
    backend = (build_byte_level_backend if model == "gpt2" else build_sentencepiece_backend)(
        metadata, vocabulary
    )
    _add_tokens(
        backend,
        vocabulary,
        strip=values.get("general.architecture") == RSTRIP_ARCHITECTURE and model == "llama",
    )
    named = {name: metadata.get_token_id(key, vocabulary.size) for name, key in SPECIAL_TOKEN_KEYS.items()}
    special = {
        name: token
        for name, index in named.items()
        if (token := backend.id_to_token(index or 0)) and index is not None
    }
    _set_post_processor(
        backend, metadata, special, add_bos=model != "gpt2" or _read_pre_tokenizer(metadata).add_bos
    )
    ends = _find_end_token_ids(metadata, vocabulary, named["eos_token"])
    return Tokenizer(
        backend,
        TokenizerFiles(
            special_tokens=special,
            eos_token_ids=ends,
            suppress_tokens=metadata.get_token_ids("suppress_tokens", vocabulary.size),
            chat_template=_read_chat_template(values, source),
            generation_config=read_gguf_generation_config(values, source),
        ),
    )


def _with_control_tokens(vocabulary: GGUFVocab) -> GGUFVocab:
    """Mark known control tokens as such: prompts contain them, and some end an answer."""
    types = list(vocabulary.token_types)
    for token in KNOWN_CONTROL_TOKENS & vocabulary.ids.keys():
        if types[vocabulary.ids[token]] in (NORMAL, USER_DEFINED):
            types[vocabulary.ids[token]] = CONTROL
    return replace(vocabulary, token_types=types)


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocab, strip: bool) -> None:
    """Add the tokens that are matched before normalization and BPE."""
    control = vocabulary.tokens_of_type(CONTROL, UNKNOWN)
    user_defined = [token for token in vocabulary.tokens_of_type(USER_DEFINED) if not is_space_run(token)]
    stripped = {token for token in control if strip and token.startswith("<|") and token != "<|endoftext|>"}
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=token in stripped) for token in control]
    )
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])


def _set_post_processor(
    backend: tokenizers.Tokenizer, metadata: TokenizerMetadata, special: Mapping[str, str], add_bos: bool
) -> None:
    """Set the tokens added before and after a text."""
    wanted = {
        "bos_token": metadata.get_bool("add_bos_token", add_bos),
        "eos_token": metadata.get_bool("add_eos_token", False),
    }
    bos, eos = (special.get(name) if on else None for name, on in wanted.items())
    for name, token in (("bos", bos), ("eos", eos)):
        if metadata.get_bool(f"add_{name}_token", False) and token is None:
            raise metadata.error(f"add_{name}_token", f"is true, but `{name}_token_id` is missing")
    added = [token for token in (bos, eos) if token is not None]
    if added:
        pieces = [token for token in (bos, "$A", eos) if token is not None]
        ids = [(token, backend.token_to_id(token)) for token in added]
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def _find_end_token_ids(
    metadata: TokenizerMetadata, vocabulary: GGUFVocab, eos: int | None
) -> tuple[int, ...]:
    """Ids that end an answer, EOS first."""
    named = [eos, *(metadata.get_token_id(key, vocabulary.size) for key in END_TOKEN_KEYS)]
    known = [vocabulary.ids.get(token) for token in END_TOKENS]
    control = [index for index in known if index is not None and vocabulary.token_types[index] == CONTROL]
    return tuple(dict.fromkeys(index for index in (*named, *control) if index is not None))


def _read_chat_template(values: Mapping[str, Any], source: str) -> str | None:
    template = values.get(CHAT_TEMPLATE_KEY)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{source}: `{CHAT_TEMPLATE_KEY}` must be a text, got {shown(template, 60)}", "chat_template"
        )
    return template or None
