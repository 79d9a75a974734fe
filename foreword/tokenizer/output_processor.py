"""Output of one choice: token events in, text and chat events out, cut at stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from foreword.chat_formats.events import (
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    HeldSpace,
    ParserEvent,
    merge_events,
)
from foreword.chat_formats.parser import ChatParser
from foreword.core.outputs import DraftResult, TokenEvent, TokenLogprob, truncate
from foreword.core.request import Request
from foreword.tokenizer.detokenizer import Detokenizer, StopStrings
from foreword.tokenizer.tokenizer import Tokenizer

Place = tuple[int, int | None]  # `offset` and `content_group` of TokenLogprobText
NO_TOKEN = -1  # id of a text without a token: an unfinished character at the end


@dataclass(frozen=True, slots=True)
class TokenLogprobText:
    """A token with its log-probabilities, for API responses."""

    text: str  # the token alone; U+FFFD for part of a character
    raw: bytes
    offset: int  # position in the answer's text
    logprob: TokenLogprob
    content_group: int | None = 0  # index of the content between reasoning and calls; None: no content


class TokenPiece(NamedTuple):
    """The text, or a part of it, that one token adds to the events."""

    text: str
    drafter: str = ""  # drafter of an accepted draft token
    confidence: float | None = None  # the drafter's probability of the token, if it has one

    @property
    def is_draft(self) -> bool:
        return self.drafter != ""


UNDRAFTED = TokenPiece("")


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The part of an answer that one event adds."""

    text: str  # content, released by the stop string search
    event: TokenEvent  # the event, cut at a stop string
    finish_reason: str | None = None  # ChoiceOutput's, at the end of the answer
    stop_reason: str | int | None = None  # the stop string or the id of `stop_token_ids`
    hit_stop_string: bool = False  # the caller must call client.finish(request_id, answer.num_tokens)
    logprobs: tuple[TokenLogprobText, ...] = ()  # one per token, if requested
    pieces: tuple[TokenPiece, ...] = ()  # the texts of `events` by token
    events: tuple[ChatEvent, ...] = ()  # reasoning, content (which is `text`) and calls, in order
    # Those of content, also of an earlier event: a text may look like a call for some tokens.
    content_logprobs: tuple[TokenLogprobText, ...] = ()

    def pieces_by_event(self) -> Iterator[tuple[ChatEvent, tuple[TokenPiece, ...]]]:
        """Each event with its pieces."""
        pieces = deque(self.pieces)
        for event in self.events:
            length = 0 if isinstance(event, CallStart | CallEnd) else len(event.text)
            yield event, _take_pieces(pieces, length)


