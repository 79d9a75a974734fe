"""Log-probabilities in the three shapes in which clients know them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from foreword.core.events import TokenLogprob
from foreword.text.answer import TokenLogprobText
from foreword.text.detokenizer import Detokenizer
from foreword.text.tokenizer import Tokenizer

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs", "prompt_tokens"]

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


def chat_logprobs(tokens: Iterable[TokenLogprobText], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_token(token, tokenizer) for token in tokens], "refusal": None}


def _chat_token(token: TokenLogprobText, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_chat_entry(tokenizer.token_bytes(token_id), logprob) for token_id, logprob in _top_and_requested(token.logprob)]
    return {**_chat_entry(token.raw, token.logprob.logprob), "top_logprobs": top}


def _top_and_requested(token: TokenLogprob) -> Iterable[tuple[int, float]]:
    """The likeliest, and those of the ids that were asked for by themselves."""
    return (dict(token.top) | dict(token.requested)).items()


def _chat_entry(raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


def completion_logprobs(
    tokens: Sequence[tuple[str, int, TokenLogprob | None]], tokenizer: Tokenizer, base_offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice, from (text, offset, logprob).

    The first token of a prompt has no logprob. `shift` is added to the offsets.
    """
    return {
        "tokens": [text for text, _, _ in tokens],
        "token_logprobs": [None if found is None else max(found.logprob, MIN_LOGPROB) for _, _, found in tokens],
        "top_logprobs": [None if found is None else _top_logprobs(text, found, tokenizer) for text, _, found in tokens],
        "text_offset": [base_offset + offset for _, offset, _ in tokens],
    }


def _top_logprobs(text: str, token: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """Logprobs by text, the token itself among them; of tokens with the same text the likeliest counts."""
    top: dict[str, float] = {}
    for token_id, logprob in _top_and_requested(token):
        top.setdefault(tokenizer.token_text(token_id), max(logprob, MIN_LOGPROB))
    top.setdefault(text, max(token.logprob, MIN_LOGPROB))
    return top


def prompt_logprobs(prompt: Sequence[TokenLogprob | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM gives them: by token id, None for the first token."""
    return [None if found is None else _prompt_entry(found, tokenizer) for found in prompt]


def _prompt_entry(token: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1)]
    entries = {token.token_id: (token.logprob, token.rank)}
    entries |= {token_id: (logprob, rank) for token_id, logprob, rank in ranked if token_id != token.token_id}
    return {
        str(token_id): {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, (logprob, rank) in entries.items()
    }


def prompt_tokens(
    prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[tuple[str, int, TokenLogprob | None]]:
    """The tokens of an echoed prompt: (text, offset, logprob)."""
    detokenizer, offset = Detokenizer(tokenizer, at_start=True), 0
    tokens: list[tuple[str, int, TokenLogprob | None]] = []
    for token_id, logprob in zip(prompt_ids, logprobs, strict=True):
        tokens.append((tokenizer.token_text(token_id), offset, logprob))
        offset += len(detokenizer.feed(token_id))
    return tokens
