"""Tokenizes texts and pairs of texts for an encoder. No torch."""

from __future__ import annotations

from pathlib import Path

from foreword.embedding.encoder_messages import EncoderInfo
from foreword.embedding.sentence_transformers import PoolingConfig
from foreword.errors import InvalidRequest
from foreword.tokenizer.tokenizer import Tokenizer


class EncoderTokenizer:
    """The tokenizer of an encoder's checkpoint. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, info: EncoderInfo) -> None:
        self.tokenizer = tokenizer
        self._info = info
        self._pooling_config = PoolingConfig(prompts=info.prompts, default_prompt=info.default_prompt)

    @classmethod
    def from_directory(cls, path: Path, info: EncoderInfo) -> EncoderTokenizer:
        """Raises CheckpointError if there is no usable tokenizer.json."""
        return cls(Tokenizer.from_directory(path, can_decode=False), info)

    def encode(
        self,
        text: str,
        *,
        prompt: str | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of one text after the prompt of this name (see EncoderInfo.prompts).

        Truncates to `max_tokens` and keeps special tokens. -1: the model's limit; None: no truncation.
        """
        text = self._pooling_config.find_prompt(prompt, self._info.name) + text
        limit = self._resolve_max_tokens(max_tokens)
        ids, _ = self.tokenizer.encode_truncated(text, None, limit, add_special_tokens, self._info.max_tokens)
        return ids

    def encode_pair(
        self, query: str, document: str, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids and type ids of a pair. Truncation cuts the longer text first."""
        limit = self._resolve_max_tokens(max_tokens)
        return self.tokenizer.encode_truncated(query, document, limit, max_whole_tokens=self._info.max_tokens)

    def _resolve_max_tokens(self, max_tokens: int | None) -> int | None:
        if max_tokens is None:
            return None
        if max_tokens == -1:
            return self._info.max_tokens
        if not 1 <= max_tokens <= self._info.max_tokens:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or 1 to {self._info.max_tokens}, got {max_tokens}",
                "truncate_prompt_tokens",
            )
        return max_tokens
