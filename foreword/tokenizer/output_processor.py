"""One choice of an answer: token events in, text out, cut where a stop string ends it."""

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
    """A token with its log-probabilities, as a caller wants to see it.

    text    of the token alone, U+FFFD for part of a character
    raw     its bytes
    offset  where it begins in the answer's text
    """

    text: str
    raw: bytes
    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one event adds to an answer.

    text           characters that are certain now
    event          the event after the cut: what counts as delivered
    finish_reason  "stop", "length" or "repetition" if the answer ends here
    stop_reason    the stop string, or the id out of `stop_token_ids`, that ended it
    stopped        a stop string ended it: the engine must be told, `client.finish(id, answer.num_tokens)`
    logprobs       one per token of the event if asked for
    pieces         `text` again, by token: (text, whether a drafter had guessed the token)
    """

    text: str
    event: TokenEvent
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    hit_stop_string: bool = False
    logprobs: tuple[TokenLogprobText, ...] = ()
    pieces: tuple[tuple[str, bool], ...] = ()


class ChoiceOutput:
    """A growing answer. Feed it the engine's events in order until it is finished."""

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
        self._length = 0  # characters of all tokens so far, those held back included
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
        """Take the next event; tokens behind a stop string never happened."""
        assert not self.finished, "an event after the end"
        assert event.index == self.num_tokens, "a gap between events"
        text, offsets, stop = self._detokenize(event)
        if stop is not None:
            event = truncate(event, len(offsets), "stop")
            self.stop_reason = stop
        elif event.finish_reason is not None:
            text += self._flush()
            self.stop_reason = event.stop_id if event.stop_id in self.request.params.stop_token_ids else None
        return self._append(text, event, offsets, stop is not None)

    def _detokenize(self, event: TokenEvent) -> tuple[str, list[int], str | None]:
        """Text that became certain, the offset of each token kept, and the stop string found in the last of them."""
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
        """The token that ended the answer is counted, but its text is shown only on request."""
        if event.stop_id is None or i < len(event.token_ids) - 1:
            return False
        params = self.request.params
        return not (params.include_stop_str_in_output and event.stop_id in params.stop_token_ids)

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        self._pending.append((rest, False))
        return self._stops.flush() + rest

    def _append(self, text: str, event: TokenEvent, offsets: list[int], hit_stop_string: bool) -> OutputDelta:
        shown = tuple(
            self._format_logprob(token, offset)
            for token, offset in zip(event.logprobs, offsets, strict=False)
        )
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(shown)
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
            shown,
            self._take_pieces(len(text)),
        )

    def _format_logprob(self, token: TokenLogprob, offset: int) -> TokenLogprobText:
        raw = self._tokenizer.token_bytes(token.token_id)
        return TokenLogprobText(raw.decode("utf-8", "replace"), raw, offset, token)

    def _take_pieces(self, length: int) -> tuple[tuple[str, bool], ...]:
        """The next `length` characters of the pending pieces."""
        taken: list[tuple[str, bool]] = []
        while length > 0:
            piece, guessed = self._pending.popleft()
            if len(piece) > length:
                self._pending.appendleft((piece[length:], guessed))
            if piece:
                taken.append((piece[:length], guessed))
            length -= len(piece)
        return tuple(taken)
