"""Log-probabilities in three forms: of chat and Responses, of completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from foreword.core.outputs import TokenLogprob
from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.output_processor import TokenLogprobText
from foreword.tokenizer.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no minus infinity

CompletionToken = tuple[str, int, TokenLogprob | None]  # text, offset, logprob


class TokenNames:
    """How logprobs write tokens: as texts, or with return_tokens_as_token_ids as "token_id:42"."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int, text: str | None = None) -> str:
        """`text` is the token's, where it is known."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id) if text is None else text


def chat_logprobs(tokens: Iterable[TokenLogprobText], names: TokenNames) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [chat_logprob(token, names) for token in tokens], "refusal": None}


def chat_logprob(token: TokenLogprobText, names: TokenNames) -> dict[str, Any]:
    """Logprobs of one token, as chat and the Responses API write them."""
    top = [
        _chat_entry(names, token_id, names.tokenizer.token_bytes(token_id), value)
        for token_id, value in _top_logprobs(token.logprob)
    ]
    entry = _chat_entry(names, token.logprob.token_id, token.raw, token.logprob.logprob)
    return {**entry, "top_logprobs": top}


def _top_logprobs(token: TokenLogprob) -> Iterable[tuple[int, float]]:
    """The likeliest token ids; with `logprob_token_ids` the sampled token and those instead."""
    if token.requested:
        return ({token.token_id: token.logprob} | dict(token.requested)).items()
    return token.top


def _chat_entry(names: TokenNames, token_id: int, raw: bytes, logprob: float) -> dict[str, Any]:
    text = names.name(token_id, raw.decode("utf-8", "replace"))
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


def completion_logprobs(
    tokens: Sequence[CompletionToken], names: TokenNames, base_offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; the first token of a prompt has none."""
    return {
        "tokens": [text for text, _, _ in tokens],
        "token_logprobs": [
            None if logprob is None else max(logprob.logprob, MIN_LOGPROB) for _, _, logprob in tokens
        ],
        "top_logprobs": [
            None if logprob is None else _top_by_name(text, logprob, names) for text, _, logprob in tokens
        ],
        "text_offset": [base_offset + offset for _, offset, _ in tokens],
    }


def _top_by_name(name: str, token: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """Logprobs by name, the token itself first; of tokens with equal text the likeliest counts."""
    top = {name: max(token.logprob, MIN_LOGPROB)}
    for token_id, logprob in _top_logprobs(token):
        other = names.name(token_id)
        top[other] = max(top.get(other, MIN_LOGPROB), logprob)
    return top


def format_prompt_logprob(token: TokenLogprob | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """One entry of vLLM's `prompt_logprobs`: by token id; None for the first token."""
    if token is None:
        return None
    entries = {token.token_id: (token.logprob, token.rank)}
    for rank, (token_id, logprob) in enumerate(token.top, 1):
        entries.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in entries.items()
    }


def prompt_tokens(
    prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], names: TokenNames
) -> list[CompletionToken]:
    """The tokens of an echoed prompt."""
    detokenizer, offset = Detokenizer(names.tokenizer, at_start=True), 0
    tokens: list[CompletionToken] = []
    for token_id, logprob in zip(prompt_ids, logprobs, strict=True):
        tokens.append((names.name(token_id), offset, logprob))
        offset += len(detokenizer.feed(token_id))
    return tokens
