"""The tokenizer of a GGUF file, from its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from foreword.errors import CheckpointError
from foreword.text.checkpoint import TokenizerFiles
from foreword.text.gguf_bpe import build_byte_level_backend, prepends_bos
from foreword.text.gguf_sentencepiece import is_space_run, build_sentencepiece_backend
from foreword.text.gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, TokenizerMetadata, GGUFVocab
from foreword.text.tokenizer import Tokenizer

__all__ = ["build_gguf_tokenizer"]

TOKENIZER_MODELS = ("gpt2", "llama")
SPECIAL_TOKEN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "sep_token": "seperator_token_id",  # so misspelt by the format
        "pad_token": "padding_token_id",
        "cls_token": "cls_token_id",
        "mask_token": "mask_token_id",
    }
)
END_TOKEN_KEYS = ("eot_token_id", "eom_token_id")
# Control tokens that end an answer wherever they are part of a vocabulary: most files name only one of theirs.
END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
# Tokens that no text means otherwise. Some files call them normal, or user-defined; llama.cpp overrides that too.
AMBIGUOUS_TOKENS = ("<EOT>",)
KNOWN_CONTROL_TOKENS = frozenset(
    (*END_TOKENS, "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<start_of_turn>")
).difference(AMBIGUOUS_TOKENS)
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
RSTRIP_ARCHITECTURE = "phi3"  # its control tokens swallow the spaces after them, of which no key tells


def build_gguf_tokenizer(values: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that a file's metadata describes.

    source  what error messages call the file
    Raises CheckpointError, which names the key.
    """
    metadata = TokenizerMetadata(values, source)
    model = metadata.get_str("model")
    if model not in TOKENIZER_MODELS:
        raise metadata.error("model", f"{model!r:.60} is not supported; known: {', '.join(TOKENIZER_MODELS)}")
    _reject_unsupported(metadata)
    vocabulary = _with_control_tokens(GGUFVocab.from_metadata(metadata))
    backend = (build_byte_level_backend if model == "gpt2" else build_sentencepiece_backend)(metadata, vocabulary)
    _add_tokens(backend, vocabulary, strip=values.get("general.architecture") == RSTRIP_ARCHITECTURE and model == "llama")
    named = {name: metadata.get_token_id(key, vocabulary.size) for name, key in SPECIAL_TOKEN_KEYS.items()}
    special = {name: token for name, index in named.items() if (token := backend.id_to_token(index or 0)) and index is not None}
    _set_post_processor(backend, metadata, special, add_bos=model == "llama" or prepends_bos(metadata))
    ends = _find_end_token_ids(metadata, vocabulary, named["eos_token"])
    return Tokenizer(backend, TokenizerFiles(special_tokens=special, eos_token_ids=ends, chat_template=_read_chat_template(values, source)))


def _reject_unsupported(metadata: TokenizerMetadata) -> None:
    metadata.require_value("normalizer.lowercase", False)
    metadata.require_value("normalizer.strip_accents", False)
    metadata.require_value("add_sep_token", False)
    metadata.require_value("suppress_tokens", [])


def _with_control_tokens(vocabulary: GGUFVocab) -> GGUFVocab:
    """Tokens that look like control tokens are: a prompt's are found, and those that end a turn end an answer."""
    types = list(vocabulary.token_types)
    for token in KNOWN_CONTROL_TOKENS & vocabulary.ids.keys():
        if types[vocabulary.ids[token]] in (NORMAL, USER_DEFINED):
            types[vocabulary.ids[token]] = CONTROL
    return replace(vocabulary, token_types=types)


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocab, strip: bool) -> None:
    """Tokens that are found in a text before anything else happens to it."""
    control = vocabulary.tokens_of_type(CONTROL, UNKNOWN)
    own = [token for token in vocabulary.tokens_of_type(USER_DEFINED) if not is_space_run(token)]
    stripped = {token for token in control if strip and token.startswith("<|") and token != "<|endoftext|>"}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=token in stripped) for token in control])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])


def _set_post_processor(backend: tokenizers.Tokenizer, metadata: TokenizerMetadata, special: Mapping[str, str], add_bos: bool) -> None:
    """What a text gets in front and behind."""
    wanted = {"bos_token": metadata.get_bool("add_bos_token", add_bos), "eos_token": metadata.get_bool("add_eos_token", False)}
    bos, eos = (special.get(name) if on else None for name, on in wanted.items())
    for name, token in (("bos", bos), ("eos", eos)):
        if metadata.get_bool(f"add_{name}_token", False) and token is None:
            raise metadata.error(f"add_{name}_token", f"is true, but `{name}_token_id` is missing")
    added = [token for token in (bos, eos) if token is not None]
    if added:
        pieces = [token for token in (bos, "$A", eos) if token is not None]
        ids = [(token, backend.token_to_id(token)) for token in added]
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def _find_end_token_ids(metadata: TokenizerMetadata, vocabulary: GGUFVocab, eos: int | None) -> tuple[int, ...]:
    """Ids that end an answer, that of the EOS token first."""
    named = [eos, *(metadata.get_token_id(key, vocabulary.size) for key in END_TOKEN_KEYS)]
    known = [vocabulary.ids.get(token) for token in END_TOKENS]
    control = [index for index in known if index is not None and vocabulary.token_types[index] == CONTROL]
    return tuple(dict.fromkeys(index for index in (*named, *control) if index is not None))


def _read_chat_template(values: Mapping[str, Any], source: str) -> str | None:
    template = values.get(CHAT_TEMPLATE_KEY)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{source}: `{CHAT_TEMPLATE_KEY}` must be a text, got {template!r:.60}", "chat_template")
    return template or None
