"""Texts, and pairs of texts, as an encoder wants them. No torch."""

from __future__ import annotations

from pathlib import Path

from foreword.embedding.messages import EncoderInfo
from foreword.errors import InvalidRequest
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["EncoderTokenizer"]


class EncoderTokenizer:
    """The tokenizer of an encoder's checkpoint. Safe in threads."""

    def __init__(self, tokenizer: Tokenizer, info: EncoderInfo) -> None:
        self.tokenizer = tokenizer
        self._info = info

    @classmethod
    def from_directory(cls, path: Path, info: EncoderInfo) -> EncoderTokenizer:
        """Raises CheckpointError where there is no usable tokenizer.json."""
        return cls(Tokenizer.from_directory(path, can_decode=False), info)

    def encode(
        self,
        text: str,
        *,
        prompt: str | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of one text.

        prompt      purpose whose text the checkpoint wants in front (EncoderInfo.prompts)
        max_tokens  cut to so many; special tokens are kept. -1: the model's limit; None: nothing is cut
        """
        text = self._find_prompt(prompt) + text
        return self.tokenizer.encode_truncated(
            text, None, self._resolve_max_tokens(max_tokens), add_special_tokens
        )[0]

    def encode_pair(
        self, query: str, document: str, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids and type ids of a pair; of a pair that is too long, the longer text is cut first."""
        return self.tokenizer.encode_truncated(query, document, self._resolve_max_tokens(max_tokens))

    def _find_prompt(self, name: str | None) -> str:
        name = name or self._info.default_prompt
        if name is None:
            return ""
        if name not in self._info.prompts:
            known = ", ".join(sorted(self._info.prompts)) or "none"
            raise InvalidRequest(
                f"prompt_name must be one that {self._info.name} has ({known}), got {name!r:.80}",
                "prompt_name",
            )
        return self._info.prompts[name]

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