class ChoiceOutput:
    """A growing answer; takes the engine's events in order until it is finished.

    Without a parser all text is content. Stop strings are searched in content alone, not in reasoning or in
    calls, and none spans a call. A stop string may end in whitespace that a marker would drop.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, parser: ChatParser | None = None) -> None:
        params = request.params
        self.request = request
        self.parser = parser
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobText] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.num_cached = 0
        self.finish_reason: str | None = None  # "stop", "tool_calls", "length" or "repetition"
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        markers = () if parser is None else parser.marker_ids
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, kept_ids=markers)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._events: list[ChatEvent] = []
        self._num_open_calls = 0
        self._undecided: list[TokenLogprobText] = []  # the last tokens, if they may be content or a call
        self._settled: list[TokenLogprobText] = []  # those of them that this event shows to be content
        self._length = 0  # characters so far, including held-back ones
        self._pending: deque[TokenPiece] = deque()  # texts of events by token, also held-back ones

    @property
    def text(self) -> str:
        """The content."""
        return "".join(event.text for event in self._events if isinstance(event, ContentText))

    @property
    def events(self) -> tuple[ChatEvent, ...]:
        """All events so far."""
        return merge_events(self._events)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.parser is None else self.parser.num_reasoning_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, event: TokenEvent) -> OutputDelta:
        """Take the next event; tokens after a stop string are dropped."""
        assert not self.finished, "event after the end"
        assert event.index == self.num_tokens, "gap between events"
        events: list[ChatEvent] = []
        places, stop = self._process_tokens(event, events)
        if stop is not None:
            event = truncate(event, len(places), "stop")
            self.stop_reason = stop
        elif event.finish_reason is not None:
            self.stop_reason = event.stop_id if event.stop_id in self.request.params.stop_token_ids else None
            if (last := self._flush(event, places, events)) is not None:
                event, self.stop_reason = event._replace(finish_reason="stop"), last
        return self._append(events, event, places, stop is not None)

    def _process_tokens(self, event: TokenEvent, events: list[ChatEvent]) -> tuple[list[Place], str | None]:
        """Append the released events; (place of each kept token, stop string that ends in the last one)."""
        places: list[Place] = []
        for i, token_id in enumerate(event.token_ids):
            offset = self._length
            piece = "" if self._is_stop_token_hidden(event, i) else self._detokenizer.feed(token_id)
            self._length += len(piece)
            before, num_returned = self._num_parsed_tokens(), self._num_returned_tokens()
            parsed: Sequence[ParserEvent] = (ContentText(piece),)
            if self.parser is not None:
                parsed = self.parser.feed(token_id, piece)
            # Tokens of content between reasoning and calls have one number of parsed tokens before them.
            group = self._settle(places, before, num_returned)
            places.append((offset, group if group == self._num_parsed_tokens() else None))
            search = event.index + i >= self.request.params.min_tokens
            stop = self._release(parsed, _make_piece(event.draft, i), search, events)
            if stop is not None:
                return places, stop
        return places, None

    def _num_parsed_tokens(self) -> int:
        """Tokens of reasoning and calls so far."""
        return 0 if self.parser is None else self.parser.num_reasoning_tokens + self.parser.num_call_tokens

    def _num_returned_tokens(self) -> int:
        return 0 if self.parser is None else self.parser.num_returned_tokens

    def _settle(self, places: list[Place], num_parsed: int, num_returned: int) -> int:
        """Give the last tokens, which the parser has read as a call and returned to the content, their group.

        places        of the event's tokens before this one
        num_parsed    parsed tokens before this one was read
        num_returned  returned tokens before it was read
        Returns the group, which is that of this token too if it is content.
        """
        num_settled = self._num_returned_tokens() - num_returned
        group = num_parsed - num_settled
        num_here = min(num_settled, len(places))
        for i in range(len(places) - num_here, len(places)):
            places[i] = (places[i][0], group)
        if num_earlier := num_settled - num_here:
            settled = [replace(token, content_group=group) for token in self._undecided[-num_earlier:]]
            self._settled += settled
            self._undecided.clear()
            num_kept = min(len(settled), len(self.logprobs))  # a stream has freed what it has sent
            self.logprobs[len(self.logprobs) - num_kept :] = settled[len(settled) - num_kept :]
        return group

    def _release(
        self, parsed: Iterable[ParserEvent], piece: TokenPiece, search: bool, events: list[ChatEvent]
    ) -> str | None:
        """Append the text that the stop string search releases; returns the stop string that ends it.

        piece  of the token, without its text
        """
        for item in parsed:
            if isinstance(item, HeldSpace):
                space = self._stops.peek(item.text, search)
                if not item.text:
                    self._stops.drop_peeked()
                if not space:
                    continue
                item = ContentText(space)
            if isinstance(item, ContentText):
                self._pending.append(piece._replace(text=item.text))
                text, stop = self._stops.feed(item.text, search)
                if text:
                    events.append(ContentText(text))
                if stop is not None:
                    return stop
                continue
            if held := self._stops.flush():
                events.append(ContentText(held))
            if isinstance(item, CallStart):
                self._num_open_calls += 1
            elif isinstance(item, CallEnd):
                self._num_open_calls -= 1
            else:
                self._pending.append(piece._replace(text=item.text))
            events.append(item)
        return None

    def _is_stop_token_hidden(self, event: TokenEvent, i: int) -> bool:
        """The token that ended the answer is counted; its text is output only on request."""
        if event.stop_id is None or i < len(event.token_ids) - 1:
            return False
        params = self.request.params
        return not (params.include_stop_str_in_output and event.stop_id in params.stop_token_ids)

    def _flush(self, event: TokenEvent, places: list[Place], events: list[ChatEvent]) -> str | None:
        """Append all held-back text; the stop string in it, if there is one."""
        rest = self._detokenizer.flush()
        before, num_returned = self._num_parsed_tokens(), self._num_returned_tokens()
        parsed: list[ParserEvent] = [ContentText(rest)]
        if self.parser is not None:
            parsed = self.parser.feed(NO_TOKEN, rest) if rest else []
            parsed += self.parser.flush(ended_by_model=event.finish_reason == "stop")
            self._settle(places, before, num_returned)
        search = event.index + len(event.token_ids) > self.request.params.min_tokens
        stop = self._release(parsed, UNDRAFTED, search, events)
        if stop is None and (held := self._stops.flush()):
            events.append(ContentText(held))
        return stop

    def _append(
        self, events: list[ChatEvent], event: TokenEvent, places: list[Place], hit_stop_string: bool
    ) -> OutputDelta:
        logprobs = tuple(map(self._format_logprob, event.logprobs, places))
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(logprobs)
        content_logprobs = (*self._settled, *(token for token in logprobs if token.content_group is not None))
        self._settled.clear()
        if self.parser is not None and self.parser.is_undecided:
            self._undecided += logprobs
        else:
            self._undecided.clear()
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        self.num_cached = max(self.num_cached, event.num_cached)
        self.finish_reason = event.finish_reason
        if self.finish_reason == "stop" and self._has_called():
            self.finish_reason = "tool_calls"
        self._events.extend(events)
        merged = merge_events(events)
        num_chars = sum(len(item.text) for item in merged if not isinstance(item, CallStart | CallEnd))
        return OutputDelta(
            "".join(item.text for item in merged if isinstance(item, ContentText)),
            event,
            self.finish_reason,
            self.stop_reason,
            hit_stop_string,
            logprobs,
            _take_pieces(self._pending, num_chars),
            merged,
            content_logprobs,
        )

    def _has_called(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self.parser is not None and self.parser.num_calls > 0 and self._num_open_calls == 0

    def _format_logprob(self, token: TokenLogprob, place: Place) -> TokenLogprobText:
        raw = self._tokenizer.token_bytes(token.token_id)
        return TokenLogprobText(raw.decode("utf-8", "replace"), raw, place[0], token, place[1])


def _make_piece(draft: DraftResult | None, index: int) -> TokenPiece:
    """The piece of an event's token `index`, without its text."""
    if draft is None or index >= draft.num_accepted:
        return UNDRAFTED
    return TokenPiece("", draft.drafter, draft.confidence[index] if index < len(draft.confidence) else None)


def _take_pieces(pieces: deque[TokenPiece], length: int) -> tuple[TokenPiece, ...]:
    """Remove `length` characters from the pieces."""
    taken: list[TokenPiece] = []
    while length > 0:
        piece = pieces.popleft()
        text = piece.text
        if len(text) > length:
            pieces.appendleft(piece._replace(text=text[length:]))
            piece = piece._replace(text=text[:length])
        if text:
            taken.append(piece)
        length -= len(text)
    return tuple(taken)
