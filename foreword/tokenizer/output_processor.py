"""Output of one choice: token events in, text deltas out, cut at stop strings."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from foreword.core.outputs import TokenEvent, TokenLogprob, truncate
from foreword.core.request import Request
from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.stop_strings import StopStrings
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["ChoiceOutput", "OutputDelta", "TokenLogprobText"]


@dataclass(frozen=True, slots=True)
class TokenLogprobText:
    """A token with its log-probabilities, for API responses."""

    text: str  # of the token alone, U+FFFD for part of a character
    raw: bytes
    offset: int  # in the answer's text
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The part of an answer that one event adds."""

    text: str  # released by the stop string search
    event: TokenEvent  # after the cut
    finish_reason: str | None = None  # "stop", "length" or "repetition" at the end of the answer
    stop_reason: str | int | None = None  # the stop string or the id of `stop_token_ids`
    hit_stop_string: bool = False  # the caller must call client.finish(request_id, answer.num_tokens)
    logprobs: tuple[TokenLogprobText, ...] = ()  # one per token, if requested
    pieces: tuple[tuple[str, bool], ...] = ()  # `text` by token, and whether it was drafted


class ChoiceOutput:
    """A growing answer; takes the engine's events in order until it is finished."""

    __slots__ = (
        "_detokenizer",
        "_length",
        "_pending",
        "_stops",
        "_text_parts",
        "_tokenizer",
        "finish_reason",
        "logprobs",
        "num_cached",
        "prompt_logprobs",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobText] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.num_cached = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._text_parts: list[str] = []
        self._length = 0  # characters so far, including held-back ones
        self._pending: deque[tuple[str, bool]] = deque()  # held-back text by token

    @property
    def text(self) -> str:
        return "".join(self._text_parts)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, event: TokenEvent) -> OutputDelta:
        """Take the next event; tokens after a stop string are dropped."""
        assert not self.finished, "event after the end"
        assert event.index == self.num_tokens, "gap between events"
        text, offsets, stop = self._detokenize(event)
        if stop is not None:
            event = truncate(event, len(offsets), "stop")
            self.stop_reason = stop
        elif event.finish_reason is not None:
            text += self._flush()
            self.stop_reason = event.stop_id if event.stop_id in self.request.params.stop_token_ids else None
        return self._append(text, event, offsets, stop is not None)

    def _detokenize(self, event: TokenEvent) -> tuple[str, list[int], str | None]:
        """(released text, offset of each kept token, stop string that ends in the last one)"""
        released: list[str] = []
        offsets: list[int] = []
        accepted = event.draft.num_accepted if event.draft else 0
        for i, token_id in enumerate(event.token_ids):
            offsets.append(self._length)
            piece = "" if self._is_stop_token_hidden(event, i) else self._detokenizer.feed(token_id)
            self._length += len(piece)
            self._pending.append((piece, i < accepted))
            search = event.index + i >= self.request.params.min_tokens
            text, stop = self._stops.feed(piece, search)
            released.append(text)
            if stop is not None:
                return "".join(released), offsets, stop
        return "".join(released), offsets, None

    def _is_stop_token_hidden(self, event: TokenEvent, i: int) -> bool:
        """The token that ended the answer is counted; its text is output only on request."""
        if event.stop_id is None or i < len(event.token_ids) - 1:
            return False
        params = self.request.params
        return not (params.include_stop_str_in_output and event.stop_id in params.stop_token_ids)

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        self._pending.append((rest, False))
        return self._stops.flush() + rest

    def _append(self, text: str, event: TokenEvent, offsets: list[int], hit_stop_string: bool) -> OutputDelta:
        logprobs = tuple(map(self._format_logprob, event.logprobs, offsets))
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(logprobs)
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        self.num_cached = max(self.num_cached, event.num_cached)
        self.finish_reason = event.finish_reason
        self._text_parts.append(text)
        return OutputDelta(
            text,
            event,
            event.finish_reason,
            self.stop_reason,
            hit_stop_string,
            logprobs,
            self._take_pieces(len(text)),
        )

    def _format_logprob(self, token: TokenLogprob, offset: int) -> TokenLogprobText:
        raw = self._tokenizer.token_bytes(token.token_id)
        return TokenLogprobText(raw.decode("utf-8", "replace"), raw, offset, token)

    def _take_pieces(self, length: int) -> tuple[tuple[str, bool], ...]:
        """Remove `length` characters from the pending pieces."""
        taken: list[tuple[str, bool]] = []
        while length > 0:
            piece, was_drafted = self._pending.popleft()
            if len(piece) > length:
                self._pending.appendleft((piece[length:], was_drafted))
            if piece:
                taken.append((piece[:length], was_drafted))
            length -= len(piece)
        return tuple(taken)
