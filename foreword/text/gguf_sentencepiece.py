"""SentencePiece's BPE from a GGUF file: `tokenizer.ggml.model` llama.

The file has a score for each token and no merges. SentencePiece joins the two neighbours whose token has the highest
score; the merges that say the same are all ways to cut a token in two tokens, ordered by its score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tokenizers
from tokenizers import decoders, models, normalizers

from foreword.text.gguf_vocabulary import NORMAL, UNKNOWN, USER_DEFINED, TokenizerMetadata, GGUFVocab

__all__ = ["SPACE", "is_space_run", "build_sentencepiece_backend"]

SPACE = "▁"


def build_sentencepiece_backend(metadata: TokenizerMetadata, vocabulary: GGUFVocab) -> tokenizers.Tokenizer:
    """Without post-processor and added tokens."""
    metadata.require_value("remove_extra_whitespaces", False)
    metadata.require_value("precompiled_charsmap", [])
    prefix = metadata.get_bool("add_space_prefix", True)
    ids = {_normalize_spaces(token, vocabulary.token_types[index]): index for token, index in vocabulary.ids.items()}
    if len(ids) < len(vocabulary.ids):
        raise metadata.error("tokens", "holds runs of spaces twice, as spaces and as ▁")
    unknown = vocabulary.tokens_of_type(UNKNOWN)
    merges = _build_merges(_merge_scores(metadata, vocabulary, ids))
    model = models.BPE(vocab=ids, merges=merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def is_space_run(token: str) -> bool:
    """Whether a token is a run of spaces, as such or as ▁."""
    return not token.strip(" " + SPACE)


def _normalize_spaces(token: str, token_type: float) -> str:
    """Converters write the spaces of some user-defined tokens as spaces."""
    return token.replace(" ", SPACE) if token_type == USER_DEFINED and is_space_run(token) else token


def _merge_scores(metadata: TokenizerMetadata, vocabulary: GGUFVocab, ids: Mapping[str, int]) -> dict[str, float]:
    """Of the tokens that merges lead to. User-defined ones come before all others, longest first.

    Where all scores are equal the converter did not know them, and tokens stand in their order.
    """
    if vocabulary.scores is None:
        raise metadata.error("scores", "is missing")
    kinds, scores = vocabulary.token_types, vocabulary.scores
    normal = [index for index in ids.values() if kinds[index] == NORMAL]
    known = len({scores[index] for index in normal}) > 1
    found = {token: scores[index] if known else -index for token, index in ids.items() if kinds[index] == NORMAL}
    return found | {token: float("inf") for token, index in ids.items() if kinds[index] == USER_DEFINED and is_space_run(token)}


def _build_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Of equal scores the longer left part comes first, as where transformers reads SentencePiece's own files."""
    cuts = sorted(_iter_splits(scores), key=lambda cut: (cut[0], cut[1], cut[2]), reverse=True)
    return [(left, right) for *_, left, right in cuts]


def _iter_splits(scores: Mapping[str, float]) -> Iterator[tuple[float, int, int, str, str]]:
    """Score, length left and right, and the two parts, for each way to cut a token into two."""
    for token, score in scores.items():
        length = len(token)
        for cut in range(1, length):
            left = token[:cut]
            if left in scores:
                right = token[cut:]
                if right in scores:
                    yield score, cut, length - cut, left, right
